"""Launches on a GPU, or on its stand-in: large sizes, known calls, streams and graphs."""

from __future__ import annotations

import itertools
import json
import re
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import jitrope
from jitrope import KVCache, Norm, Packed, torch_state
from jitrope.plan import heuristics, problem
from jitrope.run import dispatch
from jitrope.run import launch as runtime
from jitrope.values import constants

from .. import oracle
from ..calls import GRADIENTS, named
from ..fresh import python
from ..host import backend
from ..host.backend import DEVICE
from ..results import check_gradients, flat, gradients, outputs, places_of, same
from ..sweep import Made

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
RELATIVE_L2 = {torch.bfloat16: 1.7e-3, torch.float16: 2.2e-4, torch.float32: 1e-7}
FLOATS = pytest.mark.parametrize("dtype", RELATIVE_L2, ids=str)
LAUNCHES = ("token_linear", "grid_2d")


def offsets(tokens: int, sequences: int, multiple: int = 1) -> Tensor:
    """int32 offsets of random lengths that are multiples; some are zero."""
    generator = torch.Generator().manual_seed(sequences)
    cuts = torch.randint(0, tokens // multiple + 1, (sequences - 1,), generator=generator).sort().values * multiple
    return torch.cat((torch.zeros(1), cuts, torch.full((1,), tokens))).int().to(DEVICE)


def plain_call() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, cos and sin."""
    q, k = (torch.randn(2, 5, heads, 64, device=DEVICE, dtype=torch.bfloat16) for heads in (4, 2))
    return q, k, *torch.rand(2, 5, 32, device=DEVICE)


# ---- large sizes -------------------------------------------------------------------------------------


@pytest.mark.hardware
@pytest.mark.parametrize("cp", [(1, 0), (2, 1), (4, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sequences", [1, 2, 8, 32, 128, 512, 1024, 2401])
def test_packs_have_the_bits_of_ids_with_both_launches(sequences: int, dtype: torch.dtype, cp: tuple[int, int]) -> None:
    """Packs of 65,536 tokens, forward and gradient; each token's position as an id is another kernel."""
    size, rank = cp
    cu_seqlens = offsets(65_536, sequences, 2 * size)
    q, grad = (torch.randn(65_536 // size, 4, 128, device=DEVICE).to(dtype) for _ in range(2))
    freqs = torch.rand(65_536, 64, device=DEVICE) * 100
    ids = [x for first, end in itertools.pairwise(cu_seqlens.tolist()) for x in oracle.chunked(first, end, size, rank)]
    positions = [(launch, Packed(cu_seqlens, cp_size=size, cp_rank=rank)) for launch in LAUNCHES]
    found = []
    for launch, given in [*positions, ("auto", torch.tensor(ids, device=DEVICE))]:
        jitrope.configure(launch=launch)
        leaf = q.clone().requires_grad_()
        out, _ = jitrope.apply_rope(leaf, None, freqs=freqs, positions=given, layout="thd")
        found.append((out, *torch.autograd.grad(out, leaf, grad)))
    for other in found[:2]:
        assert all(map(torch.equal, other, found[2]))


@pytest.mark.hardware
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("cp_size", [2, 3, 8])
@pytest.mark.parametrize("sequences", [1, 8, 512, 2401])
def test_ragged_packs_have_the_bits_of_the_whole(sequences: int, cp_size: int, launch: str) -> None:
    """Lengths that no number of chunks divides, every rank's shard: forward, gradient, and spare tokens in place."""
    jitrope.configure(launch=launch)
    tokens, total = 32_771, 0
    cu_seqlens = offsets(tokens, sequences).to(torch.int64 if cp_size == 3 else torch.int32)
    q, grad = (torch.randn(tokens, 4, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    freqs = torch.rand(tokens, 64, device=DEVICE) * 100
    whole, _ = jitrope.apply_rope(q, None, freqs=freqs, positions=Packed(cu_seqlens))
    gradient, _ = jitrope.apply_rope(grad, None, freqs=freqs, positions=Packed(cu_seqlens), inverse=True)
    for rank in range(cp_size):
        ends = [*itertools.pairwise(cu_seqlens.tolist())]
        mine = [first + x for first, end in ends for x in oracle.chunked(first, end, cp_size, rank)]
        total += len(mine)
        positions = Packed(cu_seqlens, cp_size=cp_size, cp_rank=rank)
        leaf = q[mine].requires_grad_()
        out, _ = jitrope.apply_rope(leaf, None, freqs=freqs, positions=positions)
        assert torch.equal(out, whole[mine])
        assert torch.equal(torch.autograd.grad(out, leaf, grad[mine])[0], gradient[mine])
        padded = torch.cat((q[mine], torch.ones_like(q[:5])))
        jitrope.apply_rope(padded, None, freqs=freqs, positions=positions, inplace=True)
        assert torch.equal(padded, torch.cat((whole[mine], torch.ones_like(q[:5]))))
    assert total == tokens


@pytest.mark.hardware
@pytest.mark.parametrize("launch", ["auto", *LAUNCHES])
@pytest.mark.parametrize("sequences", [70_000, 100_000, 1_000_000])
def test_a_million_sequences(sequences: int, launch: str) -> None:
    """More than a grid has rows."""
    jitrope.configure(launch=launch)
    tokens = 1_000_000
    cu_seqlens = offsets(tokens, sequences).long()
    starts = torch.randint(0, 9, (sequences,), device=DEVICE)
    q, freqs = torch.randn(tokens, 2, 64, device=DEVICE).bfloat16(), torch.rand(512, 32, device=DEVICE) * 100
    out, _ = jitrope.apply_rope(q, None, freqs=freqs, positions=Packed(cu_seqlens, start_positions=starts))
    lengths = cu_seqlens.diff()
    ids = torch.arange(tokens, device=DEVICE) + torch.repeat_interleave(starts - cu_seqlens[:-1], lengths)
    want, _ = jitrope.apply_rope(q, None, freqs=freqs, positions=ids, layout="thd")
    assert not want.isnan().any()
    assert torch.equal(out, want)


@pytest.mark.hardware
@pytest.mark.parametrize("rounding", ["fp32", "complex64"])
@pytest.mark.parametrize("interleaved", [False, True])
@FLOATS
def test_error_against_fp64(dtype: torch.dtype, rounding: str, interleaved: bool) -> None:
    q, k = (torch.randn(2, 2048, h, 128, device=DEVICE).to(dtype).requires_grad_() for h in (16, 4))
    angles = torch.outer(torch.arange(2048).double(), 10000 ** (-torch.arange(64).double() / 64)).to(DEVICE)
    tables = angles.cos().float(), angles.sin().float()
    results = jitrope.apply_rope(q, k, *tables, interleaved=interleaved, rounding=rounding)
    grads = [torch.randn_like(y) for y in results]
    back = torch.autograd.grad(results, (q, k), grads)
    for given, inverse, got in (((q, k), False, results), (grads, True, back)):
        want, _ = oracle.rope(*[x.detach() for x in given], *tables, interleaved=interleaved, inverse=inverse)
        for x, y in zip(got, want):
            assert (x.detach().double() - y).norm() <= RELATIVE_L2[dtype] * y.norm()


@pytest.mark.hardware
@pytest.mark.parametrize("interleaved", [False, True])
@FLOATS
def test_angles_against_fp64(dtype: torch.dtype, interleaved: bool) -> None:
    """Angles up to a million radians: the kernel's sines have fp32's accuracy at all of them."""
    q = torch.randn(8192, 8, 128, device=DEVICE).to(dtype)
    freqs = torch.rand(8192, 64, device=DEVICE) ** 4 * 1e6
    out, _ = jitrope.apply_rope(q, None, freqs=freqs, layout="thd", interleaved=interleaved)
    (want, _), _ = oracle.rope(q, None, freqs=freqs, layout="thd", interleaved=interleaved)
    assert (out.double() - want).norm() <= RELATIVE_L2[dtype] * want.norm()


@pytest.mark.hardware
@FLOATS
def test_there_and_back_is_one_rounding(dtype: torch.dtype) -> None:
    q = torch.randn(4096, 16, 128, device=DEVICE).to(dtype)
    freqs = torch.outer(torch.arange(4096.0), 10000 ** (-torch.arange(64) / 64)).to(DEVICE)
    words = {"freqs": freqs, "positions": Packed(offsets(4096, 9))}
    again, _ = jitrope.apply_rope(jitrope.apply_rope(q, None, **words)[0], None, **words, inverse=True)
    # Rounding there and back, half a unit each of the pair's length; in fp32 products and sums round too.
    units = 4 if dtype == torch.float32 else 1.01
    bound = units * torch.finfo(dtype).eps * q.float().unflatten(-1, (2, 64)).norm(dim=-2)
    assert ((again.float() - q.float()).abs().unflatten(-1, (2, 64)) <= bound.unsqueeze(-2)).all()


@pytest.mark.hardware
@pytest.mark.parametrize("norm", [False, True], ids=["rope", "norm"])
def test_past_two_to_the_31_elements(norm: bool) -> None:
    """32-bit offsets would wrap. Slices are compared with calls of their own."""
    tokens = (1 << 31) // (64 * 128) + 1000
    q = torch.randn(tokens, 64, 128, device=DEVICE, dtype=torch.bfloat16)
    cos, sin = (torch.rand(tokens, 64, device=DEVICE) for _ in range(2))
    words = {"layout": "thd", **({"norm": Norm(torch.rand(128, device=DEVICE), rounding="once")} if norm else {})}
    parts = [slice(start, start + 700) for start in (0, tokens // 2, tokens - 700)]
    want = [jitrope.prepare_qkv(q[part], None, None, cos[part], sin[part], **words)[0] for part in parts]
    assert q.numel() > 2**31
    if not norm:
        out = jitrope.prepare_qkv(q, None, None, cos, sin, **words)[0]
        assert all(torch.equal(out[part], y) for part, y in zip(parts, want))
        del out
    jitrope.prepare_qkv(q, None, None, cos, sin, **words, inplace=True)
    assert all(torch.equal(q[part], y) for part, y in zip(parts, want))


@pytest.mark.hardware
@pytest.mark.parametrize("shape", [(70_000, 2, 2, 64), (1, 140_000, 1, 64)], ids=["rows", "tokens"])
@pytest.mark.parametrize("launch", ["auto", "grid_2d"])
def test_more_rows_and_tokens_than_a_grids_second_axis_has(shape: tuple[int, ...], launch: str) -> None:
    jitrope.configure(launch=launch)
    q, (cos, sin) = torch.randn(shape, device=DEVICE), torch.rand(2, shape[1], 32, device=DEVICE)
    out, _ = jitrope.apply_rope(q, None, cos, sin)
    assert torch.equal(out.cpu(), jitrope.apply_rope(q.cpu(), None, cos.cpu(), sin.cpu())[0])


# ---- numbers that the host does not read -------------------------------------------------------------


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("given", [[0, 5, 3, 12], [0, 4, 40], [3, 12], [-7, 4, 12], [0, 90, -3, 12]], ids=str)
@pytest.mark.parametrize("table", ["cos_sin_cache", "freqs"])
def test_malformed_lengths_stay_in_bounds(given: list[int], launch: str, table: str) -> None:
    """The host does not read cu_seqlens, so the kernel must not trust it: no access outside of q or the table."""
    jitrope.configure(launch=launch)
    q, cu_seqlens = torch.randn(12, 2, 64, device=DEVICE), torch.tensor(given, dtype=torch.int32, device=DEVICE)
    for words in ({}, {"cp_size": 2, "cp_rank": 1}, {"packed_table": True}):
        rows = torch.rand(12, 64, device=DEVICE)
        jitrope.apply_rope(q, None, **{table: rows}, positions=Packed(cu_seqlens, **words))
    if backend.DEVICE != "cpu":
        torch.cuda.synchronize()


@pytest.mark.parametrize("cp", [(1, 0), (3, 0), (3, 2)], ids=str)
@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 1000, 1025, 3000])
def test_any_number_of_sequences_is_searched(count: int, cp: tuple[int, int]) -> None:
    """Each step of the search leaves a 32nd; any number of empty sequences is skipped."""
    jitrope.configure(launch="token_linear")
    generator, lengths = torch.Generator().manual_seed(count), [0] * count
    for n in torch.randint(count, (8,), generator=generator).tolist():
        lengths[n] += 2 if cp[0] == 1 else 5
    ends = [0, *itertools.accumulate(lengths)]
    q, table = torch.randn(18, 1, 8, device=DEVICE), torch.rand(40, 8, device=DEVICE)
    ids = [x for first, end in itertools.pairwise(ends) for x in oracle.chunked(first, end, *cp)][:18]
    positions = Packed(torch.tensor(ends, device=DEVICE), cp_size=cp[0], cp_rank=cp[1])
    got, _ = jitrope.apply_rope(q, None, cos_sin_cache=table, positions=positions)
    own = {"positions": torch.tensor(ids, device=DEVICE), "layout": "thd"}
    want, _ = jitrope.apply_rope(q[: len(ids)], None, cos_sin_cache=table, **own)
    assert torch.equal(got[: len(ids)], want)
    assert not got[len(ids) :].any()


@pytest.mark.parametrize("heads", [40, 48, 129], ids="{} heads".format)
@pytest.mark.parametrize("where", ["rows", "angles", "ids", "pack", "slots"])
def test_blocks_with_parts_of_tokens_have_the_bits_of_whole_tokens(where: str, heads: int, monkeypatch: Any) -> None:
    """Large calls on fast memory, forward and gradient: blocks side by side have heads of the same tokens."""
    order, offsets = (torch.tensor(x, device=DEVICE) for x in ([3, 4, 0, 8, 1, 2, 7, 5, 6], [0, 4, 4, 7]))
    q, k, v = (torch.randn(9, n, 128, device=DEVICE).bfloat16() for n in (heads - 8, 8, 8))
    angles, found = torch.rand(9, 64, device=DEVICE), []
    table = {"freqs": angles} if where == "angles" else {"cos": angles.cos(), "sin": angles.sin()}
    positions = {"pack": Packed(offsets), "ids": order}.get(where)
    for speed, launch in ((0.0, "auto"), (4.8, "auto"), (0.0, "grid_2d")):
        jitrope.configure(launch=launch)
        monkeypatch.setattr(torch_state, "memory_speed", lambda gpu, speed=speed: speed)
        for name, value in {"LARGE_THREADS_PER_SM": 0, "MAX_GRID_Y": 4}.items() if speed else ():
            monkeypatch.setattr(heuristics, name, value)
        heuristics.plan.cache_clear()
        cache = KVCache(*torch.zeros(2, 9, 8, 128, device=DEVICE).bfloat16(), order) if where == "slots" else None
        leaves = [x.detach().requires_grad_(cache is None) for x in (q, k)]
        words = {"positions": positions, "layout": "thd", **({"cache": cache} if cache else {})}
        out = [x for x in jitrope.prepare_qkv(*leaves, v if cache else None, **table, **words) if x is not None]
        grads = [] if cache else torch.autograd.grad(out, leaves, [x.detach() * 2 for x in out])
        found.append([*out, *grads, *([] if cache is None else cache.tensors.values())])
    heuristics.plan.cache_clear()
    for others in zip(*found, strict=True):
        assert all(torch.equal(others[0], x) for x in others)


def test_wild_starts_ids_and_slots_stay_in_bounds() -> None:
    """Positions outside of the table give NaN, slots outside of the cache are not written."""
    q, (cos, sin) = torch.randn(3, 4, 2, 64, device=DEVICE), torch.rand(2, 4, 32, device=DEVICE)
    starts = torch.tensor([-(2**62), 2**63 - 2, -1], device=DEVICE)
    out, _ = jitrope.apply_rope(q, None, cos, sin, positions=jitrope.Starts(starts))
    assert out.isnan().all(-1).all(-1).tolist() == [[True] * 4, [True] * 4, [True, False, False, False]]
    q, (k, v) = torch.ones(6, 4, 64, device=DEVICE), torch.ones(2, 6, 2, 64, device=DEVICE)
    k_cache, v_cache = torch.zeros(2, 8, 2, 64, device=DEVICE)
    for slots in ([0, 8, -1, 2**31, 2**40, 7], [2**31, 2**32, 0, -(2**40), 2**63 - 1, -(2**63)]):
        ids = torch.tensor([0, 4, 5, -1, 2**40, -(2**62)], device=DEVICE)
        cache = KVCache(k_cache, v_cache, torch.tensor(slots, device=DEVICE))
        words = {"cos_sin_cache": torch.ones(5, 64, device=DEVICE), "positions": ids, "layout": "thd", "cache": cache}
        out = jitrope.prepare_qkv(q, k, v, **words)[0]
        assert out.isnan().all(-1).all(-1).tolist() == [False, False, True, True, True, True]
        assert v_cache.sum((-1, -2)).tolist() == [128, *[0] * 6, 128 * (7 in slots)]
        v_cache.zero_()


WALKED = [case for case in GRADIENTS if case["norm"] in ("rms", "layer", "across", "after", "zero", "v_norm", "of_q")]


@pytest.mark.parametrize(("number", "case"), list(enumerate(WALKED[::5])))
def test_blocks_that_walk_over_tokens_sum_all_gradients(
    number: int, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On few SMs a block has several groups of tokens; 20 SMs sum the sums of blocks once more. Twice the same bits."""
    tokens = 34 if number else 300
    monkeypatch.setattr(backend, "SMS", 1 if number else 20)
    found = []
    for _ in range(2):
        m = Made(case, DEVICE, leaves=True, tokens=tokens)
        found.append(gradients(outputs(m), m))
    check_gradients(Made(case, "cpu", leaves=True, tokens=tokens), found[0])
    assert all(x is y or same(x, y) for x, y in zip(*found))


# ---- known calls -------------------------------------------------------------------------------------

KNOWN = [
    *("rope", "rope_alone", "rope starts", "rope packed", "rope packed_starts", "rope cache", "rope ids", "rope mrope"),
    *("rope inplace", "rope inplace ids", "rope packed inplace", "rms", "rms inplace", "slots", "qkv", "latent"),
]


@pytest.mark.parametrize("words", KNOWN)
def test_a_call_of_the_same_form_is_known(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """New contents and positions are used; other strides, sizes and alignments are looked at again, once each."""
    runtime.local.recent = {}
    case, looked, first = named(words), [], dispatch._call
    monkeypatch.setattr(dispatch, "_call", lambda *a: (looked.append(a), first(*a))[1])
    for seed, changes in ((7, {}), (8, {}), (9, {"strides": "offset"}), (10, {"strides": "turned"}), (11, {})):
        m, like = (Made({**case, **changes}, device, seed) for device in (DEVICE, "cpu"))
        places = places_of(m)
        places_of(like)
        places.check(like, m.call(**places.words))
    assert len(looked) == 3


@pytest.mark.parametrize("words", ["rope", "rms", "rms inplace"])
def test_a_known_call_notices_what_changes(words: str) -> None:
    """Gradients, grad mode, inference mode, a dispatch mode, saved-tensor hooks, and versions of what is written."""
    m = Made(named(words), DEVICE)
    q, k, seen = m.tensors["q"], m.tensors["k"], []
    given = {**m.words(), **places_of(m).words}
    call = lambda q: m.function(q, k.clone(), *[None] * ("rms" in words), **given)[0]  # noqa: E731
    want = call(q.clone())
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            for _ in range(3):
                assert torch.equal(call(q.clone()), want)
    noted = lambda _, op, types, args=(), words=None: (seen.append(op.namespace), op(*args, **(words or {})))[1]  # noqa: E731
    with type("Seen", (TorchDispatchMode,), {"__torch_dispatch__": noted})():
        assert torch.equal(call(q.clone()), want)
    assert "jitrope" in seen
    written = q.clone()
    for version in (1, 2):
        call(written)
        assert written._version == version * ("inplace" in words)
    if "inplace" in words:
        return
    leaf = q.clone().requires_grad_()
    for _ in range(2):
        assert call(leaf).requires_grad
        with torch.no_grad():
            assert not call(leaf).requires_grad
        assert not call(q).requires_grad
    packed = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or {}["of the user"], lambda x: x)
    with hooks, pytest.raises(KeyError, match="of the user"):
        call(leaf)
    assert len(packed) == 1


@pytest.mark.parametrize("norm", [False, True], ids=["rope", "norm"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_call_takes_the_short_cut(grad: bool, norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither direction goes through the dispatcher, and a second call is not looked at again."""
    for name in ("prepare", "prepare_"):
        monkeypatch.setattr(torch.ops.jitrope, name, lambda *_: pytest.fail("through the dispatcher"))
    q, k, weight = (torch.randn(*x, device=DEVICE).requires_grad_(grad) for x in ((1, 7, 5, 64), (1, 7, 3, 64), (64,)))
    words = {"norm": Norm(weight, weight)} if norm else {}
    cos, sin = torch.rand(2, 7, 32, device=DEVICE)
    found = jitrope.prepare_qkv(q, k, None, cos, sin, **words)[:2]
    if grad:
        leaves = [q, k, *([weight] if norm else [])]
        assert all(x.any() for x in torch.autograd.grad(found, leaves, [torch.ones_like(y) for y in found]))
        return
    monkeypatch.setattr(dispatch, "_call", lambda *_: pytest.fail("looked at again"))
    assert all(map(torch.equal, jitrope.prepare_qkv(q, k, None, cos, sin, **words)[:2], found))


@pytest.mark.parametrize("stage", ["fresh", "in place", "cache", "table"])
def test_a_gradient_that_begins_to_be_wanted_leaves_the_short_cut(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights under torch.no_grad() are known calls; with gradients they get theirs, or the call is refused."""
    q, k, v = (torch.randn(6, n, 64, device=DEVICE) for n in (4, 2, 2))
    weight, table = torch.rand(64, device=DEVICE), torch.rand(8, 64, device=DEVICE)
    words: dict[str, Any] = {"cos_sin_cache": table, "positions": torch.arange(6, device=DEVICE), "layout": "thd"}
    if stage == "cache":
        caches = torch.zeros(2, 2, 4, 2, 64, device=DEVICE)
        words["cache"] = KVCache(*caches, torch.arange(6, device=DEVICE))
    if stage != "table":
        words |= {"norm": Norm(weight, weight), "inplace": stage == "in place"}
    copies = [[x.clone() for x in (q, k)] for _ in range(4)]
    want, leaf = jitrope.prepare_qkv(*copies[0], v, **words)[0], table if stage == "table" else weight
    leaf.requires_grad_()
    with torch.no_grad():
        assert torch.equal(jitrope.prepare_qkv(*copies[1], v, **words)[0], want)
        with monkeypatch.context() as patched:
            patched.setattr(dispatch, "_call", lambda *_: pytest.fail("looked at again"))
            assert torch.equal(jitrope.prepare_qkv(*copies[2], v, **words)[0], want)
    if stage in ("table", "fresh"):
        assert torch.autograd.grad(jitrope.prepare_qkv(*copies[3], v, **words)[0].sum(), leaf)[0].any()
    else:
        with pytest.raises(jitrope.InvalidInput, match="gradient"):
            jitrope.prepare_qkv(*copies[3], v, **words)


def test_a_plan_from_before_a_change_is_not_used_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`configure` is called in another thread while a first call is planned."""
    call, planned = plain_call(), Mock(wraps=problem.plan_call)
    changes = iter([partial(jitrope.configure, batch_invariant=True), lambda: None])
    planned.side_effect = lambda *_: next(changes)() or DEFAULT
    monkeypatch.setattr(problem, "plan_call", planned)
    runtime.local.recent = {}
    for _ in range(3):
        jitrope.apply_rope(*call)
    assert planned.call_count == 2


def test_a_running_process_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is known keeps its launch until `configure(launch=None)`."""
    call, plans, plan_call = plain_call(), [], problem.plan_call
    monkeypatch.setattr(problem, "plan_call", lambda *a: (plans.append(plan_call(*a)[0].spec.launch), plan_call(*a))[1])
    for told in (*LAUNCHES, "auto"):
        monkeypatch.setenv("JITROPE_LAUNCH", told)
        jitrope.configure(launch=None)
        for _ in range(3):
            jitrope.apply_rope(*call)
    monkeypatch.setenv("JITROPE_LAUNCH", "token_linear")
    jitrope.apply_rope(*call)
    assert plans == ["token_linear", "grid_2d", "grid_2d"]


def test_max_seqlen_bounds_the_grid_not_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    jitrope.configure(launch="grid_2d")
    grids, plan_call = [], problem.plan_call
    monkeypatch.setattr(problem, "plan_call", lambda *a: (grids.append(plan_call(*a)[0].grid), plan_call(*a))[1])
    q, table = torch.randn(40, 2, 64, device=DEVICE), torch.rand(40, 64, device=DEVICE)
    lengths = torch.tensor([0, 18, 38], device=DEVICE)
    found = [jitrope.apply_rope(q, None, cos_sin_cache=table, positions=Packed(lengths, n))[0] for n in (7, 20)]
    assert torch.equal(*found)
    assert grids[0][0] < 10


def test_words_without_a_hash() -> None:
    """A list counts as a tuple; a numpy array has no hash, so its call is prepared each time."""
    q, k, cos, sin = plain_call()
    ids = torch.randint(0, 5, (3, 2, 5), device=DEVICE)
    want = jitrope.apply_rope(q, k, cos, sin, positions=jitrope.Mrope(ids, (8, 12, 12)))
    for sections in ([8, 12, 12], np.array([8, 12, 12])):
        for _ in range(3):
            got = jitrope.apply_rope(q, k, cos, sin, positions=jitrope.Mrope(ids, sections))
            assert all(map(torch.equal, got, want))


STEADY = {
    "rope": jitrope.apply_rope,
    "in place": partial(jitrope.apply_rope, inplace=True),
    "norm": lambda q, k, *tables, norm=Norm(): jitrope.prepare_qkv(q, k, None, *tables, norm=norm),  # noqa: B008
    "gradient": lambda q, k, cos, sin: jitrope.apply_rope(q.requires_grad_(), k, cos, sin)[0].sum().backward(),
}


@pytest.mark.parametrize("what", STEADY)
def test_a_known_call_uses_nothing_of_jit_and_base_but_the_launch(what: str) -> None:
    """So nothing is rendered, hashed, logged or looked up on a disk (jitrope/jit/README.md)."""
    q, k, cos, sin = plain_call()
    events: list[tuple[str, Any]] = []
    for turn in range(4):
        before = sys.getprofile()
        sys.setprofile((lambda frame, event, _: events.append((event, frame.f_code))) if turn == 3 else before)
        try:
            STEADY[what](q.detach(), k, cos, sin)
        finally:
            sys.setprofile(before)
    called = {(Path(code.co_filename), code.co_name) for event, code in events if event == "call"}
    ours = {(path, name) for path, name in called if path.parent.parent.name == "jitrope"}
    assert ours
    inside = {name for path, name in ours if path.parent.name in ("jit", "base") and path.name != "layouts.py"}
    assert inside <= {"enqueue"}  # layouts.py has the words of a call


@pytest.mark.parametrize("norm", [None, Norm()], ids=["rope", "norm"])
@pytest.mark.parametrize("learned", [False, True])
def test_gradients_of_several_cotangents_at_once(norm: Any, learned: bool) -> None:
    q = torch.randn(1, 6, 2, 64, device=DEVICE, requires_grad=True)
    tables = [x.to(DEVICE).requires_grad_(learned) for x in torch.rand(2, 6, 32)]
    leaves = [q, *tables] if learned else [q]
    y = jitrope.prepare_qkv(q, None, None, *tables, norm=norm)[0]
    sent = torch.randn(3, *y.shape, device=DEVICE)
    got = torch.autograd.grad(y, leaves, sent, retain_graph=True, is_grads_batched=True)
    for n, grad in enumerate(sent):
        for x, want in zip(got, torch.autograd.grad(y, leaves, grad, retain_graph=True)):
            torch.testing.assert_close(x[n], want)


@pytest.mark.parametrize("inplace", [False, True])
def test_compiled_by_inductor(inplace: bool) -> None:
    (q, k, cos, sin), results = plain_call(), []
    for compile_it in (partial, partial(torch.compile, fullgraph=True)):
        rotated = compile_it(lambda q, k: [x * 2 for x in jitrope.apply_rope(q * 2, k + 1, cos, sin, inplace=inplace)])
        leaves = [x.clone().requires_grad_() for x in (q, k)]
        found = rotated(*leaves)
        sum(x.float().square().sum() for x in found).backward()
        results.append((*found, *(x.grad for x in leaves)))
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


# ---- graphs and streams ------------------------------------------------------------------------------


@pytest.mark.hardware
@pytest.mark.parametrize("words", [
    *("rope packed", "rope", "rms", "norm=across interleaved", "rms ids cache", "two rms", "rms packed", "streams"),
    *("qkv packed", "slots", "pages", "slots rms", "fp8_slots", "own rms", "latent", "mxfp8", "l2 none"),
])  # fmt: skip
def test_a_graph_reads_its_inputs_anew(words: str) -> None:
    """A call is captured once it is known; a replay reads what its tensors hold then."""
    case = named(words)
    m = Made(case, DEVICE)
    places = places_of(m)
    given = {**m.words(), **places.words}
    m.function(*m.arguments(), **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = m.function(*m.arguments(), **given)
    held = (*m.tensors.values(), *places.tensors)
    for seed in (11, 12):
        other = Made(case, DEVICE, seed)
        given_anew = [x.view(torch.uint8) for x in (*other.tensors.values(), *places_of(other).tensors)]
        results = []
        for call in (lambda: graph.replay() or got, lambda: m.function(*m.arguments(), **given)):
            for x, y in zip(held, given_anew):
                x.view(torch.uint8).copy_(y)
            results.append([x.clone() for x in (*flat(call()), *held)])
        assert all(map(same, *results))


@pytest.mark.hardware
def test_a_check_during_a_capture_is_refused_and_the_capture_goes_on() -> None:
    call = plain_call()
    want = jitrope.apply_rope(*call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(jitrope.InvalidInput, match=r"check=True .* a CUDA graph do not; leave it out"):
            jitrope.apply_rope(*call, check=True)
        found = jitrope.apply_rope(*call)
    graph.replay()
    assert all(map(torch.equal, found, want))


@pytest.mark.hardware
def test_a_cold_capture_says_what_to_do() -> None:
    q, cos = torch.randn(1, 3, 2, 34, device=DEVICE), torch.rand(3, 17, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(jitrope.JitropeError, match="once before the capture"), torch.cuda.graph(graph):
        jitrope.apply_rope(q, None, cos, cos)
    torch.cuda.synchronize()
    jitrope.apply_rope(q, None, cos, cos)


@pytest.mark.hardware
def test_what_is_made_once_is_not_in_a_graphs_memory() -> None:
    """The row of a norm alone, first met in a capture: later calls do not read it from the graph's memory."""
    q, norm = torch.randn(1, 8, 2, 64, device=DEVICE), Norm(torch.randn(64, device=DEVICE))
    cos = torch.ones(1, 32, device=DEVICE).expand(8, 32)
    want = jitrope.prepare_qkv(q, None, None, cos, torch.zeros_like(cos), norm=norm)[0]
    jitrope.prepare_qkv(torch.cat((q, q), 1), None, None, norm=norm)  # the same kernel
    constants.one_row.cache_clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        jitrope.prepare_qkv(q, None, None, norm=norm)
    del graph
    torch.cuda.empty_cache()
    torch.full((1 << 20,), 7.0, device=DEVICE)
    assert torch.equal(jitrope.prepare_qkv(q, None, None, norm=norm)[0], want)


@pytest.mark.hardware
def test_scales_that_are_numbers_are_filled_once() -> None:
    """Not again in a CUDA graph, where each would be a launch of every replay."""
    caches = torch.zeros(2, 8, 2, 16, device=DEVICE).to(torch.float8_e4m3fn)
    known, graph = (KVCache(*caches, torch.arange(8, device=DEVICE), k_scale=0.3, v_scale=0.7), torch.cuda.CUDAGraph())
    with torch.cuda.graph(graph):
        captured = KVCache(*caches, torch.arange(8, device=DEVICE), k_scale=0.3, v_scale=0.7)
    assert all(captured.tensors[name] is known.tensors[name] for name in ("k_scale", "v_scale"))


@pytest.mark.hardware
@pytest.mark.parametrize("grad", [False, True])
def test_a_norm_in_the_graphs_of_torch_compile(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors that jitrope makes once are not in the memory of a graph, which torch uses again."""
    constants.filled.cache_clear()
    monkeypatch.setattr(constants, "_counters", {})
    cos, sin = torch.randn(2, 7, 44, device=DEVICE)
    q, k, weight = (torch.randn(*shape, device=DEVICE).bfloat16() for shape in ((1, 7, 3, 88), (1, 7, 1, 88), (88,)))
    leaves = [x.requires_grad_(grad) for x in (q, k, weight)]
    call = lambda q, k, w: jitrope.prepare_qkv(q, k, None, cos, sin, norm=Norm(w))[:2]  # noqa: E731
    compiled = torch.compile(call, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        got, want = ([x.clone() for x in function(*leaves)] for function in (compiled, call))
        if grad:
            sent = [torch.randn_like(x) for x in want]
            got += [x.clone() for x in torch.autograd.grad(got, leaves, sent)]
            want += torch.autograd.grad(want, leaves, sent)
        assert all(map(torch.equal, got, want))


HARDWARE = partial(pytest.param, marks=pytest.mark.hardware)


@pytest.mark.parametrize("captured", [False, HARDWARE(True)])
@pytest.mark.parametrize("tokens", [1, 20, HARDWARE(300), HARDWARE(4096)])
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("kind", ["rope", "head", "across"])
def test_overlapping_launches_keep_their_order(kind: str, launch: str, tokens: int, captured: bool) -> None:
    """A kernel begins while the previous one runs, and still sees its writes: programmatic dependent launch.

    A chain of launches, on a GPU hundreds, each of which reads what the one before wrote: in place, fresh, through a
    cache whose rows are in the other order, of two streams, and gradients. Angles are quarter turns, elements have few
    bits, and with a norm they are 1 and -1, so each step ends exactly where it began, but for m, which comes an even
    number of times. The same chain with a pause after each launch has the same bits.
    """
    jitrope.configure(launch=launch)
    gpu, count = DEVICE == "cuda", 40 if DEVICE == "cuda" else 4
    torch.manual_seed(0)
    start = [torch.randint(1, 61, (1, tokens, 8, 128), device=DEVICE).bfloat16() - 30.5 for _ in range(2)]
    turns, ids = torch.randint(4, (2 * tokens, 64), device=DEVICE), torch.arange(tokens, device=DEVICE)
    last_first = ids.flip(0)
    tables = torch.tensor([[1.0, 0, -1, 0], [0, 1, 0, -1]], device=DEVICE)[:, turns]
    m = torch.tensor([1, -1] * 64, device=DEVICE, dtype=torch.bfloat16)
    size = 1024 if kind == "across" else 128
    weights = [torch.ones(size, device=DEVICE) for _ in range(2 if kind != "rope" else 0)]
    start = [x.sign() for x in start] if weights else start

    def norm(*weights: Tensor) -> Norm | None:
        return Norm(*weights, eps=1e-30, across_heads=kind == "across") if weights else None

    words: dict[str, Any] = {"norm": norm(*weights), "positions": ids}
    back: dict[str, Any] = {"inverse": True, "positions": ids}

    def chain(q: Tensor, k: Tensor, pause: Any) -> list[Tensor]:
        def after(found: Any) -> Any:
            pause()
            return found

        caches = torch.zeros(2, tokens, 8, 128, device=DEVICE, dtype=q.dtype)
        totals = [torch.zeros_like(x) for x in weights]
        for step in range(count):
            if gpu and step % 4 == 0:
                torch.cuda._sleep(2_000_000)  # the next launches are queued meanwhile
            after(jitrope.prepare_qkv(q, k, None, *tables, **words, inplace=True))
            after(jitrope.apply_rope(q, k, *tables, **back, inplace=True))
            q, k, _ = after(jitrope.prepare_qkv(q, k, None, *tables, **words))
            q, k = after(jitrope.apply_rope(q, k, *tables, **back))
            cached = {**words, "cache": KVCache(*caches, last_first), "layout": "thd"}
            cached |= {"norm": None} if kind == "across" else {}  # which goes with no cache
            q, *_ = after(jitrope.prepare_qkv(q[0], k[0], k[0], *tables, **cached))
            k, _ = after(
                jitrope.apply_rope(caches[0], None, *tables, **{**back, "positions": last_first}, layout="thd")
            )
            q, _ = after(jitrope.apply_rope(q[None], None, *tables, **back))
            q, k = q.add_(caches[1].flip(0)).sub_(k.flip(0)), k[None]  # v is k as it was
            joint = after(jitrope.prepare_joint_qkv((q, k, k), (k, q, q), *tables))
            both, _ = after(jitrope.apply_rope(joint[0], None, *tables, inverse=True))
            leaves = [x.detach().requires_grad_() for x in (*both.split(tokens, 1), *weights)]
            found = after(jitrope.prepare_qkv(*leaves[:2], None, *tables, norm=norm(*leaves[2:]), positions=ids)[:2])
            q, k, *sums = after(torch.autograd.grad(found, leaves, [x * m for x in found]))
            for total, one in zip(totals, sums):
                total.add_(one)
        return [q, k, *totals]

    given = [x.clone() for x in start]
    want = chain(*[x.clone() for x in start], torch.cuda.synchronize if gpu else int)
    of_weights = [(m.float() * count * tokens * (8 if kind == "head" else 1)).repeat(size // 128) for _ in weights]
    torch.testing.assert_close(want[2:], of_weights)
    assert all(map(torch.equal, want[:2], start))
    graph = torch.cuda.CUDAGraph() if captured else None
    with torch.cuda.graph(graph) if captured else nullcontext():
        got = chain(*given, int)
    if graph is not None:
        graph.replay()
    assert all(map(torch.equal, got, want))


@pytest.mark.hardware
def test_a_launch_goes_to_the_current_stream() -> None:
    """It waits for the same events."""
    q, _, cos, sin = plain_call()
    want, _ = jitrope.apply_rope(q, None, cos, sin)
    late, stream = torch.zeros_like(q), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        out, _ = jitrope.apply_rope(late, None, cos, sin)
    stream.synchronize()
    assert torch.equal(out, want)


@pytest.mark.hardware
def test_a_refused_call_writes_nothing_each_time() -> None:
    q, k, cos, sin = plain_call()
    before = q.clone()
    for call, message in (
        ((q, k, cos.cpu(), sin), "cos is .*, on cpu; it must be .*, on cuda:0 like q"),
        ((q, k.cpu(), cos, sin), "k is .*, on cpu; it must be .*, on cuda:0 like q"),
        ((q, k, cos[:2], sin[:2]), "cos has 2 rows"),
    ):
        for _ in range(2):
            with pytest.raises(jitrope.InvalidInput, match=message):
                jitrope.apply_rope(*call, inplace=True)
    assert torch.equal(q, before)


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
NO_CUPY = """
import sys
sys.modules["cupy"] = None
import torch, jitrope
q = torch.ones(1, 2, 1, 8, device="cuda")
jitrope.apply_rope(q, None, q[0, :, 0, :4], q[0, :, 0, :4])
"""


BENCHES = [  # train at full size takes 50 GiB
    *("host", "rope --only wan,decode1 --no-peers", "decode --tokens 1,5 --heads 4/2 --prefill 64 --no-peers"),
    *("train --smoke", "thd --sequences 1,7 --tokens 2048 --heads 4", "layer --batches 4x64,8x32"),
    *("roofline --only decode", "targets --only decode"),
]
ran = partial(python, check=True, timeout=900)


@pytest.mark.hardware
def test_a_prewarmed_process_compiles_nothing(tmp_path: Path) -> None:
    """The cache of a real run works too, and a cache that cannot be written is only slower."""
    (tmp_path / "file").write_text("")
    for heads, names in (("32,8", ""), ("24,24", "q k"), ("24", "q")):
        texts = [f"bshd heads {names} > rotate cos sin interleaved > fresh"] if names else []
        ran("-m", "jitrope", "prewarm", "--heads", heads, *texts, JITROPE_CACHE_DIR=f"{tmp_path}/warm")
    for folder, compiled in (("cold", 3), ("file/kernels", 3), ("cold", 0), ("warm", 0)):
        assert len(json.loads(ran("-c", FRESH, JITROPE_CACHE_DIR=f"{tmp_path}/{folder}").stdout)) == compiled


@pytest.mark.hardware
def test_a_gpu_without_cupy_names_the_packages(tmp_path: Path) -> None:
    done = python("-c", NO_CUPY, JITROPE_CACHE_DIR=str(tmp_path))
    packages = f"pip install cupy-cuda{torch.version.cuda.split('.')[0]}x nvidia-cuda-nvrtc"
    assert re.search(f"CompileError: .*{packages}", done.stderr)


@pytest.mark.hardware
@pytest.mark.parametrize("bench", BENCHES, ids=lambda text: text.split()[0])
def test_bench_runs(bench: str) -> None:
    assert json.loads(ran("-m", "jitrope", "bench", *bench.split(), "--json").stdout)["rows"]


@pytest.mark.hardware
def test_serving_example_in_a_graph() -> None:
    example = str(ROOT / "examples" / "serving.py")
    assert "CUDA graph" in ran(example, "--layers", "2", "--batch", "3", "--steps", "10").stdout
