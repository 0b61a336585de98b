"""Caches below the user's own: read-only folders and bundles."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from .archive import Archive
from .entry import CUBIN, DAMAGE, FILES, FOUND, NAME, Key, belongs, read, untrusted
from .errors import CacheError


class SystemLayer:
    """A read-only cache: a folder that jitrope wrote, a bundle, or a folder that one was unpacked into.

    Its entries are matched by what they are made from (templates, constants, options, architecture, format), not by
    what compiler made them: so neither NVRTC nor CuPy's compiler is needed to find one, only CuPy's driver part to
    load it. Like the user's own it is trusted only where nobody but root and the user can write. It is listed when it
    is first asked.
    """

    def __init__(self, path: Path, warn: Callable[[str, str], None]) -> None:
        self.path = path
        self._warn = warn

    @cached_property
    def _archive(self) -> Archive | None:
        return Archive(self.path, own=True) if self.path.is_file() else None

    @cached_property
    def _index(self) -> dict[str, list[str]]:
        """Entries by what they are made from."""
        index: dict[str, list[str]] = {}
        try:
            if reason := untrusted(self.path):
                raise CacheError(f"it {reason}")
            names = self._archive.kernels if self._archive else os.listdir(self.path)
        except (OSError, CacheError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self._warn(f"system {self.path}", f"the system cache {self.path} is not used ({reason})")
            return index
        for name in sorted(names):
            if match := NAME.fullmatch(name):
                index.setdefault(match["stem"], []).append(name)
        return index

    def find(self, key: Key) -> Path | bytes | None:
        """The key's cubin, checked: a path in a folder, or bytes from a bundle."""
        found = self._read(key, FOUND)
        return None if found is None else found[1][CUBIN] if self._archive else self.path / found[0] / CUBIN

    def read(self, key: Key) -> dict[str, bytes] | None:
        """The files of the key's entry."""
        found = self._read(key, FILES)
        return found and found[1]

    def _read(self, key: Key, names: tuple[str, ...]) -> tuple[str, dict[str, bytes]] | None:
        first = (key.folder, key.portable_folder)
        for name in sorted(self._index.get(key.stem, ()), key=lambda name: (name not in first, name)):
            try:
                meta, files = self._archive.read(name, names) if self._archive else read(self.path / name, names)
                if belongs(meta, key, any_compiler=True):
                    return name, files
            except (OSError, CacheError, *DAMAGE) as error:
                self._warn(f"{self.path} {name}", f"{name} in the system cache {self.path} is not usable ({error})")
        return None
