"""Numerics and behaviour on a CUDA device."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import jitrope
from jitrope import reference, runtime

from .cases import CASES, DTYPES, Case, make, random_case

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parent.parent
RELATIVE_L2 = {"bf16": 1.7e-3, "fp16": 2.2e-4, "fp32": 1e-7}


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def relative_l2(out: torch.Tensor, want: torch.Tensor) -> float:
    return float((out.detach().double() - want).norm() / want.norm())


# ---- numerics ----------------------------------------------------------------------------------


@pytest.mark.parametrize("launch", ["auto", "token_linear", "grid_2d"])
@pytest.mark.parametrize("case", [*CASES, *(random_case(seed) for seed in range(40))], ids=str)
def test_bits_of_the_reference(case: Case, launch: str) -> None:
    """Forward and gradient, out of place and in place, whatever the launch: the CPU path's bits."""
    q, k, cos, sin, keywords = make(case)
    for conjugate in (False, True):
        want = reference.rope(
            q, k, cos, sin, keywords.get("cu_seqlens"), case.layout, case.interleaved, case.rotary_dim or q.shape[-1],
            conjugate,
        )  # fmt: skip
        for in_place in (False, True):
            device = [None if x is None else on_gpu(x) for x in (q, k, cos, sin, keywords.get("cu_seqlens"))]
            rotary = case.rotary_dim or q.shape[-1]
            options = (case.layout, case.interleaved, rotary, 0, case.rounding, launch, conjugate, in_place)
            outputs = runtime.rope(*device, options)
            end = None
            if in_place and case.lengths is not None:
                end = sum(case.lengths)
                for x, out in zip((q, k), outputs):
                    assert torch.equal(out[end:].cpu(), x[end:])
            for out, expected in zip(outputs, want):
                if expected is None:
                    assert out is None
                elif case.rounding == "fp32":
                    torch.testing.assert_close(out.cpu()[:end], expected[:end], rtol=0, atol=0, equal_nan=True)
                else:
                    torch.testing.assert_close(out.cpu()[:end], expected[:end], rtol=2**-7, atol=1e-6)


def on_gpu(x: torch.Tensor) -> torch.Tensor:
    """A copy on the GPU with the same strides over a storage of its own."""
    storage = torch.empty(x.untyped_storage().nbytes() // x.element_size(), dtype=x.dtype)
    storage.untyped_storage().copy_(x.untyped_storage())
    return torch.as_strided(storage.cuda(), x.shape, x.stride(), x.storage_offset())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rounding", ["fp32", "complex64"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_against_fp64(dtype: str, rounding: str, interleaved: bool) -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(2, 2048, h, 128, device="cuda").to(DTYPES[dtype]).requires_grad_() for h in (16, 4))
    angles = torch.outer(torch.arange(2048).double(), 10000 ** (-torch.arange(64).double() / 64)).cuda()
    tables = angles.cos().float(), angles.sin().float()
    outputs = jitrope.apply_rope(q, k, *tables, interleaved=interleaved, rounding=rounding)
    grads = [torch.randn_like(y) for y in outputs]
    got = [*outputs, *torch.autograd.grad(outputs, (q, k), grads)]
    for inputs, conjugate, results in (((q, k), False, got[:2]), (grads, True, got[2:])):
        want = reference.rope(
            *(x.detach().double() for x in inputs), *(t.double() for t in tables), None, "bshd", interleaved, 128,
            conjugate, compute_dtype=torch.float64,
        )  # fmt: skip
        for out, expected in zip(results, want):
            assert relative_l2(out, expected) <= RELATIVE_L2[dtype]


def test_past_two_to_the_31_elements() -> None:
    """32-bit offsets would wrap; compared in slices, since a reference of the whole does not fit."""
    tokens, heads, dim = (1 << 31) // (64 * 128) + 1000, 64, 128
    q = torch.randn(tokens, heads, dim, device="cuda", dtype=torch.bfloat16)
    angles = torch.rand(tokens, dim // 2, device="cuda") * 6
    cos, sin = angles.cos(), angles.sin()
    out, _ = jitrope.apply_rope(q, None, cos, sin, layout="thd")
    assert out.numel() > 2**31
    for start in (0, tokens // 2, tokens - 700):
        part = slice(start, start + 700)
        want, _ = reference.rope(q[part], None, cos[part], sin[part], None, "thd", False, dim, False)
        assert torch.equal(out[part], want)
    expected = out[-700:].clone()
    del out
    jitrope.apply_rope_(q, None, cos, sin, layout="thd")
    assert torch.equal(q[-700:], expected)


def test_more_sequences_than_a_grid_has_rows() -> None:
    lengths = torch.randint(0, 3, (70_000,))
    cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0))).cuda()
    tokens = int(cu_seqlens[-1])
    q = torch.randn(tokens, 2, 64, device="cuda")
    angles = torch.rand(4, 32, device="cuda")
    for launch in ("token_linear", "grid_2d"):
        arguments = (q, None, angles.cos(), angles.sin())
        out, _ = jitrope.apply_rope(*arguments, layout="thd", cu_seqlens=cu_seqlens, launch=launch)
        assert torch.equal(out, reference.rope(*arguments, cu_seqlens, "thd", False, 64, False)[0])


