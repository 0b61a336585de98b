"""The public functions on the CPU: values, gradients, torch's machinery, refusals."""

from __future__ import annotations

import importlib
import itertools
import math
import re
import threading
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import jitrope
from jitrope import Norm
from jitrope.base import partition, views
from tests.said import KINDS, fp8, kv_cache, said

from .cases import (
    CACHE_CASES,
    CASES,
    QKV_CASES,
    ROPE_FP8,
    Case,
    dealt,
    heads_of,
    lower,
    make,
    make_cache,
    make_qkv,
    op_arguments,
)
from .devices import DEVICES, slow


def by_name(*names: str) -> list[Case]:
    found = [case for case in CASES if case.name in names]
    assert len(found) == len(names)
    return found


# ---- values ------------------------------------------------------------------------------------


def test_a_pair_is_turned_by_hand() -> None:
    """(3, 4) rotated by 90 degrees is (-4, 3), in both pairings; the rest of the head does not change."""
    q = torch.tensor([3.0, 4.0, 7.0, 8.0]).view(1, 1, 1, 4)
    cos, sin = torch.zeros(1, 1), torch.ones(1, 1)
    out, none = jitrope.apply_rope(q, None, cos, sin, rotary_dim=2, interleaved=True)
    assert out.flatten().tolist() == [-4, 3, 7, 8]
    assert none is None
    q = torch.tensor([3.0, 5.0, 4.0, 6.0]).view(1, 1, 1, 4)
    out, _ = jitrope.apply_rope(q, None, torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
    assert out.flatten().tolist() == [-4, 5, 3, 6]


def test_positions_are_relative() -> None:
    """The product of q at position m and k at n depends only on m - n."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 64).expand(2, 12, 1, 64)
    angles = torch.outer(torch.arange(12.0), 10000 ** (-torch.arange(32) / 32))
    q, k = (x.unsqueeze(0) for x in (q, k))
    q, k = jitrope.apply_rope(q, k, angles.cos(), angles.sin())
    scores = (q[0, :, 0] @ k[0, :, 0].T).double()
    for offset in range(-11, 12):
        diagonal = scores.diagonal(offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


SAME_PAIRING = [case for case in CASES if "interleaved_out" not in case.options]


@pytest.mark.parametrize("case", SAME_PAIRING, ids=str)
def test_in_place_gives_the_same_bits(case: Case) -> None:
    q, k, cos, sin, keywords = make(case)
    expected = jitrope.apply_rope(q, k, cos, sin, **said(**keywords))
    before = [None if x is None else x.clone() for x in (q, k)]
    outputs = jitrope.apply_rope(q, k, cos, sin, **said(**keywords), inplace=True)
    assert outputs[0] is q
    assert outputs[1] is k
    for out, want, old in zip(outputs, expected, before):
        if want is not None:
            assert torch.equal(out[: case.end].nan_to_num(9), want[: case.end].nan_to_num(9))
            if case.end is not None:  # spare rows: zero in a fresh output, untouched in place
                assert torch.equal(out[case.end :], old[case.end :])
                assert not want[case.end :].any()


@pytest.mark.parametrize("how", ["fresh", "in place", "qkv", "qkv in place", "packed table"])
@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_shards_of_any_lengths_are_parts_of_the_whole(cp_size: int, how: str) -> None:
    """The results and gradients of each rank are its tokens of the results and gradients of the whole batch."""
    lengths, starts = (37, 0, 41, 1, 2, 0, 89, 3), (0, 4, 1, 0, 3, 2, 0, 7)
    offsets = [0, *itertools.accumulate(lengths)]
    angles = torch.rand(offsets[-1] + max(starts), 8) * 20
    words = {"layout": "thd", "cu_seqlens": torch.tensor(offsets), "start_positions": torch.tensor(starts)}
    words |= {"cos": angles.cos(), "sin": angles.sin(), "packed_table": how == "packed table"}

    def rotated(x, **more):
        if how.startswith("qkv"):
            rotate = KINDS["fused_qkv_" if how == "qkv in place" else "fused_qkv"]
            return rotate((x * 1).flatten(1), heads=(2, 1), **words, **more)
        rotate = KINDS["rope_" if how == "in place" else "rope"]
        return rotate(x[:, :3] * 1, x[:, 3:] * 1, **words, **more)

    whole = torch.randn(offsets[-1], 4, 16, requires_grad=True)
    outputs = rotated(whole)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weights = [torch.randn_like(y) for y in outputs]
    (gradient,) = torch.autograd.grad(outputs, whole, weights)
    shards = [[offsets[sequence] + position for sequence, position in tokens] for tokens in dealt(offsets, cp_size)]
    assert sorted(itertools.chain(*shards)) == list(range(offsets[-1]))
    for rank, tokens in enumerate(shards):
        assert len(tokens) == partition.local_rows(offsets[-1], rank, cp_size, "dual_chunk")
        leaf = whole.detach()[tokens].requires_grad_()
        got = rotated(leaf, cp_size=cp_size, cp_rank=rank)
        got = got if isinstance(got, tuple) else (got,)
        for y, want in zip(got, outputs):
            assert torch.equal(y, want[tokens])
        (g,) = torch.autograd.grad(got, leaf, [w[tokens] for w in weights])
        assert torch.equal(g, gradient[tokens])


def test_outputs_keep_dense_strides() -> None:
    q, k, cos, sin, keywords = make(*by_name("bhsd"))
    for x, out in zip((q, k), jitrope.apply_rope(q, k, cos, sin, **said(**keywords))):
        assert out.stride() == x.stride()


@pytest.mark.parametrize("shape", [(0, 4, 2, 8), (2, 0, 2, 8), (2, 4, 0, 8)])
def test_nothing_to_rotate(shape: tuple[int, ...]) -> None:
    q = torch.empty(shape)
    cos = torch.zeros(4, 4)
    out, k = jitrope.apply_rope(q, q.clone(), cos, cos)
    assert out.shape == k.shape == shape


def test_module_names() -> None:
    assert set(jitrope.__all__) <= set(dir(jitrope))


# ---- gradients ---------------------------------------------------------------------------------


def autograd_reference(case: Case, q, k, cos, sin, keywords):
    """The rotation in differentiable torch, in fp32, one token after the other."""
    (_, _, cos, sin, cu_seqlens, starts, ids, *factor), o = lower((q, k, cos, sin, keywords))
    if o.table == "freqs_cis":
        cos, sin = cos.real, cos.imag
    if o.table == "cos_sin_cache":
        cos, sin = cos.chunk(2, -1)
    outputs = []
    for x in (q, k):
        if x is None:
            outputs.append(None)
            continue
        view = views.canonical(x, o.layout).float()
        tokens = view.shape[1]
        offsets = [0, tokens * o.cp_size] if cu_seqlens is None else cu_seqlens.tolist()
        sources = dealt(offsets, o.cp_size)[o.cp_rank]
        rows = []
        for b, s in itertools.product(range(view.shape[0]), range(tokens)):
            if s >= len(sources):  # after the last sequence
                rows.append(torch.zeros_like(view[b, s]))
                continue
            sequence, row = sources[s]
            row += 0 if starts is None else int(starts[b if cu_seqlens is None else sequence])
            row += (int(cu_seqlens[sequence]) if o.packed_table else 0) - o.unrotated
            if row < 0:
                rows.append(view[b, s])
                continue
            c, sn = (views.table_view(t).float() for t in (cos, cos if sin is None else sin))
            c, sn = (t[min(b, len(t) - 1)] for t in (c, sn))
            c, sn = (t[row] if ids is None else row_of_ids(t, ids, b, s, o) for t in (c, sn))
            c, sn = (c.cos() * o.mscale, sn.sin() * o.mscale) if o.table == "freqs" else (c, sn)
            back = o.shifts and int(ids[s] if ids.dim() == 1 else ids[min(b, len(ids) - 1), s]) < 0
            rows.append(turned(view[b, s], c, sn, o._replace(inverse=o.inverse != back)))
        y = torch.stack(rows).view(view.shape)
        if factor and x is q:
            y = y * factor[0].reshape((1,) * (2 - factor[0].dim()) + factor[0].shape)[..., None, None]
        order = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}
        y = y.squeeze(0) if o.layout == "thd" else y.permute(order[o.layout])
        outputs.append(y.to(x.dtype))
    return outputs


def row_of_ids(table, ids, b: int, s: int, o):
    """A row of the table, in which each pair comes from the row that its axis of the ids selects."""
    ids = ids if o.mrope_section else ids[None]
    axes = [int(axis[s] if axis.dim() == 1 else axis[min(b, len(axis) - 1), s]) for axis in ids]
    axes = [abs(row) for row in axes] if o.shifts else axes
    width, columns = table.shape[-1], []
    for column in range(width):
        half = o.rotary_dim // 2
        pair = column if width == half else column // 2 if o.interleaved else column % half
        axis = 0
        if o.mrope_interleaved:
            axis = pair % len(axes) if pair // len(axes) < o.mrope_section[pair % len(axes)] else 0
        elif o.mrope_section:
            axis = next(i for i, end in enumerate(itertools.accumulate(o.mrope_section)) if pair < end)
        inside = all(0 <= row < len(table) for row in axes)
        columns.append(table[axes[axis], :, column] if inside else torch.full_like(table[0, :, column], torch.nan))
    return torch.stack(columns, -1)


def turned(x, cos, sin, o):
    """Rotate the heads (H, D) of one token by a row of the tables, pair by pair."""
    y = list(x.unbind(-1))
    n = o.rotary_dim // 2
    for i in range(n):
        a, b = (2 * i, 2 * i + 1) if o.interleaved else (i, i + n)
        c, d = (2 * i, 2 * i + 1) if o.interleaved_out else (i, i + n)
        angle = (a, b) if cos.shape[-1] == o.rotary_dim else (i, i)
        (c0, c1), (s0, s1) = ([t[..., j] for j in angle] for t in (cos, sin))
        if o.inverse:
            s0, s1 = -s1, -s0
        x0, x1 = (x[:, o.rotary_offset + j] for j in (a, b))
        y[o.rotary_offset + c] = x0 * c0 - x1 * s0
        y[o.rotary_offset + d] = x1 * c1 + x0 * s1
    return torch.stack(y, -1)


# A plain rotation cannot handle a position past the table.
PAST_THE_TABLE = ("packed-too-long", "starts-past", "angles-packed")


@pytest.mark.parametrize("case", [c for c in CASES if c.name not in PAST_THE_TABLE], ids=str)
def test_values_are_those_of_a_token_by_token_rotation(case: Case) -> None:
    """The vectorised reference has the results of an independent one."""
    q, k, cos, sin, keywords = make(case)
    got = jitrope.apply_rope(q, k, cos, sin, **said(**keywords))
    # Where products nearly cancel, roundings before the sum are visible.
    atol = 2**-6 if case.rounding == "dtype" else 1e-6
    for out, want in zip(got, autograd_reference(case, q, k, cos, sin, keywords)):
        if want is None:
            assert out is None
            continue
        torch.testing.assert_close(out, want, rtol=2**-7, atol=atol, equal_nan=True)


GRADIENT_CASES = by_name(
    "halves", "interleaved", "partial", "full", "full-interleaved", "full-partial", "sbhd", "bhsd", "packed",
    "per-head", "fused-qkv", "fp32", "batched-table", "starts", "starts-packed", "cp", "cp-packed-starts",
    "packed-table-cp", "ragged-short-0", "ragged-short-3", "ragged-three", "ragged-table", "ragged-angles", "inverse",
    "offset", "mla", "angles", "angles-full", "angles-packed-cp", "angles-mla",
    "ids", "ids-cis", "ids-full", "mrope", "mrope-interleaved", "mrope-angles", "decode-batched-table",
)  # fmt: skip


@pytest.mark.parametrize("case", GRADIENT_CASES, ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_gradient_is_autograds(case: Case, in_place: bool) -> None:
    q, k, cos, sin, keywords = make(case)
    in_place = in_place and "interleaved_out" not in case.options
    grads = []
    for rotate in (autograd_reference, None):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k)]
        if rotate:
            outputs = rotate(case, *leaves, cos, sin, keywords)
        elif in_place:
            outputs = jitrope.apply_rope(*(x * 1 for x in leaves), cos, sin, **said(**keywords), inplace=True)
        else:
            outputs = jitrope.apply_rope(*leaves, cos, sin, **said(**keywords))
        torch.manual_seed(1)
        weights = [torch.randn(y.shape).to(y.dtype) for y in outputs]
        grads.append(torch.autograd.grad(outputs, leaves, weights))
    for got, want in zip(grads[1], grads[0]):
        if in_place and case.end is not None:  # spare tokens do not change, and neither does their gradient
            end = case.end
            weight = weights[0] if got is grads[1][0] else weights[1]
            assert torch.equal(got[end:], weight[end:])
            got, want = got[:end], want[:end]
        torch.testing.assert_close(got, want, rtol=2**-8, atol=1e-6)


def test_gradient_is_not_the_forward_rotation() -> None:
    """The gradient of q . q0, rotated back, is q0. torchembed 0.3.0 used the sign of the forward."""
    q, _, cos, sin, _ = make(*by_name("fp32"))
    q.requires_grad_()
    out, _ = jitrope.apply_rope(q, None, cos, sin)
    out.backward(out.detach())
    torch.testing.assert_close(q.grad, q.detach(), rtol=1e-5, atol=1e-5)


def test_expanded_gradient() -> None:
    q, k, cos, sin, _ = make(*by_name("fp32"))
    leaves = [x.requires_grad_() for x in (q, k)]
    outputs = jitrope.apply_rope(*leaves, cos, sin)
    (outputs[0].sum() + outputs[1].sum()).backward()  # stride-0 gradients
    expanded = [x.grad.clone() for x in leaves]
    for x in leaves:
        x.grad = None
    outputs = jitrope.apply_rope(*leaves, cos, sin)
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    for x, want in zip(leaves, expanded):
        torch.testing.assert_close(x.grad, want)


@pytest.mark.parametrize("which", [0, 1])
def test_gradient_through_one_of_two(which: int) -> None:
    q, k, cos, sin, _ = make(*by_name("fp32"))
    leaves = [x.requires_grad_() for x in (q, k)]
    jitrope.apply_rope(*leaves, cos, sin)[which].square().sum().backward()
    assert leaves[1 - which].grad is None or not leaves[1 - which].grad.any()
    torch.testing.assert_close(leaves[which].grad, 2 * leaves[which].detach(), rtol=1e-4, atol=1e-4)


def test_only_tables_and_lengths_are_saved() -> None:
    q, k, cos, sin, keywords = make(*by_name("packed"))
    saved = []

    def pack(x):
        saved.append(x.data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        jitrope.apply_rope(q.requires_grad_(), k.requires_grad_(), cos, sin, **said(**keywords))
    assert set(saved) == {x.data_ptr() for x in (cos, sin, keywords["cu_seqlens"])}


def test_in_place_on_a_leaf_is_refused() -> None:
    q, k, cos, sin, _ = make(*by_name("fp32"))
    with pytest.raises(jitrope.InvalidInput, match="q requires a gradient and is a leaf"):
        jitrope.apply_rope(q.requires_grad_(), k, cos, sin, inplace=True)


def test_in_place_bumps_the_version() -> None:
    """Autograd notices an in-place rotation of a tensor that a backward still needs."""
    q, k, cos, sin, _ = make(*by_name("fp32"))
    version = q._version
    jitrope.apply_rope(q, k, cos, sin, inplace=True)
    assert q._version > version


# ---- fused QKV ----------------------------------------------------------------------------------


def fused_call(case: Case):
    """(qkv, flat words) of a fused case."""
    (qkv, cos, sin, cu_seqlens, starts, ids, *factor), o = make_qkv(case)
    tables = {"freqs": cos} if o.table == "freqs" else {"cos": cos, "sin": sin}
    tables |= {"q_factor": factor[0]} if factor else {}
    return qkv, {
        **tables, "heads": heads_of(case), "order": o.order, "layout": o.layout, "interleaved": o.interleaved,
        "rotary_dim": o.rotary_dim, "position_ids": ids, "mrope_section": o.mrope_section,
        "cu_seqlens": cu_seqlens, "start_positions": starts, "cp_size": o.cp_size, "cp_rank": o.cp_rank,
        "unrotated": o.unrotated,
    }  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize(("order", "axes"), [("qkv", (8, 64)), ("grouped", (2, 256)), ("qkv_gated", (12, 64))])
def test_what_a_linear_gives_is_that_with_an_axis_of_heads(
    order: str, axes: tuple[int, int], layout: str, device: str
) -> None:
    """(B, S, W), also with strides: results, gradients, a bias, in place, compiled, and a view of v."""
    leaf = torch.randn(*(5, 5)[: len(layout) - 2], 2 * math.prod(axes), device=device).bfloat16().requires_grad_()
    cos, sin, bias = (torch.rand(*x, device=device) for x in ((5, 32), (5, 32), axes))
    words = {"cos": cos, "sin": sin, "heads": (4, 2), "order": order, "layout": layout}

    def call(wide, **more):
        return jitrope.prepare_fused_qkv(wide[..., ::2], **words, **more)

    def found(split):
        wide = leaf.unflatten(-1, (axes[0], -1)) if split else leaf
        biased = {"bias": bias.bfloat16() if split else bias.bfloat16().flatten()}
        results = [*call(wide), *call(wide, **biased), *call(wide, copy_v=False)]
        own = (wide[..., ::2] * 1, wide[..., ::2] * 1)
        assert all(jitrope.prepare_fused_qkv(x, **words, inplace=True) is x for x in own)
        weights = [torch.sin(torch.arange(x.numel(), device=device)).view(x.shape).to(x) for x in results]
        gradient = torch.autograd.grad(results, leaf, weights)[0]
        (in_place,) = torch.autograd.grad(own[0].float().pow(3).sum(), leaf)
        return [*results, gradient, in_place, own[1].flatten(-2) if split else own[1]]

    for got, want in zip(found(False), found(True)):
        assert torch.equal(got, want)
    torch._dynamo.reset()
    for got, want in zip(torch.compile(call, fullgraph=True, backend="aot_eager")(leaf), call(leaf)):
        assert torch.equal(got, want)


def test_fused_double_backward() -> None:
    qkv, keywords = fused_call(QKV_CASES[-1])
    leaf = qkv.clone().requires_grad_()
    parts = jitrope.prepare_fused_qkv(leaf, **said(**keywords))
    (first,) = torch.autograd.grad(sum(y.square().sum() for y in parts), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    torch.testing.assert_close(second, torch.full_like(qkv, 2.0), rtol=1e-4, atol=1e-4)


def test_fused_double_backward_without_the_gate() -> None:
    qkv = torch.randn(2, 6, 8, 64, requires_grad=True)
    *parts, _ = jitrope.prepare_fused_qkv(qkv, *torch.rand(2, 6, 32), heads=(2, 2), order="qkv_gated")
    (first,) = torch.autograd.grad(parts[2].pow(3).sum() + parts[0].sum(), qkv, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), qkv)
    want = torch.zeros_like(qkv)
    want[:, :, 6:] = 6 * qkv[:, :, 6:]
    torch.testing.assert_close(second, want)


# ---- numerics --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["halves", "interleaved", "full-interleaved", "mla", "packed"])
def test_gradcheck_of_the_reference(name: str) -> None:
    """Numeric derivatives in fp32, with its eps and tolerance."""
    (q, _, *tables), o = lower(make(*by_name(name)))
    tables = [t.float() if t is not None and t.is_floating_point() else t for t in tables]
    keywords = {"interleaved": o.interleaved, "interleaved_out": o.interleaved_out, "rotary_dim": o.rotary_dim,
                "rotary_offset": o.rotary_offset, "layout": o.layout, "cu_seqlens": tables[2]}  # fmt: skip

    def function(q):
        return jitrope.apply_rope(q, None, *tables[:2], **said(**keywords))[0]

    small = q.float()[..., :2, :].clone().requires_grad_()
    assert torch.autograd.gradcheck(function, small, eps=1e-2, atol=1e-2, rtol=1e-2, fast_mode=True)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", ["halves", "interleaved", "angles-packed-cp", "mla"])
def test_there_and_back_is_one_rounding(name: str, dtype: str) -> None:
    """Rotating and rotating back returns the input within one rounding of the pair to the dtype."""
    case = replace(by_name(name)[0], dtype=dtype, options={**by_name(name)[0].options})
    case.options.pop("mscale", None)
    q, _, cos, sin, keywords = make(case)
    keywords["freqs" if cos is None else "cos"] = keywords.pop("freqs", cos)
    if sin is not None:
        keywords["sin"] = sin
    there, _ = jitrope.apply_rope(q, None, **said(**keywords))
    out = keywords.get("interleaved_out", keywords["interleaved"])
    back = {**keywords, "interleaved": out, "interleaved_out": keywords["interleaved"], "inverse": True}
    again, _ = jitrope.apply_rope(there, None, **said(**back))
    end = case.end
    o, n, w = keywords.get("rotary_offset", 0), case.rotary_dim or q.shape[-1], q.shape[-1]
    x, y = (t.float()[:end, ..., o : o + n] for t in (q, again))
    shape = (n // 2, 2) if case.interleaved else (2, n // 2)
    length = x.unflatten(-1, shape).norm(dim=-1 if case.interleaved else -2)
    # Rounding there and back, half a unit each of the pair's length; in fp32 products and sums round too.
    bound = (4 if dtype == "fp32" else 1.01) * torch.finfo(q.dtype).eps * length
    error = (y - x).abs().unflatten(-1, shape).amax(-1 if case.interleaved else -2)
    assert (error <= bound).all()
    rest = [i for i in range(w) if not o <= i < o + n]
    assert torch.equal(again[:end, ..., rest], q[:end, ..., rest])


# ---- roundings: the hosts' own functions, bit for bit ----------------------------------------------

HALF_DTYPES = [torch.bfloat16, torch.float16]
SHAPES = [(1, 5, 3, 64), (2, 7, 2, 72), (1, 3, 4, 80), (1, 1, 5, 96), (2, 9, 2, 128), (1, 4, 3, 160), (1, 3, 2, 192),
          (1, 2, 1, 256)]  # fmt: skip


def host(library: str, module: str, name: str, inside: str | None = None):
    """A function of a library. If a processor's `__call__` defines it, the name is that of the class too."""
    pytest.importorskip(library, reason=f"{library} is not installed: pip install -e '.[diffusers]'")
    namespace = importlib.import_module(f"{library}.models.{module}")
    if inside is None:
        return getattr(namespace, name)
    call = getattr(namespace, inside).__call__
    code = next(c for c in call.__code__.co_consts if getattr(c, "co_name", "") == name)
    return type(host)(code, call.__globals__)


def inputs_of(device: str, dtype: torch.dtype, shape, rotary_dim: int | None = None):
    """q, k with half as many heads, and fp64 angles of half width."""
    generator = torch.Generator().manual_seed(0)
    b, s, h, d = shape
    q, k = (torch.randn(b, s, n, d, generator=generator).to(device, dtype) for n in (h, max(1, h // 2)))
    return q, k, (torch.rand(s, (rotary_dim or d) // 2, generator=generator, dtype=torch.float64) * 50).to(device)


def assert_equal(got, want) -> None:
    for a, b in zip(got, want):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [*HALF_DTYPES, torch.float32])
@pytest.mark.parametrize("name", ["lumina2", "anyflow"])
def test_complex128_is_the_hosts(name: str, dtype: torch.dtype, shape, device: str) -> None:
    q, k, angles = inputs_of(device, dtype, shape)
    table = torch.polar(torch.ones_like(angles), angles)
    if name == "lumina2":
        function = host("diffusers", "embeddings", "apply_rotary_emb")
        want = [function(x, table[None], use_real=False) for x in (q, k)]
    else:
        function = host("diffusers", "transformers.transformer_anyflow", "apply_rotary_emb")
        want = [function(x, table[None, :, None]) for x in (q, k)]
    words = {"interleaved": True, "rounding": "complex128"}
    assert_equal(jitrope.apply_rope(q, k, angles.cos(), angles.sin(), **said(**words)), want)
    assert_equal(jitrope.apply_rope(q, k, **said(freqs_cis=table, **words)), want)
    assert_equal(jitrope.apply_rope(q, k, **said(freqs_cis=table, **words), inplace=True), want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [*HALF_DTYPES, torch.float32])
def test_addcmul_is_ltx2s(dtype: torch.dtype, shape, device: str) -> None:
    b, s, h, d = shape
    q, _, _ = inputs_of(device, dtype, shape)
    angles = torch.rand(b, h, s, d // 2, device=device) * 50
    function = host("diffusers", "transformers.transformer_ltx2", "apply_split_rotary_emb")
    want = function(q.flatten(2), (angles.cos(), angles.sin())).view(q.shape)
    tables = [t.transpose(1, 2) for t in (angles.cos(), angles.sin())]
    out, _ = jitrope.apply_rope(q, None, *tables, rounding="addcmul")
    assert torch.equal(out, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_dtype_is_wans_with_tables_in_it(dtype: torch.dtype, shape, device: str) -> None:
    q, k, angles = inputs_of(device, dtype, shape)
    cos, sin = (f(angles).repeat_interleave(2, -1).to(dtype)[None, :, None] for f in (torch.cos, torch.sin))
    function = host("diffusers", "transformers.transformer_wan", "apply_rotary_emb", "WanAttnProcessor")
    want = [function(x, cos, sin) for x in (q, k)]
    got = jitrope.apply_rope(q, k, cos[..., 0::2], sin[..., 1::2], interleaved=True, rounding="dtype")
    assert_equal(got, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [*HALF_DTYPES, torch.float32])
@pytest.mark.parametrize("rotary_dim", [128, 48])
def test_dtype_is_ernies_and_minimaxs(rotary_dim: int, dtype: torch.dtype, device: str) -> None:
    """fp32 tables that the host rounds first: in ERNIE each member of a pair has its own angle; partial too."""
    q, k, angles = inputs_of(device, dtype, (2, 7, 3, 128), rotary_dim)
    angles = angles.float()
    repeated = angles.repeat_interleave(2, -1)[None, :, None]
    function = host("diffusers", "transformers.transformer_ernie_image", "apply_rotary_emb",
                    "ErnieImageSingleStreamAttnProcessor")  # fmt: skip
    want = [function(x, repeated) for x in (q, k)]
    words = {"rounding": "dtype", "rotary_dim": rotary_dim}
    assert_equal(jitrope.apply_rope(q, k, repeated.cos(), repeated.sin(), **said(**words)), want)
    function = host("diffusers", "transformers.transformer_minimax_h3", "_apply_rotary_emb")
    cos, sin = (torch.cat((f(angles), f(angles)), -1) for f in (torch.cos, torch.sin))
    want = [function(x, cos, sin) for x in (q, k)]
    assert_equal(jitrope.apply_rope(q, k, cos, sin, **said(**words)), want)
    assert_equal(jitrope.apply_rope(q, k, angles.cos(), angles.sin(), **said(**words)), want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_dtype_is_llamas(dtype: torch.dtype, shape, device: str) -> None:
    q, k, angles = inputs_of(device, dtype, shape)
    cos, sin = (torch.cat((f(angles), f(angles)), -1).to(dtype) for f in (torch.cos, torch.sin))
    function = host("transformers", "llama.modeling_llama", "apply_rotary_pos_emb")
    q, k = (x.transpose(1, 2) for x in (q, k))
    want = function(q, k, cos[None], sin[None])
    words = {"layout": "bhsd", "rounding": "dtype"}
    assert_equal(jitrope.apply_rope(q, k, cos, sin, **said(**words)), want)
    half = shape[-1] // 2
    assert_equal(jitrope.apply_rope(q, k, cos[..., :half], sin[..., :half], **said(**words)), want)
    assert_equal(jitrope.apply_rope(q.clone(), k.clone(), cos, sin, **said(**words), inplace=True), want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_fp32_is_qwens_vision_towers(dtype: torch.dtype, device: str) -> None:
    """One model of the library rounds differently: its products are fp32."""
    q, _, angles = inputs_of(device, dtype, (1, 9, 4, 80))
    cos, sin = (torch.cat((f(angles), f(angles)), -1).float() for f in (torch.cos, torch.sin))
    function = host("transformers", "qwen2_vl.modeling_qwen2_vl", "apply_rotary_pos_emb_vision")
    want, _ = function(q[0], q[0], cos, sin)
    out, _ = jitrope.apply_rope(q[0], None, cos, sin, layout="thd")
    assert torch.equal(out, want)
    other, _ = jitrope.apply_rope(q[0], None, cos, sin, layout="thd", rounding="dtype")
    assert not torch.equal(other, want)


@pytest.mark.parametrize("rounding", ["complex64", "complex128", "dtype", "addcmul"])
def test_gradient_of_a_rounding_is_the_turn_back(rounding: str) -> None:
    q, _, angles = inputs_of("cpu", torch.float32, (2, 5, 3, 64))
    tables = (angles.cos(), angles.sin()) if rounding == "complex128" else (angles.cos().float(), angles.sin().float())
    leaf = q.clone().requires_grad_()
    out, _ = jitrope.apply_rope(leaf, None, *tables, rounding=rounding)
    (gradient,) = torch.autograd.grad(out, leaf, out.detach())
    torch.testing.assert_close(gradient, q, rtol=1e-5, atol=1e-5)


# ---- torch's machinery -------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_compile_fullgraph(in_place: bool, grad: bool) -> None:
    q, k, cos, sin, _ = make(*by_name("fp32"))
    rotate = KINDS["rope_" if in_place else "rope"]

    def model(q, k):
        q, k = rotate(q * 2, k * 2, cos, sin)
        return q.sum(-1), k * q.mean()

    results = []
    for function in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_(grad) for x in (q, k)]
        outputs = function(*leaves)
        if grad:
            (outputs[0].sum() + outputs[1].square().sum()).backward()
            outputs = (*outputs, *(x.grad for x in leaves))
        results.append(outputs)
    for got, want in zip(results[1], results[0]):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("fused_qkv", [False, slow(True)])
def test_compile_with_numbers_that_change(fused_qkv: bool) -> None:
    """Forward and gradient are right with a symbolic max_seqlen, cp_rank and number of tokens."""
    cos = torch.rand(40, 32)
    cu_seqlens, fused = torch.tensor([0, 8, 16]), {"heads": (2, 2), "order": "grouped"}

    def model(x, longest, rank):
        words = {"layout": "thd", "cu_seqlens": cu_seqlens, "max_seqlen": longest, "cp_size": 8, "cp_rank": rank}
        if fused_qkv:
            return sum(y.square().sum(-1) for y in jitrope.prepare_fused_qkv(x * 1, cos, cos, **fused, **said(**words)))
        return jitrope.apply_rope(x * 1, None, cos, cos, **said(**words))[0].sin()

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for i in range(4):
        x = torch.randn(16 + i, 2, 192 if fused_qkv else 64, requires_grad=True)
        results = []
        for function in (compiled, model):
            out = function(x, 8 + i, i)
            results.append((out, *torch.autograd.grad(out.square().sum(), x)))
        for got, want in zip(*results):
            torch.testing.assert_close(got, want)


class OwnNorm(Norm):
    pass


_WORDS = {"norm": OwnNorm(torch.ones(64))}
COMPILED = {  # what Dynamo meets in a function, and what only the function itself knows to refuse
    "a flag by a size": lambda x, f: jitrope.apply_rope(x, None, freqs=f, interleaved=x.shape[1] > 3)[0],
    "a number of numpy": lambda x, f: jitrope.apply_rope(x, None, freqs=f, q_scale=numpy.float32(0.5))[0],
    "vmap": lambda x, f: torch.vmap(lambda y: jitrope.apply_rope(y[None], None, freqs=f)[0])(x),
    "a class of the user's": lambda x, f: jitrope.prepare_qkv(x, None, None, freqs=f, **_WORDS)[0],
    "another keyword": lambda x, f: jitrope.apply_rope(x, None, freqs=f, interleave=True),
    "another norm": lambda x, f: jitrope.prepare_qkv(x, None, None, freqs=f, norm=torch.nn.RMSNorm(64)),
    "infinite": lambda x, f: jitrope.apply_rope(x, None, freqs=f, q_scale=math.inf),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_function_does_as_the_function(name: str, backend: str) -> None:
    x, freqs = torch.randn(2, 6, 4, 64), torch.rand(6, 64)
    compiled = torch.compile(COMPILED[name], backend=backend, dynamic=True)
    try:
        want = COMPILED[name](x, freqs)
    except (jitrope.InvalidInput, TypeError) as error:
        with pytest.raises(type(error), match=f"^{re.escape(str(error))}$"):
            compiled(x, freqs)
    else:
        torch.testing.assert_close(compiled(x, freqs), want)


@pytest.mark.skipif(not hasattr(torch, "float8_e8m0fnu"), reason="torch 2.6 cannot trace an exception of a package")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_refusal_is_caught_in_a_compiled_function(backend: str) -> None:
    def model(q, cos):
        try:
            return jitrope.apply_rope(q, None, cos, cos)[0]
        except jitrope.InvalidInput:
            return q + 1

    q, cos = torch.randn(1, 6, 2, 64), torch.rand(6, 32)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for x in (q, q.double(), q):
        torch.testing.assert_close(compiled(x, cos), model(x, cos))


@pytest.mark.parametrize("words", [{"order": "qkv_gated"}, {"copy_v": False}])
def test_views_of_a_projection_may_be_written_under_autograd(words: dict[str, Any]) -> None:
    leaf, freqs = torch.randn(1, 6, 12, 64, requires_grad=True), torch.rand(6, 64)
    heads, found = (4, 2) if "order" in words else (8, 2), []
    for _ in range(3):  # the same call again is known
        *_, view = jitrope.prepare_fused_qkv(leaf * 1, freqs=freqs, heads=heads, **words)
        found.append(torch.autograd.grad(view.mul_(2).square().sum(), leaf)[0])
    assert found[0].any()
    assert torch.equal(found[0], found[2])


def test_compile_with_head_sizes_that_change() -> None:
    """One compiled function serves the heads of a text model and of a vision tower, with symbolic sizes."""
    compiled = torch.compile(
        lambda q, cos: jitrope.apply_rope(q * 1, None, cos, cos)[0], fullgraph=True, backend="aot_eager"
    )
    for batch, dim in ((1, 64), (2, 192), (3, 32), (2, 80)):
        q, cos = torch.randn(batch, 6, 2, dim), torch.rand(batch, 6, dim // 2)
        torch.testing.assert_close(compiled(q, cos), jitrope.apply_rope(q, None, cos, cos)[0])


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("case", by_name("packed", "ragged-short-1"), ids=str)
def test_compiled_in_place_leaves_spare_tokens(case: Case, grad: bool) -> None:
    q, k, cos, sin, keywords = make(case)

    def model(q, k):
        return jitrope.apply_rope(q * 1, k * 1, cos, sin, **said(**keywords), inplace=True)

    results = []
    for function in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_(grad) for x in (q, k)]
        outputs = function(*leaves)
        assert torch.equal(outputs[0][case.end :], q[case.end :])
        if grad:
            torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
            outputs = (*outputs, *(x.grad for x in leaves))
            assert torch.equal(outputs[2][case.end :], torch.ones_like(q[case.end :]))
        results.append(outputs)
    for got, want in zip(*results):
        assert torch.equal(got, want)


def test_compile_with_inductor() -> None:
    q, k, cos, sin, _ = make(*by_name("fp32"))

    def model(q, k):
        q, k = jitrope.apply_rope(q + 1, k, cos, sin)
        return q * k[:, :, :1]

    torch.testing.assert_close(torch.compile(model, fullgraph=True)(q, k), model(q, k))


def test_check_goes_without_vmap() -> None:
    _, _, cos, sin, _ = make(*by_name("fp32"))
    rows, ids = torch.randn(3, 7, 4, 2 * cos.shape[-1]), torch.zeros(3, 7, dtype=torch.long)
    words = {"layout": "thd", "check": True}
    with pytest.raises(jitrope.InvalidInput, match=r"check=True waits for the device, which .*torch.func"):
        torch.vmap(lambda x, i: jitrope.apply_rope(x, None, cos, sin, positions=i, **words)[0])(rows, ids)


def test_vmap() -> None:
    q, _, cos, sin, _ = make(*by_name("fp32"))
    stacked = torch.stack([q, q.flip(1), q * 2])
    out = torch.func.vmap(lambda x: jitrope.apply_rope(x, None, cos, sin)[0])(stacked)
    want = torch.stack([jitrope.apply_rope(x, None, cos, sin)[0] for x in stacked])
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("function", [KINDS["rope"], KINDS["rope_"]])
def test_forward_mode_is_refused(function) -> None:
    """Without a refusal torch would silently drop the tangent."""
    q, _, cos, sin, _ = make(*by_name("fp32"))
    with pytest.raises(jitrope.InvalidInput, match="forward-mode"):
        torch.func.jvp(lambda x: function(x * 1, None, cos, sin)[0], (q,), (q,))


def test_functional_gradient_is_refused() -> None:
    q, _, cos, sin, _ = make(*by_name("fp32"))
    with pytest.raises(jitrope.InvalidInput, match="grad is not supported here"):
        torch.func.grad(lambda x: jitrope.apply_rope(x, None, cos, sin)[0].sum())(q)


def test_a_batch_of_cotangents_in_another_thread() -> None:
    """`is_grads_batched` on a GPU: torch runs a backward there in a thread that does not know of the batch."""
    q, _, cos, sin, _ = make(*by_name("fp32"))
    text, found = f"bshd heads q > rotate cos sin rotary_dim={q.shape[-1]} > fresh", []

    def elsewhere(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: found.extend(torch.ops.jitrope.prepare([x, cos, sin], text, [0, 0])))
        thread.start()
        thread.join()
        return found[0]

    batch = torch.stack([q, q + 1, -q])
    want = torch.stack([jitrope.apply_rope(x, None, cos, sin)[0] for x in batch])
    assert torch.equal(torch._vmap_internals._vmap(elsewhere)(batch), want)


@pytest.mark.filterwarnings("ignore")
def test_jit_trace() -> None:
    """A call in place is traced as a fresh one and a copy, which torch.jit keeps; other tensors that it would lose."""
    q, _, cos, sin, _ = make(*by_name("fp32"))
    traced = torch.jit.trace(lambda x: jitrope.apply_rope(x, None, cos, sin, inplace=True)[0], q.clone())
    other = q.flip(1).clone()
    want = jitrope.apply_rope(other, None, cos, sin)[0]
    assert torch.equal(traced(other), want)
    assert torch.equal(other, want)
    with pytest.raises(
        jitrope.InvalidInput, match=r"apply_rope: torch.jit.trace loses what .* or to out; export the model"
    ):
        torch.jit.trace(lambda x: jitrope.apply_rope(x, None, cos, sin, out=(torch.empty_like(x), None))[0], q)


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_checkpointing(policy: CheckpointPolicy) -> None:
    q, k, cos, sin, _ = make(*by_name("fp32"))
    seen = []

    def choose(context, op, *arguments, **keywords):
        if op is torch.ops.jitrope.prepare.default:
            seen.append(context.is_recompute)
            return policy
        return CheckpointPolicy.PREFER_RECOMPUTE

    def block(q, k):
        q, k = jitrope.apply_rope(q * 2, k * 2, cos, sin)
        return (q.sin().sum() + k.cos().sum()).square()

    grads = []
    for run in (
        block,
        lambda q, k: checkpoint(
            block, q, k, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(choose)
        ),
    ):
        leaves = [x.clone().requires_grad_() for x in (q, k)]
        run(*leaves).backward()
        grads.append([x.grad for x in leaves])
    assert seen
    for got, want in zip(grads[1], grads[0]):
        torch.testing.assert_close(got, want)


def test_fake_tensors_and_meta() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, cos, sin, keywords = make(*by_name("bhsd"))
        outputs = jitrope.apply_rope(q, k, cos, sin, **said(**keywords))
        assert [y.stride() for y in outputs] == [q.stride(), k.stride()]
        with pytest.raises(jitrope.InvalidInput):
            jitrope.apply_rope(q, k, cos[:2], sin[:2], **said(**keywords))


# ---- refusals ----------------------------------------------------------------------------------


# ---- serving: positions, caches, fp8 ---------------------------------------------------------------


def test_positions_in_range_pass_the_check() -> None:
    q, k, cos, sin, keywords = make(*by_name("ids"))
    for got, want in zip(jitrope.apply_rope(q, k, cos, sin, **said(check=True, **keywords)),
                         jitrope.apply_rope(q, k, cos, sin, **said(**keywords))):  # fmt: skip
        assert torch.equal(got, want)


def test_axial_positions_are_those_of_a_table_of_all_tokens() -> None:
    """A video's 3 x 4 x 5 grid: three small tables by ids, or one row written out for each token."""
    torch.manual_seed(0)
    sizes, sections = (3, 4, 5), (4, 6, 6)
    grid = torch.stack(torch.meshgrid(*map(torch.arange, sizes), indexing="ij")).flatten(1)
    angles = torch.rand(8, sum(sections)) * 9
    parts = angles.split(sections, -1)
    written_out = torch.cat([part[ids] for part, ids in zip(parts, grid)], -1)
    q = torch.randn(2, 60, 3, 32)
    want, _ = jitrope.apply_rope(q, None, written_out.cos(), written_out.sin())
    got, _ = jitrope.apply_rope(q, None, angles.cos(), angles.sin(), **said(position_ids=grid, mrope_section=sections))
    assert torch.equal(got, want)


def cache_words(c, case):
    """The flat words of a case's call."""
    table = {c.options.table: c.tables[0]}
    names = ("layout", "interleaved", "rotary_dim", "rotary_offset", "mrope_section", "mrope_interleaved")
    return {
        **table, **{name: getattr(c.options, name) for name in names}, "position_ids": c.tables[4],
        "k_cache": c.k_cache, "v_cache": c.v_cache, "slot_mapping": c.slots, "rotate_k": case.rotate_k,
        "k_scale": c.scales[1], "v_scale": c.scales[2],
    }  # fmt: skip


def test_scales_may_be_numbers() -> None:
    q, k, cos, sin, _ = make(*by_name("halves"))
    for scale in (0.25, torch.tensor(0.25)):
        a, b = fp8(q, k, cos, sin, q_scale=scale, k_scale=0.5)
        want, _ = jitrope.apply_rope(q.float(), None, cos, sin)
        assert a.dtype == b.dtype == torch.float8_e4m3fn
        assert torch.equal(a.float(), (want * 4).to(a.dtype).float())


CACHE_REFUSALS = {
    "width": (
        {"k_cache": torch.zeros(9, 2, 32), "v_cache": torch.zeros(9, 2, 32)},
        r"k_cache is .*; it must be \(slots, 2, 64\) or \(pages, rows, 2, 64\), bfloat16 or float8",
    ),
    "dtype": (
        {"k_cache": torch.zeros(11, 2, 64), "v_cache": torch.zeros(11, 2, 64)},
        r"k_cache is float32; it must be .*, bfloat16 or float8_e4m3fn or float8_e5m2, on cpu like k$",
    ),
    "differ": ({"v_cache": torch.zeros(12, 2, 64).bfloat16()}, r"v_cache is .*; it must be \(11, 2, 64\), bfloat16"),
    "slots": ({"slot_mapping": torch.zeros(5, dtype=torch.int64)}, "slot_mapping has 5 entries for 6 tokens"),
    "slots-dtype": ({"slot_mapping": torch.zeros(6)}, "slot_mapping is float32; it must be int32 or int64, contiguous"),
    "slots-past": ({"slot_mapping": torch.tensor([0, 1, 2, 3, 4, 11]), "check": True}, "goes up to 11, but"),
    "scale-alone": ({"k_scale": 0.5}, "k_scale is given, but no output is divided by it"),
    "scale-missing": (
        {name: torch.zeros(11, 2, 64).to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}, "k_scale is missing",
    ),
    "no-cache": ({"k_cache": None}, "k_cache is None; it must be a tensor"),
    "expanded": ({"v_cache": torch.zeros(1, 2, 64).bfloat16().expand(11, 2, 64)}, "elements overlap in memory"),
}  # fmt: skip


@pytest.mark.parametrize("name", CACHE_REFUSALS)
def test_cache_refusals_write_nothing(name: str) -> None:
    c = make_cache(CACHE_CASES[0])
    changes, message = CACHE_REFUSALS[name]
    before = [x.clone() for x in (c.q, c.k, c.k_cache, c.v_cache)]
    with pytest.raises(jitrope.InvalidInput, match=message):
        kv_cache(c.q, c.k, c.v, **{**cache_words(c, CACHE_CASES[0]), **changes}, inplace=True)
    for x, old in zip((c.q, c.k, c.k_cache, c.v_cache), before):
        assert torch.equal(x, old)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_no_gradient_is_dropped_in_silence(name: str) -> None:
    """Caches and fp8 have no backward: tensors that require a gradient are refused, in eager mode and by the op."""
    c = make_cache(CACHE_CASES[0])
    getattr(c, name).requires_grad_()
    with pytest.raises(jitrope.InvalidInput, match=f"{name} requires a gradient"):
        kv_cache(c.q, c.k, c.v, **cache_words(c, CACHE_CASES[0]))
    with torch.no_grad():
        kv_cache(c.q, c.k, c.v, **cache_words(c, CACHE_CASES[0]))
    if name == "q":
        with pytest.raises(jitrope.InvalidInput, match="q requires a gradient"):
            fp8(c.q, None, c.tables[0][:6, :32], c.tables[0][:6, 32:], layout="thd", q_scale=1.0)
        (q, _, *tables), options = lower(make(*by_name("fp32")))
        tensors = (q.requires_grad_(), None, torch.ones(()))
        out = torch.ops.jitrope.prepare(*op_arguments(ROPE_FP8, (*tensors, None), tables, options))[0]
        with pytest.raises(jitrope.JitropeError, match="has no gradient"):
            out.float().sum().backward()
        leaf = torch.randn(3, 1, 6, 2, 32, requires_grad=True)  # under vmap a call does not see that it is a leaf
        quantize = jitrope.DynamicQuantize()
        scales = torch.vmap(lambda x: jitrope.prepare_qkv(x, None, None, quantize=quantize)[0].scale)(leaf)
        with pytest.raises(jitrope.JitropeError, match="prepare_qkv has no gradient"):
            scales.sum().backward()


def test_serving_compiles_fullgraph_once_for_all_lengths() -> None:
    counter = CompileCounter()
    k_cache, v_cache = torch.zeros(2, 64, 2, 64)

    def step(q, k, v, cache, ids, slots):
        q = kv_cache(
            q * 2,
            k * 1,
            v,
            cos_sin_cache=cache,
            position_ids=ids,
            layout="thd",
            k_cache=k_cache,
            v_cache=v_cache,
            slot_mapping=slots,
            inplace=True,
        )
        return jitrope.apply_rope(q, k, cos_sin_cache=cache, positions=ids, layout="thd")

    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    cache = torch.rand(128, 64)
    for tokens in (5, 7, 12, 33):
        q, k, v = (torch.randn(tokens, heads, 64) for heads in (4, 2, 2))
        arguments = (q, k, v, cache, torch.randint(0, 128, (tokens,)), torch.randperm(64)[:tokens])
        got = compiled(*arguments)
        stored = k_cache.clone()
        for a, b in zip(got, step(*arguments)):
            assert torch.equal(a, b)
        assert torch.equal(stored, k_cache)
    assert counter.frame_count == 1


FREQS = torch.rand(64, 32)
CHANGING = {  # a call, and its arguments of a length
    "unrotated": (
        lambda x, n: jitrope.apply_rope(x, None, freqs=FREQS, unrotated=n)[0],
        lambda n: (torch.randn(1, 40, 2, 64), n),
    ),
    "max_seqlen": (
        lambda x, ends, n: jitrope.apply_rope(x, None, freqs=FREQS, positions=jitrope.Packed(ends, n))[0],
        lambda n: (torch.randn(20 + n, 2, 64), torch.tensor([0, 20, 20 + n]), 20 + n),
    ),
    "text tokens": (
        lambda x, y, w: jitrope.prepare_joint_qkv(
            (x,) * 3, (y,) * 3, freqs=FREQS, unrotated=x.shape[1], norm=jitrope.Norm(w, w)
        )[0],
        lambda n: (torch.randn(1, n, 2, 64), torch.randn(1, 20, 2, 64), torch.ones(64, requires_grad=True)),
    ),
}


@pytest.mark.parametrize(("dtype", "other"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_autocast_to_another_dtype_changes_nothing(dtype: torch.dtype, other: torch.dtype) -> None:
    q, (cos, sin) = torch.randn(2, 6, 2, 16).to(dtype), torch.randn(2, 6, 8)
    calls = [
        lambda: jitrope.apply_rope(q, q, cos, sin, rounding="dtype"),
        lambda: jitrope.prepare_qkv(q, q, None, cos, sin, norm=jitrope.Norm(after_rope=True))[:2],
    ]
    for call in calls:
        want = call()
        with torch.autocast("cpu", other):
            got = call()
        assert all(map(torch.equal, got, want))
    tables = [x.requires_grad_() for x in (cos, sin)]
    want = [torch.autograd.grad(call(), tables, [q, q]) for call in calls]
    with torch.autocast("cpu", other):
        got = [torch.autograd.grad(call(), tables, [q, q]) for call in calls]
    assert all(torch.equal(x, y) for pair in zip(got, want) for x, y in zip(*pair))


@pytest.mark.parametrize("name", CHANGING)
def test_a_changing_number_is_compiled_twice_at_most(name: str) -> None:
    """The text's length of each prompt, and the longest sequence of each batch."""
    call, made = CHANGING[name]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for n in range(3, 14):
        arguments = made(n)
        want, got = call(*arguments), compiled(*arguments)
        assert torch.equal(got, want)
        if got.requires_grad:
            weight = arguments[-1]
            torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), weight)[0] for y in (got, want)))
    assert counter.frame_count <= 2


def _paged(freqs, q, page_table, seq_lens, ends):
    pages = jitrope.Pages(page_table, seq_lens=seq_lens, cu_seqlens_q=ends)
    cache = jitrope.KVCache(*torch.zeros(2, 32, 16, 2, 64), pages)
    ids = torch.zeros(q.shape[0], dtype=torch.int32)
    return jitrope.prepare_qkv(q, q[:, :2], q[:, :2], freqs=freqs, layout="thd", positions=ids, cache=cache)[0]


def _ints(*sizes: int) -> torch.Tensor:
    return torch.arange(math.prod(sizes), dtype=torch.int32).view(sizes)


EXPORTED = {  # a call, arguments of n sequences, and how many more than n the first axis of each has; None: it is fixed
    "packed": (
        lambda freqs, q, ends: jitrope.apply_rope(q, None, freqs=freqs, positions=jitrope.Packed(ends))[0],
        lambda n: (torch.randn(12, 2, 64), _ints(n + 1) * 3),
        (None, 1),
    ),
    "packed norm": (
        lambda freqs, q, ends: jitrope.prepare_qkv(
            q, q, None, freqs=freqs, norm=jitrope.Norm(), positions=jitrope.Packed(ends)
        )[0],
        lambda n: (torch.randn(12, 2, 64), _ints(n + 1) * 3),
        (None, 1),
    ),
    "starts": (
        lambda freqs, q, starts: jitrope.apply_rope(q, None, freqs=freqs, positions=jitrope.Starts(starts))[0],
        lambda n: (torch.randn(n, 5, 2, 64), _ints(n)),
        (0, 0),
    ),
    "pages": (_paged, lambda n: (torch.randn(12, 4, 64), _ints(n, 3), _ints(n) + 5, _ints(n + 1) * 3), (None, 0, 0, 1)),
}


class _Called(torch.nn.Module):
    """A call with angles of its own."""

    def __init__(self, call) -> None:
        super().__init__()
        self.call = call
        self.register_buffer("freqs", FREQS)

    def forward(self, *arguments):
        return self.call(self.freqs, *arguments)


@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_call_takes_any_number_of_sequences(name: str) -> None:
    call, made, more = EXPORTED[name]
    count = torch.export.Dim("count", max=99)
    shapes = tuple({} if n is None else {0: count + n if n else count} for n in more)
    program = torch.export.export(_Called(call), made(3), dynamic_shapes=(shapes,)).module()
    arguments = made(4)
    assert torch.equal(program(*arguments), call(FREQS, *arguments))


def test_the_guard_of_known_calls_sees_what_changes_and_what_watches() -> None:
    """`run/replay.py` uses torch's guards instead of comparing each tensor."""
    q, other = torch.randn(2, 3), torch.randn(2, 3)
    guards = torch._C._dynamo.guards.TensorGuards(q, other, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    assert guards.check(torch.randn(2, 3), torch.randn(2, 3))
    assert not guards.check(q, q)  # one tensor twice
    subclass = torch.nn.Parameter(torch.randn(2, 3), requires_grad=False)
    others = (
        torch.randn(2, 4), torch.randn(3, 2).T, q.double(), q.half(), torch.randn(2, 3, requires_grad=True), subclass,
        torch.randn(2, 3, device="meta"), torch.randn(6),
    )  # fmt: skip
    for x in others:
        assert not guards.check(x, other)
        with torch.no_grad():
            assert not guards.check(x, other)
    with torch.inference_mode():
        assert not guards.check(torch.randn(2, 3), other)
    seen = []
    torch.vmap(lambda x: (seen.append(guards.check(q, other)), x)[1])(torch.randn(4))
    torch.func.grad(lambda x: (seen.append(guards.check(q, other)), x.sum())[1])(torch.randn(4))
    assert seen == [False, False]


def call(**changes):
    arguments = {
        "q": torch.ones(2, 6, 4, 8), "k": torch.ones(2, 6, 2, 8), "cos": torch.zeros(6, 4), "sin": torch.zeros(6, 4),
    }  # fmt: skip
    arguments.update(changes)
    return arguments


packed = {"q": torch.ones(6, 4, 8), "k": None, "layout": "thd"}
REFUSALS = {
    "rank": (call(q=torch.ones(6, 4, 8)), r"q is .*\(6, 4, 8\).*; it must be \(B, S, H, D\).* pass layout=\"thd\""),
    "k-rank": (call(k=torch.ones(6, 4, 8)), r"k is .*\(6, 4, 8\).*; it must be \(2, 6, H, 8\)"),
    "thd-rank": (call(layout="thd"), r"it must be \(T, H, D\)"),
    "dtype": (
        call(q=torch.ones(2, 6, 4, 8).double(), k=None),
        "q is float64; it must be .* float32 or float16 or bfloat16",
    ),
    "integers": (
        call(q=torch.ones(2, 6, 4, 8, dtype=torch.int32), k=None),
        "q is int32; it must be .* float32 or float16 or bfloat16",
    ),
    "mixed-dtypes": (call(k=torch.ones(2, 6, 2, 8).half()), r"k is float16; it must be .* float32.*; pass k.to\(q\)"),
    "device-mix": (call(k=torch.ones(2, 6, 2, 8, device="meta")), r"k is .*; it must be .* float32.*; pass k.to\(q\)"),
    "table-device": (
        call(cos=torch.zeros(6, 4, device="meta")),
        r"cos is .*; it must be \(P, 4\|8\) or .*, float32 or .*, on cpu like q \(B=2, S=6, H=4, D=8\)$",
    ),
    "device": (
        call(q=torch.ones(2, 6, 4, 8, device="meta"), k=None),
        r"cos is .*; it must be \(P, 4\|8\) or .*, float32 or .*, on meta like q \(B=2, S=6, H=4, D=8\)$",
    ),
    "batch": (
        call(k=torch.ones(1, 6, 2, 8)),
        r"k is .*\(1, 6, 2, 8\).*; it must be \(2, 6, H, 8\).* like q \(B=2, S=6, H=4, D=8\)",
    ),
    "odd-rotary": (call(rotary_dim=3), "rotary_dim is 3; it must be even"),
    "large-rotary": (call(rotary_dim=10), "rotary_dim is 10; it must be even and from 2 to D=8"),
    "large-head": (call(q=torch.ones(1, 1, 1, 514), k=None), "D=514; at most 512"),
    "short-table": (call(cos=torch.zeros(5, 4), sin=torch.zeros(5, 4)), r"\(B=2, S=6, H=4, D=8\) but cos has 5 rows"),
    "table-width": (
        call(cos=torch.zeros(6, 3), sin=torch.zeros(6, 3)),
        r"cos is .*\(6, 3\).* must be \(P, 4\|8\) or \(1\|2, P, 4\|8\).*; pass rotary_dim for a partial",
    ),
    "table-rank": (call(cos=torch.zeros(4), sin=torch.zeros(4)), r"cos is a tensor of shape \(4,\)"),
    "table-dtype": (call(cos=torch.zeros(6, 4).double(), sin=torch.zeros(6, 4).double()), "cos is float64; it must be"),
    "complex-table": (
        call(cos=torch.zeros(6, 4).cfloat(), sin=torch.zeros(6, 4).cfloat()),
        "cos is complex64; it must be .*; pass a complex table as freqs_cis=table",
    ),
    "tables-differ": (call(sin=torch.zeros(7, 4)), r"sin is .*; it must be \(6, 4\), float32, on cpu like cos$"),
    "table-batch": (
        call(cos=torch.zeros(3, 6, 4), sin=torch.zeros(3, 6, 4)),
        r"cos is .*\(3, 6, 4\).* or \(1\|2, P, 4\|8\) or",
    ),
    "table-heads": (
        call(cos=torch.zeros(1, 6, 4, 4), sin=torch.zeros(1, 6, 4, 4)),
        r"or \(1\|2, P, 1, 4\|8\), .*; the third axis is the heads, as many of q and k",
    ),
    "ids-shape": (
        call(position_ids=torch.zeros(6, 2, dtype=torch.int32)),
        r"positions is .*; it must be \(6,\) or \(1\|2, 6\), int32 or int64",
    ),
    "ids-dtype": (
        call(position_ids=torch.zeros(6)),
        r"positions is float32; it must be \(6,\) or \(1\|2, 6\), int32 or int64",
    ),
    "ids-device": (
        call(position_ids=torch.zeros(6, dtype=torch.int32, device="meta")),
        r"positions is .*; it must be \(6,\) or \(1\|2, 6\), int32 or int64",
    ),
    "mrope-sum": (
        call(position_ids=torch.zeros(2, 6, dtype=torch.int32), mrope_section=(2, 1)),
        "numbers of pairs, 4 in all",
    ),
    "mrope-axes": (
        call(position_ids=torch.zeros(6, dtype=torch.int32), mrope_section=(2, 2)),
        r"position_ids is .*; it must be \(2, 6\) or \(2, 1\|2, 6\), int32 or int64",
    ),
    "check-past": (
        call(position_ids=torch.tensor([0, 1, 2, 3, 4, 6]), check=True),
        "positions go from 0 to 6, but the table has rows 0 to 5; make it longer",
    ),
    "check-negative": (call(position_ids=torch.tensor([0, 1, -2, 3, 4, 5]), check=True), "positions go from -2 to 5"),
    "check-starts": (call(start_positions=torch.tensor([0, 1]), check=True), "positions go from 0 to 6"),
    "cache-width": (
        call(cos=None, sin=None, cos_sin_cache=torch.zeros(6, 8), rotary_dim=6),
        r"cos_sin_cache is .*\(6, 8\).*; it must be \(P, 6\), .*; pass rotary_dim",
    ),
    "cache-rank": (
        call(cos=None, sin=None, cos_sin_cache=torch.zeros(1, 6, 8)),
        r"cos_sin_cache is .*; it must be \(P, 8\)",
    ),
    "cis-dtype": (
        call(cos=None, sin=None, freqs_cis=torch.zeros(6, 4)),
        r"freqs_cis is float32; it must be .*, complex64, .*; pass torch.view_as_complex\(table\)",
    ),
    "layout": (call(layout="hsbd"), "layout is 'hsbd'; it must be one of 'bshd', 'sbhd', 'bhsd', 'thd'"),
    "rounding": (
        call(rounding="bf16"),
        "rounding is 'bf16'; it must be one of 'fp32', 'complex64', 'complex128', 'dtype', 'addcmul'",
    ),
    "complex128-freqs": (
        call(cos=None, sin=None, freqs=torch.zeros(6, 4), rounding="complex128"),
        "rounding='complex128' does not go with freqs or cu_seqlens",
    ),
    "complex128-packed": (
        call(**packed, cu_seqlens=torch.tensor([0, 6]), rounding="complex128"),
        "does not go with freqs or cu_seqlens",
    ),
    "complex128-cis": (
        call(cos=None, sin=None, freqs_cis=torch.zeros(6, 4).cdouble()),
        "freqs_cis is complex128; it must be .*, complex64, .*; fp64 goes with rounding='complex128'",
    ),
    "fp64-dtype": (
        call(cos=torch.zeros(6, 4).double(), sin=torch.zeros(6, 4).double(), rounding="dtype"),
        "cos is float64; it must be .* float32 or float16 or bfloat16, .*; fp64 goes with rounding='complex128'",
    ),
    "lengths-layout": (
        call(cu_seqlens=torch.tensor([0, 6]), layout="bshd"),
        "cu_seqlens goes with layout 'thd', not 'bshd'",
    ),
    "lengths-dtype": (
        call(**packed, cu_seqlens=torch.tensor([0.0, 6.0])),
        r"cu_seqlens is float32; it must be \(N \+ 1,\), int32 or int64, contiguous",
    ),
    "lengths-device": (
        call(**packed, cu_seqlens=torch.zeros(2, dtype=torch.int32, device="meta")),
        r"cu_seqlens is .*; it must be \(N \+ 1,\), int32 or int64, contiguous",
    ),
    "lengths-rank": (
        call(**packed, cu_seqlens=torch.zeros(2, 2, dtype=torch.int32)),
        r"cu_seqlens is .*; it must be \(N \+ 1,\), int32 or int64, contiguous",
    ),
    "lengths-strided": (
        call(**packed, cu_seqlens=torch.zeros(4, dtype=torch.int32)[::2]),
        r"cu_seqlens is .*; it must be \(N \+ 1,\), int32 or int64, contiguous",
    ),
    "lengths-too-long": (call(**packed, cu_seqlens=torch.tensor([0, 6]), max_seqlen=7), "it needs 7"),
    "cp-size": (call(cp_size=0), "cp_size is 0; it must be a whole number of at least 1"),
    "cp-rank": (call(cp_size=2, cp_rank=2), "cp_rank is 2; it must be from 0 to cp_size - 1 = 1"),
    "cp-odd": (call(**{**packed, "q": torch.ones(5, 4, 8)}, cp_size=2), "S must be even, for two equal chunks"),
    "cp-table": (call(cp_size=2), "cos has 6 rows; it needs 12"),
    "starts-count": (
        call(start_positions=torch.tensor([0])),
        r"start_positions is .*; it must be \(2,\), int32 or int64, contiguous",
    ),
    "starts-sequences": (
        call(**packed, cu_seqlens=torch.tensor([0, 6]), start_positions=torch.tensor([0, 1])),
        r"start_positions is .*; it must be \(1,\), int32 or int64, contiguous",
    ),
    "starts-dtype": (
        call(start_positions=torch.zeros(2)),
        r"start_positions is float32; it must be \(2,\), int32 or int64, contiguous",
    ),
    "no-table": (call(cos=None), "pass cos and sin, or one of cos_sin_cache, freqs and freqs_cis, not sin"),
    "freqs-and-cos": (call(freqs=torch.zeros(6, 4)), "not cos and sin, freqs"),
    "freqs-dtype": (
        call(cos=None, sin=None, freqs=torch.zeros(6, 4).bfloat16()),
        "freqs is bfloat16; it must be .*, float32, on",
    ),
    "freqs-rows": (call(cos=None, sin=None, freqs=torch.zeros(5, 1, 1, 4)), "freqs has 5 rows"),
    "freqs-heads": (
        call(cos=None, sin=None, freqs=torch.zeros(6, 1, 4, 4), k=None),
        r"freqs is .*\(6, 1, 4, 4\).* or \(P, 1\|2, 1, 4\|8\)",
    ),
    "mscale-alone": (call(mscale=2.0), "mscale goes with freqs"),
    "offset": (call(rotary_offset=-1), "rotary_offset is -1"),
    "offset-past": (call(rotary_offset=6, rotary_dim=4), "from 2 to D - rotary_offset=2"),
}


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize("function", [KINDS["rope"], KINDS["rope_"]])
def test_refusals_name_the_argument_and_write_nothing(name: str, function) -> None:
    arguments, message = REFUSALS[name]
    before = arguments["q"].clone()
    with pytest.raises(jitrope.InvalidInput, match=message) as error:
        function(**arguments)
    assert str(error.value).startswith(("apply_rope: ", "prepare_fused_qkv: ", "Starts: "))
    assert isinstance(error.value, ValueError)
    if not before.is_meta:
        assert torch.equal(arguments["q"], before)


def test_two_pairings_need_half_width() -> None:
    with pytest.raises(
        jitrope.InvalidInput,
        match=r"cos is .*\(6, 8\).*; interleaved_out goes with half-width tables",
    ):
        jitrope.apply_rope(**said(**call(cos=torch.zeros(6, 8), sin=torch.zeros(6, 8)), interleaved_out=True))


QKV_REFUSALS = {
    "no heads": ({"heads": (0, 3)}, r"heads\[0\] is 0; it must be a whole number of at least 1"),
    "one number": ({"heads": 6}, "heads is 6; it must be a list or tuple of whole numbers"),
    "three numbers": ({"heads": (6, 3, 3)}, r"heads is \(6, 3, 3\); it must be \(Hq, Hk\)"),
    "heads that do not divide": ({"heads": (5, 3)}, "it must be .*Hk must divide Hq"),
    "width": (
        {"heads": (9, 3)},
        r"qkv has shape \(2, 6, 3, 32\), but heads=\(9, 3\) with order='grouped' are 15 heads of D elements; "
        r"it must be \(B, S, 15 D\) or \(B, S, 3, 5 D\) in layout 'bshd'",
    ),
    "plain width": ({"heads": (9, 3), "qkv": torch.ones(2, 6, 96)}, r"qkv has shape \(2, 6, 96\), but heads"),
    "as many tokens as heads": ({"qkv": torch.ones(2, 3, 32)}, r"qkv has shape \(2, 3, 32\), but heads"),
    "layout": ({"layout": "bhsd"}, "layout is 'bhsd'; it must be one of 'bshd', 'sbhd', 'thd'"),
    "heads": ({"cos": torch.zeros(1, 6, 3, 4), "sin": torch.zeros(1, 6, 3, 4)}, "the heads must share it"),
    "heads of qkv": ({"order": "qkv"}, r"are 12 heads .*; it must be \(B, S, 12 D\) or \(B, S, 12, D\)"),
    "heads with a gate": ({"order": "qkv_gated"}, r"are 18 heads .*; it must be \(B, S, 18 D\) or \(B, S, 18, D\)"),
    "no axes": ({"qkv": torch.ones(())}, r"qkv has shape \(\), but heads"),
    "an axis more": ({"qkv": torch.ones(1, 2, 6, 3, 32)}, r"qkv has shape \(1, 2, 6, 3, 32\), but heads"),
    "no width": ({"qkv": torch.ones(2, 6, 3, 0)}, r"qkv has shape \(2, 6, 3, 0\), but heads"),
    "tokens first": ({"layout": "thd"}, r"it must be \(T, 12 D\) or \(T, 3, 4 D\) in layout 'thd'"),
    "order": ({"order": "kqv"}, "order is 'kqv'; it must be one of 'grouped', 'qkv', 'qkv_gated'"),
    "rows": ({"cos": torch.zeros(5, 4), "sin": torch.zeros(5, 4)}, "cos has 5 rows"),
    "dtype": (
        {"qkv": torch.ones(2, 6, 3, 32).double()},
        "qkv is float64; it must be .* float32 or float16 or bfloat16",
    ),
}


@pytest.mark.parametrize("name", QKV_REFUSALS)
@pytest.mark.parametrize("function", [KINDS["fused_qkv"], KINDS["fused_qkv_"]])
def test_fused_refusals_name_the_argument(name: str, function) -> None:
    changes, message = QKV_REFUSALS[name]
    arguments = {"qkv": torch.ones(2, 6, 3, 32), "cos": torch.zeros(6, 4), "sin": torch.zeros(6, 4)}
    arguments |= {"heads": (6, 3), "order": "grouped"}
    with pytest.raises(jitrope.InvalidInput, match=message) as error:
        function(**{**arguments, **changes})
    assert str(error.value).startswith(("apply_rope: ", "prepare_fused_qkv: ", "Starts: "))
