"""A kernel comes from memory, a cache or the compiler: once for all threads, without waiting for other processes."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest
import torch

import jitrope
from jitrope.base.errors import CompileError
from jitrope.jit import compiler, kernels
from jitrope.jit.cache import KernelCache
from jitrope.jit.driver import Refused
from jitrope.jit.entry import CUBIN, FILES, META, TEXT, pack, write_bundle
from jitrope.tools.prewarm import prewarm, read_record, specs_of

from .. import fresh
from ..caches import DATA, no_nvrtc, on_the_gpu, run_in_child
from .conftest import Loaded

SPECS = specs_of([32, 8])
SPEC = SPECS[0]
FORK = multiprocessing.get_context("fork")


def test_each_compile_is_said(cache: KernelCache, caplog) -> None:
    caplog.set_level(logging.INFO, "jitrope")
    made = kernels.build(SPEC, "sm_90")
    assert (made.compiled, made.kept) == (True, True)
    for _ in range(2):
        assert kernels.build(SPEC, "sm_90") == (made.data, False, True)
    (entry,) = cache.entries()
    assert (entry.path / TEXT).read_text().startswith(f"// {SPEC.name}\n")
    (entry.path / CUBIN).write_bytes(b"")
    assert kernels.build(SPEC, "sm_90").compiled
    first, _ = [message for message in caplog.messages if message.startswith("compiled ")]
    assert f"compiled {SPEC.name} for sm_90 in" in first
    assert kernels.build(SPEC, "sm_80").compiled
    assert kernels.build(SPEC, "sm_90", rebuild=True).compiled


def test_same_key_same_bytes(cache: KernelCache, tmp_path: Path) -> None:
    """Two processes write equal files, because no time and no path is in them."""
    code = "from jitrope.jit import kernels; from jitrope.tools.prewarm import specs_of; "
    code += "kernels.build(specs_of([32, 8])[0], 'sm_90')"
    fresh.python("-c", code, check=True, JITROPE_CACHE_DIR=str(tmp_path / "b"))
    kernels.build(SPEC, "sm_90")
    (a,), (b,) = cache.entries(), KernelCache(tmp_path / "b").entries()
    assert a.path.name == b.path.name
    assert all((a.path / name).read_bytes() == (b.path / name).read_bytes() for name in FILES)


def test_another_call_finds_the_kernel_of_the_first(cache: KernelCache) -> None:
    """The entry keeps the text of the first. One that the other builds differs in that text alone."""
    other = SPEC.of("bhsd heads q k > rotate cos sin rotary_dim=128 > fresh")
    seen: list[jitrope.KernelEvent] = []
    remove = jitrope.on_compile(seen.append)
    try:
        kernels.build(SPEC, "sm_90")
        kernels.build(other, "sm_90")
    finally:
        remove()
    assert [(event.call, event.source) for event in seen] == [(SPEC.call, "compiled"), (other.call, "disk")]
    (entry,) = cache.entries()
    assert entry.spec["call"] == SPEC.call
    first = {name: (entry.path / name).read_bytes() for name in FILES}
    cache.clear()
    assert kernels.build(other, "sm_90").compiled
    second = {name: (entry.path / name).read_bytes() for name in FILES}
    assert [name for name in FILES if first[name] != second[name]] == [META]
    assert json.loads(second[META])["spec"] == {**json.loads(first[META])["spec"], "call": other.call}


def test_a_hit_renders_and_compiles_nothing(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new compiler never loads an old kernel. A machine that cannot compile uses that of any compiler."""
    want = kernels.build(SPEC, "sm_90").data
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "render", None)
        patch.setattr(compiler, "_nvrtc", None)
        assert not kernels.build(SPEC, "sm_90").compiled
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "compiler_version", no_nvrtc)
        patch.setattr(compiler, "_nvrtc", no_nvrtc)
        assert kernels.build(SPEC, "sm_90").data == want
        with pytest.raises(CompileError, match="NVRTC cannot be loaded"):
            kernels.build(SPEC, "sm_80")
    monkeypatch.setattr(compiler, "compiler_version", lambda: "cupy 99, nvrtc 99")
    assert kernels.build(SPEC, "sm_90").compiled


