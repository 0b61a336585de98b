"""Numerics and behaviour on a CUDA device."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import jitrope
from jitrope.base.views import FORMATS
from jitrope.jit import kernels
from jitrope.plan import problem
from jitrope.plan.options import Options
from jitrope.run import dispatch
from jitrope.run import launch as runtime
from jitrope.stages import convert
from jitrope.values import constants
from tests.said import KINDS, kv_cache, norm_fp8, norm_kv_cache, norm_rope, norm_rope_joint, said

from . import oracle
from .cases import (
    CACHE_CASES,
    CASES,
    DTYPES,
    HEADS_BACK,
    NORM_CASES,
    NORM_ROPE,
    QKV_CASES,
    ROPE,
    Case,
    dealt,
    heads_of,
    launched,
    lower,
    make,
    make_cache,
    make_norm,
    make_qkv,
    norm_call,
    op_arguments,
    rope_reference,
)
from .host.backend import DEVICE

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parent.parent
RELATIVE_L2 = {"bf16": 1.7e-3, "fp16": 2.2e-4, "fp32": 1e-7}


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """A dispatch mode that lists the ops that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.functions.append(function)
        return function(*args, **(kwargs or {}))


def relative_l2(out: torch.Tensor, want: torch.Tensor) -> float:
    return float((out.detach().double() - want).norm() / want.norm())


# ---- numerics ----------------------------------------------------------------------------------


