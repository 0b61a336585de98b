"""Threads, forks and spawned workers: they compile once if one compile is enough, and nothing waits for ever."""

from __future__ import annotations

import copy
import errno
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import jitrope
from jitrope.base.errors import CompileError
from jitrope.base.spec import spec_from_dict
from jitrope.context_parallel import Partition, Rope, Schedule, all_gather_attention
from jitrope.context_parallel.backends import Case
from jitrope.jit import compiler, entry, kernels, recording
from jitrope.jit.cache import KernelCache
from jitrope.jit.driver import Refused
from jitrope.jit.entry import CUBIN, Entry
from jitrope.plan import heuristics
from jitrope.plan.options import Options
from jitrope.thd.shape import Mask
from jitrope.thd.spec import CorrectionSpec, RowsSpec, SegmentsSpec
from jitrope.tools.doctor import Check
from jitrope.tools.prewarm import Built, read_record

from . import fresh
from .caches import IMPORTS, on_the_gpu, run_in_child
from .described import popular
from .devices import slow
from .test_heuristics import BASE

SPECS = [*popular()]
SPEC = SPECS[0]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelCache:
    """The cache of this process, empty."""
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "kernels"))
    return kernels.kernel_cache()


class Loaded:
    """A kernel that is not loaded, because there is no driver; it only keeps its arguments."""

    def __init__(self, cubin: bytes, entry: str, device: int) -> None:
        self.cubin, self.entry, self.device = cubin, entry, device


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `get_kernel` work as on a machine with GPUs of sm_90. Only the loading is replaced."""
    monkeypatch.setattr(kernels, "Kernel", Loaded)
    monkeypatch.setattr(kernels, "arch_of", lambda device: "sm_90")
    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.setattr(kernels.torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(recording, "_asked", {})


def python(code: str, **environment: str) -> str:
    """Return the output of a new process."""
    given = {**os.environ, "PYTHONPATH": IMPORTS, **environment}
    done = fresh.python("-c", code, env=given)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- threads -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("driver")
def test_32_threads_on_one_spec_compile_once(cache: KernelCache) -> None:
    barrier, found, before = threading.Barrier(32), [], len(kernels.compiled)

    def work() -> None:
        barrier.wait()
        found.append(kernels.get_kernel(SPEC, 0))

    threads = [threading.Thread(target=work) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 32
    assert all(kernel is found[0] for kernel in found)
    assert found[0].cubin.startswith(b"\x7fELF")
    assert kernels.compiled[before:] == [SPEC.name]


@pytest.mark.usefixtures("driver")
def test_devices_have_kernels_of_their_own_and_one_compile(cache: KernelCache) -> None:
    before = len(kernels.compiled)
    first, second = (kernels.get_kernel(SPEC, device) for device in (0, 1))
    assert (first.device, second.device) == (0, 1)
    assert first.cubin == second.cubin
    assert kernels.get_kernel(SPEC, 1) is second
    assert kernels.compiled[before:] == [SPEC.name]


@pytest.mark.usefixtures("driver")
def test_no_disk_and_no_lock_after_the_first_call(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.get_kernel(SPEC, 0)

    def work() -> None:
        thread = threading.Thread(target=kernels._build_lock.acquire)  # taking it now would wait for ever
        thread.start()
        thread.join()
        assert not kernels._build_lock.acquire(timeout=0.01)
        seen = []
        sys.addaudithook(lambda name, _: seen.append(name) if name == "open" or name.startswith("os.") else None)
        for _ in range(1000):
            kernels.get_kernel(SPEC, 0)
        assert not seen, seen
        os.listdir(".")
        assert seen  # the hook works

    assert run_in_child(work) == 0


def test_what_is_not_the_images_fault_is_not_compiled_again(cache: KernelCache, driver, monkeypatch, caplog) -> None:
    """Out of memory or the fault of an earlier kernel: the entry is kept, because other processes use it."""
    path = cache.root / kernels.key_of(SPEC, "sm_90").folder
    kernels.build(SPEC, "sm_90")

    def out_of_memory(*_: object) -> None:
        raise CompileError("cannot be loaded: CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(kernels, "Kernel", out_of_memory)
    before = len(kernels.compiled), path.stat().st_ino
    with pytest.raises(CompileError, match="OUT_OF_MEMORY"):
        kernels.get_kernel(SPEC, 0)
    assert (len(kernels.compiled), path.stat().st_ino) == before
    assert not caplog.text


@pytest.mark.parametrize("place", ["own", "loaded from a bundle", "layer"])
def test_an_image_that_the_driver_refuses_is_rebuilt_once(place: str, driver, tmp_path: Path, monkeypatch) -> None:
    """The rebuilt kernel replaces the refused one, or is found before it."""
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("JITROPE_SYSTEM_CACHE", str(tmp_path / "layer"))
    key, refused = kernels.key_of(SPEC, "sm_90"), []
    name = key.portable_folder if place == "loaded from a bundle" else key.folder
    folder = KernelCache(tmp_path / ("layer" if place == "layer" else "kernels"))
    assert folder.install(name, entry.pack(key, "text", b"of another GPU", SPEC.to_dict()))

    def load(cubin: bytes, *given: object) -> Loaded:
        if cubin == b"of another GPU":
            refused.append(cubin)
            raise Refused("the driver refuses the kernel")
        return Loaded(cubin, SPEC.entry, 0)

    monkeypatch.setattr(kernels, "Kernel", load)
    for compiled in (1, 0):  # the second time as in a new process
        before = len(kernels.compiled)
        monkeypatch.setattr(kernels, "_kernels", {})
        assert kernels.get_kernel(SPEC, 0).cubin.startswith(b"\x7fELF")
        assert len(kernels.compiled) - before == compiled
    assert len(refused) == 1


# ---- processes on one cache ----------------------------------------------------------------------

RANKS = """
import hashlib, json, multiprocessing, os, sys
from pathlib import Path
import jitrope
from jitrope.jit import kernels
from jitrope.jit.entry import CUBIN
from jitrope.tools.prewarm import specs_of
spec = specs_of(heads=[32, 8])[0]
context = multiprocessing.get_context("fork")
barrier, results = context.Barrier(16), context.Queue()

