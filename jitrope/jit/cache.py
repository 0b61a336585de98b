"""The user's kernels on disk: `<name>-<arch>-<source>-<compiler>/{kernel.cu, kernel.cubin, spec.json}`.

The folder's name has hashes of what a kernel is made from (templates, constants, options, architecture, format) and
of the compiler, so a hit renders nothing and an upgrade never finds an old kernel. An entry is written in a temporary
folder and renamed: it is there whole or not at all, and no lock is taken. An entry that is damaged or cannot
be read is a miss: the log says so once, and the kernel is made again. Read-only layers lie below the folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base import arguments
from ..base.config import log
from ..base.errors import CacheError
from . import entry
from .entry import ANY, CUBIN, DAMAGE, NAME, Entry, Key, Read, reason
from .layers import Layer

__all__ = ["Counts", "KernelCache"]

ABANDONED = 3600.0
"""Seconds after which a temporary folder is taken for one of a process that died."""

_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{32}")
"""Temporary folders. Nothing but these and entries is ever removed, because the folder may be one of the user's."""


@dataclass
class Counts:
    """Counters of one process.

    Attributes:
        hits, misses: kernels found in any layer, and in none.
        compiled: kernels compiled by this process.
        repaired: entries that were not usable, and were removed.
        compile_ms: milliseconds spent on rendering and compiling.
    """

    hits: int = 0
    misses: int = 0
    compiled: int = 0
    repaired: int = 0
    compile_ms: float = 0.0


