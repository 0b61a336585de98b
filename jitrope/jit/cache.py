"""Kernels on disk: `<name>-<arch>-<source>-<compiler>/{kernel.cu, kernel.cubin, spec.json}`.

The name holds hashes of what a kernel is made from (templates, constants, options, architecture, format) and by what
compiler, so a hit renders nothing and an upgrade finds nothing old. An entry is written in a temporary folder,
fsynced and renamed: it is there whole or not at all, and no lock is taken. What cannot be trusted or read is a miss,
said once and written anew. Below the user's own folder lie read-only ones and bundles (`SystemLayer`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base import arguments
from ..base.config import compile_allowed, log
from ..base.errors import CacheError
from .entry import (
    ANY,
    CUBIN,
    DAMAGE,
    FILES,
    FOUND,
    META,
    NAME,
    Entry,
    Key,
    OtherFormat,
    belongs,
    listed,
    pack,
    parse,
    read,
    sync,
    untrusted,
    write,
)
from .system_cache import SystemLayer

__all__ = ["Counts", "KernelCache"]

YOUNG = 3600.0
"""Seconds: an entry that was used in them is not pruned, a temporary folder may be somebody's; how often is looked."""

_PRUNED = ".pruned"
_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{32}")
"""What `_temporary` names. It and entries are all that is ever removed: the folder may be one of the user's."""

_BROKEN = (errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM)
"""Errors that an entry has for good. Others (ESTALE, EBUSY, EMFILE, EIO) are the moment's, or the disk's."""

_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR, errno.EBUSY, errno.EACCES, errno.EPERM)
"""Errors of a rename to where something is."""


@dataclass
class Counts:
    """What a process's cache did.

    Attributes:
        hits, misses: kernels found in any layer, and in none.
        compiled: kernels made by this process.
        repaired: entries that were not usable, and were taken away.
        compile_ms: milliseconds spent on what was compiled.
    """

    hits: int = 0
    misses: int = 0
    compiled: int = 0
    repaired: int = 0
    compile_ms: float = 0.0


