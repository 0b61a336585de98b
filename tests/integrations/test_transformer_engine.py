"""TransformerEngine: its rope functions, and `MultiheadAttention` with norms of q and k before or after rope.

The wheel has no CPU build: `te` in conftest.py has its files, with stand-ins for what they import.
"""

from __future__ import annotations

import inspect
import sys
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from jitrope.integrations import transformer_engine

from .. import hosts
from ..devices import devices
from ..hosts import freqs_of, separate

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture
def rope(te: Any) -> Any:
    """Its rope.py, whose plain torch path does not use what has a stand-in."""
    return sys.modules[hosts.TE_ROPE]


# ---- the functions -------------------------------------------------------------------------------------


def assert_alike(ours: Any, host: Any, t: Tensor, overlapping: bool = False) -> None:
    """Output and gradient are the host's, computed in fp32 and rounded once. overlapping: of an expanded gradient."""
    results = []
    for function, x in ((ours, t), (host, t.float())):
        leaf = x.detach().requires_grad_()
        out = function(leaf)
        loss = out.float().sum() * 2 if overlapping else (out.float() * torch.arange(out.shape[-1]).to(out)).sum()
        results.append((out.detach(), *torch.autograd.grad(loss, leaf)))
    for a, b in zip(*results):
        assert a.dtype == t.dtype
        torch.testing.assert_close(a, b.to(t.dtype))


@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "apply_fused_qkv_rotary_pos_emb"])
def test_te_signatures(rope: Any, name: str) -> None:
    parameters = [inspect.signature(getattr(x, name)).parameters.values() for x in (rope, transformer_engine)]
    theirs, ours = ([(p.name, p.default) for p in each] for each in parameters)
    assert name in rope.__all__
    assert ours == theirs


TE_CASES = [  # tensor_format, dtype, interleaved, rotary part, starts, cp, transposed axes, overlapping gradient
    ("sbhd", "fp32", False, 1.0, False, 1, None, False),
    ("sbhd", "bf16", False, 1.0, True, 1, None, True),
    ("sbhd", "fp16", True, 0.5, False, 2, (0, 1), False),
    ("sbhd", "fp32", False, 0.5, True, 2, (2, 3), False),
    ("bshd", "bf16", True, 1.0, True, 2, None, True),
    ("bshd", "fp16", False, 1.0, True, 1, (2, 3), True),
    ("thd", "fp32", False, 0.5, False, 1, None, False),
    ("thd", "bf16", False, 0.5, True, 2, None, False),
    ("thd", "fp16", True, 0.5, False, 2, None, False),
    ("thd", "fp32", True, 1.0, True, 2, None, True),
]
TE_NAMES = ("device", "tensor_format", "dtype", "interleaved", "part", "starts", "cp", "axes", "overlapping")


@pytest.mark.parametrize(TE_NAMES, devices(TE_CASES, (*TE_CASES[1:5], *TE_CASES[7:])))
def test_te_rope(
    rope: Any, device: str, tensor_format: str, dtype: str, interleaved: bool, part: float, starts: bool, cp: int,
    axes: Any, overlapping: bool,
) -> None:  # fmt: skip
    """The plain torch path of TransformerEngine, padded and packed, on every rank."""
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
        words["cp_rank"] = rank
        ours = partial(transformer_engine.apply_rotary_pos_emb, freqs=freqs, fused=True, **words)
        assert_alike(ours, partial(rope.apply_rotary_pos_emb, freqs=freqs, **words), t, overlapping)
        assert ours(t).is_contiguous()


TE_QKV = [(*case, n) for case in (("sbhd", 1, False), ("bshd", 2, True), ("thd", 2, False)) for n in ("one", "two")]