def rank(number):
    barrier.wait()
    seen = set()
    for turn in range(TURNS):
        found = kernels.build(spec, "sm_90")
        seen.add(hashlib.sha256(found.data).hexdigest())
        if TEARS and number == 0:
            for path in Path(os.environ["JITROPE_CACHE_DIR"]).glob("rope*/" + CUBIN):
                os.replace(path, path.with_suffix(".old"))
                path.write_bytes(b"torn")
    results.put((sorted(seen), len(kernels.compiled)))

ranks = [context.Process(target=rank, args=(i,)) for i in range(16)]
for process in ranks: process.start()
found = [results.get(timeout=200) for _ in ranks]
for process in ranks: process.join()
print(json.dumps({"codes": [p.exitcode for p in ranks], "found": found}))
"""


def run_ranks(cache: KernelCache, turns: int, tears: bool) -> dict:
    code = RANKS.replace("TURNS", str(turns)).replace("TEARS", str(tears))
    return json.loads(python(code, JITROPE_CACHE_DIR=str(cache.root)).splitlines()[-1])


@pytest.mark.parametrize("tears", [slow(False), True], ids=["all whole", "one of which tears entries"])
def test_16_ranks_on_one_empty_cache(cache: KernelCache, tears: bool) -> None:
    """All start at once. Each gets the right bytes, and one whole entry is left, without a lock."""
    report = run_ranks(cache, 3 if tears else 1, tears)
    assert report["codes"] == [0] * 16
    assert len({digest for seen, _ in report["found"] for digest in seen}) == 1
    kernels.build(SPEC, "sm_90")  # replaces a torn entry
    assert cache.verify() == (1, [])
    assert [p.name for p in cache.root.iterdir()] == [cache.entries()[0].path.name]


SLOW = """
import os, sys, time
from jitrope.jit import compiler, kernels
from jitrope.tools.prewarm import specs_of
real = compiler.compile_source
def slow(*arguments, **keywords):
    print("compiling", flush=True)
    time.sleep(60)