class KernelCache:
    """The kernels in one folder, and read-only layers below it. Trouble with the disk is a miss, never an error.

    Args:
        root: the folder; it is made when the first kernel is written.
        system: read-only folders and bundles, which are asked after it, in order.
    """

    def __init__(self, root: Path, system: Iterable[Path] = ()) -> None:
        self.root = arguments.path("KernelCache", "root", root)
        self.counts = Counts()
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        if not isinstance(system, (list, tuple)):
            arguments.refuse("KernelCache", "system", system, "a list or tuple of paths")
        paths = [arguments.path("KernelCache", f"system[{i}]", path) for i, path in enumerate(system)]
        self.system = [Layer(path, self._warn) for path in paths]

    def __repr__(self) -> str:
        return f"KernelCache({str(self.root)!r})"

    # ---- finding ---------------------------------------------------------------------------------

    def find(self, key: Key) -> bytes | None:
        """The key's cubin, checked, from the user's own folder or else from a layer. Counts a hit or a miss."""
        files = self.read(key)
        self.count(**{"hits" if files else "misses": 1})
        return files[CUBIN] if files else None

    def read(self, key: Key) -> dict[str, bytes] | None:
        """The files of the key's entry, checked, from the user's own folder or else from a layer."""
        found = self.load(key)
        for layer in self.system:
            found = found or layer.read(key)
        return found

    def load(self, key: Key) -> dict[str, bytes] | None:
        """The files of the key's entry in the user's own folder, checked, or None. Removes the entry if damaged."""
        for path in self._paths_of(key):
            try:
                return self._read_owned(key, path)
            except FileNotFoundError:
                continue  # the ordinary miss
            except (PermissionError, *DAMAGE) as error:
                text = f"cache entry {path.name} is not usable ({reason(error)}); it is rebuilt"
                self._warn(f"repair {path.name}", text)
                self.count(repaired=1)
                self._remove(path)
            except OSError as error:  # it may pass
                text = f"cannot read the cache entry {path.name} ({error.strerror}); the kernel is made again"
                self._warn(f"read {error.errno}", text)
        return None

    def holds(self, key: Key) -> bool:
        """Whether `find` would find the key's entry. Changes nothing and counts nothing."""
        for path in self._paths_of(key):
            with contextlib.suppress(OSError, *DAMAGE):
                return bool(self._read_owned(key, path))
        return any(layer.read(key) for layer in self.system)

    def _paths_of(self, key: Key) -> list[Path]:
        """The entries that may serve a key, in order; none if the folder must not be used."""
        if not self._usable():
            return []
        paths = [self.root / key.folder, self.root / key.portable_folder]
        if not key.compiler:  # nothing can be compiled here, so any compiler's kernel serves
            with contextlib.suppress(CacheError):
                paths += [path for path in self._paths(NAME) if path.name.startswith(f"{key.stem}-")]
        return list(dict.fromkeys(paths))

    def _read_owned(self, key: Key, path: Path) -> dict[str, bytes]:
        meta, files = self._read(path)
        if not key.owns(meta, any_compiler=path.name != key.folder):
            raise ValueError("it belongs to another key")
        return files

    def _read(self, path: Path) -> Read:
        """Read and check an entry, a second time if it looks damaged: another process may have replaced it midway."""
        try:
            return entry.read(path)
        except DAMAGE:
            return entry.read(path)

    def _usable(self) -> bool:
        """Whether the folder is there and can be trusted; if it cannot, the log says so once."""
        try:
            wrong = entry.untrusted(self.root)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            wrong = f"cannot be read ({error.strerror})"
        if wrong:
            self._warn("root", f"{self.root} {wrong}; kernels are not loaded from it and stay in memory")
        return not wrong

    # ---- writing ---------------------------------------------------------------------------------

    def store(self, key: Key, text: str, cubin: bytes, spec: dict[str, Any]) -> bool:
        """Write an entry; False if the folder cannot be written."""
        return self.install(key.folder, entry.pack(key, text, cubin, spec))

    def install(self, name: str, files: Mapping[str, bytes]) -> bool:
        """Put an entry in its place, in one step; False if the folder cannot be written. The same one stays."""
        temporary, path = self._temporary(), self.root / name
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._usable():
                return False
            entry.write(temporary, files)
            try:
                os.rename(temporary, path)
            except OSError:
                if not os.path.lexists(path):
                    raise
                if not self._is(path, files):
                    self._remove(path)
                    os.rename(temporary, path)
        except OSError as error:
            self._warn("write", f"cannot write the kernel cache {self.root} ({reason(error)}); kernels stay in memory")
            return False
        finally:
            _delete(temporary)
        return True

    def _is(self, path: Path, files: Mapping[str, bytes]) -> bool:
        """Whether an entry has these files."""
        try:
            return self._read(path)[1] == files
        except OSError:
            return True  # on a network the other process' files may appear later
        except DAMAGE:
            return False

    def discard(self, key: Key) -> None:
        """Remove an entry that the driver refused."""
        for name in (key.folder, key.portable_folder):
            self._remove(self.root / name)

    def _remove(self, path: Path) -> bool:
        """Rename an entry first, so that no process sees half of it, then delete it. False if it is still there."""
        grave = self._temporary()
        try:
            os.rename(path, grave)
        except OSError:
            return not os.path.lexists(path)
        _delete(grave)
        return True

    def _temporary(self) -> Path:
        return self.root / f".tmp-{uuid.uuid4().hex}"

    # ---- looking after the folder ----------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """The whole entries, by name.

        Raises:
            CacheError: the folder cannot be listed.
        """
        return entry.survey(self._paths(NAME), self._read)[0]

    def verify(self) -> tuple[int, list[tuple[Path, str]]]:
        """How many entries are whole, and the damaged ones with the reason; another version's are neither.

        If nothing in the folder is used, the folder itself is the only item.
        """
        try:
            if self.root.exists() and (wrong := entry.untrusted(self.root)):
                return 0, [(self.root, f"it {wrong}")]
            good, bad = entry.survey(self._paths(NAME), self._read)
        except (OSError, CacheError) as error:
            return 0, [(self.root, reason(error))]
        return len(good), bad

    def clear(self, dry_run: bool = False) -> list[Path]:
        """Remove every entry, those of bundles and of other versions too.

        Args:
            dry_run: remove nothing.

        Returns:
            The entries' folders.

        Raises:
            CacheError: the folder cannot be listed, or an entry cannot be removed.
        """
        dry_run = arguments.flag("clear", "dry_run", dry_run)
        return self._without(self._paths(NAME), self._paths(_TEMPORARY), dry_run)

    def prune(self, older_than: float, dry_run: bool = False) -> list[Path]:
        """Remove the entries that were written before a time, damaged ones and those of other versions too.

        Entries that were loaded from bundles stay, because this machine may be unable to make them.

        Args:
            older_than: seconds before now.
            dry_run: remove nothing.

        Returns:
            The entries' folders.

        Raises:
            CacheError: the folder cannot be listed, or an entry cannot be removed.
        """
        seconds = arguments.number("prune", "older_than", older_than)
        dry_run = arguments.flag("prune", "dry_run", dry_run)
        own = [path for path in self._paths(NAME) if not path.name.endswith(f"-{ANY}")]
        return self._without(_older(own, seconds), _older(self._paths(_TEMPORARY), ABANDONED), dry_run)

    def _without(self, paths: list[Path], leftovers: list[Path], dry_run: bool) -> list[Path]:
        """Remove entries and temporary folders; returns the entries'."""
        for path in () if dry_run else (*paths, *leftovers):
            if not self._remove(path):
                raise CacheError(f"cannot remove {path}")
        return paths

    def count(self, **more: float) -> None:
        """Add to `counts`."""
        with self._lock:
            for name, number in more.items():
                setattr(self.counts, name, getattr(self.counts, name) + number)

    def _paths(self, pattern: re.Pattern[str]) -> list[Path]:
        """What has such a name in the folder, whole or not, of other versions too. Raises CacheError."""
        try:
            return [self.root / name for name in sorted(os.listdir(self.root)) if pattern.fullmatch(name)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CacheError(f"cannot read the kernel cache {self.root}: {error.strerror}") from error

    def _warn(self, topic: str, message: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            log.warning(message)


def _older(paths: list[Path], seconds: float) -> list[Path]:
    before = time.time() - seconds
    return [path for path in paths if entry.written(path) <= before]


def _delete(path: Path) -> None:
    """Delete a file, a folder or a link; links are not followed."""
    if path.is_symlink() or path.is_file():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
