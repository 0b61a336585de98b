"""One kernel on disk or in a bundle: `kernel.cu`, `kernel.cubin` and `spec.json`, and what makes it whole and ours."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

FORMAT = 2
"""Layout of an entry; part of every key."""

TEXT, CUBIN, META = "kernel.cu", "kernel.cubin", "spec.json"
FILES = (TEXT, CUBIN, META)
FOUND = (META, CUBIN)
"""What is read of an entry to use it."""

DAMAGE = (ValueError, KeyError, TypeError, AttributeError)
"""What reading an entry raises where something else was written in its place."""

ANY = "any"
"""Stands for the compiler in the name of an entry from a bundle: it serves whatever compiler is there, or none."""

MAX_FILE = 64 << 20
"""Bytes of one file; a kernel has some thousands."""

NAME = re.compile(r"(?P<stem>\w[\w.+-]*-\w+-[0-9a-f]{20})-(?P<tag>[0-9a-f]{8}|any)", re.ASCII)
"""An entry's folder: name, architecture, what it is made from, by what compiler."""


_TEXTS = {"name": re.compile(r"\w[\w.+-]*", re.ASCII), "arch": re.compile(r"\w+", re.ASCII)}
"""Parts of `spec.json` that a terminal is shown: nothing in them may be a command to it."""


class OtherFormat(ValueError):
    """The entry is another version's: not damaged, but nothing for this one."""


@dataclass(frozen=True)
class Key:
    """What identifies a compiled kernel. `name` is only for the reader. compiler: "" where there is none."""

    name: str
    ingredients: str
    options: tuple[str, ...]
    arch: str
    compiler: str

    @cached_property
    def source(self) -> str:
        """SHA-256 over all that a kernel is made from, but not by what: format, text, options, architecture."""
        return _sha(json.dumps([FORMAT, self.ingredients, self.options, self.arch]).encode())

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything but the name."""
        return _sha(json.dumps([self.source, self.compiler]).encode())

    @property
    def stem(self) -> str:
        """The folder's name without the compiler."""
        return f"{self.name[:150]}-{self.arch}-{self.source[:20]}"

    @property
    def folder(self) -> str:
        """The entry's folder name."""
        return f"{self.stem}-{_sha(self.compiler.encode())[:8]}"

    @property
    def portable_folder(self) -> str:
        """The same for an entry that serves beside any compiler."""
        return f"{self.stem}-{ANY}"

    @property
    def parts(self) -> dict[str, Any]:
        """The key in pieces that can be compared: every constant, a hash of every template, and the rest."""
        parts: dict[str, Any] = {"format": FORMAT, "arch": self.arch, "options": list(self.options)}
        parts["compiler"] = self.compiler
        try:
            texts, constants = json.loads(self.ingredients)
            parts |= {f"template {name}": _sha(text.encode())[:12] for name, text in texts.items()}
            parts |= {f"constant {name}": value for name, value in constants.items()}
        except DAMAGE:  # not made by `render`
            parts["ingredients"] = _sha(self.ingredients.encode())[:12]
        return parts


@dataclass(frozen=True)
class Entry:
    """One kernel, for listings. used: when it was last loaded or written, seconds since 1970."""

    path: Path
    name: str
    arch: str
    size: int
    spec: dict[str, Any] = field(default_factory=dict)
    compiler: str = ""
    used: float = 0.0


def listed(path: Path, meta: Mapping[str, Any], size: int, used: float = 0.0) -> Entry:
    """An entry as its `spec.json` describes it."""
    return Entry(path, meta["name"], meta["arch"], size, meta["spec"], meta["compiler"], used)


def pack(key: Key, text: str, cubin: bytes, spec: dict[str, Any]) -> dict[str, bytes]:
    """The files of an entry. The same key gives the same bytes: no time and no path is in them."""
    meta = {
        "format": FORMAT,
        "digest": key.digest,
        "source": key.source,
        "name": key.name,
        "arch": key.arch,
        "options": list(key.options),
        "compiler": key.compiler,
        "parts": key.parts,
        "sha256": {TEXT: _sha(text.encode()), CUBIN: _sha(cubin)},
        "spec": spec,
    }
    meta["seal"] = seal(meta)
    return {TEXT: text.encode(), CUBIN: cubin, META: json.dumps(meta, indent=1).encode()}


