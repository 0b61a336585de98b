"""Caches below the user's own: read-only folders and bundles."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from ..base.errors import CacheError
from .archive import Archive
from .entry import CUBIN, DAMAGE, FILES, FOUND, NAME, Entry, Key, OtherFormat, belongs, listed, read, untrusted


class SystemLayer:
    """A read-only cache: a folder that jitrope wrote, a bundle, or a folder that one was unpacked into.

    Its entries are matched by what they are made from (templates, constants, options, architecture, format), not by
    what compiler made them: so neither NVRTC nor CuPy's compiler is needed to find one, only CuPy's driver part to
    load it. Whoever names it trusts its owner: it may be anybody's, but only its owner, root and the user may be able
    to write it and what is in it. It is listed when it is first asked.
    """

    def __init__(self, path: Path, warn: Callable[[str, str], None]) -> None:
        self.path = path
        self._warn = warn

    @cached_property
    def _archive(self) -> Archive | None:
        return Archive(self.path, own=True) if self.path.is_file() else None

    @cached_property
    def _owners(self) -> tuple[int, ...]:
        """Who may have written it besides root and the user: asked for once, so that it cannot change hands later."""
        return (self.path.stat().st_uid,)

    @cached_property
    def _index(self) -> dict[str, list[str]]:
        """Entries by what they are made from."""
        index: dict[str, list[str]] = {}
        try:
            names = self._names()
        except (OSError, CacheError) as error:
            self._warn(f"system {self.path}", f"the system cache {self.path} is not used ({_reason(error)})")
            return index
        for name in names:
            if match := NAME.fullmatch(name):
                index.setdefault(match["stem"], []).append(name)
        return index

    def find(self, key: Key) -> Path | bytes | None:
        """The key's cubin, checked: a path in a folder, or bytes from a bundle."""
        found = self._find(key, FOUND)
        return None if found is None else found[1][CUBIN] if self._archive else self.path / found[0] / CUBIN

    def read(self, key: Key) -> dict[str, bytes] | None:
        """The files of the key's entry."""
        found = self._find(key, FILES)
        return found and found[1]

    def entries(self) -> list[Entry]:
        """The whole entries, by name; none where the layer cannot be used (`verify` says why)."""
        found: list[Entry] = []
        with contextlib.suppress(OSError, CacheError):
            for name in self._names():
                with contextlib.suppress(OSError, CacheError, *DAMAGE):
                    meta, files = self._read(name, FILES)
                    used = 0.0 if self._archive else (self.path / name).stat().st_mtime
                    found.append(listed(self.path / name, meta, sum(map(len, files.values())), used))
        return found

    def verify(self) -> tuple[int, list[tuple[Path, str]]]:
        """How many entries are whole, and those that are not with the reason; or the layer itself with the reason why
        nothing in it is used. Another version's are neither."""
        try:
            names = self._names()
        except (OSError, CacheError) as error:
            return 0, [(self.path, _reason(error))]
        good, bad = 0, []
        for name in names:
            try:
                self._read(name, FILES)
                good += 1
            except OtherFormat:
                continue
            except (OSError, CacheError, *DAMAGE) as error:
                bad.append((self.path / name, _reason(error)))
        return good, bad

    def _names(self) -> list[str]:
        """The names of its entries. Raises OSError or CacheError where the layer cannot be used."""
        if reason := untrusted(self.path, self._owners):
            raise CacheError(f"it {reason}")
        names = self._archive.kernels if self._archive else os.listdir(self.path)
        return sorted(name for name in names if NAME.fullmatch(name))

    def _find(self, key: Key, names: tuple[str, ...]) -> tuple[str, dict[str, bytes]] | None:
        first = (key.folder, key.portable_folder)
        for name in sorted(self._index.get(key.stem, ()), key=lambda name: (name not in first, name)):
            try:
                meta, files = self._read(name, names)
                if belongs(meta, key, any_compiler=True):
                    return name, files
            except (OSError, CacheError, *DAMAGE) as error:
                self._warn(f"{self.path} {name}", f"{name} in the system cache {self.path} is not usable ({error})")
        return None

    def _read(self, name: str, names: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, bytes]]:
        return self._archive.read(name, names) if self._archive else read(self.path / name, names, self._owners)


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