@pytest.mark.parametrize("place", ["file/kernels", "x" * 300])
def test_build_without_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog, place: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / place))
    for _ in range(2):
        found = kernels.build(SPEC, "sm_90")
        assert (found.compiled, found.kept) == (True, False)
        assert found.data.startswith(b"\x7fELF")
    assert caplog.text.count("kernels stay in memory") == len(caplog.records) == 1
    (built,) = prewarm([SPEC], ["sm_90"], 1)
    assert built.failed
    assert "cannot be written" in built.outcome


def test_a_compiled_kernel_is_never_read_again(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network the files of another process may appear late, or may have changed."""
    kernels.build(SPEC, "sm_90")
    want = cache.read(kernels.key_of(SPEC, "sm_90"))[CUBIN]
    monkeypatch.setattr(KernelCache, "find", lambda *_: None)  # as if another process had been faster
    assert kernels.build(SPEC, "sm_90") == (want, True, True)


def test_no_compile(cache: KernelCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A miss is an error with the command that makes the kernel. The test runs this command."""
    monkeypatch.setenv("JITROPE_NO_COMPILE", "1")
    before = len(kernels.compiled)
    with pytest.raises(jitrope.MissingKernel, match="compiling is forbidden") as caught:
        kernels.build(SPEC, "sm_90")
    error = caught.value
    assert isinstance(error, CompileError)
    assert (error.spec, error.arch) == (SPEC.to_dict(), "sm_90")
    assert error.command in str(error)
    assert str(cache.root) in str(error)
    assert len(kernels.compiled) == before
    with FORK.Pool(1) as pool, pytest.raises(jitrope.MissingKernel) as caught:  # it reaches a worker's parent
        pool.apply(kernels.build, (SPEC, "sm_90"))
    assert caught.value.spec == SPEC.to_dict()
    command = error.command.replace("jitrope prewarm", f"{sys.executable} -m jitrope prewarm")
    environment = {**os.environ, "PYTHONPATH": fresh.IMPORTS}
    subprocess.run(["sh", "-c", command], check=True, cwd=tmp_path, env=environment, capture_output=True)
    assert read_record(tmp_path / "missing.json") == [SPEC]
    assert not kernels.build(SPEC, "sm_90").compiled


@pytest.mark.parametrize("how", ["bundle", "unpacked", "another cache"])
def test_a_system_cache_is_found_by_what_its_kernels_are_made_from(cache, tmp_path, monkeypatch, how: str) -> None:
    """By any compiler or none, and without a change of any file."""
    folder = tmp_path / "given"
    folder.mkdir()
    keys = {kernels.key_of(spec, arch): spec for spec in SPECS for arch in ("sm_80", "sm_90")}
    files = {key.portable_folder: pack(key, "text", DATA, spec.to_dict()) for key, spec in keys.items()}
    if how == "another cache":
        layer = folder / "kernels"
        assert all(KernelCache(layer).store(key, "text", DATA, spec.to_dict()) for key, spec in keys.items())
    else:
        layer = folder / "layer.zip"
        write_bundle(layer, files)
    if how == "unpacked":
        layer = folder / "layer"
        shutil.unpack_archive(folder / "layer.zip", layer)
    before = [(path, path.stat().st_mtime_ns, path.stat().st_size) for path in (folder, *folder.rglob("*"))]
    assert KernelCache(tmp_path / "own", (layer,)).system[0].verify() == (len(keys), [])
    monkeypatch.setenv("JITROPE_SYSTEM_CACHE", str(layer))
    monkeypatch.setenv("JITROPE_NO_COMPILE", "1")
    for version in (compiler.compiler_version, lambda: "cupy 99, nvrtc 99", no_nvrtc):
        monkeypatch.setattr(compiler, "compiler_version", version)
        assert [kernels.build(spec, "sm_90") for spec in SPECS] == [(DATA, False, True)] * len(SPECS)
    with pytest.raises(CompileError, match=f"is not in .*{layer.name}"):
        kernels.build(replace(SPEC, vec=4), "sm_90")
    with pytest.raises(CompileError, match="for sm_89 is not in"):
        kernels.build(SPEC, "sm_89")
    assert not cache.root.exists()
    assert [(path, path.stat().st_mtime_ns, path.stat().st_size) for path in (folder, *folder.rglob("*"))] == before


@pytest.mark.usefixtures("driver")
def test_32_threads_on_one_spec_compile_once(cache: KernelCache) -> None:
    """Devices have kernels of their own, of one compile."""
    barrier, before = threading.Barrier(32), len(kernels.compiled)
    with ThreadPoolExecutor(32) as pool:
        found = [*pool.map(lambda _: (barrier.wait(), kernels.get_kernel(SPEC, 0))[1], range(32))]
    assert all(kernel is found[0] for kernel in found)
    assert found[0].cubin.startswith(b"\x7fELF")
    other = kernels.get_kernel(SPEC, 1)
    assert (found[0].device, other.device, other.cubin) == (0, 1, found[0].cubin)
    assert kernels.get_kernel(SPEC, 1) is other
    assert kernels.compiled[before:] == [SPEC.name]


@pytest.mark.usefixtures("driver")
def test_no_disk_and_no_lock_after_the_first_call(cache: KernelCache) -> None:
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


@pytest.mark.usefixtures("driver")
def test_what_is_not_the_images_fault_is_not_compiled_again(cache: KernelCache, monkeypatch, caplog) -> None:
    """Out of memory or the fault of an earlier kernel: the entry is kept, because other processes use it."""
    path = cache.root / kernels.key_of(SPEC, "sm_90").folder
    kernels.build(SPEC, "sm_90")
    fault = CompileError("cannot be loaded: CUDA_ERROR_OUT_OF_MEMORY")
    monkeypatch.setattr(kernels, "Kernel", Mock(side_effect=fault))
    before = len(kernels.compiled), path.stat().st_ino
    with pytest.raises(CompileError, match="OUT_OF_MEMORY"):
        kernels.get_kernel(SPEC, 0)
    assert (len(kernels.compiled), path.stat().st_ino) == before
    assert not caplog.text


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("place", ["own", "loaded from a bundle", "layer"])
def test_an_image_that_the_driver_refuses_is_rebuilt_once(place: str, cache, tmp_path: Path, monkeypatch) -> None:
    """The rebuilt kernel replaces the refused one, or is found before it."""
    monkeypatch.setenv("JITROPE_SYSTEM_CACHE", str(tmp_path / "layer"))
    key = kernels.key_of(SPEC, "sm_90")
    name = key.portable_folder if place == "loaded from a bundle" else key.folder
    folder = KernelCache(tmp_path / "layer") if place == "layer" else cache
    assert folder.install(name, pack(key, "text", b"of another GPU", SPEC.to_dict()))
    load = Mock(wraps=Loaded, side_effect=[Refused("the driver refuses the kernel"), DEFAULT, DEFAULT])
    monkeypatch.setattr(kernels, "Kernel", load)
    for compiled in (1, 0):  # the second time as in a new process
        before = len(kernels.compiled)
        monkeypatch.setattr(kernels, "_kernels", {})
        assert kernels.get_kernel(SPEC, 0).cubin.startswith(b"\x7fELF")
        assert len(kernels.compiled) - before == compiled
    assert [call.args[0] == b"of another GPU" for call in load.call_args_list] == [True, False, False]


def test_ranks_on_one_empty_cache_whose_entries_are_torn(cache: KernelCache) -> None:
    """Each gets the right bytes, and one whole entry is left, without a lock."""
    compiler.import_cupy()  # as documented: at a fork, an import in another thread would never end
    with FORK.Pool(6) as ranks:
        found, torn = ranks.starmap_async(kernels.build, [(SPEC, "sm_90")] * 18, chunksize=1), 0
        while not found.ready():
            time.sleep(0.01)
            for path in cache.root.glob("rope*/" + CUBIN) if torn < 3 else ():
                with contextlib.suppress(FileNotFoundError):  # a rank has replaced it
                    os.replace(path, path.with_suffix(".old"))
                    path.write_bytes(b"torn")
                    torn += 1
        assert len({cubin.data for cubin in found.get()}) == 1
    assert torn
    kernels.build(SPEC, "sm_90")  # replaces a torn entry
    assert cache.verify() == (1, [])
    assert [p.name for p in cache.root.iterdir()] == [cache.entries()[0].path.name]


def test_a_rank_that_is_killed_while_it_compiles_holds_up_nobody(cache: KernelCache, monkeypatch) -> None:
    compiler.import_cupy()
    compiling = FORK.Event()
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "compile_source", lambda *_: (compiling.set(), time.sleep(60)))
        process = FORK.Process(target=kernels.build, args=(SPEC, "sm_90"))
        process.start()
    assert compiling.wait(60)
    start = time.monotonic()
    assert kernels.build(SPEC, "sm_90").kept  # while the other one compiles
    assert time.monotonic() - start < 30
    process.kill()
    process.join()
    assert cache.verify() == (1, [])


