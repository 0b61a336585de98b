"""The user's kernels on disk: `<name>-<arch>-<source>-<compiler>/{kernel.cu, kernel.cubin, spec.json}`.

The folder's name has two hashes: one of all ingredients of a kernel (templates, constants, options, architecture,
format) and one of the compiler. So a hit renders nothing, and an upgrade never finds an old kernel. An entry is written
to a temporary folder, which is then renamed: it exists completely or not at all, and no lock is taken. A damaged or
unreadable entry counts as a miss: it is logged once and rebuilt. Read-only layers are searched after the folder.
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
from .entry import ANY, CUBIN, DAMAGE, NAME, Key, Listing, Read, reason
from .layers import Layer

__all__ = ["Counts", "KernelCache"]

ABANDONED = 3600.0
"""Seconds after which the process that made a temporary folder is assumed to be dead."""

_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{32}")
"""Temporary folders. Only these and entries are ever removed, because the user may keep other files in the folder."""


@dataclass
class Counts:
    """Counters of one process.

    >>> KernelCache(Path("kernels")).counts
    Counts(hits=0, misses=0, compiled=0, repaired=0, compile_ms=0.0)

    Attributes:
        hits, misses: kernels that were found in the folder or a layer, and kernels that were not.
        compiled: kernels compiled by this process.
        repaired: unusable entries that were removed.
        compile_ms: milliseconds spent on rendering and compiling.
    """

    hits: int = 0
    misses: int = 0
    compiled: int = 0
    repaired: int = 0
    compile_ms: float = 0.0


class KernelCache(Listing):
    """The kernels in one folder and in read-only layers. A disk fault is a miss, never an error.

    >>> cache = KernelCache(Path("kernels"))  # the folder need not exist
    >>> cache.entries()
    []

    Args:
        root: the folder; it is made when the first kernel is written.
        system: read-only folders and bundles, which are searched after it, in order.
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

    # ---- finding ---------------------------------------------------------------------------------

    def find(self, key: Key) -> bytes | None:
        """The key's cubin, checked, from the user's own folder or else from a layer. Counts a hit or a miss."""
        files = self.read(key)
        self.count("hits" if files else "misses")
        return files[CUBIN] if files else None

    def read(self, key: Key) -> dict[str, bytes] | None:
        """The files of the key's entry, checked, from the user's own folder or else from a layer, or None."""
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
                self.count("repaired")
                self._remove(path)
            except OSError as error:  # it may be temporary
                text = f"cannot read the cache entry {path.name} ({error.strerror}); the kernel is made again"
                self._warn(f"read {error.errno}", text)
        return None

    def holds(self, key: Key) -> bool:
        """Whether `find` would find the key's entry. Nothing is changed or counted."""
        for path in self._paths_of(key):
            with contextlib.suppress(OSError, *DAMAGE):
                return bool(self._read_owned(key, path))
        return any(layer.read(key) for layer in self.system)

    def _paths_of(self, key: Key) -> list[Path]:
        """The entries that may match a key, in order. The list is empty if the folder must not be used."""
        if not self._usable():
            return []
        paths = [self.root / key.folder, self.root / key.portable_folder]
        if not key.compiler:  # nothing can be compiled here, so kernels of any compiler match
            with contextlib.suppress(CacheError):
                paths += [path for path in self._named(NAME) if path.name.startswith(f"{key.stem}-")]
        return list(dict.fromkeys(paths))

    def _read_owned(self, key: Key, path: Path) -> dict[str, bytes]:
        meta, files = self._read(path)
        if not key.owns(meta, any_compiler=path.name != key.folder):
            raise ValueError("it belongs to another key")
        return files

    def _read(self, path: Path) -> Read:
        """Read and check an entry. If it looks damaged, read it again: another process may have just replaced it."""
        try:
            return entry.read(path)
        except DAMAGE:
            return entry.read(path)

    def _exists(self) -> bool:
        """Whether the folder exists. Raises CacheError if it cannot be trusted."""
        try:
            wrong = entry.untrusted(self.root)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            wrong = f"cannot be read ({error.strerror})"
        if wrong:
            raise CacheError(f"{self.root} {wrong}")
        return True

    def _usable(self) -> bool:
        """Whether the folder exists and can be trusted. If it cannot be trusted, the log says so once."""
        try:
            return self._exists()
        except CacheError as error:
            self._warn("root", f"{error}; kernels are not loaded from it and stay in memory")
            return False

    # ---- writing ---------------------------------------------------------------------------------

    def store(self, key: Key, text: str, cubin: bytes, spec: dict[str, Any]) -> bool:
        """Write an entry; False if the folder cannot be written."""
        return self.install(key.folder, entry.pack(key, text, cubin, spec))

    def install(self, name: str, files: Mapping[str, bytes]) -> bool:
        """Install an entry in one step; an equal one is kept. False if the folder cannot be written."""
        temporary, path = self._temporary(), self.root / name
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._usable():
                return False
            entry.write(temporary, files)
            for tries_left in (2, 1, 0):  # another process may put an entry there, or remove it, at any time
                try:
                    os.rename(temporary, path)
                    break
                except OSError:
                    if not tries_left:
                        raise
                    if os.path.lexists(path) and self._is(path, files):
                        break
                    self._remove(path)
                    if not os.path.lexists(temporary):  # by `clear`
                        entry.write(temporary, files)
        except OSError as error:
            self._warn("write", f"cannot write the kernel cache {self.root} ({reason(error)}); kernels stay in memory")
            return False
        finally:
            _delete(temporary)
        return True

    def _is(self, path: Path, files: Mapping[str, bytes]) -> bool:
        try:
            return self._read(path)[1] == files
        except OSError:
            return True  # on a network file system, files of another process may appear late
        except DAMAGE:
            return False

    def discard(self, key: Key) -> None:
        """Remove the entries of a key, because the driver refused the kernel."""
        for name in (key.folder, key.portable_folder):
            self._remove(self.root / name)

    def _remove(self, path: Path) -> bool:
        """Rename an entry, so that no process sees half of it, then delete it. False if it is still there."""
        grave = self._temporary()
        try:
            os.rename(path, grave)
        except FileNotFoundError:  # another process removed it
            return True
        except OSError:
            return not os.path.lexists(path)
        _delete(grave)
        return True

    def _temporary(self) -> Path:
        return self.root / f".tmp-{uuid.uuid4().hex}"

    # ---- listing and removing --------------------------------------------------------------------

    def _paths(self) -> list[Path]:
        return self._named(NAME) if self._exists() else []

    def clear(self, dry_run: bool = False) -> list[Path]:
        """Remove every entry, also those of bundles and of other versions.

        Args:
            dry_run: remove nothing.

        Returns:
            The entries' folders.

        Raises:
            CacheError: the folder cannot be listed, or an entry cannot be removed.
        """
        dry_run = arguments.flag("clear", "dry_run", dry_run)
        return self._without(self._named(NAME), self._named(_TEMPORARY), dry_run)

    def prune(self, older_than: float, dry_run: bool = False) -> list[Path]:
        """Remove the entries that were written before a time, also damaged ones and those of other versions.

        Entries from bundles are kept, because this machine may be unable to make them.

        Args:
            older_than: age in seconds.
            dry_run: remove nothing.

        Returns:
            The entries' folders.

        Raises:
            CacheError: the folder cannot be listed, or an entry cannot be removed.
        """
        seconds = arguments.number("prune", "older_than", older_than)
        dry_run = arguments.flag("prune", "dry_run", dry_run)
        own = [path for path in self._named(NAME) if not path.name.endswith(f"-{ANY}")]
        return self._without(_older(own, seconds), _older(self._named(_TEMPORARY), ABANDONED), dry_run)

    def _without(self, paths: list[Path], leftovers: list[Path], dry_run: bool) -> list[Path]:
        """Remove entries and temporary folders. Returns the entries' folders."""
        for path in () if dry_run else (*paths, *leftovers):
            if not self._remove(path):
                raise CacheError(f"cannot remove {path}")
        return paths

    def count(self, name: str, more: float = 1) -> None:
        """Add to one of `counts`."""
        with self._lock:
            setattr(self.counts, name, getattr(self.counts, name) + more)

    def _named(self, pattern: re.Pattern[str]) -> list[Path]:
        """All paths in the folder whose names match, whole or damaged. Raises CacheError."""
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
    """The paths older than `seconds`. A date more than an hour in the future counts as old: a clock was wrong."""
    found = []
    for path in paths:
        try:
            age = time.time() - os.lstat(path).st_mtime
        except FileNotFoundError:
            continue
        except OSError as error:
            raise CacheError(f"cannot read {path}: {error.strerror}") from error
        found += [path] if age >= seconds or age < -3600 else []
    return found


def _delete(path: Path) -> None:
    """Delete a file, a folder or a link, if that is possible; links are not followed."""
    if os.path.islink(path) or os.path.isfile(path):  # these never raise OSError, unlike the methods of a path
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
