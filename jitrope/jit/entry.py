"""Kernels on disk, and the checks of their files: an entry, the files of one kernel, and a bundle, a tar of entries."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..base.config import OWN_BUNDLE
from ..base.errors import CacheError
from . import trust

FORMAT = 3  # version of an entry's layout; part of every key

FILES = TEXT, CUBIN, META = "kernel.cu", "kernel.cubin", "spec.json"

_OF_FILES = (NotADirectoryError, IsADirectoryError)
DAMAGE = (CacheError, ValueError, KeyError, TypeError, AttributeError, RecursionError, *_OF_FILES)
"""Errors of reading a damaged or changed entry, or one that is not trusted."""

ANY = "any"  # replaces the compiler's hash in the name of an entry from a bundle, which works with any compiler or none

NAME = re.compile(r"\w[\w.+-]*-\w+-[0-9a-f]{20}-([0-9a-f]{8}|any)", re.ASCII)
"""The name of an entry's folder: kernel, architecture, hash of the source, hash of the compiler."""


class OtherFormat(ValueError):
    """Another version of jitrope wrote the entry. It is not damaged, but this version cannot use it."""


@dataclass(frozen=True)
class Key:
    """The identity of a compiled kernel. `name` is only informative. compiler: "" without a compiler."""

    name: str
    ingredients: str
    options: tuple[str, ...]
    arch: str
    compiler: str

    @cached_property
    def source(self) -> str:
        """SHA-256 of all ingredients of a kernel, without the compiler."""
        return _sha(json.dumps([FORMAT, self.ingredients, self.options, self.arch]).encode())

    @property
    def stem(self) -> str:
        """The folder's name without the compiler."""
        return _stem(self.name, self.arch, self.source)

    @property
    def folder(self) -> str:
        """The name of the entry's folder."""
        return f"{self.stem}-{_sha(self.compiler.encode())[:8]}"

    @property
    def portable_folder(self) -> str:
        """The folder's name of an entry for any compiler."""
        return f"{self.stem}-{ANY}"


@dataclass(frozen=True)
class Entry:
    """One kernel, for listings. size: bytes of its files."""

    path: Path
    name: str
    arch: str
    size: int
    spec: dict[str, Any]


Read = tuple[Entry, dict[str, bytes]]  # an entry by the name of its folder, and {name: content}, checked


def pack(key: Key, text: str, cubin: bytes, spec: dict[str, Any]) -> dict[str, bytes]:
    """The files of an entry, without a time or a path. The same key gives the same bytes, but for the call's text."""
    meta = {
        "format": FORMAT,
        "source": key.source,
        "name": key.name,
        "arch": key.arch,
        "options": list(key.options),
        "compiler": key.compiler,
        "sha256": {TEXT: _sha(text.encode()), CUBIN: _sha(cubin)},
        "spec": spec,
    }
    meta["seal"] = seal(meta)
    return {TEXT: text.encode(), CUBIN: cubin, META: json.dumps(meta, indent=1).encode()}


def check(folder: str, files: Mapping[str, bytes]) -> Read:
    """The entry with this folder's name, and its files. Raises one of `DAMAGE` if any file was changed."""
    meta: dict[str, Any] = json.loads(files[META])
    if meta.get("format") != FORMAT:
        raise OtherFormat(f"format {meta.get('format')}, not {FORMAT}")
    if meta.get("seal") != seal(meta):
        raise ValueError(f"{META} does not match its checksum")
    if not isinstance(meta["spec"], dict):
        raise ValueError("it has no spec")
    for name in (TEXT, CUBIN):
        if _sha(files[name]) != meta["sha256"][name]:
            raise ValueError(f"{name} does not match its checksum")
    stem = _stem(meta["name"], meta["arch"], meta["source"])
    own = [f"{stem}-{compiler}" for compiler in (ANY, _sha(str(meta["compiler"]).encode())[:8])]
    if folder not in own or not NAME.fullmatch(folder):
        raise ValueError(f"{folder} is another kernel")
    return Entry(Path(folder), meta["name"], meta["arch"], sum(map(len, files.values())), meta["spec"]), dict(files)


def seal(meta: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON object without its seal."""
    rest = {name: value for name, value in meta.items() if name != "seal"}
    return _sha(json.dumps(rest, sort_keys=True).encode())


def _stem(name: str, arch: str, source: str) -> str:
    return f"{name[:100]}-{arch}-{source[:20]}"


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ---- bundles --------------------------------------------------------------------------------------

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
            return check(name, {file: self._content(f"{name}/{file}") for file in FILES})
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
