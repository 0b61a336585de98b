"""A bundle: entries in a tar with a manifest. Plain files, nothing that is executed by reading it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..base.errors import CacheError
from .entry import DAMAGE, FILES, FORMAT, MAX_FILE, NAME, check, open_own, parse, seal

MANIFEST = "manifest.json"
MAX_MANIFEST = 1 << 30


def write(path: Path, entries: Mapping[str, Mapping[str, bytes]]) -> None:
    """Write a bundle of {folder: files}, whole or not at all. The same entries give the same bytes."""
    kernels = {
        folder: {name: hashlib.sha256(files[name]).hexdigest() for name in FILES}
        for folder, files in sorted(entries.items())
    }
    manifest: dict[str, Any] = {"format": FORMAT, "kernels": kernels}
    manifest["seal"] = seal(manifest)
    temporary = path.parent / f".jitrope-{uuid.uuid4().hex}"
    try:
        # A cache's bundle must not be others' to write, whatever the umask.
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o644)) as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
                _add(tar, MANIFEST, json.dumps(manifest, indent=1).encode())
                for folder in kernels:
                    _add(tar, folder, None)
                    for name in FILES:
                        _add(tar, f"{folder}/{name}", entries[folder][name])
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CacheError(f"cannot write the bundle {path}: {error.strerror or error}") from error


def _add(tar: tarfile.TarFile, name: str, data: bytes | None) -> None:
    """A file, or without data a folder: its mode keeps `tar xf` from making one that a group can write."""
    info = tarfile.TarInfo(name)  # no time, no owner
    if data is None:
        info.type, info.mode = tarfile.DIRTYPE, 0o755
    else:
        info.size, info.mode = len(data), 0o644
    tar.addfile(info, io.BytesIO(data or b""))


class Archive:
    """A bundle that is read. Its manifest is checked at once, an entry when it is read.

    own: refuse a file that others than its owner can have written. Raises CacheError: not a bundle, of another format,
    or with anything in it but the entries of its manifest (other files, links, other folders, paths out of it).
    """

    def __init__(self, path: Path, own: bool = False) -> None:
        self.path = path
        self._own = own
        with self._open() as tar:
            members: dict[str, tuple[int, int]] = {}
            for member in tar:
                limit = _limit(member)
                if limit is None:
                    raise CacheError(f"{path} is not a bundle of kernels: {member.name!r} is not a kernel's file")
                if member.name in members:
                    raise CacheError(f"{path} has {member.name} twice")
                if member.size > limit:
                    raise CacheError(f"{path}: {member.name} has {member.size} bytes, which no kernel has")
                members[member.name] = member.offset_data, member.size
            self.kernels = self._manifest(tar, members)
        self._members = members

    def _manifest(self, tar: tarfile.TarFile, members: Mapping[str, tuple[int, int]]) -> dict[str, dict[str, str]]:
        if MANIFEST not in members:
            raise CacheError(f"{self.path} is not a bundle of kernels: it has no {MANIFEST}")
        manifest = parse(_at(tar, members[MANIFEST]), MANIFEST)
        if manifest.get("format") != FORMAT:
            raise CacheError(f"{self.path} has format {manifest.get('format')!r}, not {FORMAT}; write it again")
        if manifest.get("seal") != seal(manifest):
            raise CacheError(f"{self.path} is damaged: {MANIFEST} does not match its checksum")
        kernels: dict[str, dict[str, str]] = manifest["kernels"]
        listed = {MANIFEST} | {f"{folder}/{name}" for folder, files in kernels.items() for name in files}
        found = members.keys() - kernels.keys()  # folders need not be in it
        if listed != found:
            names = ", ".join(map(repr, sorted(listed ^ found)[:3]))
            raise CacheError(f"{self.path} is damaged: its manifest and its files differ in {names}")
        return kernels

    def read(self, folder: str, names: tuple[str, ...] = FILES) -> tuple[dict[str, Any], dict[str, bytes]]:
        """(`spec.json`, files) of an entry, checked; raises CacheError."""
        with self._open() as tar:
            return self._read(tar, folder, names)

    def read_all(self) -> Iterator[tuple[str, dict[str, Any], dict[str, bytes]]]:
        """(folder, `spec.json`, files) of every entry, checked; raises CacheError."""
        with self._open() as tar:
            for folder in self.kernels:
                yield folder, *self._read(tar, folder, FILES)

    def _read(
        self, tar: tarfile.TarFile, folder: str, names: tuple[str, ...]
    ) -> tuple[dict[str, Any], dict[str, bytes]]:
        files = {name: _at(tar, self._members[f"{folder}/{name}"]) for name in names}
        for name, data in files.items():
            if hashlib.sha256(data).hexdigest() != self.kernels[folder][name]:
                raise CacheError(f"{self.path} is damaged: {folder}/{name} does not match its digest")
        meta = check(files)
        if NAME.fullmatch(folder)["stem"].rpartition("-")[2] != meta["source"][:20]:  # type: ignore[index]
            raise CacheError(f"{self.path} is damaged: {folder} is another kernel")
        return meta, files

    @contextmanager
    def _open(self) -> Iterator[tarfile.TarFile]:
        try:
            file = open_own(self.path, None) if self._own else open(self.path, "rb")  # noqa: SIM115
            with file, tarfile.open(fileobj=file, mode="r:") as tar:
                yield tar
        except (tarfile.TarError, OverflowError, *DAMAGE) as error:
            raise CacheError(f"{self.path} cannot be read as a bundle: {error}") from error
        except OSError as error:
            raise CacheError(f"cannot read the bundle {self.path}: {error.strerror or error}") from error


def _limit(member: tarfile.TarInfo) -> int | None:
    """How many bytes a member may have; None: it is nothing of a bundle's."""
    folder, _, name = member.name.rpartition("/")
    if member.type == tarfile.DIRTYPE:
        return 0 if NAME.fullmatch(member.name) else None
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        return None
    if member.name == MANIFEST:
        return MAX_MANIFEST
    return MAX_FILE if name in FILES and NAME.fullmatch(folder) else None


def _at(tar: tarfile.TarFile, place: tuple[int, int]) -> bytes:
    assert tar.fileobj is not None
    tar.fileobj.seek(place[0])
    data: bytes = tar.fileobj.read(place[1])
    if len(data) != place[1]:
        raise ValueError("it is cut short")
    return data
