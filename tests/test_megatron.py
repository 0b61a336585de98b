"""Megatron-core: latent attention's fused functions, and its attention layers with jitrope."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope.integrations import _host, megatron

from .hosts import group, missing

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
UNIT = {"fp32": 2**-20, "fp16": 2**-10, "bf16": 2**-7}


@pytest.fixture(scope="module")
def core() -> Any:
    """Megatron's modules of attention."""
    try:
        from megatron.core.fusions import fused_mla_yarn_rope_apply
        from megatron.core.transformer import attention, multi_latent_attention
    except ImportError:
        missing("pip install megatron-core")
    return SimpleNamespace(fused=fused_mla_yarn_rope_apply, attention=attention, latent=multi_latent_attention)


@pytest.fixture
def enabled(core: Any) -> Iterator[Any]:
    with megatron.enable() as report:
        yield report
    assert not _host.placed


# ---- latent attention's functions ----------------------------------------------------------------------


def yarn_tables(rows: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tables like those of `YarnRotaryEmbedding`, [rows, 1, 1, dim]: equal halves, a factor, the model's dtype."""
    angles = torch.outer(torch.arange(rows).float(), 100 ** (-torch.arange(0, dim, 2) / dim))
    angles = torch.cat((angles, angles), -1)[:, None, None]
    return (angles.cos() * 1.2).to(dtype), (angles.sin() * 1.2).to(dtype)


def rows_of(cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Each token's position: a rank has the chunks `rank` and `2 cp_size - 1 - rank` of each sequence."""
    rows = []
    for length in cu_seqlens.diff().tolist():
        chunk = length // (2 * cp_size)
        chunks = (cp_rank, 2 * cp_size - 1 - cp_rank) if cp_size > 1 else (0, 1)
        rows += [torch.arange(c * chunk, (c + 1) * chunk) for c in chunks]
    return torch.cat(rows)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The published formula in fp64: neighbours (a, b) become a cos - b sin in the left half, b cos + a sin in the
    right one."""
    x, cos, sin = x.double(), cos.double(), sin.double()
    half = x.shape[-1] // 2
    a, b = x[..., 0::2], x[..., 1::2]
    left = a * cos[..., :half] - b * sin[..., :half]
    return torch.cat((left, b * cos[..., half:] + a * sin[..., half:]), -1)


def latent_oracle(q: Tensor, kv: Tensor, k_pe: Tensor, cos: Tensor, sin: Tensor, first: int) -> tuple[Tensor, ...]:
    """q, k and v by slices and concatenations."""
    query = torch.cat((q[..., :first].double(), rotated(q[..., first:], cos, sin)), -1)
    turned = rotated(k_pe, cos, sin).expand(*kv.shape[:-1], -1)
    return query, torch.cat((kv[..., :first].double(), turned), -1), kv[..., first:].double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("packed", "cp"), [(False, 1), (False, 2), (True, 1), (True, 2), (True, 4)], ids=lambda x: str(x).lower()
)
def test_latent_functions(packed: bool, cp: int, dtype: str) -> None:
    """Results and gradients are those of the published formula, rounded once, for every rank."""
    torch.manual_seed(0)
    first, dim, v_dim, heads = 32, 16, 24, 3
    cu_seqlens = torch.tensor([0, 8, 24, 24, 48], dtype=torch.int32)
    lead = (48 // cp,) if packed else (6, 2)
    tables = yarn_tables(24, dim, DTYPES[dtype])
    for rank in range(cp):
        sizes = ((heads, first + dim), (heads, first + v_dim), (1, dim))
        leaves = [torch.randn(*lead, *size).to(DTYPES[dtype]).requires_grad_() for size in sizes]
        where = (cu_seqlens if packed else None, rank, cp)
        q = megatron.fused_apply_mla_rope_for_q(leaves[0], *tables, first, dim, *where)
        kv = megatron.fused_apply_mla_rope_for_kv(*leaves[1:], *tables, dim, first, v_dim, *where)
        if packed:
            rows = [x[rows_of(cu_seqlens, cp, rank)].squeeze(1) for x in tables]
        else:  # the host has sliced the tables for its rank already
            rows = [x[: lead[0]] for x in tables]
        want = latent_oracle(*leaves, *rows, first)
        weights = [torch.randn_like(x) for x in want]
        grads = [
            torch.autograd.grad(
                sum((x.double() * w.to(DTYPES[dtype]).double()).sum() for x, w in zip(xs, weights)), leaves
            )
            for xs in ((q, *kv), want)
        ]
        for got, expected in zip((q, *kv, *grads[0]), (*want, *grads[1])):
            assert got.dtype == DTYPES[dtype]
            assert got.is_contiguous()
            torch.testing.assert_close(got.double(), expected.double(), rtol=UNIT[dtype], atol=UNIT[dtype])
        assert torch.equal(kv[1], leaves[1][..., first:])


def test_latent_signatures(core: Any) -> None:
    for ours in (megatron.fused_apply_mla_rope_for_q, megatron.fused_apply_mla_rope_for_kv):
        theirs = getattr(core.fused, ours.__name__)
        got, want = ([(p.name, p.default) for p in inspect.signature(f).parameters.values()] for f in (ours, theirs))
        assert got == want


def test_latent_refusals(core: Any, enabled: Any) -> None:
    """A refused call reaches the host, which refuses it in its own words."""
    tables, q = yarn_tables(6, 16, torch.float32), torch.randn(6, 1, 2, 48)
    kv, k_pe = torch.randn(6, 1, 2, 56), torch.randn(6, 1, 1, 16)
    for call, message in (
        (lambda m: m.fused_apply_mla_rope_for_q(q, *tables, 32, 16, rotary_interleaved=True), "rotary_interleaved"),
        (lambda m: m.fused_apply_mla_rope_for_q(q, *tables, 40, 8), "16 and 16 columns; they must have 8"),
        (lambda m: m.fused_apply_mla_rope_for_kv(kv, k_pe, *tables, 16, 32, 16), "heads of 56 and k_pos_emb of 16"),
    ):
        with pytest.raises(jitrope.InvalidInput, match=message):
            call(megatron)
        with pytest.raises(Exception) as error:  # noqa: PT011
            call(core.fused)
        assert not isinstance(error.value, jitrope.InvalidInput)
    assert enabled.calls == {"jitrope": 0, "host": 3}


# ---- layers --------------------------------------------------------------------------------------------


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Megatron's process groups of one rank, on the CPU."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import multi_latent_attention

    monkeypatch.setattr(multi_latent_attention, "HAVE_TE", False)  # 0.16.1 sets it to True without TransformerEngine
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    with group(1) as alone:
        yield ProcessGroupCollection(tp=alone, cp=alone, pp=alone)


class Core(torch.nn.Module):
    """Causal attention in plain torch, of [s, b, h, d] or one sequence [t, h, d]; Megatron's local one is fp32 only."""

    def __init__(self, **words: Any) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **words: Any) -> Tensor:
        self.inputs = [q, k, v]
        q, k, v = (x.reshape(len(x), -1, *x.shape[-2:]).permute(1, 2, 0, 3) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def built(spec: Any, config: Any, ranks: Any) -> Any:
    """An attention layer of a spec with our core, and with random weights."""
    from megatron.core.transformer.spec_utils import build_module

    torch.manual_seed(0)
    attention = spec.submodules.self_attention
    attention.submodules.core_attention = Core
    layer = build_module(attention, config=config, layer_number=1, pg_collection=ranks)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def packed_of(cu_seqlens: Tensor) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    longest = int(cu_seqlens.diff().max())
    return PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest)


def results(layer: Any, x: Tensor, *arguments: Any, **words: Any) -> list[Tensor]:
    """A layer's q, k, v and output, and the gradients of the input and of all its weights."""
    leaf = x.clone().requires_grad_()
    out, _ = layer(leaf, None, *arguments, **words)
    grads = torch.autograd.grad(out.float().sin().sum(), (leaf, *layer.parameters()), allow_unused=True)
    return [*layer.core_attention.inputs, out, *(g for g in grads if g is not None)]


@pytest.mark.parametrize("packed", [False, True])
def test_latent_attention_layer(core: Any, ranks: Any, packed: bool) -> None:
    """Megatron's layer with `apply_rope_fusion` and jitrope computes what its own code without fusion does."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import MLATransformerConfig

    config = MLATransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=2, q_lora_rank=24, kv_lora_rank=24, qk_head_dim=32,
        qk_pos_emb_head_dim=16, v_head_dim=24, use_cpu_initialization=True, normalization="RMSNorm",
    )  # fmt: skip
    layer = built(get_gpt_layer_local_spec(multi_latent_attention=True, normalization="RMSNorm"), config, ranks)
    x = torch.randn(12, 1 if packed else 2, 64)
    where = packed_of(torch.tensor([0, 5, 12], dtype=torch.int32)) if packed else None
    want = results(layer, x, packed_seq_params=where)
    config.apply_rope_fusion = True
    with megatron.enable() as report:
        got = results(layer, x, packed_seq_params=where)
    assert report.calls == {"jitrope": 2, "host": 0}
    assert len(got) == len(want) > 8
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    with pytest.raises(TypeError):  # disabled: the host's functions are Triton's
        layer(x, None, packed_seq_params=where)