@pytest.mark.usefixtures("driver")
def test_a_child_forked_while_a_thread_builds_has_a_lock_of_its_own(cache: KernelCache, monkeypatch) -> None:
    compiler.import_cupy()
    lock = threading.Lock()
    monkeypatch.setattr(kernels, "_build_lock", lock)
    with lock, FORK.Pool(1) as pool:
        found = pool.apply_async(kernels.get_kernel, (SPEC, 0)).get(60)
    assert found.cubin == cache.read(kernels.key_of(SPEC, "sm_90"))[CUBIN]


@pytest.mark.gpu
def test_a_cold_gpu(tmp_path: Path) -> None:
    """It compiles once, if that is allowed. Afterwards no call touches the disk; another process reads it."""
    missing = """
try:
    call()
except jitrope.MissingKernel as error:
    print(error.arch, error.spec["head_dim"])
"""
    major, minor = torch.cuda.get_device_capability()
    assert on_the_gpu(missing, tmp_path / "k", JITROPE_NO_COMPILE="1") == f"sm_{major}{minor} 128"
    code = """
import sys
from jitrope.jit import kernels
call(); call()
print(len(kernels.compiled))
events, on = [], True
sys.addaudithook(lambda name, _: events.append(name) if on and name.startswith(("open", "os.", "shutil")) else None)
for _ in range(100):
    call()
on = False
print(events)
"""
    assert on_the_gpu(code, tmp_path / "k").splitlines() == ["1", "[]"]
    assert on_the_gpu("call(); print('read')", tmp_path / "k", JITROPE_NO_COMPILE="1") == "read"


@pytest.mark.gpu
def test_a_forked_child_may_be_the_first_to_use_the_gpu(tmp_path: Path) -> None:
    code = """
import os, torch, jitrope
pid = os.fork()
if pid == 0:
    table = torch.ones(2, 4, device="cuda")
    out, _ = jitrope.apply_rope(torch.ones(1, 2, 1, 8, device="cuda"), None, table, table * 0)
    os._exit(out.sum().item() != 16)
assert os.waitpid(pid, 0)[1] == 0
assert not torch.cuda.is_initialized()
"""
    fresh.python("-c", code, check=True, JITROPE_CACHE_DIR=str(tmp_path / "k"))


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
