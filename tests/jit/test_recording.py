"""A process writes down the kernels that it needs, and tells monitors of those that it makes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

import jitrope
from jitrope.base.spec import record_of, spec_from_dict
from jitrope.jit import kernels, recording
from jitrope.jit.cache import KernelCache
from jitrope.jit.entry import CUBIN
from jitrope.tools.prewarm import read_record, specs_of

from .. import fresh
from ..caches import on_the_gpu

SIZES = (8, 128), ([32, 8], 128), (8, 64), (8, 256), ([32, 8], 64)
SPECS = [*dict.fromkeys(spec for heads, size in SIZES for spec in specs_of(heads, size))]
SPEC = SPECS[0]


def test_a_monitor_is_told_of_compiles(cache: KernelCache) -> None:
    """An exception of a callback reaches the caller; the kernel is kept, and its text is a file for `--from`."""
    seen: list[jitrope.KernelEvent] = []
    remove, other = jitrope.on_compile(seen.append), jitrope.on_compile(seen.append)
    other()
    other()  # nothing is left to remove
    for _ in range(2):
        kernels.build(SPEC, "sm_90")
    found = [(event.name, event.arch, event.source) for event in seen]
    assert found == [(SPEC.name, "sm_90", source) for source in ("compiled", "disk")]
    assert seen[0].seconds > seen[1].seconds > 0
    assert seen[0].spec == json.dumps(record_of([SPEC]))
    assert seen[0].call == SPEC.call == "bshd heads q > rotate cos sin rotary_dim=128 > fresh"
    remove()
    remove = jitrope.on_compile(Mock(side_effect=RuntimeError("refused")))
    try:
        with pytest.raises(RuntimeError, match="refused"):
            kernels.build(SPEC, "sm_80")
    finally:
        remove()
    assert not kernels.build(SPEC, "sm_80").compiled
    assert len(seen) == 2


@pytest.mark.usefixtures("driver")
def test_record_notes_what_was_asked_for(cache: KernelCache, tmp_path: Path, monkeypatch) -> None:
    """What was missing too. A file keeps what it has, and its place if the working folder changes."""
    monkeypatch.setenv("JITROPE_NO_COMPILE", "1")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.txt"  # JSON, for any file name
    path.write_text(json.dumps({"version": 1, "spec": [SPECS[1].to_dict()], "by": "me"}))
    with pytest.raises(jitrope.MissingKernel):
        kernels.get_kernel(SPECS[0], 0)  # before the block: a prepared launch does not look it up again
    (tmp_path / "elsewhere").mkdir()
    with jitrope.record("run.txt") as seen:
        os.chdir("elsewhere")
        for device in (0, 1):
            with pytest.raises(jitrope.MissingKernel):
                kernels.get_kernel(SPECS[1], device)
    assert seen == SPECS[:2]
    data = json.loads(path.read_text())
    assert data["by"] == "me"
    assert [spec_from_dict(spec) for spec in data["spec"]] == read_record(path) == [SPECS[1], SPECS[0]]
    with pytest.raises(jitrope.MissingKernel), jitrope.record(path):
        kernels.get_kernel(SPECS[2], 0)
    assert read_record(path) == [SPECS[1], SPECS[0], SPECS[2]]
    with jitrope.record() as seen:
        pass
    assert seen == SPECS[:3]


NO_RECORDS = ["{", "[]", "\0", '{"spec": ' + "[" * 100_000, '{"version": 1, "spec": 1}', '{"spec": []}']
NO_RECORDS += [f'{{"version": {version}, "spec": []}}' for version in ("0", "2", '"1"')]


@pytest.mark.parametrize("text", NO_RECORDS, ids=range(len(NO_RECORDS)))
def test_a_file_that_is_no_record_is_refused_before_the_run(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(jitrope.CacheError, match=r"run\.json"), jitrope.record(path):
        raise AssertionError("not reached")
    assert path.read_text() == text


def test_an_empty_file_is_an_empty_record(tmp_path: Path) -> None:
    """`mktemp` makes such a file. A byte order mark is no content either."""
    path = tmp_path / "run.json"
    path.touch()
    assert read_record(path) == []
    with jitrope.record(path):
        pass
    recording.add(path, [SPEC])
    assert read_record(path) == [SPEC]
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert read_record(path) == [SPEC]


def test_a_lock_that_was_there_is_neither_followed_nor_emptied(tmp_path: Path) -> None:
    path, lock, target = (tmp_path / name for name in ("run.json", ".run.json.lock", "target"))
    target.write_text("precious")
    lock.symlink_to(target)
    with pytest.raises(jitrope.CacheError, match=r"cannot write .*run\.json: .*symbolic link"):
        recording.add(path, [SPEC])
    assert not path.exists()
    target.replace(lock)
    recording.add(path, [SPEC])
    assert lock.read_text() == "precious"


@pytest.mark.parametrize("field", [{"interleaved": 0}, {"rotary_dim": 128.0}, {"heads_per_block": True}])
def test_a_record_has_no_spec_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: dict) -> None:
    monkeypatch.setattr(recording, "_asked", {})
    monkeypatch.setenv("JITROPE_RECORD", str(tmp_path / "run.json"))
    with pytest.raises(jitrope.InvalidInput, match=f"{next(iter(field))} is"):
        recording.note(replace(SPEC, **field))
    recording.note(SPEC)  # it is equal to the other one
    with jitrope.record(tmp_path / "other.json") as seen:
        pass
    assert seen == read_record(tmp_path / "run.json") == read_record(tmp_path / "other.json") == [SPEC]


def test_a_record_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """A run goes on without its record. No device is replaced by a file."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "run.json", tmp_path, tmp_path / ("x" * 300)):
        with pytest.raises(jitrope.CacheError, match=r"^cannot (write|read) .*$"):
            recording.add(path, [SPEC])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(jitrope.CacheError, match="pipe: it is not a file"):
        recording.add(tmp_path / "pipe", [SPEC])
    assert (tmp_path / "pipe").is_fifo()
    monkeypatch.setattr(recording, "_asked", {})
    monkeypatch.setenv("JITROPE_RECORD", str(tmp_path / "file" / "run.json"))
    for _ in range(2):
        recording.note(SPEC)
    assert len(caplog.records) == 1


