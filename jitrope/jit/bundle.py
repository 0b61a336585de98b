"""Bundles: tars of entries with a manifest, for machines that do not compile."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path

from ..base.config import OWN_BUNDLE
from ..base.errors import CacheError
from . import entry, trust
from .entry import DAMAGE, FILES, FORMAT, Read

MANIFEST = "manifest.json"
DIGEST = "#sha256="
WHOLE = 1 << 30
"""The most bytes of a bundle, 1 GiB: it is read once, into memory, because its owner may change it."""


def split(path: Path) -> tuple[Path, str]:
    """(path, digest or "") of `path#sha256=digest`."""
    text, _, digest = str(path).partition(DIGEST)
    return Path(text), digest.lower()


class Bundle:
    """A tar of entries with a manifest, which lists the entries. An entry is checked when it is read.

    Files that the manifest does not list are never read. Raises CacheError if the file is not a bundle, has another
    format, or is not trusted: without a digest it must be root's or this user's.

    Args:
        path: the file, or `path#sha256=digest`.
    """

    def __init__(self, path: Path) -> None:
        self.path, digest = split(path)
        try:
            self._data = self._whole(digest)
            with tarfile.open(fileobj=io.BytesIO(self._data), mode="r:") as tar:
                self._members = {m.name: slice(m.offset_data, m.offset_data + m.size) for m in tar if m.isreg()}
            manifest = json.loads(self._content(MANIFEST))
            if manifest.get("format") != FORMAT:
                raise ValueError(f"it has format {manifest.get('format')!r}, not {FORMAT}; write it again")
            self._names = sorted(map(str, manifest["kernels"]))
        except OSError as error:  # before DAMAGE, which has some of its kinds
            raise CacheError(f"cannot read the bundle {self.path}: {trust.reason(error)}") from error
        except (tarfile.TarError, OverflowError, *DAMAGE) as error:
            raise CacheError(f"{self.path} cannot be read as a bundle: {error}") from error

    def _whole(self, digest: str) -> bytes:
        """The file's bytes. They are read once, so what was checked is what is used."""
        trusted = digest or self.path == OWN_BUNDLE  # who can change jitrope's own bundle can change jitrope too
        if not trusted and (wrong := trust.way(self.path) or trust.fault(os.stat(self.path))):
            advice = f"if you trust it, name it as {self.path}{DIGEST}DIGEST, with the output of sha256sum"
            raise ValueError(f"it is not trusted: {wrong}; {advice}")
        data = trust.read(os.path.realpath(self.path), most=WHOLE, anybodys=True)
        if digest and (found := hashlib.sha256(data).hexdigest()) != digest:
            raise ValueError(f"it has the SHA-256 {found}, not {digest}")
        return data

    def names(self) -> list[str]:
        """The names of the entries, in order."""
        return self._names

    def read(self, name: str) -> Read:
        """Read and check an entry. Raises CacheError."""
        try:
            return entry.check(name, {file: self._content(f"{name}/{file}") for file in FILES})
        except DAMAGE as error:
            raise CacheError(f"{self.path} cannot be read as a bundle: {error}") from error

    def _content(self, name: str) -> bytes:
        if name not in self._members:
            raise ValueError(f"it has no {name}")
        return self._data[self._members[name]]


def write_bundle(path: Path, entries: Mapping[str, Mapping[str, bytes]]) -> None:
    """Write a bundle of {folder: files}, whole or not at all. The same entries give the same bytes.

    Raises CacheError: the file cannot be written.
    """
    manifest = {"format": FORMAT, "kernels": sorted(entries)}
    with trust.replaced(path) as temporary:
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
    info.type, info.mode = (tarfile.DIRTYPE, 0o755) if data is None else (tarfile.REGTYPE, 0o644)
    info.size = len(data or b"")
    tar.addfile(info, io.BytesIO(data or b""))
