"""Read-only caches, searched after the user's own: folders of entries, and bundles, which are tars of entries."""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import tarfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..base.config import OWN_BUNDLE
from ..base.errors import CacheError
from . import entry, trust
from .entry import DAMAGE, FILES, FORMAT, NAME, Key, Listing, Read, reason, replaced

MANIFEST = "manifest.json"
DIGEST = "#sha256="
WHOLE = 1 << 30
"""The most bytes of a bundle with a digest, 1 GiB: it is kept in memory, because its owner may change it."""


def split(path: Path) -> tuple[Path, str]:
    """(path, digest or "") of `path#sha256=digest`."""
    text, _, digest = str(path).partition(DIGEST)
    return Path(text), digest.lower()


class Layer(Listing):
    """A read-only cache: a folder of entries, a bundle, or an unpacked bundle, by path, or a bundle by path and digest.

    Entries are matched by source (templates, constants, options, architecture, format), not by compiler, so a machine
    needs neither NVRTC nor headers to use them. A layer is opened at its first use.
    """

    def __init__(self, path: Path, warn: Callable[[str, str], None]) -> None:
        self._given, self.root = path, split(path)[0]
        self._warn = warn
        self._opened: tuple[Any, Bundle | None] = None, None  # with the file's identity

    def read(self, key: Key) -> dict[str, bytes] | None:
        """The files of the key's entry, checked, or None. An entry of this machine's compiler comes first."""
        try:
            names = [name for name in self._names() if name.startswith(f"{key.stem}-") and NAME.fullmatch(name)]
        except CacheError as error:
            self._warn(f"system {self.root}", f"a system cache is not used: {error}")
            return None
        for name in sorted(names, key=lambda name: (name not in (key.folder, key.portable_folder), name)):
            try:
                meta, files = self._read(self.root / name)
                if key.owns(meta, any_compiler=True):
                    return files
            except (OSError, CacheError, *DAMAGE) as error:
                self._warn(str(self.root / name), f"{name} in the system cache {self.root} is not usable ({error})")
        return None

    def _bundle(self) -> Bundle | None:
        """The bundle that is there now: it may be replaced while this process runs."""
        now = self.root.stat()
        identity = now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns
        if self._opened[0] != identity:
            is_folder = stat.S_ISDIR(now.st_mode) and self._given == self.root
            self._opened = identity, None if is_folder else Bundle(self._given)
        return self._opened[1]

    def _names(self) -> list[str]:
        try:
            if bundle := self._bundle():
                return bundle.kernels
            with trust.closing(trust.root(self.root, parents=True)) as folder:
                return os.listdir(folder)
        except OSError as error:
            raise CacheError(f"cannot read {self.root}: {reason(error)}") from error

    def _paths(self) -> list[Path]:
        return [self.root / name for name in sorted(self._names()) if NAME.fullmatch(name)]

    def _read(self, path: Path) -> Read:
        if bundle := self._bundle():
            return bundle.read(path.name)
        with trust.closing(trust.root(self.root, parents=True)) as folder:
            return entry.read(folder, path.name)


