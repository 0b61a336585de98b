"""vLLM and SGLang: jitrope's functions against published formulas, and against SGLang's own file if its wheel is there.

vLLM and SGLang have no CPU build, so numbers are compared with a torch version of the formulas that they publish
(`turn`, `pick_rows`), which does not use jitrope. SGLang's rope.py itself runs, with a stand-in for its compiler.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope.integrations import _host, sglang, vllm

from .devices import DEVICES
from .hosts import HOSTS, missing, stand_in

FP8 = torch.float8_e4m3fn


# ---- the oracle ----------------------------------------------------------------------------------


def table(rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Cosines of the pairs, then sines."""
    angles = torch.outer(torch.arange(rows).float(), 1e4 ** (-torch.arange(0, width, 2) / width))
    return torch.cat((angles.cos(), angles.sin()), -1).to(dtype)


def turn(x: Tensor, rows: Tensor, neox: bool, offset: int = 0, inverse: bool = False) -> Tensor:
    """x (..., H, D) in fp32, its heads rotated by rows (..., R) of a cache from element `offset` on."""
    cos, sin = (part.unsqueeze(-2) for part in rows.float().chunk(2, -1))
    sin = -sin if inverse else sin
    x, end = x.float(), offset + rows.shape[-1]
    slice_ = x[..., offset:end]
    a, b = slice_.chunk(2, -1) if neox else (slice_[..., ::2], slice_[..., 1::2])
    a, b = a * cos - b * sin, b * cos + a * sin
    turned = torch.cat((a, b), -1) if neox else torch.stack((a, b), -1).flatten(-2)
    return torch.cat((x[..., :offset], turned, x[..., end:]), -1)


def pick_rows(cache: Tensor, positions: Tensor, section: list[int], interleaved: bool) -> Tensor:
    """Rows for positions (3, T), pair by pair from the axis of `section`."""
    axes = [0] * sum(section)
    for axis in (1, 2):
        if interleaved:
            pairs = range(axis, 3 * section[axis], 3)
        else:
            pairs = range(sum(section[:axis]), sum(section[: axis + 1]))
        for pair in pairs:
            axes[pair] = axis
    rows = [cache[positions[axis].long(), pair + part * len(axes)] for part in (0, 1) for pair, axis in enumerate(axes)]
    return torch.stack(rows, -1)


