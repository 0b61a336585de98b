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
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base import arguments
from ..base.config import log
from ..base.errors import CacheError
from . import entry, trust
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
        self._given = arguments.path("KernelCache", "root", root)
        self.counts = Counts()
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        if not isinstance(system, (list, tuple)):
            arguments.refuse("KernelCache", "system", system, "a list or tuple of paths")
        paths = [arguments.path("KernelCache", f"system[{i}]", path) for i, path in enumerate(system)]
        self.system = [Layer(path, self._warn) for path in paths]

    @property
    def root(self) -> Path:  # type: ignore[override]
        """The folder that is used: the given one, or if other users can change that, a private one in it."""
        with contextlib.suppress(OSError):
            if trust.fault(os.stat(self._given)):
                return self._given / f"uid-{trust.user()}"
        return self._given

    # ---- finding ---------------------------------------------------------------------------------

    def find(self, key: Key) -> bytes | None:
        """The key's cubin, checked, from the user's own folder or else from a layer. Counts a hit or a miss."""
        files = self.read(key)
        self.count("hits" if files else "misses")
        return files[CUBIN] if files else None

    def read(self, key: Key) -> dict[str, bytes] | None:
        """The files of the key's entry, checked, from the user's own folder or else from a layer, or None."""
        return self.load(key) or next(filter(None, (layer.read(key) for layer in self.system)), None)

    def load(self, key: Key, repair: bool = True) -> dict[str, bytes] | None:
        """The files of the key's entry in the user's own folder, checked, or None.

        repair: remove the entry if it is damaged, and count it.
        """
        try:
            with self._open() as folder:
                names = [key.folder, key.portable_folder]
                if not key.compiler:  # nothing can be compiled here, so kernels of any compiler match
                    names += [name for name in _names(folder, NAME) if name.startswith(f"{key.stem}-")]
                for name in names:
                    if files := self._load(key, folder, name, repair):
                        return files
        except OSError:  # there is none, or it cannot be listed
            pass
        except CacheError as error:
            self._warn("root", f"{error}; kernels stay in memory")
        return None

    def holds(self, key: Key) -> bool:
        """Whether `find` would find the key's entry. Nothing is changed or counted."""
        return bool(self.load(key, repair=False)) or any(layer.read(key) for layer in self.system)

    def _load(self, key: Key, folder: int, name: str, repair: bool) -> dict[str, bytes] | None:
        try:
            meta, files = _checked(folder, name)
            if not key.owns(meta, any_compiler=name != key.folder):
                raise ValueError("it belongs to another key")
            return files
        except FileNotFoundError:
            pass  # the ordinary miss
        except (PermissionError, *DAMAGE) as error:
            if repair:
                self._warn(f"repair {name}", f"cache entry {name} is not usable ({reason(error)}); it is rebuilt")
                self.count("repaired")
                _remove(folder, name)
        except OSError as error:  # it may be temporary
            text = f"cannot read the cache entry {name} ({error.strerror}); the kernel is made again"
            self._warn(f"read {error.errno}", text)
        return None

    @contextlib.contextmanager
    def _open(self) -> Iterator[int]:
        """A handle of the folder.

        Raises:
            CacheError: it cannot be read, or other users can change it.
            FileNotFoundError, NotADirectoryError: there is none.
        """
        path, given = self.root, self._given
        with trust.closing(trust.root(path, private=path != given)) as folder:
            if path != given:
                self._warn("private", f"{given} {trust.fault(os.stat(given))}; your kernels are in {path}")
            yield folder

    # ---- writing ---------------------------------------------------------------------------------

    def store(self, key: Key, text: str, cubin: bytes, spec: dict[str, Any]) -> bool:
        """Write an entry; False if the folder cannot be written."""
        return self.install(key.folder, entry.pack(key, text, cubin, spec))

    def install(self, name: str, files: Mapping[str, bytes]) -> bool:
        """Install an entry in one step; an equal one is kept. False if the folder cannot be written."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._open() as folder:
                _install(folder, name, files)
        except (OSError, ValueError, CacheError) as error:
            self._warn("root", f"cannot write the kernel cache {self.root} ({reason(error)}); kernels stay in memory")
            return False
        return True

    # ---- listing and removing --------------------------------------------------------------------

    def _paths(self, pattern: re.Pattern[str] = NAME) -> list[Path]:
        """All paths in the folder whose names match, whole or damaged. Raises CacheError."""
        try:
            with self._open() as folder:
                return [self.root / name for name in _names(folder, pattern)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CacheError(f"cannot read the kernel cache {self.root}: {error.strerror}") from error

    def _read(self, path: Path) -> Read:
        with self._open() as folder:
            return _checked(folder, path.name)

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
        return self._without(self._paths(), self._paths(_TEMPORARY), dry_run)

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
        own = [path for path in self._paths() if not path.name.endswith(f"-{ANY}")]
        return self._without(_older(own, seconds), _older(self._paths(_TEMPORARY), ABANDONED), dry_run)

    def _without(self, paths: list[Path], leftovers: list[Path], dry_run: bool) -> list[Path]:
        """Remove entries and temporary folders. Returns the entries' folders."""
        with contextlib.suppress(FileNotFoundError), self._open() as folder:
            for path in () if dry_run else (*paths, *leftovers):
                if not _remove(folder, path.name):
                    raise CacheError(f"cannot remove {path}")
        return paths

    def count(self, name: str, more: float = 1) -> None:
        """Add to one of `counts`."""
        with self._lock:
            setattr(self.counts, name, getattr(self.counts, name) + more)

    def _warn(self, topic: str, message: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            log.warning(message)


def _names(folder: int, pattern: re.Pattern[str]) -> list[str]:
    return sorted(filter(pattern.fullmatch, os.listdir(folder)))


def _checked(folder: int, name: str) -> Read:
    """Read and check an entry. If it looks damaged, read it again: another process may have just replaced it."""
    try:
        return entry.read(folder, name)
    except DAMAGE:
        return entry.read(folder, name)


def _install(folder: int, name: str, files: Mapping[str, bytes]) -> None:
    """Write an entry to a temporary folder, and rename that. Raises OSError or ValueError."""
    temporary = f".tmp-{uuid.uuid4().hex}"
    try:
        entry.write(folder, temporary, files)
        for tries_left in (2, 1, 0):  # another process may put an entry there, or remove it, at any time
            try:
                return os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                if not tries_left:
                    raise
                if _exists(folder, name) and _holds(folder, name, files):
                    return None
                _remove(folder, name)
                if not _exists(folder, temporary):  # by `clear`
                    entry.write(folder, temporary, files)
    finally:
        _delete(folder, temporary)


def _holds(folder: int, name: str, files: Mapping[str, bytes]) -> bool:
    try:
        return _checked(folder, name)[1] == files
    except DAMAGE:
        return False
    except OSError:
        return True  # on a network file system, files of another process may appear late


def _exists(folder: int, name: str) -> bool:
    return os.access(name, os.F_OK, dir_fd=folder, follow_symlinks=False)  # it raises nothing


def _remove(folder: int, name: str) -> bool:
    """Rename an entry, so that no process sees half of it, then delete it. False if it is still there."""
    grave = f".tmp-{uuid.uuid4().hex}"
    try:
        os.rename(name, grave, src_dir_fd=folder, dst_dir_fd=folder)
    except FileNotFoundError:  # another process removed it
        return True
    except OSError:
        return not _exists(folder, name)
    _delete(folder, grave)
    return True


def _delete(folder: int, name: str) -> None:
    """Delete a file, a folder or a link, if that is possible; links are not followed."""
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)
        return
    with contextlib.suppress(OSError):
        with trust.closing(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)) as inside:
            for file in os.listdir(inside):
                _delete(inside, file)
        os.rmdir(name, dir_fd=folder)


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
