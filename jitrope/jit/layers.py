"""Read-only caches, searched after the user's own: folders of entries, and bundles, which are tars of entries."""

from __future__ import annotations

import io
import json
import os
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..base.errors import CacheError
from . import entry
from .entry import DAMAGE, FILES, FORMAT, NAME, Key, Listing, Read, reason, replaced

MANIFEST = "manifest.json"


class Layer(Listing):
    """A read-only cache: a folder of entries, a bundle, or an unpacked bundle.

    Entries are matched by source (templates, constants, options, architecture, format), not by compiler, so a machine
    needs neither NVRTC nor headers to use them. The owner of a layer is trusted, like the owner of a folder on PATH.
    Layers and entries that the group or other users can write are not used. A layer is opened at its first use.
    """

    def __init__(self, path: Path, warn: Callable[[str, str], None]) -> None:
        self.root = path
        self._warn = warn
        self._opened: tuple[Any, Bundle | None] = None, None  # with the file's identity

    def read(self, key: Key) -> dict[str, bytes] | None:
        """The files of the key's entry, checked, or None. An entry of this machine's compiler comes first."""
        try:
            paths = [path for path in self._paths() if path.name.startswith(f"{key.stem}-")]
        except CacheError as error:
            self._warn(f"system {self.root}", f"a system cache is not used: {error}")
            return None
        for path in sorted(paths, key=lambda path: path.name not in (key.folder, key.portable_folder)):
            try:
                meta, files = self._read(path)
                if key.owns(meta, any_compiler=True):
                    return files
            except (OSError, CacheError, *DAMAGE) as error:
                self._warn(str(path), f"{path.name} in the system cache {self.root} is not usable ({error})")
        return None

    def _bundle(self) -> Bundle | None:
        """The bundle that is there now: it may be replaced while this process runs."""
        now = self.root.stat()
        if entry.writable_by_others(now):
            raise CacheError(f"{self.root} can be written by other users")
        identity = now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns
        if self._opened[0] != identity:
            self._opened = identity, Bundle(self.root) if stat.S_ISREG(now.st_mode) else None
        return self._opened[1]

    def _paths(self) -> list[Path]:
        try:
            bundle = self._bundle()
            names = bundle.kernels if bundle else os.listdir(self.root)
        except OSError as error:
            raise CacheError(f"cannot read {self.root}: {reason(error)}") from error
        return [self.root / name for name in sorted(names) if NAME.fullmatch(name)]

    def _read(self, path: Path) -> Read:
        bundle = self._bundle()
        if bundle is None:
            return entry.read(path)
        try:
            return bundle.read(path.name)
        except CacheError:
            now = self._bundle()
            if now in (None, bundle):
                raise
            return now.read(path.name)


class Bundle:
    """A tar of entries with a manifest, which lists the entries. An entry is checked when it is read.

    Files that the manifest does not list are never read. Raises CacheError if the file is not a bundle, has another
    format or lacks a listed file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as file:
            size = os.fstat(file.fileno()).st_size
            with tarfile.open(fileobj=file, mode="r:") as tar:  # a sparse file may claim any size
                plain = [m for m in tar if m.isreg() and not m.issparse() and m.size <= size]
                self._members = {member.name: (member.offset_data, member.size) for member in plain}
            if MANIFEST not in self._members:
                raise CacheError(f"{path} is not a bundle of kernels: it has no {MANIFEST}")
            manifest = json.loads(self._content(file, MANIFEST))
            if manifest.get("format") != FORMAT:
                raise CacheError(f"{path} has format {manifest.get('format')!r}, not {FORMAT}; write it again")
            self.kernels: list[str] = [str(name) for name in manifest["kernels"]]
            if missing := {f"{folder}/{name}" for folder in self.kernels for name in FILES} - self._members.keys():
                raise ValueError(f"it has no {min(missing)}")

    def read(self, folder: str) -> Read:
        """(`spec.json`, files) of an entry, checked. Raises CacheError."""
        with self._open() as file:
            files = {name: self._content(file, f"{folder}/{name}") for name in FILES}
            meta = entry.check(files)
            match = NAME.fullmatch(folder)
            if match is None or match["source"] != meta["source"][:20]:
                raise ValueError(f"{folder} is another kernel")
            return meta, files

    def _content(self, file: Any, name: str) -> bytes:
        offset, size = self._members[name]
        file.seek(offset)
        data: bytes = file.read(size)
        if len(data) != size:
            raise ValueError("it is cut short")
        return data

    @contextmanager
    def _open(self) -> Iterator[Any]:
        """Open the file. Inside the block, a read error becomes a CacheError with the path."""
        try:
            with open(self.path, "rb") as file:
                yield file
        except (tarfile.TarError, OverflowError) as error:
            raise CacheError(f"{self.path} cannot be read as a bundle: {error}") from error
        except DAMAGE as error:
            raise CacheError(f"{self.path} is damaged: {error}") from error
        except OSError as error:
            raise CacheError(f"cannot read the bundle {self.path}: {reason(error)}") from error


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