def rounded_once(x: Tensor, scale: float, dtype: torch.dtype = FP8) -> Tensor:
    largest = torch.finfo(dtype).max
    return (x.float() * (1 / torch.tensor(scale))).clamp(-largest, largest).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are equal. torch cannot compare fp8 directly."""
    a, b = (x.view(torch.uint8) if x.element_size() == 1 else x for x in (a, b))
    return torch.equal(a.cpu(), b.cpu())


# ---- vLLM: the rotary embedding op ---------------------------------------------------------------


@dataclass(frozen=True)
class Rotary:
    """A call. `layout` is the arrangement of q and k in one buffer; tests compare the whole buffer."""

    layout: str = "packed"
    tokens: tuple[int, ...] = (7,)
    dim: int = 64
    rotary: int = 64
    q_heads: int = 4
    k_heads: int = 2
    neox: bool = True
    offset: int = 0
    inverse: bool = False
    dtype: torch.dtype = torch.bfloat16
    cache: torch.dtype = torch.float32
    positions: torch.dtype = torch.int64

    def buffer(self) -> Tensor:
        width = (self.q_heads + 2 * self.k_heads) * (self.dim + 16 * (self.layout == "gaps"))
        return torch.randn(*self.tokens, width, generator=torch.Generator().manual_seed(1)).to(self.dtype)

    def split(self, buffer: Tensor, whole: bool = False) -> tuple[Tensor, Tensor | None]:
        """q and k in the buffer, flat or (`whole`, and by layout) with an axis of heads."""
        step = buffer.shape[-1] // (self.q_heads + 2 * self.k_heads)
        q, k, _ = buffer.split([n * step for n in (self.q_heads, self.k_heads, self.k_heads)], -1)
        if whole or self.layout in ("heads", "gaps"):
            q, k = (x.unflatten(-1, (-1, step))[..., : self.dim] for x in (q, k))
        return q, None if self.layout == "no key" else k

    def ids(self) -> Tensor:
        return torch.randint(0, 50, self.tokens, generator=torch.Generator().manual_seed(2)).to(self.positions)


CASES = {
    "packed-qkv": Rotary(),
    "neighbours": Rotary(neox=False),
    "heads": Rotary("heads", positions=torch.int32),
    "gaps-between-heads": Rotary("gaps"),
    "no-key": Rotary("no key", neox=False),
    "batch": Rotary(tokens=(3, 5)),
    "batch-heads-int32": Rotary("heads", (3, 5), neox=False, positions=torch.int32),
    "decode": Rotary(tokens=(33, 1), q_heads=8),
    "one-kv-head": Rotary(q_heads=8, k_heads=1, cache=torch.bfloat16),
    "model-dtype-cache": Rotary(dtype=torch.float16, cache=torch.float16),
    "fp32-model-bf16-cache": Rotary(dtype=torch.float32, cache=torch.bfloat16),
    "partial-offset": Rotary(dim=128, rotary=32, offset=64, neox=False),
    "inverse": Rotary(dim=128, rotary=64, offset=64, inverse=True, neox=False),
    "inverse-halves": Rotary(inverse=True),
    "no-tokens": Rotary(tokens=(0,)),
    # FlashInfer's cache kernel rotates halves of heads of 80 wrongly, and reads heads of 72 misaligned.
    "halves-of-80": Rotary(dim=80, rotary=80, q_heads=16, k_heads=16, tokens=(40,)),
    "halves-of-72": Rotary(dim=72, rotary=72, q_heads=16, k_heads=16),
    "halves-of-96-in-place": Rotary(dim=96, rotary=96, q_heads=24, k_heads=8, tokens=(40,)),
    # vLLM's fused kernel rotates halves of a part of the head wrongly if a warp has several heads.
    "halves-of-64-in-128": Rotary(dim=128, rotary=64, q_heads=32, k_heads=8, tokens=(70,)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_vllm_rotary_embedding(name: str, device: str) -> None:
    """q and k are rotated, and the memory between and after them does not change."""
    case = CASES[name]
    cache, ids = table(50, case.rotary, case.cache), case.ids()
    want = case.buffer()
    for x in case.split(want, whole=True):
        if x is not None:
            x.copy_(turn(x, cache[ids.long()], case.neox, case.offset, case.inverse))
    got = case.buffer().to(device)
    q, k = case.split(got)
    vllm.rotary_embedding(
        ids.to(device), q, k, case.dim, cache.to(device), case.neox, rope_dim_offset=case.offset, inverse=case.inverse
    )
    assert same(got, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("interleaved", [False, True])
def test_mrope(interleaved: bool, neox: bool, dtype: torch.dtype, device: str) -> None:
    """Each of time, height and width counts. (A fused mRoPE of SGLang once used the time positions for all pairs.)"""
    case, section = Rotary(dim=128, rotary=96, neox=neox), [20, 14, 14]
    cache = table(50, 96)
    ids = torch.randint(0, 50, (3, 7), generator=torch.Generator().manual_seed(3)).to(dtype)
    want, of_time = case.buffer(), case.buffer()
    for buffer, rows in ((want, pick_rows(cache, ids, section, interleaved)), (of_time, cache[ids[0].long()])):
        for x in case.split(buffer, whole=True):
            x.copy_(turn(x, rows, neox))
    ids, cache = ids.to(device), cache.to(device)
    results = []
    for call in ("sglang", "vllm"):
        got = case.buffer().to(device)
        q, k = case.split(got)
        if call == "sglang":
            sglang.triton_mrope_fused(q, k, cache, ids, section, 128, 96, interleaved, False, neox, None)
        else:
            cos, sin = cache[ids].chunk(2, -1)
            q_out, k_out = vllm.triton_mrope(q, k, cos, sin, section, 128, 96, interleaved, neox)
            assert q_out is q
            assert k_out is k
        results.append(got)
    assert all(same(got, want) for got in results)
    assert not same(want, of_time)


def turn_in_dtype(x: Tensor, rows: Tensor, neox: bool) -> Tensor:
    """x rotated in 16-bit arithmetic: the rows, each product and each sum are rounded to x's dtype."""
    cos, sin = (part.to(x.dtype).unsqueeze(-2) for part in rows.chunk(2, -1))
    slice_, rest = x[..., : rows.shape[-1]], x[..., rows.shape[-1] :]
    a, b = slice_.chunk(2, -1) if neox else (slice_[..., ::2], slice_[..., 1::2])
    a, b = a * cos - b * sin, b * cos + a * sin
    return torch.cat((torch.cat((a, b), -1) if neox else torch.stack((a, b), -1).flatten(-2), rest), -1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_vllm_in_16_bits(dtype: torch.dtype, neox: bool, device: str) -> None:
    """rounding="dtype" gives the bits of a host that computes in the model's dtype; the default differs in some."""
    case, section = Rotary(dim=128, rotary=96, neox=neox, dtype=dtype, tokens=(40,)), [20, 14, 14]
    cache, ids = table(50, 96), torch.randint(0, 50, (3, 40), generator=torch.Generator().manual_seed(3))
    wants = [case.buffer(), case.buffer()]
    for want, rows in zip(wants, (cache[ids[0]], pick_rows(cache, ids, section, False))):
        for x in case.split(want, whole=True):
            x.copy_(turn_in_dtype(x, rows, neox))
    ids, cache = ids.to(device), cache.to(device)
    cos, sin = cache[ids].chunk(2, -1)
    for want, call in (
        (wants[0], lambda q, k, **words: vllm.rotary_embedding(ids[0], q, k, 128, cache, neox, **words)),
        (wants[1], lambda q, k, **words: vllm.triton_mrope(q, k, cos, sin, section, 128, 96, False, neox, **words)),
    ):
        for rounding in ("dtype", "fp32"):
            got = case.buffer().to(device)
            call(*case.split(got), rounding=rounding)
            assert same(got, want) == (rounding == "dtype")
            torch.testing.assert_close(got.cpu(), want, rtol=0.02, atol=0.05)


def test_mrope_refusals() -> None:
    q, cache, ids = torch.zeros(4, 128), table(8, 64), torch.zeros(3, 4, dtype=torch.int64)
    with pytest.raises(jitrope.InvalidInput, match="mrope_section is"):
        sglang.triton_mrope_fused(q, q.clone(), cache, ids, [8, 8, 8], 64, 64, False, False, True, None)
    with pytest.raises(jitrope.InvalidInput, match="use SGLang's function"):
        sglang.triton_mrope_fused(q, q, cache, ids, [16, 8, 8], 64, 64, True, True, True, None)
    with pytest.raises(jitrope.InvalidInput, match="cos_sin_cache is 64 wide, rotary_dim is 32"):
        sglang.triton_mrope_fused(q, q.clone(), cache, ids, [8, 4, 4], 64, 32, False, False, True, None)
    with pytest.raises(jitrope.InvalidInput, match="position"):
        sglang.triton_mrope_fused(q, q.clone(), cache, ids[0], [16, 8, 8], 64, 64, False, False, True, None)
    assert not q.any()
    with pytest.raises(jitrope.InvalidInput, match=r"cos has shape \(4, 32\)"):
        vllm.triton_mrope(q, q, cache[:4, :32], cache[:4, 32:], [16, 8, 8], 64, 64, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": torch.zeros(4)}, "positions is torch.float32"),
        ({"positions": torch.zeros(5, dtype=torch.int64)}, r"positions has shape \(5,\)"),
        (
            {"positions": torch.zeros(1, 1, 4, dtype=torch.int64)},
            r"positions have shape \(1, 1, 4\); they must be \(T\)",
        ),
        ({"query": torch.zeros(4, 100)}, r"query has shape \(4, 100\).*H \* 64"),
        ({"query": torch.zeros(4, 2, 32)}, r"query has shape \(4, 2, 32\).*H, 64"),
        ({"key": torch.zeros(3, 128)}, "only H may differ"),
        ({"key": torch.zeros(4, 128, dtype=torch.float16)}, "k is torch.float16"),
        ({"head_size": 0}, "head_size 0"),
        ({"cos_sin_cache": table(8, 128)}, "rotary_dim is 128"),
        ({"cos_sin_cache": table(8, 64).double()}, "float64"),
        ({"rope_dim_offset": 2}, "rotary_dim is 64"),
    ],
)
def test_vllm_refusals(change: dict[str, Any], message: str) -> None:
    """The message names the argument, and nothing is written."""
    words = {
        "positions": torch.ones(4, dtype=torch.int64),
        "query": torch.ones(4, 128),
        "key": torch.ones(4, 128),
        "head_size": 64,
        "cos_sin_cache": table(8, 64),
        "is_neox": True,
        **change,
    }
    before = [words[name].clone() for name in ("query", "key")]
    with pytest.raises(jitrope.InvalidInput, match=message):
        vllm.rotary_embedding(**words)
    assert all(torch.equal(a, words[name]) for a, name in zip(before, ("query", "key")))