compiler.compile_source = slow
kernels.build(specs_of(heads=[32, 8])[0], "sm_90")
"""


def test_a_rank_that_is_killed_while_it_compiles_holds_up_nobody(cache: KernelCache) -> None:
    environment = {**os.environ, "PYTHONPATH": IMPORTS}
    rank = subprocess.Popen([sys.executable, "-c", SLOW], stdout=subprocess.PIPE, env=environment)
    assert rank.stdout.readline() == b"compiling\n"
    start = time.monotonic()
    assert kernels.build(SPEC, "sm_90").kept  # while the other one compiles
    assert time.monotonic() - start < 30
    rank.kill()
    rank.wait()
    assert cache.verify() == (1, [])


# ---- forks ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("driver")
def test_a_child_forked_while_a_thread_builds_has_a_lock_of_its_own(cache: KernelCache) -> None:
    held, over, before = threading.Event(), threading.Event(), len(kernels.compiled)

    def build() -> None:
        with kernels._build_lock:
            held.set()
            over.wait()

    def work() -> None:
        signal.alarm(60)
        kernels.get_kernel(SPEC, 0)
        assert kernels.compiled[before:] == [SPEC.name]

    compiler.import_cupy()  # as documented: at a fork, an import in another thread would never end
    thread = threading.Thread(target=build)
    thread.start()
    held.wait()
    try:
        assert run_in_child(work) == 0
    finally:
        over.set()
        thread.join()


FORK_AFTER_IMPORT = """
import os, sys
before = set(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else set()
import torch, jitrope
assert not torch.cuda.is_initialized()
pid = os.fork()
if pid == 0:
    assert not torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork()
    assert not {"cupy", "cupy_backends"} & set(sys.modules)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert jitrope.apply_rope(torch.ones(1, 2, 1, 8), None, torch.ones(2, 4), torch.zeros(2, 4))[0].sum() == 16
assert not torch.cuda.is_initialized()
assert not {"cupy", "cupy_backends"} & set(sys.modules)
"""


def test_neither_import_nor_fork_nor_a_cpu_call_touches_cuda(tmp_path: Path) -> None:
    python(FORK_AFTER_IMPORT, JITROPE_CACHE_DIR=str(tmp_path / "k"))
    assert list(tmp_path.iterdir()) == []


class Rotated(torch.utils.data.Dataset):
    """A data set that rotates an item when it is loaded."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        q = torch.full((1, 4, 2, 8), float(index))
        angles = torch.arange(16.0).view(4, 4)
        out, _ = jitrope.apply_rope(q, None, angles.cos(), angles.sin())
        assert not torch.cuda.is_initialized()
        return out[0]


@pytest.mark.parametrize("method", ["fork", slow("spawn"), "forkserver"])
def test_dataloader_workers(method: str) -> None:
    dataset = Rotated()
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context=method)
    got = torch.cat(list(loader))
    assert torch.equal(got, torch.stack([dataset[i] for i in range(8)]))


# ---- pickling ------------------------------------------------------------------------------------


def missing() -> jitrope.MissingKernel:
    return kernels.missing_kernel(SPEC, "sm_90", KernelCache(Path("/a")))


PICKLED = {
    "rope spec": SPEC,
    "rows spec": RowsSpec("table"),
    "segments spec": SegmentsSpec(False, "int32", 2, "dual_chunk", False, False, False, True, 128),
    "correction spec": CorrectionSpec("lse", "add", "copy", True, "fp32", "int32", 1),
    "options": Options(layout="thd"),
    "plan": heuristics.plan(BASE),
    "a norm's options": Options(norm_kind="rms_norm", norm_rounding="once"),
    "built": Built(SPEC, "sm_90", "cached"),
    "mask": Mask(),
    "entry": Entry(Path("/a"), "name", "sm_90", 3, {}),
    "check": Check("compiler", True, "cupy 14.0"),
    "case": Case(torch.device("cpu"), torch.float32, 2, 1, 8, 8),
}


@pytest.mark.parametrize("what", PICKLED)
def test_what_users_hold_is_pickled_copied_and_printed(what: str) -> None:
    assert pickle.loads(pickle.dumps(PICKLED[what])) == PICKLED[what]
    assert copy.deepcopy(PICKLED[what]) == copy.copy(PICKLED[what]) == PICKLED[what]
    assert " object at 0x" not in repr(PICKLED[what])


