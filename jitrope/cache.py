"""Kernels on disk: `<name>-<digest>/{kernel.cu, kernel.cubin, spec.json}`.

The digest is the hash of what a kernel is made from: templates, constants, options, architecture,
compiler, format; so a hit renders nothing. An entry
is written in a temporary folder and renamed, so it is there whole or not at all, and no lock is
taken. An entry that cannot be read is a miss: said once, removed, rebuilt.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .config import log
from .errors import CacheError

FORMAT = 1
"""Layout of an entry; part of every key."""


@dataclass(frozen=True)
class Key:
    """What identifies a compiled kernel. `name` is only for the reader."""

    name: str
    ingredients: str
    options: tuple[str, ...]
    arch: str
    compiler: str

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything but the name."""
        parts = json.dumps([FORMAT, self.ingredients, self.options, self.arch, self.compiler])
        return hashlib.sha256(parts.encode()).hexdigest()

    @property
    def folder(self) -> str:
        """The entry's folder name."""
        return f"{self.name}-{self.arch}-{self.digest[:20]}"


@dataclass(frozen=True)
class Entry:
    """One kernel on disk, for `jitrope cache`."""

    path: Path
    name: str
    arch: str
    size: int
    spec: dict[str, Any]


class KernelCache:
    """The kernels under one folder. Never raises where the disk is the trouble: it misses."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._warned: set[str] = set()

    def load(self, key: Key) -> Path | None:
        """The path of the key's cubin, checked against its checksum, or None."""
        path = self.root / key.folder
        try:
            if not path.exists() or not self._trusted(path):
                return None
            meta = read_entry(path)
            if meta["digest"] != key.digest:
                raise ValueError("it belongs to another key")
            return path / "kernel.cubin"
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._warn(f"cache entry {path.name} is not usable ({error}); it is rebuilt")
            shutil.rmtree(path, ignore_errors=True)
            return None

    def store(self, key: Key, text: str, cubin: bytes, spec: dict[str, Any]) -> Path | None:
        """Write an entry; the path of its cubin, or None where the folder cannot be written."""
        final = self.root / key.folder
        temporary = self.root / f".tmp-{uuid.uuid4().hex}"
        meta = {
            "format": FORMAT,
            "digest": key.digest,
            "name": key.name,
            "arch": key.arch,
            "options": key.options,
            "compiler": key.compiler,
            "sha256": hashlib.sha256(cubin).hexdigest(),
            "spec": spec,
        }
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._trusted(self.root):
                return None
            temporary.mkdir(mode=0o700)
            _write(temporary / "kernel.cu", text.encode())
            _write(temporary / "kernel.cubin", cubin)
            _write(temporary / "spec.json", json.dumps(meta, indent=1).encode())
            os.rename(temporary, final)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if path := self.load(key):  # another process was faster, which is as good
                return path
            self._warn(f"cannot write the kernel cache {self.root} ({error}); kernels stay in memory")
            return None
        return final / "kernel.cubin"

    def discard(self, key: Key) -> None:
        """Drop an entry that the driver refused."""
        shutil.rmtree(self.root / key.folder, ignore_errors=True)

    def entries(self) -> Iterator[Entry]:
        """The readable entries, by name."""
        for path in self._folders():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                meta = read_entry(path)
                size = sum(file.stat().st_size for file in path.iterdir())
                yield Entry(path, meta["name"], meta["arch"], size, meta["spec"])

    def verify(self) -> tuple[int, list[tuple[Path, str]]]:
        """How many entries are whole, and those that are not with the reason."""
        good, bad = 0, []
        for path in self._folders():
            try:
                read_entry(path)
                good += 1
            except (OSError, ValueError, KeyError, TypeError) as error:
                bad.append((path, str(error)))
        return good, bad

    def clear(self) -> int:
        """Remove every entry; how many there were."""
        paths = list(self._folders(temporary=True))
        for path in paths:
            try:
                shutil.rmtree(path)
            except OSError as error:
                raise CacheError(f"cannot remove {path}: {error}") from error
        return sum(not path.name.startswith(".tmp-") for path in paths)

    def _folders(self, temporary: bool = False) -> Iterator[Path]:
        try:
            paths = sorted(self.root.iterdir())
        except FileNotFoundError:
            return
        except OSError as error:
            raise CacheError(f"cannot read the kernel cache {self.root}: {error}") from error
        for path in paths:
            if path.name.startswith(".tmp-"):
                if temporary:
                    yield path
            elif (path / "spec.json").exists() or (path / "kernel.cubin").exists():
                yield path

    def _trusted(self, path: Path) -> bool:
        """Code is loaded from a folder only if nobody else can have written it."""
        for folder in {self.root, path}:
            reason = untrusted(folder)
            if reason:
                self._warn(f"{folder} {reason}; kernels are not loaded from it and stay in memory")
                return False
        return True

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message)


def untrusted(folder: Path) -> str | None:
    """Why code in `folder` may not be ours, or None."""
    info = folder.stat()
    if hasattr(os, "getuid") and info.st_uid not in (os.getuid(), 0):
        return "belongs to another user"
    if os.name == "posix" and stat.S_IMODE(info.st_mode) & 0o022:
        return "can be written by other users"
    return None


def read_entry(path: Path) -> dict[str, Any]:
    """An entry's `spec.json`; raises ValueError if the cubin does not match it."""
    meta: dict[str, Any] = json.loads((path / "spec.json").read_text())
    if meta["format"] != FORMAT:
        raise ValueError(f"format {meta['format']}, not {FORMAT}")
    if hashlib.sha256((path / "kernel.cubin").read_bytes()).hexdigest() != meta["sha256"]:
        raise ValueError("kernel.cubin does not match its checksum")
    return meta


@contextlib.contextmanager
def cubin_file(cubin: bytes) -> Iterator[Path]:
    """A cubin that could not be cached, as a file for as long as it takes to load it."""
    with tempfile.TemporaryDirectory(prefix="jitrope-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        yield path


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