# ---- with the write to the cache -----------------------------------------------------------------

# The attributes of the class of this name in sgl-kernel/python/sgl_kernel/elementwise.py, sgl-kernel 0.3.
FUSED_SET_KV_BUFFER_ARG = ("value", "k_buffer", "v_buffer", "k_scale", "v_scale", "cache_loc")


def stored(
    case: Rotary, cache: Tensor, ids: Tensor, scales: tuple[float, float] | None, dtype: torch.dtype = FP8
) -> tuple[Tensor, ...]:
    """The buffer after the call, and the rows of each token in both caches."""
    buffer = case.buffer()
    q, k = case.split(buffer, whole=True)
    v = buffer[..., -case.k_heads * case.dim :].unflatten(-1, (-1, case.dim)).clone()
    rows = cache[ids.long()]
    k_turned = turn(k, rows, case.neox)
    for x in (q, k):
        x.copy_(turn(x, rows, case.neox))
    if scales is None:
        return buffer, k.clone(), v
    return buffer, *(rounded_once(x, scale, dtype) for x, scale in zip((k_turned, v), scales))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize(
    ("kind", "storage", "batch"),
    [
        ("auto", torch.bfloat16, False),
        ("bfloat16", torch.bfloat16, True),
        ("fp8", torch.uint8, False),
        ("fp8_e4m3", FP8, False),
        ("fp8_e5m2", torch.uint8, False),
        ("fp8_e5m2", torch.float8_e5m2, True),
    ],
)
def test_vllm_rotary_embedding_and_cache(
    kind: str, storage: torch.dtype, batch: bool, heads_first: bool, device: str
) -> None:
    """Tokens with padding slots are not stored. Tokens past the end of the slots are neither stored nor rotated."""
    case = Rotary(tokens=(3, 4) if batch else (12,), dim=128, rotary=64)
    slots = torch.tensor([5, -1, 31, 0, 16, 15, 7, -1, 8] + [2, 3, 4] * batch)
    cache, ids = table(50, 64), case.ids()
    scales = (0.5, 0.25) if kind.startswith("fp8") else None
    dtype = torch.float8_e5m2 if kind == "fp8_e5m2" else FP8
    want, k_rows, v_rows = stored(case, cache, ids, scales, dtype)
    want.view(12, -1)[len(slots) :] = case.buffer().view(12, -1)[len(slots) :]
    got = case.buffer().to(device)
    q, k = case.split(got)
    pages = [torch.zeros(4, 2, 8, 128) if heads_first else torch.zeros(4, 8, 2, 128) for _ in "kv"]
    pages = [x.to(device, storage).transpose(1, 2) if heads_first else x.to(device, storage) for x in pages]
    expected = [torch.zeros(4, 8, 2, 128, dtype=rows.dtype) for rows in (k_rows, v_rows)]
    for page, rows in zip(expected, (k_rows, v_rows)):
        for i, slot in enumerate(slots.tolist()):
            if slot >= 0:
                page[slot // 8, slot % 8] = rows.view(12, 2, 128)[i]
    given = (0.5, torch.tensor(0.25, device=device))  # unused without fp8, as vLLM gives them
    vllm.rotary_embedding_and_cache(
        ids.to(device), q, k, got[..., -256:], 128, cache.to(device), True, *pages, slots.to(device), kind, *given
    )
    assert same(got, want)
    for page, rows in zip(pages, expected):
        assert same(page.contiguous().view(rows.dtype), rows)


def test_vllm_cache_refusals() -> None:
    q, ids = torch.ones(4, 128), torch.zeros(4, dtype=torch.int64)
    pages = torch.zeros(2, 8, 2, 64, dtype=torch.uint8)
    cases = {("fp8_e5m2", FP8): "it must be torch.float8_e5m2", ("fp8", torch.float8_e5m2): "it must be .*e4m3fn",
             ("fp8", torch.float32): "key_cache is torch.float32", ("auto", FP8): "k_scale",
             ("auto", torch.uint8): "k_cache is torch.uint8"}  # fmt: skip
    for (kind, dtype), message in cases.items():
        caches = pages.to(dtype), pages.to(dtype)
        with pytest.raises(jitrope.InvalidInput, match=message):
            vllm.rotary_embedding_and_cache(
                ids, q, q.clone(), q.clone(), 64, table(8, 64), True, *caches, ids, kind, 1.0, 1.0
            )
    assert torch.equal(q, torch.ones(4, 128))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("scales", [None, (0.5, 0.25), (None, None)], ids=str)
def test_sglang_with_buffers(scales: tuple[Any, Any] | None, flat: bool, device: str) -> None:
    """The sgl_kernel signature: 16-bit buffers, and fp8 buffers with and without scales."""
    case, slots = Rotary(tokens=(6,), neox=False, positions=torch.int32), torch.tensor([3, 9, -1, 0, 8, 4])
    cache, ids = table(50, 64), case.ids()
    numbers = None if scales is None else tuple(scale or 1.0 for scale in scales)
    want, k_rows, v_rows = stored(case, cache, ids, numbers)
    got = case.buffer().to(device)
    q, k = case.split(got)
    buffers = [torch.zeros(10, *((128,) if flat else (2, 64))).to(device, rows.dtype) for rows in (k_rows, v_rows)]
    values = (got[:, -128:], *buffers, *(scales or (None, None)), slots.to(device))
    where = types.SimpleNamespace(**dict(zip(FUSED_SET_KV_BUFFER_ARG, values)))
    sglang.apply_rope_with_cos_sin_cache_inplace(
        ids.to(device), q, k, 64, cache.to(device), is_neox=False, fused_set_kv_buffer_arg=where, enable_pdl=True
    )
    assert same(got, want)
    for buffer, rows in zip(buffers, (k_rows, v_rows)):
        expected = torch.zeros(10, 2, 64, dtype=rows.dtype)
        for i, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot] = rows[i]
        assert same(buffer.view(10, 2, 64), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_sglang_in_place(device: str) -> None:
    """The other three functions, with heads of 80 (for which SGLang uses its slow kernel), and a wrong rope_dim."""
    case = Rotary("heads", dim=80, rotary=80)
    cache, ids = table(50, 80), case.ids()
    want, k_rows, v_rows = stored(case, cache, ids, None)
    cache, ids = cache.to(device), ids.to(device)
    buffers = [torch.zeros(7, 160, dtype=case.dtype, device=device) for _ in "kv"]
    for call in (
        lambda q, k, v: sglang.apply_rope_inplace(q, k, cache, ids, is_neox=True),
        lambda q, k, v: sglang.apply_rope_inplace(q, k, cache, ids, is_neox=True, rope_dim=80),
        lambda q, k, v: sglang.rotary_embedding(ids, q, k, 80, cache),
        lambda q, k, v: sglang.apply_rope_with_cos_sin_cache_inplace(ids, q, k, 80, cache),
        lambda q, k, v: sglang.apply_rope_inplace_with_kvcache(
            q, k, v, *buffers, cache, ids, torch.arange(7, device=device), is_neox=True
        ),
    ):
        got = case.buffer().to(device)
        q, k = case.split(got)
        out = call(q, k, got[:, -160:])
        assert out is None or (out[0] is q and out[1] is k)
        assert same(got, want)
    assert same(buffers[0], k_rows.flatten(1))
    assert same(buffers[1], v_rows.flatten(1))
    with pytest.raises(jitrope.InvalidInput, match="cos_sin_cache is 80 wide, rotary_dim is 64"):
        sglang.apply_rope_inplace(q, k, cache, ids, is_neox=True, rope_dim=64)


# ---- signatures and enable -----------------------------------------------------------------------

SIGNATURES: dict[Callable[..., Any], str] = {
    # vllm/_custom_ops.py, 0.33.0
    vllm.rotary_embedding: "positions query key head_size cos_sin_cache is_neox rope_dim_offset=0 inverse=False",
    # vllm/model_executor/layers/rotary_embedding/mrope.py, 0.33.0; is_neox_style is not in older ones
    vllm.triton_mrope: "q k cos sin mrope_section head_size rotary_dim mrope_interleaved is_neox_style=True",
    # sgl-kernel/python/sgl_kernel/elementwise.py, sgl-kernel 0.3
    sglang.apply_rope_with_cos_sin_cache_inplace: (
        "positions query key head_size cos_sin_cache is_neox=True fused_set_kv_buffer_arg=None enable_pdl=None"
    ),
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_published_signatures(function: Callable[..., Any]) -> None:
    """The parameters are the published ones; jitrope adds at most one keyword, rounding."""
    parameters = inspect.signature(function).parameters.values()
    theirs = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    words = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in theirs]
    assert " ".join(words) == SIGNATURES[function]
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} <= {"rounding"}


