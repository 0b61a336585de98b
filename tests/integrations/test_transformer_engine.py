"""TransformerEngine: its rope functions, and `MultiheadAttention` with norms of q and k before or after rope.

The wheel has no CPU build: `te` in conftest.py has its files, with stand-ins for what they import.
"""

from __future__ import annotations

import inspect
import sys
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import jitrope
from jitrope.integrations import transformer_engine

from .. import hosts
from ..devices import devices
from ..hosts import freqs_of

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


# ---- the functions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "apply_fused_qkv_rotary_pos_emb"])
def test_te_signatures(te: Any, name: str) -> None:
    rope = sys.modules[hosts.TE_ROPE]
    theirs, ours = (inspect.signature(getattr(x, name)).parameters.values() for x in (rope, transformer_engine))
    assert name in rope.__all__
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs]


TE_CASES = [  # tensor_format, dtype, interleaved, rotary part, starts, cp, transposed axes, overlapping gradient
    *[("sbhd", "fp32", False, 1.0, False, 1, None, False), ("sbhd", "bf16", False, 1.0, True, 1, None, True)],
    *[("sbhd", "fp16", True, 0.5, False, 2, (0, 1), False), ("sbhd", "fp32", False, 0.5, True, 2, (2, 3), False)],
    *[("bshd", "bf16", True, 1.0, True, 2, None, True), ("bshd", "fp16", False, 1.0, True, 1, (2, 3), True)],
    *[("thd", "fp32", False, 0.5, False, 1, None, False), ("thd", "bf16", False, 0.5, True, 2, None, False)],
    *[("thd", "fp16", True, 0.5, False, 2, None, False), ("thd", "fp32", True, 1.0, True, 2, None, True)],
]
TE_NAMES = ("device", "tensor_format", "dtype", "interleaved", "part", "starts", "cp", "axes", "overlapping")