def test_video_length_batches() -> None:
    """More batch rows and more positions than a grid's second axis has blocks."""
    for shape in ((70_000, 2, 2, 64), (1, 140_000, 1, 64)):
        q = torch.randn(shape, device="cuda")
        angles = torch.rand(shape[1], 32, device="cuda")
        for launch in ("auto", "grid_2d"):
            out, _ = jitrope.apply_rope(q, None, angles.cos(), angles.sin(), launch=launch)
            assert torch.equal(
                out, reference.rope(q, None, angles.cos(), angles.sin(), None, "bshd", False, 64, False)[0]
            )


def test_results_do_not_change_from_run_to_run() -> None:
    q, k, cos, sin, keywords = make(case_named("packed"), "cuda")
    first = jitrope.apply_rope(q, k, cos, sin, **keywords)
    for _ in range(20):
        for a, b in zip(first, jitrope.apply_rope(q, k, cos, sin, **keywords)):
            assert torch.equal(a, b)


# ---- torch's machinery -------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", ["fp32", "full-partial", "packed", "per-head", "bhsd"])
def test_gradient_is_the_cpus(name: str, in_place: bool) -> None:
    case = case_named(name)
    rotate = jitrope.apply_rope_ if in_place else jitrope.apply_rope
    grads = []
    for device in ("cpu", "cuda"):
        q, k, cos, sin, keywords = make(case, device)
        leaves = [x.requires_grad_() for x in (q, k)]
        outputs = rotate(*(x * 1 for x in leaves), cos, sin, **keywords)
        torch.manual_seed(1)
        weights = [torch.randn(y.shape).to(y.dtype).to(device) for y in outputs]
        grads.append(torch.autograd.grad(outputs, leaves, weights))
    for got, want in zip(grads[1], grads[0]):
        assert torch.equal(got.cpu(), want)


def test_expanded_gradient_and_double_backward() -> None:
    q, _, cos, sin, _ = make(case_named("fp32"), "cuda")
    q.requires_grad_()
    out, _ = jitrope.apply_rope(q, None, cos, sin)
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)  # a stride-0 gradient
    want, _ = reference.rope(torch.ones_like(q).cpu(), None, cos.cpu(), sin.cpu(), None, "bshd", False, 64, True)
    assert torch.equal(gradient.detach().cpu(), want)
    out, _ = jitrope.apply_rope(q, None, cos, sin)
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), q)
    torch.testing.assert_close(second, torch.full_like(q, 2.0), rtol=1e-4, atol=1e-4)


def test_in_place_is_seen_by_autograd() -> None:
    q, _, cos, sin, _ = make(case_named("fp32"), "cuda")
    weight = torch.ones_like(q, requires_grad=True)
    product = weight * q  # needs q for its backward
    jitrope.apply_rope_(q, None, cos, sin)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("op", ["rope", "rope_"])
def test_opcheck(op: str) -> None:
    q, k, cos, sin, _ = make(case_named("halves"), "cuda")
    if op == "rope":
        q.requires_grad_()
    arguments = (q, k, cos, sin, None, "bshd", False, 64, 0, "fp32", "auto", False)
    torch.library.opcheck(getattr(torch.ops.jitrope, op).default, arguments)


@pytest.mark.parametrize("in_place", [False, True])
def test_compile_fullgraph(in_place: bool) -> None:
    q, k, cos, sin, _ = make(case_named("halves"), "cuda")
    rotate = jitrope.apply_rope_ if in_place else jitrope.apply_rope

    def model(q, k):
        q, k = rotate(q * 2, k + 1, cos, sin)
        return q.float().sum(-1), k * 2

    results = []
    for function in (model, torch.compile(model, fullgraph=True)):
        leaves = [x.clone().requires_grad_() for x in (q, k)]
        outputs = function(*leaves)
        (outputs[0].sum() + outputs[1].float().square().sum()).backward()
        results.append((*outputs, *(x.grad for x in leaves)))
    for got, want in zip(results[1], results[0]):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("grad", [False, True])