def packed_offsets(tokens: int, sequences: int, multiple: int, generator: torch.Generator) -> torch.Tensor:
    """int32 offsets of random lengths that are multiples; some are zero."""
    cuts = torch.randint(0, tokens // multiple + 1, (sequences - 1,), generator=generator).sort().values * multiple
    return torch.cat((torch.zeros(1), cuts, torch.full((1,), tokens))).int().to(DEVICE)


@pytest.mark.hardware
@pytest.mark.parametrize("cp", [(1, 0), (2, 1), (4, 3)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("sequences", [1, 2, 8, 32, 128, 512, 1024, 2401])
def test_both_launches_give_the_same_bits_over_the_sweep(sequences: int, dtype: str, cp: tuple[int, int]) -> None:
    """Packs of 65,536 tokens, forward and gradient, against the reference too."""
    generator = torch.Generator().manual_seed(sequences)
    tokens, (size, rank) = 65_536, cp
    cu_seqlens = packed_offsets(tokens, sequences, 2 * size, generator)
    q = torch.randn(tokens // size, 4, 128, device=DEVICE).to(DTYPES[dtype])
    freqs = torch.rand(tokens, 64, device=DEVICE) * 100
    freqs = torch.cat((freqs, freqs), -1)[:, None, None]
    grad = torch.randn_like(q)
    results = []
    for launch in ("token_linear", "grid_2d"):
        leaf = q.clone().requires_grad_()
        out, _ = jitrope.apply_rope(
            leaf, None, **said(freqs=freqs, launch=launch, cu_seqlens=cu_seqlens, cp_size=size, cp_rank=rank)
        )
        results.append((out.detach(), *torch.autograd.grad(out, leaf, grad)))
    for a, b in zip(*results):
        assert torch.equal(a, b)
    options = Options(layout="thd", rotary_dim=128, table="freqs", cp_size=size, cp_rank=rank)
    table = freqs.transpose(0, 1)
    for x, conjugate, got in ((q, False, results[0][0]), (grad, True, results[0][1])):
        want, _ = rope_reference(x, None, table, table, cu_seqlens, None, None, options._replace(inverse=conjugate))
        assert torch.equal(got, want)


@pytest.mark.hardware
@pytest.mark.parametrize("launch", ["token_linear", "grid_2d"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("cp_size", [2, 3, 8])
@pytest.mark.parametrize("sequences", [1, 8, 512, 2401])
def test_ragged_packs_have_the_bits_of_the_whole(
    sequences: int, cp_size: int, index_dtype: torch.dtype, launch: str
) -> None:
    """Packed lengths that no number of chunks divides, every rank's shard: forward, gradient and in place."""
    generator = torch.Generator().manual_seed(sequences)
    tokens = 32_771
    cu_seqlens = packed_offsets(tokens, sequences, 1, generator)
    q = torch.randn(tokens, 4, 128, device=DEVICE, dtype=torch.bfloat16)
    freqs = torch.rand(tokens, 64, device=DEVICE) * 100
    words = {"freqs": freqs, "layout": "thd", "cu_seqlens": cu_seqlens.to(index_dtype), "launch": launch}
    grad = torch.randn_like(q)
    whole = jitrope.apply_rope(q, None, **said(**words))[0]
    gradient = jitrope.apply_rope(grad, None, **said(**words, inverse=True))[0]
    begins = cu_seqlens.tolist()
    total = 0
    for rank, places in enumerate(dealt(begins, cp_size)):
        mine = torch.tensor([begins[sequence] + position for sequence, position in places], device=DEVICE)
        total += len(mine)
        leaf = q[mine].requires_grad_()
        out, _ = jitrope.apply_rope(leaf, None, **said(**words, cp_size=cp_size, cp_rank=rank))
        assert torch.equal(out, whole[mine])
        assert torch.equal(torch.autograd.grad(out, leaf, grad[mine])[0], gradient[mine])
        spare = torch.ones_like(q[:5])
        padded = torch.cat((q[mine], spare))
        jitrope.apply_rope(padded, None, **said(**words, cp_size=cp_size, cp_rank=rank), inplace=True)
        assert torch.equal(padded, torch.cat((whole[mine], spare)))
    assert total == tokens


@pytest.mark.hardware
@pytest.mark.parametrize("sequences", [100_000, 1_000_000])
def test_a_million_sequences(sequences: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = 1_000_000
    cu_seqlens = packed_offsets(tokens, sequences, 1, generator)
    starts = torch.randint(0, 9, (sequences,), generator=generator, dtype=torch.int32).to(DEVICE)
    q = torch.randn(tokens, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    freqs = torch.rand(512, 32, device=DEVICE) * 100
    out, _ = jitrope.apply_rope(q, None, freqs=freqs, positions=jitrope.Packed(cu_seqlens, start_positions=starts))
    options = Options(layout="thd", rotary_dim=64, table="freqs")
    want, _ = rope_reference(q, None, freqs, freqs, cu_seqlens, starts, None, options)
    assert not want.isnan().any()
    assert torch.equal(out, want)


@pytest.mark.hardware
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rounding", ["fp32", "complex64"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_against_fp64(dtype: str, rounding: str, interleaved: bool) -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(2, 2048, h, 128, device=DEVICE).to(DTYPES[dtype]).requires_grad_() for h in (16, 4))
    angles = torch.outer(torch.arange(2048).double(), 10000 ** (-torch.arange(64).double() / 64)).to(DEVICE)
    tables = angles.cos().float(), angles.sin().float()
    outputs = jitrope.apply_rope(q, k, *tables, interleaved=interleaved, rounding=rounding)
    grads = [torch.randn_like(y) for y in outputs]
    got = [*outputs, *torch.autograd.grad(outputs, (q, k), grads)]
    for inputs, conjugate, results in (((q, k), False, got[:2]), (grads, True, got[2:])):
        given = [x.detach() for x in inputs]
        want, _ = oracle.rope(*given, *tables, interleaved=interleaved, inverse=conjugate)
        for out, expected in zip(results, want):
            assert relative_l2(out, expected) <= RELATIVE_L2[dtype]


@pytest.mark.hardware
def test_past_two_to_the_31_elements() -> None:
    """32-bit offsets would wrap. Slices are compared, because a reference of the whole does not fit."""
    tokens, heads, dim = (1 << 31) // (64 * 128) + 1000, 64, 128
    q = torch.randn(tokens, heads, dim, device=DEVICE, dtype=torch.bfloat16)
    angles = torch.rand(tokens, dim // 2, device=DEVICE) * 6
    cos, sin = angles.cos(), angles.sin()
    out, _ = jitrope.apply_rope(q, None, cos, sin, layout="thd")
    assert out.numel() > 2**31
    for start in (0, tokens // 2, tokens - 700):
        part = slice(start, start + 700)
        want, _ = rope_reference(
            q[part], None, cos[part], sin[part], None, None, None, Options(layout="thd", rotary_dim=dim)
        )
        assert torch.equal(out[part], want)
    expected = out[-700:].clone()
    del out
    jitrope.apply_rope(q, None, cos, sin, layout="thd", inplace=True)
    assert torch.equal(q[-700:], expected)


@pytest.mark.hardware
def test_norm_past_two_to_the_31_elements() -> None:
    """The same with a norm, in place."""
    tokens, heads, dim = (1 << 31) // (64 * 128) + 1000, 64, 128
    q = torch.randn(tokens, heads, dim, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(dim, device=DEVICE, dtype=torch.bfloat16)
    angles = torch.rand(tokens, dim // 2, device=DEVICE) * 6
    words = {"layout": "thd", "norm_rounding": "once"}
    parts = [slice(start, start + 700) for start in (0, tokens // 2, tokens - 700)]
    want = [
        norm_rope(q[part], None, weight, None, angles[part].cos(), angles[part].sin(), **words)[0] for part in parts
    ]
    norm_rope(q, None, weight, None, angles.cos(), angles.sin(), **words, inplace=True)
    assert q.numel() > 2**31
    for part, expected in zip(parts, want):
        assert torch.equal(q[part], expected)


@pytest.mark.hardware
def test_more_sequences_than_a_grid_has_rows() -> None:
    lengths = torch.randint(0, 3, (70_000,))
    cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0))).to(DEVICE)
    tokens = int(cu_seqlens[-1])
    q = torch.randn(tokens, 2, 64, device=DEVICE)
    angles = torch.rand(4, 32, device=DEVICE)
    for launch in ("token_linear", "grid_2d"):
        arguments = (q, None, angles.cos(), angles.sin())
        out, _ = jitrope.apply_rope(*arguments, **said(launch=launch, cu_seqlens=cu_seqlens))
        assert torch.equal(
            out, rope_reference(*arguments, cu_seqlens, None, None, Options(layout="thd", rotary_dim=64))[0]
        )


@pytest.mark.hardware
def test_video_length_batches() -> None:
    """More batch rows and more positions than a grid's second axis has blocks."""
    for shape in ((70_000, 2, 2, 64), (1, 140_000, 1, 64)):
        q = torch.randn(shape, device=DEVICE)
        angles = torch.rand(shape[1], 32, device=DEVICE)
        for launch in ("auto", "grid_2d"):
            out, _ = jitrope.apply_rope(q, None, angles.cos(), angles.sin(), **said(launch=launch))
            assert torch.equal(
                out, rope_reference(q, None, angles.cos(), angles.sin(), None, None, None, Options(rotary_dim=64))[0]
            )


@pytest.mark.parametrize("name", ["packed", "angles-packed-cp", "angles-full", "mla"])
def test_results_do_not_change_from_run_to_run(name: str) -> None:
    (q, k, *tables), options = lower(make(case_named(name), DEVICE))
    for conjugate in (False, True):
        words = options._replace(inverse=conjugate)
        first = launched(ROPE, (q, k), tables, words)
        for _ in range(20 if torch.cuda.is_available() else 2):
            for a, b in zip(first, launched(ROPE, (q, k), tables, words)):
                assert torch.equal(a.nan_to_num(9), b.nan_to_num(9))


@pytest.mark.hardware
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_there_and_back_is_one_rounding(dtype: str) -> None:
    torch.manual_seed(0)
    q = torch.randn(4096, 16, 128, device=DEVICE).to(DTYPES[dtype])
    freqs = torch.outer(torch.arange(4096.0), 10000 ** (-torch.arange(64) / 64)).to(DEVICE)
    cu_seqlens = packed_offsets(4096, 9, 1, torch.Generator().manual_seed(1))
    keywords = {"freqs": freqs, "layout": "thd", "cu_seqlens": cu_seqlens}
    there, _ = jitrope.apply_rope(q, None, **said(**keywords))
    again, _ = jitrope.apply_rope(there, None, **said(**keywords, inverse=True))
    # Rounding there and back, half a unit each of the pair's length; in fp32 products and sums round too.
    units = 4 if dtype == "fp32" else 1.01
    bound = units * torch.finfo(q.dtype).eps * q.float().unflatten(-1, (2, 64)).norm(dim=-2)
    assert ((again.float() - q.float()).abs().unflatten(-1, (2, 64)) <= bound.unsqueeze(-2)).all()


@pytest.mark.hardware
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_angles_against_fp64(dtype: str, interleaved: bool) -> None:
    """Angles up to a million radians: the kernel's sines have fp32's accuracy at all of them."""
    torch.manual_seed(0)
    q = torch.randn(8192, 8, 128, device=DEVICE).to(DTYPES[dtype])
    freqs = torch.rand(8192, 64, device=DEVICE) ** 4 * 1e6
    out, _ = jitrope.apply_rope(q, None, freqs=freqs, layout="thd", interleaved=interleaved)
    exact = freqs.double()
    (want, _), _ = oracle.rope(q, None, exact.cos(), exact.sin(), layout="thd", interleaved=interleaved)
    assert relative_l2(out, want) <= RELATIVE_L2[dtype]


# ---- torch's machinery -------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "fp32",
        "full-partial",
        "packed",
        "per-head",
        "bhsd",
        "starts-packed",
        "cp-packed-starts",
        "offset",
        "ids",
        "mrope",
        "ids-cis",
        "mrope-interleaved",
    ],
)
def test_gradient_is_the_cpus(name: str, in_place: bool) -> None:
    case = case_named(name)
    rotate = KINDS["rope_" if in_place else "rope"]
    grads = []
    for device in ("cpu", DEVICE):
        q, k, cos, sin, keywords = make(case, device)
        leaves = [x.requires_grad_() for x in (q, k)]
        outputs = rotate(*(x * 1 for x in leaves), cos, sin, **keywords)
        torch.manual_seed(1)
        weights = [torch.randn(y.shape).to(y.dtype).to(device) for y in outputs]
        grads.append(torch.autograd.grad(outputs, leaves, weights))
    for got, want in zip(grads[1], grads[0]):
        assert torch.equal(got.cpu(), want)


def test_expanded_gradient_and_double_backward() -> None:
    q, _, cos, sin, _ = make(case_named("fp32"), DEVICE)
    q.requires_grad_()
    out, _ = jitrope.apply_rope(q, None, cos, sin)
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)  # a stride-0 gradient
    want, _ = rope_reference(
        torch.ones_like(q).cpu(), None, cos.cpu(), sin.cpu(), None, None, None, Options(rotary_dim=64, inverse=True)
    )
    assert torch.equal(gradient.detach().cpu(), want)
    out, _ = jitrope.apply_rope(q, None, cos, sin)
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), q)
    torch.testing.assert_close(second, torch.full_like(q, 2.0), rtol=1e-4, atol=1e-4)


def test_in_place_is_seen_by_autograd() -> None:
    q, _, cos, sin, _ = make(case_named("fp32"), DEVICE)
    weight = torch.ones_like(q, requires_grad=True)
    product = weight * q  # needs q for its backward
    jitrope.apply_rope(q, None, cos, sin, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_known_calls_of_torchs_op_notice_what_changes() -> None:
    """Autograd, grad mode, inference mode, words, a dispatch mode, vmap, and versions of what is written in place."""
    q, k, cos, sin, _ = make(case_named("fp32"), DEVICE)
    (want, _), rope = jitrope.apply_rope(q, k, cos, sin), torch.ops.jitrope.prepare
    given = partial(op_arguments, ROPE, tables=(cos, sin))
    plain = given((q, k), options=Options(rotary_dim=q.shape[-1]))
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            for _ in range(3):
                assert torch.equal(rope(*plain)[0], want)
    leaf = q.clone().requires_grad_()
    learning = given((leaf, k), options=Options(rotary_dim=q.shape[-1]))
    for _ in range(3):
        with torch.no_grad():
            assert not rope(*learning)[0].requires_grad
        rope(*learning)[0].sum().backward()
        assert not rope(*plain)[0].requires_grad
    back = jitrope.apply_rope(torch.ones_like(q), k, cos, sin, inverse=True)[0]
    torch.testing.assert_close(leaf.grad, 3 * back)
    inverse = given((q, k), options=Options(rotary_dim=q.shape[-1], inverse=True))
    assert torch.equal(rope(*inverse)[0], jitrope.apply_rope(q, k, cos, sin, inverse=True)[0])
    with Seen() as seen:
        rope(*plain)
    assert rope.default in seen.functions
    (_, *others), *rest = plain
    mapped = torch.func.vmap(lambda x: rope([x, *others], *rest)[0])(torch.stack([q, q]))
    assert torch.equal(mapped[1], want)
    written = q.clone()
    for version in (1, 2):
        options = Options(rotary_dim=q.shape[-1], inplace=True)
        torch.ops.jitrope.prepare_(*given((written, k.clone()), options=options))
        assert written._version == version


@pytest.mark.parametrize("op", ["prepare", "prepare_"])
def test_opcheck(op: str) -> None:
    q, k, cos, sin, _ = make(case_named("halves"), DEVICE)
    if op == "prepare":
        q.requires_grad_()
    arguments = op_arguments(ROPE, (q, k), (cos, sin), Options(rotary_dim=64, inplace=op == "prepare_"))
    torch.library.opcheck(getattr(torch.ops.jitrope, op).default, arguments)


@pytest.mark.parametrize("in_place", [False, True])
def test_compile_fullgraph(in_place: bool) -> None:
    q, k, cos, sin, _ = make(case_named("halves"), DEVICE)
    rotate = KINDS["rope_" if in_place else "rope"]

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
    """Neither direction goes through the dispatcher. A guard that is never true would be a defect."""
    taken = []

    function_of = runtime.function_of
    monkeypatch.setattr(
        runtime,
        "function_of",
        lambda prepared, *a: (taken.append(prepared.options.inverse), function_of(prepared, *a))[1],
    )
    monkeypatch.setattr(dispatch, "run_op", lambda *_: pytest.fail("through the dispatcher"))
    new = replace(case_named("halves"), shape=(1, 7, 5, 3 + grad, 64))  # a new call for every thread, also autograd's
    q, k, cos, sin, _ = make(new, DEVICE)
    outputs = jitrope.apply_rope(q.requires_grad_(grad), k.requires_grad_(grad), cos, sin)
    if grad:
        torch.autograd.grad(outputs, (q, k), [torch.ones_like(y) for y in outputs])
    assert taken == ([False, True] if grad else [False])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", ["packed", "packed-starts", "starts", "cos_sin_cache", "q-alone", "q-is-k"])
def test_calls_of_every_form_are_known_again(name: str, in_place: bool, monkeypatch) -> None:
    """Packed batches, starts, one table and one tensor: new positions of the same form are used."""
    rotate = KINDS["rope_" if in_place else "rope"]
    runtime.local.recent = {}
    packed = name.startswith("packed")
    shape, layout = ((24, 4, 64), "thd") if packed else ((2, 12, 4, 64), "bshd")
    words = {"layout": layout}
    tables = [torch.rand(40, 32, device=DEVICE) for _ in range(2)]
    if name == "cos_sin_cache":
        words[name], tables = torch.cat(tables, -1), []
    for turn, lengths in enumerate(([0, 5, 24], [0, 16, 24], [0, 5, 24])):
        q, k = (torch.randn(shape, generator=torch.Generator().manual_seed(n)).to(DEVICE) for n in range(2))
        k = {"q-alone": None, "q-is-k": q}.get(name, k)
        if packed:
            words["cu_seqlens"] = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        if name.endswith("starts"):
            words["start_positions"] = torch.tensor([3, turn], dtype=torch.int32, device=DEVICE)
        cpu = {word: x.cpu() if isinstance(x, torch.Tensor) else x for word, x in words.items()}
        case = (q.cpu(), None if k is None else k.cpu(), *(x.cpu() for x in tables))
        if in_place and name == "q-is-k":  # memory that is written twice
            with pytest.raises(jitrope.InvalidInput, match="q and k share memory"):
                rotate(q, k, *tables, **words)
            continue
        want = reference_of(case, cpu)
        got = rotate(q, k, *tables, **words)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want) if b is not None)
        if turn == 0:
            monkeypatch.setattr(dispatch, "_call", lambda *_: pytest.fail("looked at again"))


@pytest.mark.parametrize("function", ["user", "op"])
def test_a_plan_from_before_a_change_is_not_used_after_it(function: str, monkeypatch) -> None:
    """`configure` is called in another thread while a first call is planned."""
    q, k, cos, sin, _ = make(case_named("halves"), DEVICE)
    tensors, words = (q, k, cos, sin), op_arguments(ROPE, (q, k), (cos, sin), Options(rotary_dim=q.shape[-1]))
    call = (lambda: jitrope.apply_rope(*tensors)) if function == "user" else lambda: torch.ops.jitrope.prepare(*words)
    planned, plan_call = [], problem.plan_call

    def plan(*arguments: Any) -> Any:
        planned.append(arguments)
        if len(planned) == 1:
            jitrope.configure(batch_invariant=True)
        return plan_call(*arguments)

    monkeypatch.setattr(problem, "plan_call", plan)
    runtime.local.recent = {}
    try:
        for _ in range(3):
            call()
    finally:
        jitrope.configure(batch_invariant=False)
    assert len(planned) == 2


def test_a_hook_of_saved_tensors_that_fails_is_called_once() -> None:
    q, k, cos, sin, _ = make(case_named("halves"), DEVICE)
    q.requires_grad_()
    jitrope.apply_rope(q, k, cos, sin)
    seen = []

    def pack(x: torch.Tensor) -> Any:
        seen.append(x)
        raise KeyError("of the user")

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), pytest.raises(KeyError, match="of the user"):
        jitrope.apply_rope(q, k, cos, sin)
    assert len(seen) == 1


def reference_of(case: tuple, words: dict) -> tuple:
    q, k, *tables = case
    (q, k, *rest), options = lower((q, k, *(tables or [None, None]), {"interleaved": False, **words}))
    return rope_reference(q, k, *rest, options)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", ["halves", "ids", "ids-decode", "mrope"])
def test_a_call_like_the_last_is_not_looked_at_again(name: str, in_place: bool, monkeypatch) -> None:
    """A like call takes the fast path, with the same bits; any different call does not."""
    rotate = KINDS["rope_" if in_place else "rope"]
    runtime.local.recent = {}
    results = []
    for seed in (0, 0, 1):
        q, k, cos, sin, keywords = make(case_named(name), DEVICE, seed)
        results.append([x.clone() for x in rotate(q, k, cos, sin, **keywords)])
        if len(results) == 1:
            slow = dispatch._call
            monkeypatch.setattr(dispatch, "_call", lambda *_: pytest.fail("looked at again"))
    for a, b in zip(results[0], results[1]):
        assert torch.equal(a, b)
    assert not torch.equal(results[1][0], results[2][0])
    taken = []
    monkeypatch.setattr(dispatch, "_call", lambda *a: (taken.append(a), slow(*a))[1])
    q, k, cos, sin, keywords = make(case_named(name), DEVICE)
    unaligned = torch.empty(q.numel() + 1, dtype=q.dtype, device=DEVICE)[1:].view(q.shape).copy_(q)
    for other in (unaligned, q.transpose(-2, -3).contiguous().transpose(-2, -3), q.repeat(1, 1, 2, 1)):
        want, _ = rope_reference(
            other, k, *lower((q, k, cos, sin, keywords))[0][2:], lower((q, k, cos, sin, keywords))[1]
        )
        got, _ = rotate(other, k, cos, sin, **keywords)
        assert torch.equal(got, want)
    assert len(taken) == (2 if q.shape[1] == 1 else 3)  # an axis of size 1 may have any stride
    if sin is not None:  # an unaligned table, which no guard detects
        shifted = torch.empty(sin.numel() + 1, dtype=sin.dtype, device=DEVICE)[1:].view(sin.shape).copy_(sin)
        want, _ = rotate(q.clone(), k.clone(), cos, sin, **keywords)
        got, _ = rotate(q.clone(), k.clone(), cos, shifted, **keywords)
        assert torch.equal(got, want)
    if not in_place:
        out, _ = rotate(q.requires_grad_(), k, cos, sin, **keywords)
        assert out.requires_grad


def test_words_without_a_hash() -> None:
    """A list counts as a tuple; a numpy array has no hash, so its call is prepared each time."""
    q, k, cos, sin, words = make(case_named("mrope"), DEVICE)
    want = jitrope.apply_rope(q, k, cos, sin, **said(**words))
    for sections in (list(words["mrope_section"]), np.array(words["mrope_section"])):
        for _ in range(3):
            got = jitrope.apply_rope(q, k, cos, sin, **said(**{**words, "mrope_section": sections}))
            assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_modes_are_seen_by_a_known_call() -> None:
    q, k, cos, sin, _ = make(case_named("halves"), DEVICE)
    for _ in range(2):
        jitrope.apply_rope(q, k, cos, sin)
    with Seen() as seen:
        jitrope.apply_rope(q, k, cos, sin)
    assert torch.ops.jitrope.prepare.default in seen.functions


def test_dtensors_reach_the_launch() -> None:
    """A mesh of one runs a rank's call on its own shards; `test_sharding` has four ranks."""
    dist = pytest.importorskip("torch.distributed", reason="this torch has no distributed")
    from torch.distributed.tensor import DTensor, Shard

    q, k, cos, sin, _ = make(case_named("halves"), DEVICE)
    want = jitrope.apply_rope(q, k, cos, sin)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh(torch.device(DEVICE).type, (1,))
        given = [DTensor.from_local(x.clone().requires_grad_(), mesh, [Shard(2)]) for x in (q, k)]
        got = jitrope.apply_rope(*given, cos, sin)
        grads = torch.autograd.grad(got, given, [torch.ones_like(y) for y in got])
        leaves = [x.clone().requires_grad_() for x in (q, k)]
        outputs = jitrope.apply_rope(*leaves, cos, sin)
        wanted = torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs])
        for a, b in zip((*got, *grads), (*want, *wanted)):
            assert torch.equal(a.to_local(), b)
    finally:
        dist.destroy_process_group()


NORMS = [
    {"norm_rounding": "twice"},
    {"norm_rounding": "once", "zero_centered": True},
    {},
    {"norm_rounding": "twice", "after_rope": True},
    {"norm_rounding": "once", "v_norm": True},
    {"norm_rounding": "once", "norm_kind": "layer_norm"},
]
NORMED_CASES = [case for case in CACHE_CASES if case.table != "freqs"]


@pytest.mark.parametrize("number", range(len(NORMED_CASES)), ids=[case.name for case in NORMED_CASES])
def test_a_norm_with_a_cache_has_the_bits_of_two_calls(number: int) -> None:
    """fp8 in fp32, where the first call loses nothing."""
    case, norm = NORMED_CASES[number], NORMS[number % len(NORMS)]
    if case.fp8 or case.q_fp8:
        case = replace(case, dtype="fp32")
    in_place = number % 2 == 1 and not case.q_fp8
    words = {**case.options, "layout": case.layout, "launch": ("token_linear", "grid_2d", "auto")[number % 3]}
    c = make_cache(case, DEVICE)
    weights = [torch.linspace(0.5, 1.5, case.shape[-1], device=DEVICE, dtype=c.q.dtype).roll(n) for n in (0, 5)]
    tables = {case.table: c.tables[0], "position_ids": c.tables[4]}
    q, k = norm_rope(c.q, c.k, *weights, **tables, **words, **{**norm, "v_norm": False})
    want = [x.clone() for x in (c.k_cache, c.v_cache)]
    page_size = want[0].shape[1] if want[0].dim() == 4 else 1
    v = norm_rope(c.v, None, layout=case.layout, **{**norm, "v_norm": False})[0] if "v_norm" in norm else c.v
    for cache, x, scale in zip(want, (k, v), c.scales[1:]):
        stored = x if scale is None else convert.divided(x, scale, case.form)
        for slot, token in zip(c.slots.tolist(), stored.flatten(0, -3)):
            if slot >= 0:
                cache[(slot // page_size, slot % page_size) if cache.dim() == 4 else slot] = token
    q_want = q if c.scales[0] is None else convert.divided(q, c.scales[0], case.form)
    named = {"k_cache": c.k_cache, "v_cache": c.v_cache, "slot_mapping": c.slots, "rotate_k": case.rotate_k}
    scales = dict(zip(("q_scale", "k_scale", "v_scale"), c.scales))
    k_want = k if case.rotate_k else c.k.clone()
    got = norm_kv_cache(
        c.q, c.k, c.v, *weights, **tables, **words, **norm, **named, **scales, inplace=in_place,
        dtype=FORMATS[case.form].dtype,
    )  # fmt: skip
    assert (got is c.q) == in_place
    for a, b in zip((got, c.k, c.k_cache, c.v_cache), (q_want, k_want, *want)):
        assert torch.equal(a.float(), b.float())


@pytest.mark.parametrize("norm", [*NORMS[:4], {"across_heads": True}], ids=range(5))
def test_a_norm_with_fp8_outputs_has_the_bits_of_two_calls(norm: dict) -> None:
    q, k, cos, sin, _ = make(replace(case_named("halves"), dtype="fp32"), DEVICE)
    heads = [x.shape[2] if norm.get("across_heads") else 1 for x in (q, k)]
    weights = [torch.linspace(0.5, 1.5, q.shape[-1] * n, device=DEVICE) for n in heads]
    scales = [torch.tensor(x, device=DEVICE) for x in (0.02, 0.3)]  # the first saturates
    want = norm_rope(q, k, *weights, cos, sin, **norm)
    got = norm_fp8(q, k, *weights, cos, sin, q_scale=scales[0], k_scale=scales[1], **norm)
    for a, b, scale in zip(got, want, scales):
        assert torch.equal(a.view(torch.uint8), convert.divided(b, scale, "fp8").view(torch.uint8))


def test_an_fp8_cache_in_place_returns_the_given_v() -> None:
    """In a known call too."""
    (q, k, v), table = torch.randn(3, 1, 3, 2, 16, device=DEVICE), torch.randn(8, 16, device=DEVICE)
    caches = torch.zeros(2, 8, 2, 16, device=DEVICE).to(torch.float8_e4m3fn)
    cache = jitrope.KVCache(*caches, torch.arange(3, device=DEVICE), k_scale=0.3, v_scale=0.7)
    for _ in range(2):
        out = jitrope.prepare_qkv(q, k, v, cos_sin_cache=table, cache=cache, inplace=True)
        assert out[0] is q
        assert out[2] is v


@pytest.mark.hardware
def test_scales_that_are_numbers_are_filled_once() -> None:
    """Not again in a CUDA graph, where each would be a launch of every replay."""
    caches = torch.zeros(2, 8, 2, 16, device=DEVICE).to(torch.float8_e4m3fn)
    made = partial(jitrope.KVCache, *caches, torch.arange(8, device=DEVICE), k_scale=0.3, v_scale=0.7)
    known, graph = made(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = made()
    for name in ("k_scale", "v_scale"):
        assert captured.tensors[name] is known.tensors[name]


@pytest.mark.hardware
def test_a_known_cache_call_and_its_graph() -> None:
    """Eager twice, the second time by the fast path, then in a CUDA graph with other positions and slots."""
    case = CACHE_CASES[1]
    c = make_cache(case, DEVICE)
    words = {
        "cos_sin_cache": c.tables[0], "position_ids": c.tables[4], "layout": "thd", "k_cache": c.k_cache,
        "v_cache": c.v_cache, "slot_mapping": c.slots,
    }  # fmt: skip
    results = []
    for _ in range(2):
        c.k_cache.zero_()
        results.append((kv_cache(c.q, c.k, c.v, **words), c.k_cache.clone()))
    for a, b in zip(*results):
        assert torch.equal(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = kv_cache(c.q, c.k, c.v, **words)
    c.slots.copy_(c.slots.flip(0))
    c.tables[4].copy_(c.tables[4].flip(0))
    c.k_cache.zero_()
    graph.replay()
    got = (q.clone(), c.k_cache.clone())
    c.k_cache.zero_()
    want = kv_cache(c.q, c.k, c.v, **words)
    assert torch.equal(got[0], want)
    assert torch.equal(got[1], c.k_cache)
    assert got[1].any()


@pytest.mark.hardware
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_overlapping_launches_keep_their_order(tokens: int, captured: bool) -> None:
    """Programmatic dependent launch: a kernel begins while the previous one runs, and still sees its writes.

    Chains of rotations in place, with torch's kernels in between, and with slow kernels before and after.
    """
    torch.manual_seed(0)
    q = torch.randn(tokens, 8, 128, device=DEVICE)
    k = torch.randn(tokens, 2, 128, device=DEVICE)
    cache = torch.randn(4096, 128, device=DEVICE)
    ids = torch.randint(0, 4096, (40, tokens), device=DEVICE)

    def chain(q, k, step):
        position = ids[0].clone()
        for i in range(40):
            step(q, k, position)
            if i % 4 == 1:
                q.add_(1)
                position.copy_(ids[i])
            if i % 10 == 3:
                torch.cuda._sleep(200_000)
                k.mul_(0.5)
        return q, k

    def kernels(q, k, position):
        jitrope.apply_rope(q, k, cos_sin_cache=cache, positions=position, layout="thd", inverse=False, inplace=True)
        q.mul_(0.125)
        k.mul_(0.125)

    def torch_alone(q, k, position):
        options = Options(layout="thd", rotary_dim=128, table="cos_sin_cache")
        rotated = rope_reference(q, k, cache, cache, None, None, position, options)
        for x, y in zip((q, k), rotated):
            x.copy_(y * 0.125)

    want = chain(q.clone(), k.clone(), torch_alone)
    kernels(q.clone(), k.clone(), ids[0])  # loaded before the capture
    a, b = q.clone(), k.clone()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain(a, b, kernels)
        graph.replay()
    else:
        chain(a, b, kernels)
    assert torch.equal(a, want[0])
    assert torch.equal(b, want[1])


@pytest.mark.hardware
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("tokens", [1, 64, 4096])
@pytest.mark.parametrize("across_heads", [False, True])
def test_overlapping_norms_keep_their_order(across_heads: bool, tokens: int, captured: bool) -> None:
    """The same chain with a pause after each kernel has the same bits; the next call reads joint tensors."""
    torch.manual_seed(0)
    q, k = (torch.randn(1, tokens, heads, 128, device=DEVICE, dtype=torch.bfloat16) for heads in (8, 8))
    angles = torch.rand(2 * tokens, 64, device=DEVICE)
    weights = [torch.randn(1024 if across_heads else 128, device=DEVICE) for _ in range(2)]
    tables = angles.cos(), angles.sin()

    def chain(q, k, pause):
        for i in range(20):
            norm_rope(q, k, *weights, *tables, across_heads=across_heads, inplace=True)
            pause()
            q.add_(k, alpha=0.5)
            if i % 4 == 1:
                joint = norm_rope_joint((q, k, k), (k, q, q), None, None, *tables)
                pause()
                k, q = joint[0][:, :tokens] + joint[2][:, tokens:], joint[1][:, tokens:].clone()
            if i % 10 == 3:
                torch.cuda._sleep(200_000)
        return q, k

    want = chain(q.clone(), k.clone(), torch.cuda.synchronize)
    a, b = q.clone(), k.clone()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chain(a, b, lambda: None)
        graph.replay()
    else:
        got = chain(a, b, lambda: None)
    for x, y in zip(got, want):
        assert torch.equal(x, y)


@pytest.mark.hardware
@pytest.mark.parametrize("name", ["once", "across-d128", "ids", "joint-two-tables", "only-q-weight", "unweighted"])
def test_norm_in_a_cuda_graph(name: str) -> None:
    call = make_norm(next(case for case in NORM_CASES if case.name == name), DEVICE)
    norm_call(call)  # the warm call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = norm_call(call)
    for seed in (1, 2):
        torch.manual_seed(seed)
        for x in call.streams:
            if x is not None:
                x.copy_(torch.randn_like(x))
        graph.replay()
        for got, want in zip(outputs, norm_call(call)):
            assert torch.equal(got.nan_to_num(9), want.nan_to_num(9))


@pytest.mark.hardware
def test_a_norm_alone_first_met_in_a_cuda_graph() -> None:
    """The row that rotates nothing is not in the graph's memory, so later calls do not read it from there."""
    q, weight = torch.randn(1, 8, 2, 64, device=DEVICE), torch.randn(64, device=DEVICE)
    cos = torch.ones(1, 32, device=DEVICE).expand(8, 32)
    want, _ = norm_rope(q, None, weight, None, cos, torch.zeros_like(cos[:1]).expand(8, 32))
    norm_rope(torch.cat((q, q), 1), None, weight)  # the same kernel
    constants.one_row.cache_clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm_rope(q, None, weight)
    del graph
    torch.cuda.empty_cache()
    torch.full((1 << 20,), 7.0, device=DEVICE)
    out, _ = norm_rope(q, None, weight)
    assert torch.equal(out, want)


@pytest.mark.hardware
@pytest.mark.parametrize("grad", [False, True])
def test_a_norm_in_the_graphs_of_torch_compile(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors that jitrope makes once are not in the memory of a graph, which torch uses again."""
    constants.filled.cache_clear()
    monkeypatch.setattr(constants, "_counters", {})
    cos, sin = torch.randn(2, 7, 44, device=DEVICE)
    q, k, weight = (torch.randn(*shape, device=DEVICE).bfloat16() for shape in ((1, 7, 3, 88), (1, 7, 1, 88), (88,)))
    leaves = [x.requires_grad_(grad) for x in (q, k, weight)]

    def call(q: torch.Tensor, k: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return jitrope.prepare_qkv(q, k, None, cos, sin, norm=jitrope.Norm(weight))[:2]

    compiled = torch.compile(call, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        got, want = ([x.clone() for x in function(*leaves)] for function in (compiled, call))
        if grad:
            sent = [torch.randn_like(x) for x in want]
            got += [x.clone() for x in torch.autograd.grad(got, leaves, sent)]
            want += torch.autograd.grad(want, leaves, sent)
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("grad", [False, True])
def test_a_plain_norm_takes_the_short_cut(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither direction goes through the dispatcher, and the second call of a kind is not checked again."""
    call = make_norm(next(case for case in NORM_CASES if case.name == "once"), DEVICE)
    for x in (*call.streams, *call.weights):
        x.requires_grad_(grad)
    for name in ("prepare", "prepare_"):
        monkeypatch.setattr(torch.ops.jitrope, name, lambda *_: pytest.fail("through the dispatcher"))
    outputs = norm_call(call)
    if grad:
        leaves = [*call.streams, *call.weights]
        torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs])
        return
    monkeypatch.setattr(dispatch, "_call", lambda *_: pytest.fail("looked at again"))
    for got, want in zip(norm_call(call), outputs):
        assert torch.equal(got, want)


def test_weights_that_ask_for_a_gradient_take_the_short_cut_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's weights under torch.no_grad(); with gradients enabled they get theirs."""
    call = make_norm(next(case for case in NORM_CASES if case.name == "once"), DEVICE)
    for x in call.weights:
        x.requires_grad_()
    with torch.no_grad():
        outputs = norm_call(call)
        with monkeypatch.context() as patched:
            patched.setattr(dispatch, "_call", lambda *_: pytest.fail("looked at again"))
            again = norm_call(call)
    assert all(torch.equal(a, b) for a, b in zip(outputs, again))
    watched = norm_call(call)
    assert all(x.requires_grad for x in watched)
    assert all(g.any() for g in torch.autograd.grad(watched, call.weights, [torch.ones_like(y) for y in watched]))


@pytest.mark.parametrize("stage", ["in place", "cache", "table"])
def test_a_gradient_that_a_call_lacks_leaves_the_short_cut_without_gradients(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients enabled the call is refused, or the table gets its gradient, also after calls without."""
    q, k, v = (torch.randn(6, n, 64, device=DEVICE) for n in (4, 2, 2))
    weight, table = torch.rand(64, device=DEVICE), torch.rand(8, 64, device=DEVICE)
    words: dict[str, Any] = {"cos_sin_cache": table, "positions": torch.arange(6, device=DEVICE), "layout": "thd"}
    if stage == "cache":
        caches = torch.zeros(2, 2, 4, 2, 64, device=DEVICE)
        words["cache"] = jitrope.KVCache(*caches, torch.arange(6, device=DEVICE))
    if stage != "table":
        words |= {"norm": jitrope.Norm(weight, weight), "inplace": stage == "in place"}

    def result() -> torch.Tensor:
        return jitrope.prepare_qkv(q.clone(), k.clone(), v, **words)[0]

    want = result()
    (table if stage == "table" else weight).requires_grad_()
    with torch.no_grad():
        assert torch.equal(result(), want)
        with monkeypatch.context() as patched:
            patched.setattr(dispatch, "_call", lambda *_: pytest.fail("looked at again"))
            assert torch.equal(result(), want)
    if stage == "table":
        assert torch.autograd.grad(result().sum(), table)[0].any()
    else:
        with pytest.raises(jitrope.InvalidInput, match="gradient"):
            result()


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("norm", [None, jitrope.Norm()], ids=["rope", "norm"])
def test_gradients_of_several_cotangents_at_once(norm: Any, learned: bool) -> None:
    q = torch.randn(1, 6, 2, 64, device=DEVICE, requires_grad=True)
    tables = [x.to(DEVICE).requires_grad_(learned) for x in torch.rand(2, 6, 32)]
    leaves = [q, *tables] if learned else [q]
    y = jitrope.prepare_qkv(q, None, None, *tables, norm=norm)[0] if norm else jitrope.apply_rope(q, None, *tables)[0]
    sent = torch.randn(3, *y.shape, device=DEVICE)
    got = torch.autograd.grad(y, leaves, sent, retain_graph=True, is_grads_batched=True)
    for n, grad in enumerate(sent):
        for x, want in zip(got, torch.autograd.grad(y, leaves, grad, retain_graph=True)):
            torch.testing.assert_close(x[n], want)


@pytest.mark.parametrize("name", ["once", "only-q-weight", "d192", "across-d64", "layer-biased"])
def test_opcheck_of_norms(name: str) -> None:
    call = make_norm(next(case for case in NORM_CASES if case.name == name), DEVICE)
    grads = [None if x is None else torch.randn_like(x) for x in call.streams]
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        torch.ops.jitrope.prepare.default,
        op_arguments(HEADS_BACK, (*grads, *call.streams, *call.weights, *call.biases), call.tables, call.options),
        test_utils=tests,
    )
    arguments = op_arguments(NORM_ROPE, (*call.streams, *call.weights, *call.biases), call.tables, call.options)
    arguments[0][0].requires_grad_()
    torch.library.opcheck(torch.ops.jitrope.prepare.default, arguments)


def test_wild_ids_and_slots_on_the_device() -> None:
    """No bytes outside of tables and caches are touched: compute-sanitizer runs this too."""
    q = torch.ones(6, 4, 64, device=DEVICE)
    k, v = torch.ones(2, 6, 2, 64, device=DEVICE)
    k_cache, v_cache = torch.zeros(2, 8, 2, 64, device=DEVICE)
    cache = torch.ones(5, 64, device=DEVICE)
    ids = torch.tensor([0, 4, 5, -1, 2**40, -(2**62)], device=DEVICE)
    slots = torch.tensor([0, 8, -1, 2**31, 2**40, 7], device=DEVICE)
    out = kv_cache(
        q,
        k,
        v,
        cos_sin_cache=cache,
        position_ids=ids,
        layout="thd",
        k_cache=k_cache,
        v_cache=v_cache,
        slot_mapping=slots,
    )
    assert not out[:2].isnan().any()
    assert out[2:].isnan().all()
    assert v_cache.sum((-1, -2)).tolist() == [128, 0, 0, 0, 0, 0, 0, 128]


def test_inference_mode() -> None:
    q, k, cos, sin, _ = make(case_named("halves"), DEVICE)
    want = jitrope.apply_rope(q, k, cos, sin)
    with torch.inference_mode():
        q, k = q.clone(), k.clone()
        for function in (KINDS["rope"], KINDS["rope_"]):
            for got, expected in zip(function(q, k, cos, sin), want):
                assert torch.equal(got, expected)


@pytest.mark.hardware
def test_cuda_graph() -> None:
    q, k, cos, sin, keywords = make(case_named("packed"), DEVICE)
    jitrope.apply_rope(q, k, cos, sin, **said(**keywords))  # the warm call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = jitrope.apply_rope(q, k, cos, sin, **said(**keywords))
    for seed in (1, 2):
        torch.manual_seed(seed)
        q.copy_(torch.randn_like(q))
        keywords["cu_seqlens"].copy_(torch.tensor([0, 3, 8, 8, 9, 10, 20]))
        graph.replay()
        for got, want in zip(outputs, jitrope.apply_rope(q, k, cos, sin, **said(**keywords))):
            assert torch.equal(got, want)


@pytest.mark.hardware
def test_a_check_during_a_capture_is_refused_and_the_capture_goes_on() -> None:
    q, k, cos, sin, keywords = make(case_named("packed"), DEVICE)
    words = said(**keywords)
    jitrope.apply_rope(q, k, cos, sin, **words, check=True)
    want = jitrope.apply_rope(q, k, cos, sin, **words)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(jitrope.InvalidInput, match=r"check=True .* a CUDA graph do not; leave it out"):
            jitrope.apply_rope(q, k, cos, sin, **words, check=True)
        outputs = jitrope.apply_rope(q, k, cos, sin, **words)
    graph.replay()
    for got, expected in zip(outputs, want):
        assert torch.equal(got, expected)


@pytest.mark.hardware
def test_cuda_graph_of_fused_qkv() -> None:
    case = next(case for case in QKV_CASES if case.name == "qkv-packed")
    (qkv, freqs, _, cu_seqlens, *_), _ = make_qkv(case, DEVICE)
    keywords = {"freqs": freqs, "layout": "thd", "cu_seqlens": cu_seqlens, "heads": heads_of(case)}
    keywords["order"] = "grouped"
    jitrope.prepare_fused_qkv(qkv, **said(**keywords))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = jitrope.prepare_fused_qkv(qkv, **said(**keywords))
    cu_seqlens.copy_(torch.tensor([0, 2, 2, 6]))
    graph.replay()
    for got, want in zip(outputs, jitrope.prepare_fused_qkv(qkv, **said(**keywords))):
        assert torch.equal(got, want)


@pytest.mark.hardware
def test_cold_capture_says_what_to_do() -> None:
    q = torch.randn(1, 3, 2, 34, device=DEVICE)
    cos = torch.rand(3, 17, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(jitrope.JitropeError, match="once before the capture"), torch.cuda.graph(graph):
        jitrope.apply_rope(q, None, cos, cos)
    torch.cuda.synchronize()
    jitrope.apply_rope(q, None, cos, cos)


@pytest.mark.hardware
def test_streams() -> None:
    """The launch goes to the current stream, and waits for the same events."""
    q, _, cos, sin, _ = make(case_named("halves"), DEVICE)
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
    cases = [make(case_named("halves"), DEVICE, seed) for seed in range(8)]
    want = [jitrope.apply_rope(q, k, cos, sin) for q, k, cos, sin, _ in cases]
    before = len(kernels.compiled)
    wrong = []

    def work(i: int) -> None:
        try:
            q, k, cos, sin, _ = cases[i]
            for _ in range(200):
                got = jitrope.apply_rope(q, k, cos, sin)  # this thread's first use of CUDA
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
    assert len(kernels.compiled) == before


@pytest.mark.hardware
def test_refusals_write_nothing() -> None:
    q, k, cos, sin, _ = make(case_named("halves"), DEVICE)
    before = q.clone()
    for arguments, message in (
        ((q, k, cos.cpu(), sin), "cos is .*, on cpu; it must be .*, on cuda:0 like q"),
        ((q, k.cpu(), cos, sin), "k is .*, on cpu; it must be .*, on cuda:0 like q"),
        ((q, k, cos[:2], sin[:2]), "cos has 2 rows"),
    ):
        for _ in range(2):  # the second time too
            with pytest.raises(jitrope.InvalidInput, match=message):
                jitrope.apply_rope(*arguments, inplace=True)
    assert torch.equal(q, before)


# ---- the kernel's life -------------------------------------------------------------------------

FRESH = """
import json, sys
import torch, jitrope
from jitrope.jit import kernels
for interleaved, heads, tokens in ((False, (32, 8), 4096), (True, (24, 24), 2), (True, (24, 0), 4096)):
    q, k = (torch.randn(1, tokens, h, 128, device="cuda", dtype=torch.bfloat16) if h else None for h in heads)
    angles = torch.rand(tokens, 64, device="cuda")
    jitrope.apply_rope(q, k, angles.cos(), angles.sin(), interleaved=interleaved)
torch.cuda.synchronize()
print(json.dumps(kernels.compiled))
"""


def fresh(cache: Path, code: str = FRESH) -> list[str]:
    environment = {**os.environ, "JITROPE_CACHE_DIR": str(cache), "PYTHONPATH": path_of_imports()}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def path_of_imports() -> str:
    return os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


@pytest.mark.hardware
def test_a_prewarmed_process_compiles_nothing(tmp_path: Path) -> None:
    assert len(fresh(tmp_path / "cold")) == 3
    environment = {**os.environ, "JITROPE_CACHE_DIR": str(tmp_path / "warm"), "PYTHONPATH": path_of_imports()}
    for heads, names in (("32,8", ""), ("24,24", "q k"), ("24", "q")):
        texts = [f"bshd heads {names} > rotate cos sin interleaved > fresh"] if names else []
        command = [sys.executable, "-m", "jitrope", "prewarm", "--heads", heads, *texts]
        subprocess.run(command, check=True, env=environment, capture_output=True)
    assert fresh(tmp_path / "warm") == []
    assert fresh(tmp_path / "cold") == []  # the cache of a real run works too


@pytest.mark.hardware
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


@pytest.mark.hardware
def test_a_gpu_without_cupy_names_the_packages(tmp_path: Path) -> None:
    message = fresh(tmp_path, NO_CUPY)
    assert f"pip install cupy-cuda{torch.version.cuda.split('.')[0]}x nvidia-cuda-nvrtc" in message


SANITIZED = """
import torch
from tests.said import KINDS
from tests.cases import CACHE_CASES, CASES, FUSED_BACK, NORM_CASES, QKV_CASES, ROPE_CACHE, ROPE_FUSED
from tests.cases import launched, make, make_cache, make_norm, make_qkv, norm_call
from tests.test_gpu import test_wild_ids_and_slots_on_the_device as wild
names = ("halves", "interleaved", "partial-odd", "packed", "packed-too-long", "fused-qkv", "d72", "full-interleaved",
         "cp-packed-starts", "angles-interleaved", "angles-full", "angles-packed", "angles-packed-cp", "mla",
         "ids-past", "ids-cis", "mrope-odd", "mrope-full-interleaved", "ids-decode")
for launch in ("token_linear", "grid_2d"):
    for case in CASES:
        if case.name in names:
            q, k, cos, sin, keywords = make(case, "cuda")
            KINDS["rope"](q, k, cos, sin, launch=launch, **keywords)
            if keywords.pop("interleaved_out", None) is None:
                KINDS["rope_"](q, k, cos, sin, launch=launch, **keywords)
    for case in QKV_CASES:
        tensors, options = make_qkv(case, "cuda", launch=launch)
        parts = launched(ROPE_FUSED, tensors[:1], tensors[1:], options)
        launched(FUSED_BACK, parts, tensors[1:], options)
    for case in CACHE_CASES:
        c = make_cache(case, "cuda", launch=launch)
        launched(ROPE_CACHE, (c.q, c.k, c.v, c.k_cache, c.v_cache, c.slots, *c.scales), c.tables, c.options)
for case in NORM_CASES:
    for in_place in (False, True)[: 2 if case.first is None else 1]:
        call = make_norm(case, "cuda")
        norm_call(call, in_place)
    for x in (*call.streams, *call.weights):
        if x is not None:
            x.requires_grad_()
    sum(y.float().sum() for y in norm_call(call) if y is not None).backward()
wild()
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.hardware
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


@pytest.mark.hardware
@pytest.mark.parametrize(
    "bench",
    [
        "host",
        "rope --only wan,decode1 --no-peers",
        "decode --tokens 1,5 --heads 4/2 --prefill 64 --no-peers",
        "train --smoke",  # at full size it takes 50 GiB
        "thd --sequences 1,7 --tokens 2048 --heads 4",
        "layer --batches 4x64,8x32",
        "roofline --only decode",
        "targets --only decode",
    ],
    ids=lambda text: text.split()[0],
)
def test_bench_runs(bench: str, tmp_path: Path) -> None:
    environment = {**os.environ, "JITROPE_CACHE_DIR": str(tmp_path), "PYTHONPATH": path_of_imports()}
    command = [sys.executable, "-m", "jitrope", "bench", *bench.split(), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"]


@pytest.mark.hardware
def test_serving_example_in_a_graph(tmp_path: Path) -> None:
    environment = {**os.environ, "JITROPE_CACHE_DIR": str(tmp_path), "PYTHONPATH": path_of_imports()}
    command = [sys.executable, str(ROOT / "examples" / "serving.py"), "--layers", "2", "--batch", "3", "--steps", "10"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CUDA graph" in done.stdout


NORM = jitrope.Norm(None, None)
STEADY = {
    "rope": lambda q, k, cos, sin: jitrope.apply_rope(q, k, cos, sin),
    "in place": lambda q, k, cos, sin: jitrope.apply_rope(q, k, cos, sin, inplace=True),
    "norm": lambda q, k, cos, sin: jitrope.prepare_qkv(q, k, None, cos, sin, norm=NORM),
    "gradient": lambda q, k, cos, sin: jitrope.apply_rope(q.requires_grad_(), k, cos, sin)[0].sum().backward(),
}


@pytest.mark.parametrize("what", STEADY)
def test_a_prepared_call_uses_nothing_of_jit_and_base_but_the_launch(what: str) -> None:
    """So nothing is rendered, hashed, logged or looked up on a disk (jitrope/jit/README.md)."""
    q, k = (torch.randn(1, 16, heads, 64, device=DEVICE) for heads in (8, 2))
    cos, sin = torch.rand(2, 16, 32, device=DEVICE)
    entered: list[str] = []

    def seen(frame: Any, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        inside = path.parent.parent.name == "jitrope" and path.parent.name in ("jit", "base")
        if event == "call" and inside and path.name != "layouts.py":  # which has the words of a call
            entered.append(frame.f_code.co_name)

    for turn in range(4):
        entered.clear()
        before = sys.getprofile()
        sys.setprofile(seen if turn == 3 else before)
        try:
            STEADY[what](q.detach(), k, cos, sin)
        finally:
            sys.setprofile(before)
    assert set(entered) <= {"enqueue"}