class _Bounded(io.FileIO):
    """A file of which no part can be read that is larger than a kernel. A tar may claim any size for a part."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= trust.LIMIT:
            raise ValueError(f"a part has {size} bytes, more than any kernel")
        return super().read(size)


class Bundle:
    """A tar of entries with a manifest, which lists the entries. An entry is checked when it is read.

    Files that the manifest does not list are never read. Raises CacheError if the file is not a bundle, has another
    format, or is not trusted: without a digest it must be root's or this user's.

    Args:
        path: the file, or `path#sha256=digest`.
    """

    def __init__(self, path: Path) -> None:
        self.path, digest = split(path)
        self._lock = threading.Lock()
        with self._named():
            self._file, size = self._open(digest)
            with tarfile.open(fileobj=self._file, mode="r:") as tar:  # a sparse file may claim any size
                plain = [m for m in tar if m.isreg() and not m.issparse() and m.size <= size]
                self._members = {member.name: (member.offset_data, member.size) for member in plain}
            manifest = json.loads(self._content(MANIFEST))
            if manifest.get("format") != FORMAT:
                raise CacheError(f"{self.path} has format {manifest.get('format')!r}, not {FORMAT}; write it again")
            self.kernels: list[str] = [str(name) for name in manifest["kernels"]]

    def _open(self, digest: str) -> tuple[io.FileIO | io.BytesIO, int]:
        """(the open file, its size). With a digest the file is read once, and what was read is what is used."""
        file = _Bounded(self.path, opener=lambda path, flags: os.open(path, flags | getattr(os, "O_NONBLOCK", 0)))
        weakref.finalize(self, file.close)
        info = trust.regular(file.fileno(), str(self.path))
        if not digest:  # who can change jitrope's own bundle can change jitrope too
            wrong = self.path != OWN_BUNDLE and (trust.way(self.path) or trust.fault(info))
            if wrong:
                advice = f"if you trust it, name it as {self.path}{DIGEST}DIGEST, with the output of sha256sum"
                raise CacheError(f"{self.path} is not trusted: {wrong}; {advice}")
            return file, info.st_size
        if info.st_size > WHOLE:
            raise CacheError(f"{self.path} has {info.st_size} bytes, more than {WHOLE}")
        data = io.FileIO.read(file, info.st_size)
        if (found := hashlib.sha256(data).hexdigest()) != digest:
            raise CacheError(f"{self.path} has the SHA-256 {found}, not {digest}")
        return io.BytesIO(data), len(data)

    def read(self, folder: str) -> Read:
        """(`spec.json`, files) of an entry, checked. Raises CacheError."""
        with self._named():
            files = {name: self._content(f"{folder}/{name}") for name in FILES}
            meta = entry.check(files)
            match = NAME.fullmatch(folder)
            if match is None or match["source"] != meta["source"][:20]:
                raise ValueError(f"{folder} is another kernel")
            return meta, files

    def _content(self, name: str) -> bytes:
        if name not in self._members:
            raise ValueError(f"it has no {name}")
        offset, size = self._members[name]
        with self._lock:
            self._file.seek(offset)
            data = self._file.read(size)
        if len(data) != size:
            raise ValueError("it is cut short")
        return data

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Make an error of reading a CacheError with the path."""
        try:
            yield
        except OSError as error:  # before DAMAGE, which has one of its kinds
            raise CacheError(f"cannot read the bundle {self.path}: {reason(error)}") from error
        except (tarfile.TarError, OverflowError, *DAMAGE) as error:
            raise CacheError(f"{self.path} cannot be read as a bundle: {error}") from error


def write_bundle(path: Path, entries: Mapping[str, Mapping[str, bytes]]) -> None:
    """Write a bundle of {folder: files}, whole or not at all. The same entries give the same bytes.

    Raises CacheError: the file cannot be written.
    """
    manifest = {"format": FORMAT, "kernels": sorted(entries)}
    with replaced(path) as temporary:
        with open(temporary, "xb") as file, tarfile.open(fileobj=file, mode="w") as tar:
            _add(tar, MANIFEST, json.dumps(manifest, indent=1).encode())
            for folder in sorted(entries):
                _add(tar, folder, None)
                for name in FILES:
                    _add(tar, f"{folder}/{name}", entries[folder][name])
        temporary.chmod(temporary.stat().st_mode & ~0o022)  # a group-writable layer would not be used


def _add(tar: tarfile.TarFile, name: str, data: bytes | None) -> None:
    """Add a file, or a folder if data is None. With these modes `tar xf` does not make it group-writable."""
    info = tarfile.TarInfo(name)  # without time and owner
    if data is None:
        info.type, info.mode = tarfile.DIRTYPE, 0o755
    else:
        info.size, info.mode = len(data), 0o644
    tar.addfile(info, io.BytesIO(data or b""))