OFFSETS = torch.tensor([0, 3, 10], dtype=torch.int32)
OBJECTS = {
    "partition": (Partition(OFFSETS, 11, cp_size=2, cp_rank=1), "Partition(6 of 11 tokens, 2 sequences, rank 1 of 2, "),
    "schedule": (Schedule(OFFSETS, 11, window=(4, -1)), "Schedule(11 of 11 tokens, 2 sequences, rank 0 of 1, "),
    "fixed schedule": (Schedule.fixed(2, 4, "cpu"), "Schedule(8 of 8 tokens, 2 sequences, rank 0 of 1, dual_chunk, "),
    "rope": (Rope(torch.ones(11, 2), torch.zeros(11, 2)), "Rope(interleaved=False, "),
}


@pytest.mark.parametrize("copied", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy, copy.copy])
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("what", OBJECTS)
def test_objects_are_pickled_copied_and_printed(what: str, used: bool, copied) -> None:
    """They may hold tables from earlier use."""
    x, text = OBJECTS[what]
    if used and isinstance(x, Partition):
        assert x.position_ids.shape == (x.shape.rows,)
    again = copied(x)
    assert repr(again) == repr(x)
    assert repr(x).startswith(text)
    if isinstance(x, Schedule):
        q = torch.randn(x.shape.rows, 2, 4)
        assert torch.equal(*(all_gather_attention(q, q, q, one) for one in (x, again)))
    if isinstance(x, Partition):
        assert torch.equal(again.indices, x.indices)
        rows = torch.arange(float(x.shape.tokens)).unsqueeze(1)
        assert torch.equal(again.shard(rows), x.shard(rows))


