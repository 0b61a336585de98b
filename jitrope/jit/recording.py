"""Record the kernels that a process needs, as JSON for `jitrope prewarm --from`, and tell monitors of compiles."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..base import arguments
from ..base.config import log, record_file
from ..base.errors import CacheError
from ..base.spec import VERSION, Spec, record_of
from .trust import reason, refuse_device, replaced

_patience = 10.0
"""Seconds to wait for another process that writes the file. After one such wait a process waits no more."""

_asked: dict[Spec, None] = {}


@contextlib.contextmanager
def record(path: str | Path | None = None) -> Iterator[list[Spec]]:
    """Note the kernels that a block of code needs, and write them to a JSON file for `jitrope prewarm --from`.

    The result includes the kernels that the process needed before the block, because prepared calls do not look their
    kernels up again. So recording does not slow down prepared calls. An existing file keeps its content.

    >>> with jitrope.record() as specs:  # record("run.json") also writes the file
    ...     q, _ = jitrope.apply_rope(torch.randn(1, 16, 8, 64), None, *torch.rand(2, 16, 32))

    Args:
        path: the file. Without it, the kernels are only in the list.

    Yields:
        A list, to which the specs are added when the block ends.

    Raises:
        CacheError: an existing file is not such a recording (raised before the block), or it cannot be written.
        InvalidInput: path is not a path.
    """
    if path is not None:
        path = arguments.path("record", "path", path).absolute()  # the block may change the working folder
        _read(path)
    specs: list[Spec] = []
    try:
        yield specs
    finally:
        specs += _asked
        if path is not None:
            add(path, specs)


class KernelEvent(NamedTuple):
    """A kernel that this process made or found.

    >>> text = "bshd heads q k > rotate cos sin rotary_dim=128 > fresh"
    >>> event = jitrope.KernelEvent("rope_bf16_d128", "sm_90", text, "{}", 0.2, "compiled")

    call is the text of the call that needs the kernel; `jitrope prewarm` reads it. A kernel that moves rows has "".
    spec is JSON for `jitrope prewarm --from`. source is "compiled", or "disk": from the kernel cache or a bundle.
    """

    name: str
    arch: str
    call: str
    spec: str
    seconds: float
    source: str


_callbacks: dict[object, Callable[[KernelEvent], object]] = {}


def on_compile(callback: Callable[[KernelEvent], object]) -> Callable[[], None]:
    """Call a function for each kernel that this process compiles, or reads from a cache, from now on.

    Use it to monitor a server after its warm-up. The thread that needs the kernel calls the function before the launch.
    An exception that it raises reaches the caller of jitrope, and nothing was written. Do not raise InvalidInput: a
    drop-in would call the host's function. Other threads that need a kernel wait for the callback, so it must return
    soon and not wait for them. A loaded kernel makes no event. Returns a function that removes the callback. Raises
    InvalidInput if callback cannot be called.

    >>> remove = jitrope.on_compile(lambda event: print(event.call, event.source, event.seconds))
    >>> remove()
    """
    if not callable(callback):
        arguments.refuse("on_compile", "callback", callback, "a function of a KernelEvent")
    _callbacks[key := object()] = callback

    def remove() -> None:
        _callbacks.pop(key, None)

    return remove


def tell(spec: Spec, arch: str, since: float, source: str) -> None:
    """Tell the callbacks of a kernel. since: its start, of `time.perf_counter`."""
    if _callbacks:
        seconds, text = time.perf_counter() - since, json.dumps(record_of([spec]))
        for callback in [*_callbacks.values()]:
            callback(KernelEvent(spec.name, arch, spec.call, text, seconds, source))


def note(spec: Spec) -> None:
    """Note a needed kernel. `JITROPE_RECORD` is written at once, in case the process is killed later.

    Raises:
        InvalidInput: the spec is wrong; nothing is noted.
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


@atexit.register
def _say_if_empty() -> None:
    """Say that `JITROPE_RECORD` is not written, as after a run on a CPU. Another process may have written it."""
    path = record_file()
    if path and not _asked and not os.path.exists(path):
        log.warning("JITROPE_RECORD: no kernel was launched, so nothing was recorded and %s was not written", path)


def add(path: Path, specs: Iterable[Spec]) -> None:
    """Add specs to a file in one step. Concurrent processes wait for each other."""
    wanted = json.loads(json.dumps(record_of(specs)))["spec"]
    there = _read(path)["spec"]
    if all(spec in there for spec in wanted):
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        target = Path(os.path.realpath(path))  # processes that record through a link and its target share a lock
        with _locked(target.with_name(f".{target.name}.lock")), replaced(target) as temporary:
            data = _read(path)
            data["spec"] += [spec for spec in wanted if spec not in data["spec"]]
            temporary.write_text(json.dumps(data, indent=1) + "\n")
    except OSError as error:
        raise CacheError(f"cannot write {path}: {reason(error)}") from error


def _read(path: Path) -> dict[str, Any]:
    refuse_device(path)
    return content(path) if os.path.exists(path) else record_of(())


def content(path: Path) -> dict[str, Any]:
    """The record in a file. An empty file is an empty one: `mktemp` makes such files.

    Raises CacheError: it cannot be read, or is no record of this version.
    """
    try:
        text = path.read_text(encoding="utf-8-sig").strip()
        data: Any = json.loads(text) if text else record_of(())
        if not isinstance(data, dict) or not isinstance(data.get("spec"), list) or data.get("version") != VERSION:
            raise ValueError(f"it is no record of version {VERSION}; record again with this jitrope, in a new file")
    except (OSError, ValueError, RecursionError) as error:
        raise CacheError(f"cannot read {path}: {reason(error)}") from error
    return data


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock, if the system has locks. A process that dies releases its lock."""
    global _patience
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)  # an existing file is not emptied
    with open(os.open(path, flags, 0o666), "r+") as file:
        end = time.monotonic() + _patience
        with contextlib.suppress(ImportError, OSError):  # Windows; a file system without locks
            import fcntl

            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= end:  # it may hold the lock for ever
                        _patience = 0.0
                        break
                    time.sleep(0.01)
        yield
