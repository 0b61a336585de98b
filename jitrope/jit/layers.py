"""Read-only caches below the user's own: folders that jitrope wrote, and bundles, which are tars of entries."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from ..base.errors import CacheError
from . import entry
from .entry import DAMAGE, FILES, FORMAT, NAME, Entry, Key, Read, parse, reason, seal, survey

MANIFEST = "manifest.json"


class Layer:
    """A read-only cache: a folder that jitrope wrote, a bundle, or a folder that a bundle was unpacked into.

    Entries are matched by source (templates, constants, options, architecture, format), not by compiler, so a machine
    needs neither NVRTC nor headers to use them. The owner of a layer is trusted, as the owner of a folder on PATH is;
    a layer or an entry that its group or others can write is not used. A layer is opened when it is first asked.
    """

    def __init__(self, path: Path, warn: Callable[[str, str], None]) -> None:
        self.path = path
        self._warn = warn

    def read(self, key: Key) -> dict[str, bytes] | None:
        """The files of the key's entry, checked, or None. This compiler's own comes first, if there are several."""
        try:
            paths = [path for path in self._paths() if path.name.startswith(f"{key.stem}-")]
        except CacheError as error:
            self._warn(f"system {self.path}", f"the system cache {self.path} is not used ({error})")
            return None
        for path in sorted(paths, key=lambda path: path.name not in (key.folder, key.portable_folder)):
            try:
                meta, files = self._read(path)
                if key.owns(meta, any_compiler=True):
                    return files
            except (OSError, CacheError, *DAMAGE) as error:
                self._warn(str(path), f"{path.name} in the system cache {self.path} is not usable ({error})")
        return None

    def entries(self) -> list[Entry]:
        """The whole entries, by name. Raises CacheError if the layer cannot be used."""
        return survey(self._paths(), self._read)[0]

    def verify(self) -> tuple[int, list[tuple[Path, str]]]:
        """How many entries are whole, and the damaged ones with the reason, or the layer itself if it is not usable."""
        try:
            good, bad = survey(self._paths(), self._read)
        except CacheError as error:
            return 0, [(self.path, str(error))]
        return len(good), bad

    @cached_property
    def _bundle(self) -> Bundle | None:
        return Bundle(self.path) if self.path.is_file() else None

    def _paths(self) -> list[Path]:
        try:
            if entry.writable_by_others(self.path.stat()):
                raise CacheError("it can be written by other users")
            names = self._bundle.kernels if self._bundle else os.listdir(self.path)
        except OSError as error:
            raise CacheError(reason(error)) from error
        return [self.path / name for name in sorted(names) if NAME.fullmatch(name)]

    def _read(self, path: Path) -> Read:
        return self._bundle.read(path.name) if self._bundle else entry.read(path)


class Bundle:
    """A tar of entries with a manifest. The manifest is checked at once, an entry when it is read.

    Files that the manifest does not name are never read. Raises CacheError: the file is no bundle, has another format,
    or lacks something.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as file:
            size = os.fstat(file.fileno()).st_size
            with tarfile.open(fileobj=file, mode="r:") as tar:  # of a sparse file the size is a mere word
                plain = [m for m in tar if m.isreg() and not m.issparse() and m.size <= size]
                self._members = {member.name: (member.offset_data, member.size) for member in plain}
            if MANIFEST not in self._members:
                raise CacheError(f"{path} is not a bundle of kernels: it has no {MANIFEST}")
            manifest = parse(self._content(file, MANIFEST), MANIFEST)
            if manifest.get("format") != FORMAT:
                raise CacheError(f"{path} has format {manifest.get('format')!r}, not {FORMAT}; write it again")
            if manifest.get("seal") != seal(manifest):
                raise ValueError(f"{MANIFEST} does not match its checksum")
            self.kernels: dict[str, dict[str, str]] = manifest["kernels"]
            if missing := {f"{folder}/{name}" for folder in self.kernels for name in FILES} - self._members.keys():
                raise ValueError(f"it has no {min(missing)}")

    def read(self, folder: str) -> Read:
        """(`spec.json`, files) of an entry, checked. Raises CacheError."""
        with self._open() as file:
            files = {name: self._content(file, f"{folder}/{name}") for name in FILES}
            for name, digest in _digests(files).items():
                if digest != self.kernels[folder][name]:
                    raise ValueError(f"{folder}/{name} does not match its digest")
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
        """The open file; inside, every error of reading becomes a CacheError with the path."""
        try:
            with open(self.path, "rb") as file:
                yield file
        except (tarfile.TarError, OverflowError) as error:
            raise CacheError(f"{self.path} cannot be read as a bundle: {error}") from error
        except DAMAGE as error:
            raise CacheError(f"{self.path} is damaged: {error}") from error
        except OSError as error:
            raise CacheError(f"cannot read the bundle {self.path}: {reason(error)}") from error


def _digests(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(files[name]).hexdigest() for name in FILES}


def write_bundle(path: Path, entries: Mapping[str, Mapping[str, bytes]]) -> None:
    """Write a bundle of {folder: files}, whole or not at all. The same entries give the same bytes.

    Raises CacheError: the file cannot be written.
    """
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "kernels": {name: _digests(entries[name]) for name in sorted(entries)},
    }
    manifest["seal"] = seal(manifest)
    temporary = path.parent / f".jitrope-{uuid.uuid4().hex}"

    def open_(name: str, flags: int) -> int:  # 0644 whatever the umask: a layer that the group can write is not used
        return os.open(name, flags, 0o644)

    try:
        with open(temporary, "xb", opener=open_) as file, tarfile.open(fileobj=file, mode="w") as tar:
            _add(tar, MANIFEST, json.dumps(manifest, indent=1).encode())
            for folder in manifest["kernels"]:
                _add(tar, folder, None)
                for name in FILES:
                    _add(tar, f"{folder}/{name}", entries[folder][name])
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CacheError(f"cannot write the bundle {path}: {reason(error)}") from error


def _add(tar: tarfile.TarFile, name: str, data: bytes | None) -> None:
    """Add a file, or without data a folder, with a mode that keeps `tar xf` from making it writable for a group."""
    info = tarfile.TarInfo(name)  # without time and owner
    if data is None:
        info.type, info.mode = tarfile.DIRTYPE, 0o755
    else:
        info.size, info.mode = len(data), 0o644
    tar.addfile(info, io.BytesIO(data or b""))