@pytest.mark.parametrize(("device", "tensor_format", "cp", "interleaved", "tables"), devices(TE_QKV, TE_QKV[::2]))
def test_te_fused_qkv(rope: Any, device: str, tensor_format: str, cp: int, interleaved: bool, tables: str) -> None:
    """The results are those of the host's single op on slices, also with starts and context parallelism."""
    torch.manual_seed(0)
    groups, dim, split = 3, 16, [64, 16, 16]
    lead = {"sbhd": (6, 2), "bshd": (2, 6), "thd": (12,)}[tensor_format]
    qkv = torch.rand(*lead, groups, sum(split)).to(device)
    q_freqs = freqs_of(40, dim, interleaved).to(device)
    k_freqs = q_freqs if tables == "one" else freqs_of(40, dim, interleaved, base=1e4).to(device)
    words = {"tensor_format": tensor_format, "interleaved": interleaved, "cp_size": cp, "cp_rank": cp - 1}
    words["start_positions"] = torch.tensor([2, 5], dtype=torch.int32, device=device)
    if tensor_format == "thd":
        words["cu_seqlens"] = torch.tensor([0, 8, 12 * cp], dtype=torch.int32, device=device)

    def host(x: Tensor) -> Tensor:
        q, k, v = x.split(split, -1)
        q = q.reshape(*lead, -1, dim)
        rotated = [rope.apply_rotary_pos_emb(y, f, **words) for y, f in ((q, q_freqs), (k, k_freqs))]
        return torch.cat([y.flatten() for y in (*rotated, v)])

    def ours(x: Tensor) -> Tensor:
        parts = transformer_engine.apply_fused_qkv_rotary_pos_emb(x, q_freqs, k_freqs, split, **words)
        assert [y.shape[-2] for y in parts] == [12, 3, 3]
        assert all(y.is_contiguous() for y in parts)
        return torch.cat([y.flatten() for y in parts])

    assert_alike(ours, host, qkv)


# ---- attention -----------------------------------------------------------------------------------------


NORMS = ("RMSNorm", "LayerNorm", "L2Normalization")
CASES = {  # layout, (context parallel size, rank), interleaved, partial rotation
    "sbhd": ("sbhd", (1, 0), False, 32),
    "bshd": ("bshd", (2, 1), True, 16),
    "thd": ("thd", (2, 0), False, 32),
}
SOME = [
    ("RMSNorm", "norm first", "sbhd", "bf16"),
    ("RMSNorm", "norm last", "thd", "bf16"),
    ("RMSNorm", "norm first", "thd", "fp32"),
    ("LayerNorm", "norm first", "bshd", "fp32"),
    ("L2Normalization", "norm last", "sbhd", "fp32"),
]


@pytest.mark.parametrize(
    ("device", "norm", "order", "case", "dtype"),
    devices(
        product(("RMSNorm", "LayerNorm", "L2Normalization"), ("norm last", "norm first"), CASES, ("fp32", "bf16")), SOME
    ),
)
def test_norms_and_rope_are_one_launch(te: Any, device: str, norm: str, order: str, case: str, dtype: str) -> None:
    """q and k are the host's, whose own rope has fp32 tables; gradients agree too."""
    layout, (size, rank), interleaved, rotated = CASES[case]
    words = {"qkv_format": layout, "rotary_pos_interleaved": interleaved}
    layer = hosts.te_attention(te, norm, order == "norm first", DTYPES[dtype], **words).to(device)
    layer.cp_size, layer.cp_rank = size, rank
    cu_seqlens = torch.tensor([0, 8, 24], dtype=torch.int32, device=device)
    freqs = freqs_of(24, rotated, interleaved).to(device)
    words = {"rotary_pos_emb": freqs}
    if layout == "thd":
        words |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens, "max_seqlen_q": 16, "max_seqlen_kv": 16}
    lead = {"sbhd": (12, 2), "bshd": (2, 12), "thd": (24 // size,)}[layout]
    x = torch.randn(*lead, 64).to(device, DTYPES[dtype])
    stock = hosts.step(layer, x, **words)
    with transformer_engine.enable() as report:
        got = hosts.step(layer, x, **words)
        assert report.calls == {"jitrope": 0, "host": 0, "fused": 1}
        with separate(layer.q_norm, layer.k_norm):
            want = hosts.step(layer, x, **words)
        assert report.calls == {"jitrope": 2, "host": 0, "fused": 1}
        assert report.reasons == {"not fused: a norm has hooks": 1}
    unit = {"fp32": 1e-5, "bf16": 2**-7}[dtype]
    for name, a, b, c in zip(("q", "k", "v", "out", *("gradient",) * 9), got, want, stock):
        assert a.dtype == b.dtype == c.dtype
        tolerance = unit * (4 if name in "qkv" else 16) * max(1.0, float(b.detach().abs().max()))
        torch.testing.assert_close(a, b, rtol=unit, atol=tolerance)
        if dtype == "fp32":
            torch.testing.assert_close(a, c, rtol=unit, atol=tolerance)
        if norm != "L2Normalization" and name in "qkv" and device == "cpu":
            assert torch.equal(a, b)


FREQS, CU_SEQLENS = freqs_of(24, 32), torch.tensor([0, 8, 24])
INFERENCE = SimpleNamespace(
    cache_manager=SimpleNamespace(cache={1: None}),
    get_seqlens_pre_step=lambda: torch.tensor([3, 0], dtype=torch.int32),
)
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