def test_vllm_enable(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for two modules of vLLM, whose CPU wheel is too large for CI: functions of the same names, and
    a layer that looks its function up in the module at each call, like RotaryEmbedding.forward_cuda."""
    left: list[str] = []
    ops = stand_in(monkeypatch, "vllm._custom_ops")
    mrope = stand_in(monkeypatch, "vllm.model_executor.layers.rotary_embedding.mrope")
    ops.rotary_embedding = host = lambda *a, **words: left.append("rotary_embedding")
    mrope.triton_mrope = lambda *a, **words: left.append("triton_mrope")

    def forward_cuda(query: Tensor, key: Tensor | None) -> None:
        from vllm import _custom_ops as ops

        ops.rotary_embedding(ids, query, key, 64, cache, True)

    cache, ids, case = table(50, 64), Rotary().ids(), Rotary()
    with vllm.enable() as report:
        got, want = case.buffer(), case.buffer()
        forward_cuda(*case.split(got))
        vllm.rotary_embedding(ids, *case.split(want), 64, cache, True)
        assert same(got, want)
        assert not same(got, case.buffer())
        forward_cuda(torch.zeros(7, 128, dtype=torch.float64), None)
        cos, sin = cache[ids].expand(3, -1, -1).chunk(2, -1)
        mrope.triton_mrope(*case.split(case.buffer()), cos, sin, [16, 8, 8], 64, 64, False, True)
        assert report.calls == {"jitrope": 2, "host": 1}
        assert left == ["rotary_embedding"]
        got = case.buffer()
        torch.compile(lambda x: forward_cuda(*case.split(x)), backend="aot_eager", fullgraph=True)(got)
        assert same(got, want)
        assert "vllm._custom_ops.rotary_embedding" in report.table()
        held = ops.rotary_embedding  # by a call that is still running when another thread disables
    assert ops.rotary_embedding is host
    held(ids, torch.zeros(7, 128, dtype=torch.float64), None, 64, cache, True)
    assert left == ["rotary_embedding"] * 2
    with vllm.enable(rounding="dtype"):
        got, want = case.buffer(), case.buffer()
        forward_cuda(*case.split(got))
        vllm.rotary_embedding(ids, *case.split(want), 64, cache, True, rounding="dtype")
        assert same(got, want)
    with vllm.enable():
        forward_cuda(*case.split(case.buffer()))
    assert ops.rotary_embedding is host
    with pytest.raises(jitrope.InvalidInput, match="rounding is 'bf16'; allowed are fp32 and dtype"):
        vllm.enable(rounding="bf16")


@pytest.fixture(scope="module")
def sglang_files() -> dict[str, str]:
    """Files of SGLang's wheel. The wheel is not installed, because importing it needs a GPU."""
    wheels = sorted(HOSTS.glob("sglang-*.whl"))
    if not wheels:
        missing("pip download --no-deps --only-binary :all: -d build/hosts sglang==0.5.23")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        folder = "sglang/kernels/ops/"
        return {
            name.removeprefix(folder)[:-3]: wheel.read(name).decode()
            for name in wheel.namelist()
            if re.fullmatch(f"{folder}(attention|diffusion/rope)/\\w+\\.py", name)
        }


Own = Callable[[str], Any]


@pytest.fixture
def sgl_own(sglang_files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Own:
    """Run one of SGLang's own files, with stand-ins for its CUDA compiler and its registry of ops."""
    jit, ops = (stand_in(monkeypatch, f"sglang.{name}") for name in ("kernels.jit.utils", "srt.utils.custom_op"))
    built = types.SimpleNamespace(run_rope=lambda *_: None, run_rope_store=None, rotary_embedding=None)
    jit.cache_once, jit.load_jit = lambda f: f, lambda *_, **__: built
    jit.is_arch_support_pdl, jit.make_cpp_args = lambda: False, lambda *arguments: arguments
    ops.register_custom_op = lambda **_: lambda function: function

    def own(name: str) -> Any:
        module = stand_in(monkeypatch, f"sglang.kernels.ops.{name.replace('/', '.')}")
        exec(compile(sglang_files[name], f"{module.__name__}.py", "exec"), vars(module))
        return module

    return own


@pytest.fixture
def sgl_rope(sgl_own: Own) -> Any:
    return sgl_own("attention/rope")


def test_sglang_signatures(sgl_rope: Any, sglang_files: dict[str, str]) -> None:
    for name in ("apply_rope_inplace", "apply_rope_inplace_with_kvcache", "rotary_embedding"):
        host, ours = (inspect.signature(getattr(module, name)).parameters for module in (sgl_rope, sglang))
        assert [(p.name, p.kind, p.default) for p in ours.values()] == [
            (p.name, p.kind, p.default) for p in host.values()
        ]
    nodes = ast.parse(sglang_files["attention/rotary_triton"]).body
    mrope = next(node for node in nodes if getattr(node, "name", "") == "triton_mrope_fused")
    assert [argument.arg for argument in mrope.args.args] == list(
        inspect.signature(sglang.triton_mrope_fused).parameters
    )


def test_sglang_enable(sgl_rope: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers hold SGLang's entry by `from ... import`; it calls jitrope, with and without buffers."""
    base = types.ModuleType("sglang.srt.layers.rotary_embedding.base")
    base.entry = sgl_rope.apply_rope_with_cos_sin_cache_inplace
    base.rotary_embedding = host = sgl_rope.rotary_embedding
    monkeypatch.setitem(sys.modules, base.__name__, base)
    case = Rotary("heads", tokens=(6,))
    cache, ids = table(50, 64), case.ids()
    want, k_rows, v_rows = stored(case, cache, ids, None)
    buffers = [torch.zeros(6, 128, dtype=torch.bfloat16) for _ in "kv"]
    with sglang.enable() as report:
        for buffered in (False, True):
            got = case.buffer()
            q, k = case.split(got)
            where = sgl_rope.FusedSetKVBufferArg(got[:, -128:], *buffers, torch.arange(6)) if buffered else None
            base.entry(q=q, k=k, cos_sin_cache=cache, positions=ids, is_neox=True, fused_args=where)
            assert same(got, want)
        assert same(torch.stack(buffers), torch.stack((k_rows, v_rows)).flatten(2))
        got = case.buffer()
        base.rotary_embedding(ids, *case.split(got), 64, cache)
        assert same(got, want)
        assert report.calls == {"jitrope": 3, "host": 0}
        base.entry(q=q, k=k.half(), cos_sin_cache=cache, positions=ids, is_neox=True)  # SGLang's takes two dtypes
        assert report.calls == {"jitrope": 3, "host": 1}
    assert base.rotary_embedding is host


def test_sglang_enable_with_norms(sgl_own: Own) -> None:
    """SGLang's own entries, which call the replaced functions; four groups of heads stay with the host."""
    minimax, qwen = sgl_own("attention/minimax_qknorm_rope"), sgl_own("attention/fused_qknorm_rope")
    case = Rotary(dim=128, rotary=64)
    cache, ids, weights = table(50, 64), case.ids(), torch.zeros(2, 128)
    wants = [case.buffer(), case.buffer()]
    for want, rows in zip(wants, (cache[ids], table(50, 128)[ids])):
        for x in case.split(want, whole=True):
            y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
            x.copy_(turn(y, rows, True))
    with sglang.enable() as report:
        got = case.buffer()
        assert minimax.minimax_qknorm_rope(got, *weights, cache, ids, 4, 2, 2, 1e-6) is got
        torch.testing.assert_close(got, wants[0], rtol=0.01, atol=0.01)
        given = 4, 2, 2, 128, 1e-6, *(weights + 1), 1e4, True, ids.int(), 1.0, 0.0, 0.0, 1.0
        got = case.buffer()
        qwen.fused_qk_norm_rope(got, *given)
        torch.testing.assert_close(got, wants[1], rtol=0.01, atol=0.01)
        assert report.calls == {"jitrope": 2, "host": 0}
        with pytest.raises(AttributeError):  # the stand-in for its compiler has no such function
            minimax.minimax_qknorm_rope_grouped(got, [(weights[0], 0, 1)] * 4, cache, ids, 1e-6)
        assert report.calls == {"jitrope": 2, "host": 1}


@pytest.mark.parametrize(("host", "needs"), [(vllm, ("vllm",)), (sglang, ("sglang", "sgl_kernel"))])
def test_enable_without_the_host(host: Any, needs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in needs:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError):
        host.enable()
    assert not _host.placed