class KernelCache:
    """The kernels under one folder, and layers below it. Never raises where the disk is the trouble: it misses.

    Args:
        root: the folder, made when something is written.
        system: read-only folders and bundles that are asked after it.
        max_bytes: a bound for the folder, kept after a store, once an hour; 0: none.
    """

    def __init__(self, root: Path, system: tuple[Path, ...] = (), max_bytes: int = 0) -> None:
        self.root = arguments.path("KernelCache", "root", root)
        self.max_bytes = arguments.whole("KernelCache", "max_bytes", max_bytes, 0)
        self.counts = Counts()
        self._warned: set[str] = set()
        self._loaded: set[str] = set()
        self._lock = threading.Lock()
        if not isinstance(system, (list, tuple)):
            arguments.refuse("KernelCache", "system", system, "a list or tuple of paths")
        layers = [arguments.path("KernelCache", f"system[{i}]", path) for i, path in enumerate(system)]
        self.system = [SystemLayer(path, self._warn) for path in layers]

    def __repr__(self) -> str:
        return f"KernelCache({str(self.root)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return KernelCache, (self.root, tuple(layer.path for layer in self.system), self.max_bytes)

    # ---- finding ---------------------------------------------------------------------------------

    def find(self, key: Key, whole: bool = False) -> Path | bytes | None:
        """The key's cubin, checked: a path in a folder, or bytes from a bundle; the user's own first. Counts.

        whole: as `load`.
        """
        found: Path | bytes | None = self.load(key, whole)
        for layer in self.system if found is None else ():
            found = layer.find(key)
            if found is not None:
                break
        self.count(**{"misses" if found is None else "hits": 1})
        return found

    def load(self, key: Key, whole: bool = False) -> Path | None:
        """The path of the key's cubin in the user's own folder, checked against its checksum, or None.

        whole: an entry whose `kernel.cu` is damaged, which no launch needs, is a miss too, where it can be made anew.
        """
        if not self._usable():
            return None
        files = FILES if whole and key.compiler and compile_allowed() else FOUND
        for name in self._names_of(key):
            try:
                meta, _ = self._read(name, files)
                if not belongs(meta, key, name != key.folder):
                    raise ValueError("it belongs to another key")
            except OSError as error:
                self._unreadable(name, error)
            except DAMAGE as error:
                self._repair(name, error)
            else:
                self._loaded.add(name)
                with contextlib.suppress(OSError):
                    os.utime(self.root / name)  # least recently used goes first
                return self.root / name / CUBIN
        return None

    def holds(self, key: Key) -> bool:
        """Whether `find`, asked for what is whole, would find the key's entry. Changes nothing, and counts nothing."""
        for name in self._names_of(key) if self._usable() else ():
            with contextlib.suppress(OSError, *DAMAGE):
                if belongs(self._read(name, FILES)[0], key, name != key.folder):
                    return True
        return any(layer.find(key) is not None for layer in self.system)

    def _names_of(self, key: Key) -> list[str]:
        """The entries that may serve a key, the first before the others."""
        names = [key.folder, key.portable_folder]
        if not key.compiler:  # nothing can be made here: whatever compiler made it
            names += [name for name in self._names() if name.startswith(f"{key.stem}-") and name not in names]
        return names

    def read(self, key: Key) -> dict[str, bytes] | None:
        """The files of the key's entry in any layer, or None."""
        if path := self.load(key, whole=True):
            with contextlib.suppress(OSError, *DAMAGE):
                return read(path.parent)[1]
        return next((files for layer in self.system if (files := layer.read(key))), None)

    def _read(self, name: str, names: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, bytes]]:
        """As `read`; twice before it is called damaged: another process may have put a new one in between two files."""
        folder = self.root / name
        for last in (False, True):
            try:
                return read(folder, names)
            except FileNotFoundError as error:
                if error.filename is None or Path(error.filename) == folder:
                    raise
                if last:
                    raise ValueError(f"it has no {Path(error.filename).name}") from error
            except DAMAGE:
                if last:
                    raise
        raise AssertionError

    def _unreadable(self, name: str, error: OSError) -> None:
        if error.errno == errno.ENOENT:
            return  # the ordinary miss
        if error.errno in _BROKEN:
            self._repair(name, error)
        else:
            self._warn(f"read {error.errno}", f"cannot read the cache entry {name} ({error.strerror}); it is made anew")

    def _repair(self, name: str, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        self._warn(f"repair {name}", f"cache entry {name} is not usable ({reason}); it is rebuilt")
        self.count(repaired=1)
        self._take_away(self.root / name)

    def _usable(self) -> bool:
        """Whether the folder is there; said once if code in it may be somebody else's."""
        try:
            reason = untrusted(self.root)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            reason = f"cannot be read ({error.strerror})"
        if reason:
            self._warn("root", f"{self.root} {reason}; kernels are not loaded from it and stay in memory")
        return not reason

    # ---- writing ---------------------------------------------------------------------------------

    def store(self, key: Key, text: str, cubin: bytes, spec: dict[str, Any]) -> Path | None:
        """Write an entry; the path of its cubin, or None where the folder cannot be written.

        If another process was faster the path is its entry's, which is not read: use the bytes you have.
        """
        if not self.install(key.folder, pack(key, text, cubin, spec)):
            return None
        self._keep_bound()
        return self.root / key.folder / CUBIN

    def install(self, name: str, files: Mapping[str, bytes], replace: bool = False) -> bool:
        """Put an entry's files in its place, all at once; whether they, or another process's, are there now.

        replace: these, and no other's that are there already.
        """
        temporary = self._temporary()
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._usable():
                return False
            write(temporary, files)
            self._publish(temporary, name, files, replace)
            sync(self.root)
        except OSError as error:
            text = f"cannot write the kernel cache {self.root} ({error.strerror or error}); kernels stay in memory"
            self._warn("write", text)
            return False
        finally:
            _remove(temporary)
        self._loaded.add(name)
        return True

    def _publish(self, temporary: Path, name: str, files: Mapping[str, bytes], replace: bool) -> None:
        """Rename; where an entry is already, it is as good, unless it is damaged: then it makes room, once."""
        try:
            os.rename(temporary, self.root / name)
        except OSError as error:
            if error.errno not in _TAKEN or not os.path.lexists(self.root / name):
                raise
            try:
                meta, theirs = self._read(name, FILES)
                if meta["source"] != parse(files[META], META)["source"]:
                    raise ValueError("it belongs to another key")
                if replace and theirs != files:
                    raise ValueError("it is another compiler's")
            except OSError:
                return  # on a network the winner's files may show up later
            except DAMAGE:
                self._take_away(self.root / name)
                os.rename(temporary, self.root / name)

    def discard(self, key: Key) -> None:
        """Drop an entry that the driver refused."""
        for name in (key.folder, key.portable_folder):
            self._take_away(self.root / name)

    def _take_away(self, path: Path) -> bool:
        """Out of sight in one step, so that nobody sees half an entry, then away."""
        grave = self._temporary()
        try:
            os.rename(path, grave)
        except OSError:
            return False
        _remove(grave)
        return True

    def _temporary(self) -> Path:
        return self.root / f".tmp-{uuid.uuid4().hex}"

    # ---- looking after the folder ----------------------------------------------------------------

    def entries(self) -> Iterator[Entry]:
        """The readable entries, by name.

        Raises:
            CacheError: the folder cannot be listed.
        """
        for path in self._folders():
            with contextlib.suppress(OSError, *DAMAGE):
                meta, files = read(path)
                yield listed(path, meta, sum(map(len, files.values())), _used(path))

    def verify(self) -> tuple[int, list[tuple[Path, str]]]:
        """How many entries are whole, and those that are not with the reason; or the folder itself with the reason why
        nothing in it is loaded. Another version's are neither.

        Raises:
            CacheError: the folder cannot be listed.
        """
        with contextlib.suppress(OSError):  # `_folders` says it
            if reason := untrusted(self.root):
                return 0, [(self.root, f"it {reason}")]
        good, bad = 0, []
        for path in self._folders():
            try:
                self._read(path.name, FILES)
                good += 1
            except OtherFormat:
                continue
            except (OSError, *DAMAGE) as error:
                bad.append((path, str(error)))
        return good, bad

    def clear(self, dry_run: bool = False) -> int:
        """Remove every entry, of bundles too; how many there were. dry_run: remove nothing.

        Raises:
            CacheError: the folder cannot be listed, or an entry cannot be removed.
        """
        dry_run = arguments.flag("clear", "dry_run", dry_run)
        paths = list(self._folders())
        if dry_run:
            return len(paths)
        for path in (*paths, *self._leftovers(0.0)):
            if not self._take_away(path) and os.path.lexists(path):
                raise CacheError(f"cannot remove {path}")
        with contextlib.suppress(OSError):
            (self.root / _PRUNED).unlink()
        return len(paths)

    def prune(self, max_bytes: int, dry_run: bool = False) -> list[Entry]:
        """Remove the entries that were not used for longest until the rest has at most so many bytes; which they are.

        Not removed, and so perhaps above the bound: what was used in the last hour or by this process. Bundles'
        entries neither count nor go, because nothing here may be able to make them again.

        Args:
            max_bytes: the bound, over all files of the entries.
            dry_run: remove nothing; say what would be.

        Raises:
            CacheError: the folder cannot be listed.
        """
        max_bytes = arguments.whole("prune", "max_bytes", max_bytes, 0)
        dry_run = arguments.flag("prune", "dry_run", dry_run)
        own = (path for path in self._folders() if not path.name.endswith(f"-{ANY}"))
        found = sorted((used, size, path) for path in own for used, size in [_used_and_size(path)])
        total, gone = sum(size for _, size, _ in found), []
        for used, size, path in found:
            if total <= max_bytes:
                break
            if used > time.time() - YOUNG or path.name in self._loaded:
                continue
            entry = _entry(path, size, used)
            if dry_run or (_used_and_size(path)[0] == used and self._take_away(path)):
                total -= size
                gone.append(entry)
        if not dry_run:
            for path in self._leftovers(YOUNG):
                _remove(path)
        return gone

    def explain(self, key: Key) -> str:
        """Why a key is not here: in which part it differs from the nearest entry of the same name."""
        wanted, nearest = key.parts, None
        for name in self._names():
            if name.startswith(f"{key.name[:150]}-"):
                with contextlib.suppress(OSError, *DAMAGE):
                    parts = read(self.root / name, FOUND)[0]["parts"]
                    differ = [part for part in {**wanted, **parts} if wanted.get(part) != parts.get(part)]
                    if nearest is None or len(differ) < len(nearest[1]):
                        nearest = name, differ, parts
        if nearest is None:
            return f"there is no entry of {key.name}"
        name, differ, parts = nearest
        if not differ:
            return f"{name} is the same"
        changes = (f"{part}: {parts.get(part)!r} there, {wanted.get(part)!r} here" for part in sorted(differ))
        return f"{name} differs in {'; '.join(changes)}"

    def count(self, **more: float) -> None:
        """Add to `counts`."""
        with self._lock:
            for name, number in more.items():
                setattr(self.counts, name, getattr(self.counts, name) + number)

    def _keep_bound(self) -> None:
        """Prune, if nobody did in the last hour: what is younger would stay anyway."""
        if not self.max_bytes:
            return
        stamp = self.root / _PRUNED
        with contextlib.suppress(OSError, CacheError):
            if stamp.exists() and _used(stamp) > time.time() - YOUNG:
                return
            stamp.touch(mode=0o600)  # now, so that others that start beside us do not do the same
            for entry in self.prune(self.max_bytes):
                log.info("pruned %s from the kernel cache", entry.path.name)

    def _names(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.root) if NAME.fullmatch(name))
        except OSError:
            return []

    def _folders(self) -> Iterator[Path]:
        """Entries, whole or not, of other versions too."""
        return (path for path in self._listed() if NAME.fullmatch(path.name))

    def _leftovers(self, age: float) -> Iterator[Path]:
        """Temporary folders of processes that died, older than so many seconds."""
        for path in self._listed():
            with contextlib.suppress(OSError):
                if _TEMPORARY.fullmatch(path.name) and _used(path) <= time.time() - age:
                    yield path

    def _listed(self) -> list[Path]:
        try:
            return sorted(self.root.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CacheError(f"cannot read the kernel cache {self.root}: {error.strerror}") from error

    def _warn(self, topic: str, message: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            log.warning(message)


def _entry(path: Path, size: int, used: float) -> Entry:
    with contextlib.suppress(OSError, *DAMAGE):
        meta, _ = read(path, FOUND)
        return listed(path, meta, size, used)
    return Entry(path, path.name, "", size, used=used)


def _used(path: Path) -> float:
    """When a file or folder was last used; 0, long ago, if its date is more than an hour ahead: a clock was wrong."""
    when = path.lstat().st_mtime
    return when if when < time.time() + YOUNG else 0.0


def _used_and_size(path: Path) -> tuple[float, int]:
    try:
        with os.scandir(path) as files:
            return _used(path), sum(file.stat(follow_symlinks=False).st_size for file in files)
    except OSError:
        return 0.0, 0


def _remove(path: Path) -> None:
    """Whatever it is; links are not followed."""
    if path.is_symlink() or path.is_file():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