@pytest.mark.parametrize(TE_NAMES, devices(TE_CASES, (*TE_CASES[1:5], *TE_CASES[7:])))
def test_te_rope(
    te: Any, device: str, tensor_format: str, dtype: str, interleaved: bool, part: float, starts: bool, cp: int,
    axes: Any, overlapping: bool,
) -> None:  # fmt: skip
    """The plain torch path of TransformerEngine in fp32, rounded once, padded and packed, on every rank."""
    torch.manual_seed(0)
    # The host's interleaved path fails on an empty sequence.
    lengths = torch.tensor([12, 4, 2 * cp if interleaved else 0, 20, 8, 4])
    cu_seqlens = torch.cat((torch.zeros(1), lengths.cumsum(0))).int().to(device)
    lead = {"sbhd": (22, 2), "bshd": (2, 22), "thd": (int(cu_seqlens[-1]) // cp,)}[tensor_format]
    t = torch.rand(*lead, 3, 32).to(device, DTYPES[dtype])
    if axes is not None:
        t = t.transpose(*axes).contiguous().transpose(*axes)
    freqs = freqs_of(32 * cp, int(32 * part), interleaved).to(device)
    words: dict[str, Any] = {"tensor_format": tensor_format, "interleaved": interleaved, "cp_size": cp}
    if tensor_format == "thd":
        words["cu_seqlens"] = cu_seqlens
    if starts:
        begin = torch.arange(6) if tensor_format == "thd" else torch.tensor([3, 9])
        words["start_positions"] = begin.int().to(device)
    for rank in range(cp):
        results = []
        for host, leaf in ((transformer_engine, t.clone()), (sys.modules[hosts.TE_ROPE], t.float().clone())):
            leaf.requires_grad_()
            out = host.apply_rotary_pos_emb(leaf, freqs, fused=host is transformer_engine, cp_rank=rank, **words)
            # Twice the sum has an expanded gradient.
            loss = out.float().sum() * 2 if overlapping else (out.float() * torch.arange(32).to(out)).sum()
            results.append([out, *torch.autograd.grad(loss, leaf)])
        assert results[0][0].is_contiguous()
        torch.testing.assert_close(results[0], [x.to(t.dtype) for x in results[1]])


TE_QKV = [(*case, n) for case in (("sbhd", 1, False), ("bshd", 2, True), ("thd", 2, False)) for n in ("one", "two")]


@pytest.mark.parametrize(("device", "tensor_format", "cp", "interleaved", "tables"), devices(TE_QKV, TE_QKV[::2]))
def test_te_fused_qkv(te: Any, device: str, tensor_format: str, cp: int, interleaved: bool, tables: str) -> None:
    """The results are those of the host's single op on slices, also with starts and context parallelism."""
    torch.manual_seed(0)
    lead = {"sbhd": (6, 2), "bshd": (2, 6), "thd": (12,)}[tensor_format]
    qkv, split = torch.rand(*lead, 3, 96).to(device).requires_grad_(), [64, 16, 16]
    q_freqs = freqs_of(40, 16, interleaved).to(device)
    k_freqs = q_freqs if tables == "one" else freqs_of(40, 16, interleaved, base=1e4).to(device)
    words = {"tensor_format": tensor_format, "interleaved": interleaved, "cp_size": cp, "cp_rank": cp - 1}
    words["start_positions"] = torch.tensor([2, 5], dtype=torch.int32, device=device)
    if tensor_format == "thd":
        words["cu_seqlens"] = torch.tensor([0, 8, 12 * cp], dtype=torch.int32, device=device)
    ours = transformer_engine.apply_fused_qkv_rotary_pos_emb(qkv, q_freqs, k_freqs, split, **words)
    assert all(x.is_contiguous() for x in ours)
    q, k, v = qkv.split(split, -1)
    rope = sys.modules[hosts.TE_ROPE].apply_rotary_pos_emb
    theirs = [rope(q.reshape(*lead, 12, 16), q_freqs, **words), rope(k, k_freqs, **words), v]
    grads = []
    for results in (ours, theirs):
        loss = sum((x * torch.arange(16, device=device)).sum() * n for n, x in enumerate(results, 1))
        grads.append(torch.autograd.grad(loss, qkv))
    torch.testing.assert_close([*ours, *grads[0]], [*theirs, *grads[1]])


@pytest.mark.parametrize("tables", ["one", "two"])
def test_the_parts_of_a_projection_are_turned_by_their_own_tables(tables: str) -> None:
    """Without TransformerEngine too."""
    qkv, rope = torch.rand(6, 2, 3, 96), transformer_engine.apply_rotary_pos_emb
    q_freqs, other = freqs_of(6, 16, False), freqs_of(6, 16, False, base=1e4)
    k_freqs = q_freqs if tables == "one" else other
    found = transformer_engine.apply_fused_qkv_rotary_pos_emb(qkv, q_freqs, k_freqs, [64, 16, 16])
    q, k, v = qkv.split([64, 16, 16], -1)
    assert torch.equal(found[0], rope(q.reshape(6, 2, 12, 16), q_freqs))
    assert torch.equal(found[1], rope(k, k_freqs))
    assert torch.equal(found[2], v)
    with pytest.raises(jitrope.InvalidInput, match=r"^qkv_split_arg_list \[64, 16, 8\] does not split groups of 96$"):
        transformer_engine.apply_fused_qkv_rotary_pos_emb(qkv, q_freqs, k_freqs, [64, 16, 8])


# ---- attention -----------------------------------------------------------------------------------------


CASES = {  # layout, (context parallel size, rank), interleaved, partial rotation
    "sbhd": ("sbhd", (1, 0), False, 32),
    "bshd": ("bshd", (2, 1), True, 16),
    "thd": ("thd", (2, 0), False, 32),
}
EVERY = product(("RMSNorm", "LayerNorm", "L2Normalization"), ("norm last", "norm first"), CASES, ("fp32", "bf16"))
SOME = [("RMSNorm", "norm first", "sbhd", "bf16"), ("RMSNorm", "norm last", "thd", "bf16")]
SOME += [("RMSNorm", "norm first", "thd", "fp32"), ("LayerNorm", "norm first", "bshd", "fp32")]
SOME += [("L2Normalization", "norm last", "sbhd", "fp32")]


@pytest.mark.parametrize(("device", "norm", "order", "case", "dtype"), devices(EVERY, SOME))
def test_norms_and_rope_are_one_launch(te: Any, device: str, norm: str, order: str, case: str, dtype: str) -> None:
    """q and k are the host's, whose own rope has fp32 tables; gradients agree too."""
    layout, (size, rank), interleaved, rotated = CASES[case]
    layer = hosts.te_attention(
        te, norm, order == "norm first", DTYPES[dtype], qkv_format=layout, rotary_pos_interleaved=interleaved
    ).to(device)
    layer.cp_size, layer.cp_rank = size, rank
    cu_seqlens = torch.tensor([0, 8, 24], dtype=torch.int32, device=device)
    words = {"rotary_pos_emb": freqs_of(24, rotated, interleaved).to(device)}
    if layout == "thd":
        words |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens, "max_seqlen_q": 16, "max_seqlen_kv": 16}
    lead = {"sbhd": (12, 2), "bshd": (2, 12), "thd": (24 // size,)}[layout]
    x = torch.randn(*lead, 64).to(device, DTYPES[dtype])
    stock = hosts.step(layer, x, **words)
    with transformer_engine.enable() as report:
        got = hosts.step(layer, x, **words)
        assert report.calls == {"jitrope": 0, "host": 0, "fused": 1}
        with layer.q_norm.register_forward_hook(lambda *_: None):
            want = hosts.step(layer, x, **words)
        assert report.calls == {"jitrope": 2, "host": 0, "fused": 1}
        assert report.reasons == {"not fused: a norm has hooks": 1}
    unit = {"fp32": 1e-5, "bf16": 2**-7}[dtype]
    for name, a, b, c in zip(("q", "k", "v", "out", *("gradient",) * 9), got, want, stock):
        tolerance = unit * (4 if name in "qkv" else 16) * max(1.0, float(b.detach().abs().max()))
        assert a.dtype == c.dtype
        for expected in (b, c) if dtype == "fp32" else (b,):
            torch.testing.assert_close(a, expected, rtol=unit, atol=tolerance)
        if norm != "L2Normalization" and name in "qkv" and device == "cpu":
            assert torch.equal(a, b)


FREQS, CU_SEQLENS = freqs_of(24, 32), torch.tensor([0, 8, 24])
CACHE, STARTS = SimpleNamespace(cache={1: None}), torch.tensor([3, 0], dtype=torch.int32)
INFERENCE = SimpleNamespace(cache_manager=CACHE, get_seqlens_pre_step=lambda: STARTS)
LEFT: dict[str, Any] = {  # further words of a call, and the reason
    "tables": ({"rotary_pos_emb": (FREQS, FREQS.clone())}, "q and k have different tables"),
    "offsets": ({"cu_seqlens_kv": CU_SEQLENS.clone()}, "q and k have different cu_seqlens"),
    "inference": ({"inference_params": INFERENCE}, "jitrope does not know the argument inference_params of forward"),
    "fp8": ({}, "fp8"),
    "no table": ({"rotary_pos_emb": None}, None),
    "no norm": ({}, None),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_fused(te: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    layer = hosts.te_attention(te, None if name == "no norm" else "RMSNorm", False, torch.float32, qkv_format="thd")
    more, reason = LEFT[name]
    words = {"rotary_pos_emb": FREQS, "cu_seqlens_q": CU_SEQLENS, "cu_seqlens_kv": CU_SEQLENS, **more}
    monkeypatch.setattr(te.FP8GlobalStateManager, "is_fp8_enabled", lambda: name == "fp8")
    with transformer_engine.enable() as report:
        layer(torch.randn(24, 64), **words)
    assert report.calls == {"jitrope": 0 if name == "no table" else 2, "host": 0}
    assert report.reasons == ({} if reason is None else {f"not fused: {reason}": 1})
