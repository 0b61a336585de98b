"""Kernels on disk, and the checks of their files: an entry, the files of one kernel, and a bundle, a zip of entries."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ..base.config import OWN_BUNDLE
from ..base.errors import CacheError
from . import trust

FORMAT = 3  # version of an entry's layout; part of every key

FILES = TEXT, CUBIN, META = "kernel.cu", "kernel.cubin", "spec.json"

DAMAGE = (OSError, CacheError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors of reading an entry that is damaged, changed or not trusted, or that cannot be read."""

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


class Entry(NamedTuple):
    """One kernel, for listings. size: bytes of its files."""

    path: Path
    name: str
    arch: str
    size: int
    spec: dict[str, Any]


def pack(key: Key, text: str, cubin: bytes, spec: dict[str, Any]) -> dict[str, bytes]:
    """The files of an entry, without a time or a path. The same key gives the same bytes, but for the call's text."""
    of_key = {name: getattr(key, name) for name in ("source", "name", "arch", "options", "compiler")}
    meta = {"format": FORMAT, **of_key, "sha256": {TEXT: _sha(text.encode()), CUBIN: _sha(cubin)}, "spec": spec}
    meta["seal"] = seal(meta)
    return {TEXT: text.encode(), CUBIN: cubin, META: json.dumps(meta, indent=1).encode()}


def check(folder: Path, files: Mapping[str, bytes]) -> Entry:
    """The entry in a folder, of its files. Raises one of `DAMAGE` if any file was changed."""
    meta: dict[str, Any] = json.loads(files[META])
    if meta.get("format") != FORMAT:
        raise OtherFormat(f"it has format {meta.get('format')}, and this version of jitrope has {FORMAT}")
    if meta.get("seal") != seal(meta):
        raise ValueError(f"{META} does not match its checksum")
    if not isinstance(meta["spec"], dict):
        raise ValueError("it has no spec")
    for name in (TEXT, CUBIN):
        if _sha(files[name]) != meta["sha256"][name]:
            raise ValueError(f"{name} does not match its checksum")
    stem = _stem(meta["name"], meta["arch"], meta["source"])
    own = [f"{stem}-{compiler}" for compiler in (ANY, _sha(str(meta["compiler"]).encode())[:8])]
    if folder.name not in own or not NAME.fullmatch(folder.name):
        raise ValueError(f"{folder.name} is another kernel")
    return Entry(folder, meta["name"], meta["arch"], sum(map(len, files.values())), meta["spec"])


def seal(meta: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON object without its seal."""
    rest = {name: value for name, value in meta.items() if name != "seal"}
    return _sha(json.dumps(rest, sort_keys=True).encode())


def _stem(name: str, arch: str, source: str) -> str:
    return f"{name[:100]}-{arch}-{source[:20]}"


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ---- bundles --------------------------------------------------------------------------------------

DIGEST = "#sha256="
WHOLE = 1 << 30
"""The most bytes of a bundle, 1 GiB: it is read once, into memory, because its owner may change it."""


def split(path: Path) -> tuple[Path, str]:
    """(path, digest or "") of `path#sha256=digest`."""
    text, _, digest = str(path).partition(DIGEST)
    return Path(text), digest.lower()


def read_bundle(given: Path) -> dict[str, dict[str, bytes]]:
    """{folder: files} of a bundle's entries, checked, by name. given: the file, or `path#sha256=digest`.

    Other files in it are not read. Raises CacheError if the file is not a bundle, is damaged or of another version, or
    is not trusted: without a digest it must be root's or this user's.
    """
    path, digest = split(given)
    entries: dict[str, dict[str, bytes]] = {}
    try:
        trusted = digest or path == OWN_BUNDLE  # who can change jitrope's own bundle can change jitrope too
        if not trusted and (wrong := trust.way(path) or trust.fault(os.stat(path))):
            advice = f"if you trust it, name it as {path}{DIGEST}DIGEST, with the output of sha256sum"
            raise ValueError(f"it is not trusted: {wrong}; {advice}")
        data = trust.read(os.path.realpath(path), most=WHOLE, anybodys=True)  # once: what was checked is what is used
        if digest and (found := _sha(data)) != digest:
            raise ValueError(f"it has the SHA-256 {found}, not {digest}")
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            for folder in sorted(filter(NAME.fullmatch, {name.partition("/")[0] for name in file.namelist()})):
                entries[folder] = {name: file.read(f"{folder}/{name}") for name in FILES}
                check(Path(folder), entries[folder])
    except Exception as error:  # for a damaged file zipfile raises errors of many types
        raise CacheError(f"cannot read the bundle {path}: {trust.reason(error)}") from error
    if not entries:
        raise CacheError(f"the bundle {path} has no kernels")
    return entries


def write_bundle(path: Path, entries: Mapping[str, Mapping[str, bytes]]) -> None:
    """Write a bundle of {folder: files}, whole or not at all. The same entries give the same bytes.

    Raises CacheError: the file cannot be written.
    """
    members = {f"{folder}/{name}": files[name] for folder, files in entries.items() for name in FILES}
    members |= dict.fromkeys((f"{folder}/" for folder in entries), b"")
    with trust.replaced(path) as temporary:
        with zipfile.ZipFile(temporary, "x") as file:
            for name in sorted(members):
                info = zipfile.ZipInfo(name)  # without a time
                info.external_attr = (0o40755 if info.is_dir() else 0o100644) << 16  # `unzip` uses them
                file.writestr(info, members[name])
        temporary.chmod(temporary.stat().st_mode & ~0o022)  # a group-writable layer would not be used
