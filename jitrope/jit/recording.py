"""A record of the kernels that a process asked for, as JSON for `jitrope prewarm --from`."""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base import arguments
from ..base.config import log, record_file
from ..base.errors import CacheError
from ..base.spec import Spec

LOCK_SECONDS = 10.0
"""How long to wait for a process that writes the same file and may be stopped, before going on without the lock."""

_asked: dict[Spec, None] = {}


@dataclass
class Recording:
    """The result of `record`. `specs`: the kernels that were asked for, complete when the block has ended."""

    specs: list[Spec] = field(default_factory=list)


@contextlib.contextmanager
def record(path: str | Path | None = None) -> Iterator[Recording]:
    """Note the kernels that a block of code asks for, and write them to a JSON file for `jitrope prewarm --from`.

    Kernels that the process asked for before the block are noted too, because a prepared call does not ask again.
    A steady state costs nothing. A file that is there keeps its content.

    Args:
        path: the file; without it, the specs are only in the `Recording` that the block gets.

    Yields:
        A `Recording`, whose `specs` are complete when the block has ended.

    Raises:
        CacheError: before the block, if the file is there and holds no such list; or the file cannot be written.
        InvalidInput: path is not a path.
    """
    if path is not None:
        path = arguments.path("record", "path", path)
        _read(path)
    recording = Recording()
    try:
        yield recording
    finally:
        recording.specs = list(_asked)
        if path is not None:
            add(path, recording.specs)


def note(spec: Spec) -> None:
    """Note that a kernel was asked for. `JITROPE_RECORD` is written at once, in case the process is killed later.

    Raises:
        InvalidInput: no kernel can be made from the spec; nothing is noted.
    """
    if spec in _asked:
        return
    spec.constants()  # raises for a spec that could not be read back
    _asked[spec] = None
    if path := record_file():
        try:
            add(path, [spec])
        except CacheError as error:
            log.warning("%s", error)


def add(path: Path, specs: Iterable[Spec]) -> None:
    """Add specs to a file, in one step; processes that do so at the same time wait for each other."""
    wanted = [spec.to_dict() for spec in specs]
    if not _missing(_read(path), wanted):
        return
    temporary = path.parent / f".jitrope-{uuid.uuid4().hex}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(f".{path.name}.lock")):
            data = _read(path)
            data["spec"] = [*data.get("spec", ()), *_missing(data, wanted)]
            temporary.write_text(json.dumps(data, indent=1) + "\n")
            os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CacheError(f"cannot write {path}: {error.strerror or error}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        data = json.loads(text) if text.strip() else {}  # `mktemp` and `touch` make empty files
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        text = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CacheError(f"cannot add kernels to {path}: {text}") from error
    if not isinstance(data, dict) or not isinstance(data.get("spec", []), list):
        raise CacheError(f"cannot add kernels to {path}: it has no `spec` list")
    return data


def _missing(data: dict[str, Any], wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    there = {json.dumps(spec, sort_keys=True) for spec in data.get("spec", ())}
    return [spec for spec in wanted if json.dumps(spec, sort_keys=True) not in there]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock, where there are locks. It ends with its process, so none is ever left behind."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW  # a file that is there is not emptied
    with open(os.open(path, flags, 0o666), "r+") as file:
        deadline = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # a file system without locks
                break
        yield