def test_a_run_on_the_cpu_says_that_nothing_is_recorded(tmp_path: Path, monkeypatch, caplog) -> None:
    """At its end, if it was to be recorded, and no other process of the run has recorded."""
    code = "import torch, jitrope; jitrope.apply_rope(torch.ones(1, 2, 1, 8), None, *torch.ones(2, 2, 4))"
    path = tmp_path / "run.json"
    environment = {**os.environ, "PYTHONPATH": fresh.IMPORTS, "JITROPE_RECORD": str(path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    text = f"JITROPE_RECORD: no kernel was launched, so nothing was recorded and {path} was not written\n"
    assert (done.returncode, done.stderr) == (0, text)
    monkeypatch.setattr(recording, "_asked", {})
    for name, exists in (("", False), (str(path), True)):
        monkeypatch.setenv("JITROPE_RECORD", name)
        path.touch() if exists else None
        recording._say_if_empty()
    assert caplog.text == ""


@pytest.mark.parametrize("number", ["ENOLCK", "ENOSYS"])
def test_a_record_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(getattr(errno, number), "no locks")))
    recording.add(tmp_path / "run.json", SPECS[:2])
    assert read_record(tmp_path / "run.json") == SPECS[:2]


def test_a_lock_that_is_never_released_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may be stopped while it writes. Not each kernel waits for it."""
    monkeypatch.setattr(recording, "_patience", 0.3)
    with open(tmp_path / ".run.json.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        start = time.monotonic()
        for spec in SPECS:
            recording.add(tmp_path / "run.json", [spec])
        assert 0.3 <= time.monotonic() - start < len(SPECS) * 0.3
    assert read_record(tmp_path / "run.json") == SPECS
    assert len(SPECS) > 5


WORKERS = """
import multiprocessing, os, signal
from jitrope.jit import recording
from jitrope.tools.prewarm import specs_of
SPECS = [spec for heads in range(1, 9) for size in (64, 128, 256) for spec in specs_of(heads, size)]

def work(number, barrier):
    barrier.wait()
    for spec in SPECS[number::8]:
        recording.note(spec)
    if number % 2:
        os.kill(os.getpid(), signal.SIGKILL)  # the worker gets no time to finish

if __name__ == "__main__":
    for method, numbers in (("fork", range(7)), ("spawn", range(7, 8))):
        context = multiprocessing.get_context(method)
        barrier = context.Barrier(len(numbers))
        ranks = [context.Process(target=work, args=(i, barrier)) for i in numbers]
        for rank in ranks: rank.start()
        for rank in ranks: rank.join()
"""


@pytest.mark.slow
def test_workers_record_into_one_file(tmp_path: Path) -> None:
    """Forked and spawned workers write at the same time, and some of them are killed."""
    (tmp_path / "workers.py").write_text(WORKERS)
    environment = {**os.environ, "PYTHONPATH": fresh.IMPORTS, "JITROPE_RECORD": "run.json"}
    subprocess.run([sys.executable, "workers.py"], check=True, cwd=tmp_path, env=environment, timeout=200)
    want = {spec for heads in range(1, 9) for size in (64, 128, 256) for spec in specs_of(heads, size)}
    assert len(want) > 16
    assert set(read_record(tmp_path / "run.json")) == want
    assert sorted(p.name for p in tmp_path.iterdir()) == [".run.json.lock", "run.json", "workers.py"]


@pytest.mark.gpu
def test_jitrope_record_notes_a_gpu_run(tmp_path: Path) -> None:
    on_the_gpu("call(); call()", tmp_path / "k", JITROPE_RECORD=str(tmp_path / "run.json"))
    entries = list(KernelCache(tmp_path / "k").entries())
    assert read_record(tmp_path / "run.json") == [spec_from_dict(entry.spec) for entry in entries]
    assert (entries[0].path / CUBIN).exists()