def test_a_partition_of_a_group_says_that_it_stays(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    try:
        part = Partition(OFFSETS, 10)
        assert torch.equal(copy.deepcopy(part).indices, part.indices)
        with pytest.raises(pickle.PicklingError, match="belongs to its process: make it from cu_seqlens there"):
            pickle.dumps(part)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "error",
    [
        jitrope.JitropeError("a"),
        jitrope.InvalidInput("b"),
        jitrope.CompileError("c"),
        jitrope.CacheError("d"),
        missing(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_are_pickled_and_have_one_base(error: jitrope.JitropeError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    assert isinstance(error, jitrope.JitropeError)


def test_an_error_of_a_worker_reaches_its_parent(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITROPE_NO_COMPILE", "1")
    with multiprocessing.get_context("fork").Pool(1) as pool, pytest.raises(jitrope.MissingKernel) as caught:
        pool.apply(kernels.build, (SPEC, "sm_90"))
    assert caught.value.spec == SPEC.to_dict()


# ---- recording -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("driver")
def test_record_notes_what_was_asked_for(cache: KernelCache, tmp_path: Path) -> None:
    kernels.get_kernel(SPECS[0], 0)  # before the block: a prepared launch does not look it up again
    with jitrope.record(tmp_path / "run.json") as seen:
        kernels.get_kernel(SPECS[1], 0)
        kernels.get_kernel(SPECS[1], 1)
    assert seen == SPECS[:2]
    assert read_record(tmp_path / "run.json") == SPECS[:2]
    with jitrope.record(tmp_path / "run.json"):
        kernels.get_kernel(SPECS[2], 0)
    assert read_record(tmp_path / "run.json") == SPECS[:3]
    with jitrope.record() as seen:
        pass
    assert seen == SPECS[:3]


@pytest.mark.usefixtures("driver")
def test_record_notes_what_was_missing_too(cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITROPE_NO_COMPILE", "1")
    with pytest.raises(jitrope.MissingKernel), jitrope.record(tmp_path / "run.txt"):
        kernels.get_kernel(SPEC, 0)
    assert read_record(tmp_path / "run.txt") == [SPEC]  # JSON, for any file name


@pytest.mark.usefixtures("driver")
def test_a_record_keeps_what_the_file_has(cache: KernelCache, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"version": 1, "spec": [SPECS[1].to_dict()], "by": "me"}))
    with jitrope.record(path):
        kernels.get_kernel(SPECS[0], 0)
        kernels.get_kernel(SPECS[1], 0)
    data = json.loads(path.read_text())
    assert data["by"] == "me"
    assert [spec_from_dict(spec) for spec in data["spec"]] == [SPECS[1], SPECS[0]]
    assert set(read_record(path)) == {*SPECS[:2]}


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"version": 1, "spec": 1}', "\0", '{"spec": []}', '{"version": 2, "spec": []}']
)
def test_a_file_that_is_no_record_is_refused_before_the_run(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(jitrope.CacheError, match=r"run\.json"), jitrope.record(path):
        raise AssertionError("not reached")
    assert path.read_text() == text


def test_an_empty_file_is_an_empty_record(tmp_path: Path) -> None:
    """`mktemp` makes such a file."""
    path = tmp_path / "run.json"
    path.touch()
    assert read_record(path) == []
    with jitrope.record(path):
        pass
    recording.add(path, [SPEC])
    assert read_record(path) == [SPEC]


@pytest.mark.parametrize("planted", ["link", "file"])
def test_a_lock_that_was_there_is_neither_followed_nor_emptied(tmp_path: Path, planted: str) -> None:
    target, lock = tmp_path / "target", tmp_path / ".run.json.lock"
    if planted == "file":
        target = lock
    target.write_text("precious")
    if planted == "link":
        lock.symlink_to(target)
        with pytest.raises(jitrope.CacheError, match=r"cannot write .*run\.json: .*symbolic link"):
            recording.add(tmp_path / "run.json", [SPEC])
        assert not (tmp_path / "run.json").exists()
    else:
        recording.add(tmp_path / "run.json", [SPEC])
    assert target.read_text() == "precious"


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
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "run.json", tmp_path, tmp_path / ("x" * 300)):
        with pytest.raises(jitrope.CacheError, match=r"^cannot (write|read) .*$"):
            recording.add(path, [SPEC])
    monkeypatch.setattr(recording, "_asked", {})
    monkeypatch.setenv("JITROPE_RECORD", str(tmp_path / "file" / "run.json"))
    recording.note(SPEC)  # the run goes on
    recording.note(SPEC)
    assert len(caplog.records) == 1


CPU_RUN = "import torch, jitrope; jitrope.apply_rope(torch.ones(1, 2, 1, 8), None, *torch.ones(2, 2, 4))"


def test_a_run_on_the_cpu_says_that_nothing_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    for record in ("", str(path)):
        environment = {**os.environ, "PYTHONPATH": IMPORTS, "JITROPE_RECORD": record}
        done = subprocess.run([sys.executable, "-c", CPU_RUN], capture_output=True, text=True, env=environment)
        text = f"JITROPE_RECORD: no kernel was launched, so nothing was recorded and {path} was not written\n"
        assert (done.returncode, done.stderr) == (0, text if record else "")
    recording.add(path, [SPEC])  # another process of the run records
    done = subprocess.run([sys.executable, "-c", CPU_RUN], capture_output=True, text=True, env=environment)
    assert (done.stderr, read_record(path)) == ("", [SPEC])


@pytest.mark.parametrize("number", ["ENOLCK", "ENOSYS"])
def test_a_record_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    import fcntl

    def no_locks(*_: object) -> None:
        raise OSError(getattr(errno, number), "no locks")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    recording.add(tmp_path / "run.json", SPECS[:2])
    assert read_record(tmp_path / "run.json") == SPECS[:2]


def test_a_lock_that_is_never_released_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may be stopped while it writes. Not each kernel waits for it."""
    import fcntl

    monkeypatch.setattr(recording, "_patience", 0.3)
    with open(tmp_path / ".run.json.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        start = time.monotonic()
        for spec in SPECS[:8]:
            recording.add(tmp_path / "run.json", [spec])
        assert 0.3 <= time.monotonic() - start < 8 * 0.3
    assert read_record(tmp_path / "run.json") == SPECS[:8]


WORKERS = """
import multiprocessing, os, signal
from jitrope.jit import recording
from tests.described import popular
SPECS = popular()

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
    environment = {**os.environ, "PYTHONPATH": IMPORTS, "JITROPE_RECORD": "run.json"}
    subprocess.run([sys.executable, "workers.py"], check=True, cwd=tmp_path, env=environment, timeout=200)
    assert set(read_record(tmp_path / "run.json")) == set(SPECS)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".run.json.lock", "run.json", "workers.py"]


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_forked_child_may_be_the_first_to_use_the_gpu(tmp_path: Path) -> None:
    code = """
import os
import torch, jitrope
pid = os.fork()
if pid == 0:
    q = torch.ones(1, 2, 1, 8, device="cuda")
    table = torch.ones(2, 4, device="cuda")
    out, _ = jitrope.apply_rope(q, None, table, table * 0)
    os._exit(0 if out.sum().item() == 16 else 1)
assert os.waitpid(pid, 0)[1] == 0
assert not torch.cuda.is_initialized()
"""
    python(code, JITROPE_CACHE_DIR=str(tmp_path / "k"))


@pytest.mark.gpu
def test_jitrope_record_notes_a_gpu_run(tmp_path: Path) -> None:
    on_the_gpu("call(); call()", tmp_path / "k", JITROPE_RECORD=str(tmp_path / "run.json"))
    entries = list(KernelCache(tmp_path / "k").entries())
    assert read_record(tmp_path / "run.json") == [spec_from_dict(entry.spec) for entry in entries]
    assert (entries[0].path / CUBIN).exists()


@pytest.mark.gpu
def test_32_threads_on_a_cold_gpu_compile_once(tmp_path: Path) -> None:
    code = """
import threading
from jitrope.jit import kernels
barrier, wrong = threading.Barrier(32), []
want = []
def work():
    barrier.wait()
    out = call()
    want.append(out)
threads = [threading.Thread(target=work) for _ in range(32)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(want), all(torch.equal(out, want[0]) for out in want), len(kernels.compiled))
"""
    assert on_the_gpu(code, tmp_path / "k") == "32 True 1"


@pytest.mark.gpu
def test_errors_of_an_image_and_others_are_told_apart(tmp_path: Path) -> None:
    """A damaged image, an image without the entry, and a context that an earlier kernel broke."""
    code = """
import cupy
from jitrope import CompileError
from jitrope.jit import driver, kernels

def raised(cubin, entry):
    try:
        driver.Kernel(cubin, entry, 0)
    except CompileError as error:
        return type(error).__name__

call()
((spec, _),) = kernels._kernels
good = kernels.build(spec, kernels.arch_of(0)).data
print(raised(b"\\x7fELF" + bytes(500), spec.entry), raised(good, "other"), raised(good, spec.entry))
cupy.RawKernel('extern "C" __global__ void f() { *reinterpret_cast<volatile int*>(0) = 1; }', "f")((1,), (1,), ())
try:
    torch.cuda.synchronize()
except RuntimeError:
    print(raised(good, spec.entry))
"""
    assert on_the_gpu(code, tmp_path / "k").split() == ["Refused", "Refused", "None", "CompileError"]


@pytest.mark.gpu
def test_tensors_on_another_gpu_than_the_current_one(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    code = """
import threading
from jitrope.jit import kernels
from jitrope import thd

def on(device):
    torch.manual_seed(0)
    x = torch.randn(2, 64, 4, 128).to(device, torch.bfloat16).requires_grad_()
    w = torch.ones(128, device=device, dtype=torch.bfloat16, requires_grad=True)
    angles = torch.rand(64, 64).to(device)
    q, k = jitrope.apply_rope(x, x, angles.cos(), angles.sin())
    n, _, _ = jitrope.prepare_qkv(q, k, None, angles.cos(), angles.sin(), norm=jitrope.Norm(w, w))
    n.float().square().sum().backward()
    lengths = torch.tensor([0, 24, 64], dtype=torch.int32, device=device)
    shards = thd.sequence_order_to_cp_rank_order(n.detach()[0], lengths, 2)
    return [t.cpu() for t in (q, n, x.grad, w.grad, shards)]

want = on("cuda:0")
found = {"current 0": on("cuda:1")}
assert torch.cuda.current_device() == 0
with torch.cuda.device(1):
    found["current 1"], found["and back"] = on("cuda:1"), on("cuda:0")
with torch.cuda.stream(torch.cuda.Stream("cuda:1")):
    found["a stream"] = on("cuda:1")
thread = threading.Thread(target=lambda: found.update(thread=on("cuda:1")))
thread.start()
thread.join()
for where, got in found.items():
    assert all(torch.equal(a, b) for a, b in zip(want, got)), where
print(len(found), sorted({device for _, device in kernels._kernels}))
"""
    assert on_the_gpu(code, tmp_path / "k") == "5 [0, 1]"