def test_a_plain_call_takes_the_short_cut(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast path whose guard is never true is a defect: neither direction goes through the dispatcher."""
    taken = []
    launch = runtime.rope

    def counted(*arguments):
        taken.append(arguments[5][-2])  # conjugate
        return launch(*arguments)

    monkeypatch.setattr(runtime, "rope", counted)  # the library ops hold the function itself
    q, k, cos, sin, _ = make(case_named("halves"), "cuda")
    outputs = jitrope.apply_rope(q.requires_grad_(grad), k.requires_grad_(grad), cos, sin)
    if grad:
        torch.autograd.grad(outputs, (q, k), [torch.ones_like(y) for y in outputs])
    assert taken == ([False, True] if grad else [False])


def test_inference_mode() -> None:
    q, k, cos, sin, _ = make(case_named("halves"), "cuda")
    want = jitrope.apply_rope(q, k, cos, sin)
    with torch.inference_mode():
        q, k = q.clone(), k.clone()
        for function in (jitrope.apply_rope, jitrope.apply_rope_):
            for got, expected in zip(function(q, k, cos, sin), want):
                assert torch.equal(got, expected)


def test_cuda_graph() -> None:
    q, k, cos, sin, keywords = make(case_named("packed"), "cuda")
    jitrope.apply_rope(q, k, cos, sin, **keywords)  # the warm call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = jitrope.apply_rope(q, k, cos, sin, **keywords)
    for seed in (1, 2):
        torch.manual_seed(seed)
        q.copy_(torch.randn_like(q))
        keywords["cu_seqlens"].copy_(torch.tensor([0, 3, 8, 8, 9, 10, 20]))
        graph.replay()
        for got, want in zip(outputs, jitrope.apply_rope(q, k, cos, sin, **keywords)):
            assert torch.equal(got, want)


def test_cold_capture_says_what_to_do() -> None:
    q = torch.randn(1, 3, 2, 34, device="cuda")
    cos = torch.rand(3, 17, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(jitrope.JitropeError, match="once before the capture"), torch.cuda.graph(graph):
        jitrope.apply_rope(q, None, cos, cos)
    torch.cuda.synchronize()
    jitrope.apply_rope(q, None, cos, cos)


def test_streams() -> None:
    """The launch goes to the current stream: it waits for what that stream waits for."""
    q, _, cos, sin, _ = make(case_named("halves"), "cuda")
    want, _ = jitrope.apply_rope(q, None, cos, sin)
    late = torch.zeros_like(q)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        out, _ = jitrope.apply_rope(late, None, cos, sin)
    stream.synchronize()
    assert torch.equal(out, want)


def test_threads_share_kernels_not_arguments() -> None:
    cases = [make(case_named("halves"), "cuda", seed) for seed in range(8)]
    want = [jitrope.apply_rope(q, k, cos, sin) for q, k, cos, sin, _ in cases]
    before = len(runtime.compiled)
    wrong = []

    def work(i: int) -> None:
        try:
            q, k, cos, sin, _ = cases[i]
            for _ in range(200):
                got = jitrope.apply_rope(q, k, cos, sin)  # the first thing that this thread asks of CUDA
                if not all(torch.equal(a, b) for a, b in zip(got, want[i])):
                    wrong.append(i)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(runtime.compiled) == before


def test_refusals_write_nothing() -> None:
    q, k, cos, sin, _ = make(case_named("halves"), "cuda")
    before = q.clone()
    for arguments, message in (
        ((q, k, cos.cpu(), sin), "cos is on cpu but q is on cuda:0"),
        ((q, k.cpu(), cos, sin), "k is torch.bfloat16 on cpu"),
        ((q, k, cos[:2], sin[:2]), "cos has 2 rows"),
    ):
        for _ in range(2):  # the second time too
            with pytest.raises(jitrope.InvalidInput, match=message):
                jitrope.apply_rope_(*arguments)
    assert torch.equal(q, before)


# ---- the kernel's life -------------------------------------------------------------------------

FRESH = """
import json, sys
import torch, jitrope
from jitrope import runtime
for interleaved, heads, tokens in ((False, (32, 8), 4096), (True, (24, 24), 2), (True, (24, 0), 4096)):
    q, k = (torch.randn(1, tokens, h, 128, device="cuda", dtype=torch.bfloat16) if h else None for h in heads)
    angles = torch.rand(tokens, 64, device="cuda")
    jitrope.apply_rope(q, k, angles.cos(), angles.sin(), interleaved=interleaved)
torch.cuda.synchronize()
print(json.dumps(runtime.compiled))
"""


def fresh(cache: Path, code: str = FRESH) -> list[str]:
    environment = {**os.environ, "JITROPE_CACHE_DIR": str(cache), "PYTHONPATH": path_of_imports()}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def path_of_imports() -> str:
    return os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


def test_a_prewarmed_process_compiles_nothing(tmp_path: Path) -> None:
    assert len(fresh(tmp_path / "cold")) == 3
    environment = {**os.environ, "JITROPE_CACHE_DIR": str(tmp_path / "warm"), "PYTHONPATH": path_of_imports()}
    for options in (["--heads", "32,8"], ["--heads", "24,24", "--heads", "24", "--interleaved"]):
        command = [sys.executable, "-m", "jitrope", "prewarm", *options]
        subprocess.run(command, check=True, env=environment, capture_output=True)
    assert fresh(tmp_path / "warm") == []
    assert fresh(tmp_path / "cold") == []  # what a real run left behind serves as well


def test_a_cubin_of_another_architecture_is_rebuilt(tmp_path: Path, caplog) -> None:
    """As after a cache was copied between machines under the wrong name: refused by the driver, rebuilt."""
    assert len(fresh(tmp_path / "k")) == 3
    import hashlib

    from jitrope import compiler
    from jitrope.cache import KernelCache
    from jitrope.render import render
    from jitrope.spec import RopeSpec

    for entry in KernelCache(tmp_path / "k").entries():
        alien = compiler.compile_source(render(RopeSpec.from_dict(entry.spec)), "sm_120")[0]
        (entry.path / "kernel.cubin").write_bytes(alien)
        meta = json.loads((entry.path / "spec.json").read_text())
        meta["sha256"] = hashlib.sha256(alien).hexdigest()
        (entry.path / "spec.json").write_text(json.dumps(meta))
    assert len(fresh(tmp_path / "k")) == 3
    assert fresh(tmp_path / "k") == []


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert len(fresh(tmp_path / "file" / "kernels")) == 3


NO_CUPY = """
import sys, json
sys.modules["cupy"] = None
import torch, jitrope
q = torch.ones(1, 2, 1, 8, device="cuda")
try:
    jitrope.apply_rope(q, None, q[0, :, 0, :4], q[0, :, 0, :4])
except jitrope.CompileError as error:
    print(json.dumps(str(error)))
"""


def test_a_gpu_without_cupy_names_the_extra(tmp_path: Path) -> None:
    message = fresh(tmp_path, NO_CUPY)
    assert f"pip install 'jitrope[cuda{torch.version.cuda.split('.')[0]}]'" in message


SANITIZED = """
import torch
from jitrope import apply_rope, apply_rope_
from tests.cases import CASES, make
names = ("halves", "interleaved", "partial-odd", "packed", "packed-too-long", "packed-qkv", "d72", "full-interleaved")
for case in CASES:
    if case.name in names:
        q, k, cos, sin, keywords = make(case, "cuda")
        for launch in ("token_linear", "grid_2d"):
            apply_rope(q, k, cos, sin, launch=launch, **keywords)
            apply_rope_(q, k, cos, sin, launch=launch, **keywords)
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer(tool: str, tmp_path: Path) -> None:
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        pytest.skip("compute-sanitizer comes with the CUDA toolkit, which is not installed")
    environment = {
        **os.environ, "JITROPE_CACHE_DIR": str(tmp_path), "PYTHONPATH": path_of_imports(),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }  # fmt: skip
    command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", SANITIZED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "done" in done.stdout
    assert "0 errors" in done.stdout or "0 hazards" in done.stdout


@pytest.mark.parametrize("bench", ["host", "train"])
def test_bench_runs(bench: str, tmp_path: Path) -> None:
    environment = {**os.environ, "JITROPE_CACHE_DIR": str(tmp_path), "PYTHONPATH": path_of_imports()}
    command = [sys.executable, "-m", "jitrope", "bench", bench, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"]
