"""One kernel on disk or in a bundle: `kernel.cu`, `kernel.cubin` and `spec.json`, and the checks of these files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..base.errors import CacheError

FORMAT = 3  # version of an entry's layout; part of every key

FILES = TEXT, CUBIN, META = "kernel.cu", "kernel.cubin", "spec.json"

_OF_FILES = (NotADirectoryError, IsADirectoryError)
DAMAGE = (CacheError, ValueError, KeyError, TypeError, AttributeError, RecursionError, *_OF_FILES)
"""Errors of reading a damaged or changed entry, or one that is not trusted."""

ANY = "any"  # replaces the compiler's hash in the name of an entry from a bundle, which works with any compiler or none

NAME = re.compile(r"\w[\w.+-]*-\w+-(?P<source>[0-9a-f]{20})-(?P<compiler>[0-9a-f]{8}|any)", re.ASCII)
"""The name of an entry's folder: kernel, architecture, hash of the source, hash of the compiler."""

Read = tuple[dict[str, Any], dict[str, bytes]]  # (`spec.json`, {name: content}) of an entry, checked


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
        return f"{self.name[:100]}-{self.arch}-{self.source[:20]}"

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


def described(path: Path, meta: Mapping[str, Any], files: Mapping[str, bytes]) -> Entry:
    """The listing's row for an entry."""
    return Entry(path, meta["name"], meta["arch"], sum(map(len, files.values())), meta["spec"])


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
    """(`spec.json`, files) of the entry with this folder's name. Raises one of `DAMAGE` if any file was changed."""
    meta: dict[str, Any] = json.loads(files[META])
    if meta.get("format") != FORMAT:
        raise OtherFormat(f"format {meta.get('format')}, not {FORMAT}")
    if meta.get("seal") != seal(meta):
        raise ValueError(f"{META} does not match its checksum")
    for name in ("name", "arch"):  # they are printed, so they must not contain control sequences of a terminal
        if not re.fullmatch(r"\w[\w.+-]*", meta[name], re.ASCII):
            raise ValueError(f"its {name} is {meta[name]!r}, which no kernel has")
    if not isinstance(meta["spec"], dict):
        raise ValueError("it has no spec")
    if not isinstance(meta["options"], list) or not isinstance(meta["compiler"], str):
        raise ValueError("its options or its compiler are none")
    for name in (TEXT, CUBIN):
        if _sha(files[name]) != meta["sha256"][name]:
            raise ValueError(f"{name} does not match its checksum")
    hashes = NAME.fullmatch(folder)
    own = (ANY, _sha(meta["compiler"].encode())[:8])
    if hashes is None or hashes["source"] != meta["source"][:20] or hashes["compiler"] not in own:
        raise ValueError(f"{folder} is another kernel")
    return meta, dict(files)


def seal(meta: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON object without its seal."""
    rest = {name: value for name, value in meta.items() if name != "seal"}
    return _sha(json.dumps(rest, sort_keys=True).encode())


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
