"""The user's kernels on disk: `<name>-<arch>-<source>-<compiler>/{kernel.cu, kernel.cubin, spec.json}`.

The folder's name has two hashes: one of all ingredients of a kernel (templates, constants, options, architecture,
format) and one of the compiler. So a hit renders nothing, and an upgrade never finds an old kernel. An entry is written
to a temporary folder, which is then renamed: it exists completely or not at all, and no lock is taken. A damaged or
unreadable entry counts as a miss: it is logged once and rebuilt. Read-only layers are searched after the folder.
"""

from __future__ import annotations

import math
import os
import re
import stat
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..base import arguments
from ..base.config import warn_once
from ..base.errors import CacheError
from . import trust
from .entry import ANY, CUBIN, DAMAGE, FILES, NAME, Entry, Key, OtherFormat, check, pack, read_bundle, split

__all__ = ["KernelCache"]

ABANDONED = 3600.0
"""Seconds after which the process that made a temporary folder is assumed to be dead."""

_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{32}")
"""Temporary folders. Only these and entries are ever removed, because the user may keep other files in the folder."""


class Folder:
    """An open folder of entries: {name: files}, as `read_bundle` returns them.

    They are opened relative to it, so nobody can put others in their place.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def __iter__(self) -> Iterator[str]:
        """The names of all entries, whole or damaged."""
        return filter(NAME.fullmatch, os.listdir(self._number))

    def __getitem__(self, name: str) -> dict[str, bytes]:
        """The files of an entry. Raises OSError if they cannot be read, CacheError if they must not be used."""
        with trust.folder(name, self._number) as inside:
            return {file: trust.read(file, inside) for file in FILES}

    def install(self, name: str, files: Mapping[str, bytes]) -> None:
        """Write an entry to a temporary folder, and rename that. An equal one is kept. Raises OSError, CacheError."""
        for tries_left in (2, 1, 0):  # another process may put an entry there, or remove it, at any time
            temporary = f".tmp-{uuid.uuid4().hex}"
            try:
                self._write(temporary, files)
                try:
                    return os.rename(temporary, name, src_dir_fd=self._number, dst_dir_fd=self._number)
                except OSError:
                    with suppress(*DAMAGE):
                        if self[name] == files:
                            return None
                    if not tries_left:
                        raise
                    self.remove(name)
            finally:
                _delete(self._number, temporary)

    def _write(self, name: str, files: Mapping[str, bytes]) -> None:
        os.mkdir(name, 0o755, dir_fd=self._number)  # subject to the umask: who can read the folder can read the entry
        with trust.folder(name, self._number) as inside:
            for file, data in files.items():
                with open(file, "xb", opener=lambda name, flags: os.open(name, flags, 0o644, dir_fd=inside)) as out:
                    out.write(data)

    def remove(self, name: str) -> bool:
        """Rename an entry, so that no process sees half of it, then delete it. False if it is still there."""
        grave = f".tmp-{uuid.uuid4().hex}"
        try:
            os.rename(name, grave, src_dir_fd=self._number, dst_dir_fd=self._number)
        except OSError as error:
            return isinstance(error, FileNotFoundError)  # another process removed it
        _delete(self._number, grave)
        return True

    def older(self, seconds: float, pattern: re.Pattern[str]) -> list[str]:
        """The names that match, of what is older. A date more than an hour ahead is old too: a clock was wrong."""
        found = []
        for name in sorted(filter(pattern.fullmatch, os.listdir(self._number))):
            with suppress(FileNotFoundError):  # another process removed it
                age = time.time() - os.stat(name, dir_fd=self._number, follow_symlinks=False).st_mtime
                found += [name] if age >= seconds or age < -3600 else []
        return found


def _delete(folder: int, name: str) -> None:
    """Delete a file, a folder or a link, if that is possible; links are not followed."""
    with suppress(OSError):
        os.unlink(name, dir_fd=folder)
        return
    with suppress(OSError):
        inside = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
        try:
            for file in os.listdir(inside):
                _delete(inside, file)
        finally:
            os.close(inside)
        os.rmdir(name, dir_fd=folder)


class Layer:
    """A read-only cache: a folder of entries, a bundle, or an unpacked bundle, by path, or a bundle by path and digest.

    Entries are matched by source (templates, constants, options, architecture, format), not by compiler, so a machine
    needs neither NVRTC nor headers to use them.
    """

    own = False  # whether it is the user's own folder

    def __init__(self, given: Path) -> None:
        self._given = given
        self._bundle: tuple[Any, Any] = None, None  # (the file's identity, what was in it)

    @property
    def root(self) -> Path:
        """The folder or file."""
        return split(self._given)[0]

    @contextmanager
    def _open(self) -> Iterator[Any]:
        """The entries that are there now, {name: files}: the folder or file may be replaced while this process runs.

        Raises:
            CacheError: it cannot be used.
            FileNotFoundError: the user has none yet.
        """
        try:
            now = self.root.stat()
            if self.own or (stat.S_ISDIR(now.st_mode) and self._given == self.root):
                with trust.root(self.root, self.own) as number:
                    yield Folder(number)
            else:
                identity = now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns
                if self._bundle[0] != identity:
                    self._bundle = identity, read_bundle(self._given)
                yield self._bundle[1]
        except OSError as error:
            if self.own and isinstance(error, FileNotFoundError):
                raise
            raise CacheError(f"cannot read the kernel cache {self.root}: {trust.reason(error)}") from error

    def read(self, key: Key) -> dict[str, bytes] | None:
        """The files of the key's entry, checked, or None. An entry of this machine's compiler comes first."""
        names = [key.folder, key.portable_folder]
        try:
            with suppress(FileNotFoundError), self._open() as place:
                if not self.own or not key.compiler:  # nothing can be compiled here, so any compiler's kernels match
                    there = [x for x in place if x.startswith(f"{key.stem}-")]
                    names = sorted(there, key=lambda x: (x != key.folder, x != key.portable_folder, x))
                for name in names:
                    try:
                        files: dict[str, bytes] = place[name]
                        check(self.root / name, files)
                        return files
                    except FileNotFoundError:  # another process removed it
                        continue
                    except DAMAGE as error:
                        text = f"{name} in the kernel cache {self.root} is not usable ({trust.reason(error)})"
                        warn_once(text, self.root / name)
        except CacheError as error:
            text = "{}; kernels stay in memory" if self.own else "a system cache is not used: {}"
            warn_once(text.format(error), self._given)
        return None

    def survey(self) -> tuple[list[Entry], list[tuple[Path, str]]]:
        """(whole entries, damaged ones with the reason), by name. Entries of another version are in neither list.

        Raises:
            CacheError: the folder or bundle cannot be used.
        """
        good, bad = [], []
        with suppress(FileNotFoundError), self._open() as place:
            for name in sorted(place):
                try:
                    good.append(check(self.root / name, place[name]))
                except (OtherFormat, FileNotFoundError):  # the second: another process removed it
                    continue
                except DAMAGE as error:
                    bad.append((self.root / name, trust.reason(error)))
        return good, bad

    def entries(self) -> list[Entry]:
        """The whole entries, by name. Raises CacheError as `survey` does."""
        return self.survey()[0]

    def verify(self) -> tuple[int, list[tuple[Path, str]]]:
        """(number of whole entries, damaged ones with the reason). An unusable folder or bundle is one damaged item."""
        try:
            good, bad = self.survey()
        except CacheError as error:
            return 0, [(self.root, str(error))]
        return len(good), bad


class KernelCache(Layer):
    """The kernels in one folder and in read-only layers. A disk fault is a miss, never an error.

    >>> cache = KernelCache(Path("kernels"))  # the folder need not exist
    >>> cache.entries()
    []

    Args:
        root: the folder; it is made when the first kernel is written.
        system: read-only folders and bundles, which are searched after it, in order.
    """

    own = True

    def __init__(self, root: Path, system: Iterable[Path] = ()) -> None:
        super().__init__(arguments.path("KernelCache", "root", root))
        if not isinstance(system, (list, tuple)):
            arguments.refuse("KernelCache", "system", system, "a list or tuple of paths")
        self.system = [Layer(arguments.path("KernelCache", f"system[{i}]", path)) for i, path in enumerate(system)]

    @property
    def root(self) -> Path:
        """The folder that is used: the given one, or if other users can change that, a private one in it."""
        with suppress(OSError):
            if wrong := trust.fault(os.stat(self._given)):
                private = self._given / f"uid-{trust.user()}"
                warn_once(f"{self._given} {wrong}; your kernels are in {private}", private)
                return private
        return self._given

    # ---- finding ---------------------------------------------------------------------------------

    def find(self, key: Key) -> bytes | None:
        """The key's cubin, checked, from the user's own folder or else from a layer."""
        files = self.read(key)
        return files[CUBIN] if files else None

    def read(self, key: Key) -> dict[str, bytes] | None:
        """The files of the key's entry, checked, from the user's own folder or else from a layer, or None."""
        return super().read(key) or next(filter(None, (layer.read(key) for layer in self.system)), None)

    # ---- writing ---------------------------------------------------------------------------------

    def store(self, key: Key, text: str, cubin: bytes, spec: dict[str, Any]) -> bool:
        """Write an entry; False if the folder cannot be written."""
        return self.install(key.folder, pack(key, text, cubin, spec))

    def install(self, name: str, files: Mapping[str, bytes]) -> bool:
        """Install an entry in one step; an equal one is kept. False if the folder cannot be written."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._open() as folder:
                folder.install(name, files)
        except (OSError, CacheError) as error:
            why = trust.reason(error.__cause__ or error)
            warn_once(f"cannot write the kernel cache {self.root} ({why}); kernels stay in memory", self._given)
            return False
        return True

    # ---- removing --------------------------------------------------------------------------------

    def clear(self, dry_run: bool = False) -> list[Path]:
        """Remove every entry, also those of bundles and of other versions.

        Args:
            dry_run: remove nothing.

        Returns:
            The entries' folders.

        Raises:
            CacheError: the folder cannot be listed, or an entry cannot be removed.
        """
        return self._without("clear", dry_run)

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
        return self._without("prune", dry_run, arguments.number("prune", "older_than", older_than))

    def _without(self, function: str, dry_run: bool, age: float | None = None) -> list[Path]:
        """Remove entries and temporary folders: all, or those that are older and not from a bundle."""
        dry_run, entries = arguments.flag(function, "dry_run", dry_run), []
        old, abandoned = (-math.inf, -math.inf) if age is None else (age, ABANDONED)
        with suppress(FileNotFoundError), self._open() as folder:
            entries = [x for x in folder.older(old, NAME) if age is None or not x.endswith(f"-{ANY}")]
            for name in () if dry_run else (*entries, *folder.older(abandoned, _TEMPORARY)):
                if not folder.remove(name):
                    raise CacheError(f"cannot remove {self.root / name}")
        return [self.root / name for name in entries]
