"""One kernel on disk or in a bundle: `kernel.cu`, `kernel.cubin` and `spec.json`, and the checks of these files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..base.errors import CacheError
from . import trust

FORMAT = 3  # version of an entry's layout; part of every key

TEXT, CUBIN, META = "kernel.cu", "kernel.cubin", "spec.json"
FILES = (TEXT, CUBIN, META)

DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError, NotADirectoryError)
"""Errors of reading a damaged or changed entry."""

ANY = "any"  # replaces the compiler's hash in the name of an entry from a bundle, which works with any compiler or none

NAME = re.compile(r"(?P<stem>\w[\w.+-]*-\w+-(?P<source>[0-9a-f]{20}))-(?P<tag>[0-9a-f]{8}|any)", re.ASCII)
"""The name of an entry's folder: kernel, architecture, hash of the source, hash of the compiler."""

_PRINTED = {"name": re.compile(r"\w[\w.+-]*", re.ASCII), "arch": re.compile(r"\w+", re.ASCII)}
"""Texts of `spec.json` that are printed, so they must not contain control sequences of a terminal."""

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

    def owns(self, meta: Mapping[str, Any], any_compiler: bool) -> bool:
        """Whether a `spec.json` belongs to this key."""
        return bool(meta["source"] == self.source and (any_compiler or meta["compiler"] == self.compiler))


@dataclass(frozen=True)
class Entry:
    """One kernel, for listings. size: bytes of its files."""

    path: Path
    name: str
    arch: str
    size: int
    spec: dict[str, Any]


# ---- content -------------------------------------------------------------------------------------


def pack(key: Key, text: str, cubin: bytes, spec: dict[str, Any]) -> dict[str, bytes]:
    """The files of an entry. They contain no time and no path, so the same key gives the same bytes."""
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


def check(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return an entry's `spec.json`. Raises one of `DAMAGE` if any file of the entry was changed."""
    meta: dict[str, Any] = json.loads(files[META])
    if meta.get("format") != FORMAT:
        raise OtherFormat(f"format {meta.get('format')}, not {FORMAT}")
    if meta.get("seal") != seal(meta):
        raise ValueError(f"{META} does not match its checksum")
    for name, pattern in _PRINTED.items():
        if not isinstance(meta[name], str) or not pattern.fullmatch(meta[name]):
            raise ValueError(f"its {name} is {meta[name]!r}, which no kernel has")
    if not isinstance(meta["spec"], dict):
        raise ValueError("it has no spec")
    if not isinstance(meta["options"], list) or not isinstance(meta["compiler"], str):
        raise ValueError("its options or its compiler are none")
    for name in (TEXT, CUBIN):
        if _sha(files[name]) != meta["sha256"][name]:
            raise ValueError(f"{name} does not match its checksum")
    return meta


def seal(meta: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON object without its seal."""
    rest = {name: value for name, value in meta.items() if name != "seal"}
    return _sha(json.dumps(rest, sort_keys=True).encode())


# ---- files ---------------------------------------------------------------------------------------


def read(folder: int, name: str) -> Read:
    """Read and check an entry of an open folder.

    Raises OSError if it cannot be read, one of `DAMAGE` if it must not be used.
    """
    with trust.closing(trust.folder(name, folder)) as inside:
        files = {file: trust.read(file, inside) for file in FILES}
    return check(files), files


def write(folder: int, name: str, files: Mapping[str, bytes]) -> None:
    """Make an entry in an open folder. Raises OSError."""
    os.mkdir(name, 0o755, dir_fd=folder)  # subject to the umask: anyone who can read the folder can read the entry
    with trust.closing(trust.folder(name, folder)) as inside:
        for file, data in files.items():
            with open(file, "xb", opener=lambda name, flags: os.open(name, flags, 0o644, dir_fd=inside)) as out:
                out.write(data)


def refuse_device(path: Path) -> None:
    """Raise CacheError if there is something else than a file, such as a device or a folder."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise CacheError(f"cannot write {path}: it is not a file")


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A new file, which replaces the one at a path at the end. The path may be a link to a file.

    Raises CacheError, and changes nothing, if it cannot be written, or is a device.
    """
    refuse_device(path)
    target = Path(os.path.realpath(path))
    temporary = target.parent / f".jitrope-{uuid.uuid4().hex}"
    try:
        yield temporary
        os.replace(temporary, target)
    except OSError as error:
        raise CacheError(f"cannot write {path}: {reason(error)}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


# ---- all entries of a folder or bundle -----------------------------------------------------------


def described(path: Path, meta: Mapping[str, Any], files: Mapping[str, bytes]) -> Entry:
    """Return the listing's row for an entry."""
    return Entry(path, meta["name"], meta["arch"], sum(map(len, files.values())), meta["spec"])


class Listing:
    """A folder or bundle of entries. Subclasses find the entries and read them."""

    root: Path

    @abstractmethod
    def _paths(self) -> list[Path]:
        """The paths of all entries, whole or damaged. Raises CacheError if the folder or bundle cannot be used."""

    @abstractmethod
    def _read(self, path: Path) -> Read:
        """Read and check an entry."""

    def survey(self) -> tuple[list[Entry], list[tuple[Path, str]]]:
        """(whole entries, damaged ones with the reason), by name. Entries of another version are in neither list.

        Raises:
            CacheError: the folder or bundle cannot be used.
        """
        good, bad = [], []
        for path in self._paths():
            try:
                good.append(described(path, *self._read(path)))
            except (OtherFormat, FileNotFoundError):  # the second: another process removed it
                continue
            except (OSError, CacheError, *DAMAGE) as error:
                if os.path.lexists(path) or self.root.is_file():  # else it was removed since
                    bad.append((path, reason(error)))
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


def reason(error: Exception) -> str:
    """An error's message without the path."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