def check(files: Mapping[str, bytes]) -> dict[str, Any]:
    """An entry's `spec.json`; raises ValueError if it or one of the files beside it is not what was written."""
    meta = parse(files[META], "spec.json")
    if meta.get("format") != FORMAT:
        raise OtherFormat(f"format {meta.get('format')}, not {FORMAT}")
    if meta.get("seal") != seal(meta):
        raise ValueError("spec.json does not match its checksum")
    for name, pattern in _TEXTS.items():
        if not isinstance(meta[name], str) or not pattern.fullmatch(meta[name]):
            raise ValueError(f"its {name} is {meta[name]!r}, which no kernel's is")
    if not isinstance(meta["spec"], dict):
        raise ValueError("it has no spec")
    for name, data in files.items():
        if name != META and _sha(data) != meta["sha256"][name]:
            raise ValueError(f"{name} does not match its checksum")
    return meta


def parse(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object; ValueError with anything else."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not JSON") from error
    if not isinstance(found, dict):
        raise ValueError(f"{what} is not a JSON object")
    return found


def seal(meta: Mapping[str, Any]) -> str:
    """SHA-256 over a JSON object, but for the seal itself."""
    rest = {name: value for name, value in meta.items() if name != "seal"}
    return _sha(json.dumps(rest, sort_keys=True).encode())


def belongs(meta: Mapping[str, Any], key: Key, any_compiler: bool) -> bool:
    """Whether an entry is the key's."""
    return bool(meta["source"] == key.source if any_compiler else meta["digest"] == key.digest)


def read(
    folder: Path, names: tuple[str, ...] = FILES, owners: tuple[int, ...] = ()
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """(`spec.json`, files) of an entry. Raises OSError if it cannot be read, ValueError if it is damaged or if
    somebody other than root, this user and `owners` can have written it."""
    info = os.lstat(folder)
    if not stat.S_ISDIR(info.st_mode):
        raise ValueError("it is not a folder" if not stat.S_ISLNK(info.st_mode) else "it is a symbolic link")
    if reason := _others(info, owners):
        raise ValueError(f"it {reason}")
    files = {}
    for name in names:
        with open_own(folder / name, owners) as file:
            files[name] = file.read()
    return check(files), files


def open_own(path: Path, owners: tuple[int, ...] | None = ()) -> Any:
    """A regular file that nobody but root, this user and `owners` can have written, open for reading; ValueError
    with any other. owners: None: a bundle, which may be anybody's and a link, if only its owner can write it.

    What is looked at is the open file, so it cannot be exchanged in between.
    """
    follow = owners is None
    flags = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NONBLOCK", "O_BINARY"))  # FIFOs wait
    try:
        number = os.open(path, flags | (0 if follow else getattr(os, "O_NOFOLLOW", 0)))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path.name} is a symbolic link") from error
        raise
    try:
        info = os.fstat(number)
        if not stat.S_ISREG(info.st_mode):
            raise ValueError(f"{path.name} is not a file")
        if reason := _others(info, (info.st_uid,) if owners is None else owners):
            raise ValueError(f"{path.name} {reason}")
        if info.st_size > MAX_FILE and not follow:
            raise ValueError(f"{path.name} has {info.st_size} bytes, which no kernel has")
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Make a folder with an entry's files in it, on the disk when this returns. Raises OSError."""
    os.mkdir(folder, 0o755)  # less the umask: who shares the folder shares what is in it
    for name, data in files.items():
        number = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o644)
        with open(number, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    sync(folder)


def sync(folder: Path) -> None:
    """What is in a folder stays in it through a crash."""
    if os.name != "posix":
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):  # file systems that cannot
            raise
    finally:
        os.close(number)


def untrusted(path: Path, owners: tuple[int, ...] = ()) -> str | None:
    """Why somebody other than root, this user and `owners` can have written a folder or file, or None; of a
    symbolic link, its own owner counts too."""
    link = os.lstat(path)
    if stat.S_ISLNK(link.st_mode) and _foreign(link, owners):
        return "is a symbolic link of another user"
    return _others(path.stat(), owners)


def _others(info: os.stat_result, owners: tuple[int, ...]) -> str | None:
    if _foreign(info, owners):
        return "belongs to another user"
    if os.name == "posix" and stat.S_IMODE(info.st_mode) & 0o022:
        return "can be written by other users"
    return None


def _foreign(info: os.stat_result, owners: tuple[int, ...]) -> bool:
    return hasattr(os, "getuid") and info.st_uid not in (os.getuid(), 0, *owners)


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
