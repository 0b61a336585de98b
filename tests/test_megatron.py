"""Megatron-core: jitrope's rope, latent attention and attention layers against Megatron's own, without fusion.

`.ci/run` runs this file with 0.16.1, which is installed, and with 0.19.2.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope.integrations import _host, megatron

from . import hosts
from .devices import devices
from .hosts import doubled, freqs_of, group, separate

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(scope="module")
def core() -> Any:
    return hosts.megatron()


@pytest.fixture
def enabled(core: Any) -> Iterator[Any]:
    with megatron.enable() as report:
        yield report
    assert not _host.placed


@pytest.fixture
def device() -> str:
    """The device of tests that have no such parameter."""
    return "cpu"


# ---- rope ----------------------------------------------------------------------------------------------


def config(
    core: Any, apply_rope_fusion: bool = True, multi_latent_attention: bool = False, heads: int = 2, **words: Any
) -> Any:
    """Megatron's own configuration of a small model."""
    kind = core.transformer.MLATransformerConfig if multi_latent_attention else core.transformer.TransformerConfig
    made = kind(num_layers=1, hidden_size=64, num_attention_heads=heads, **words, apply_rope_fusion=False)
    made.apply_rope_fusion = apply_rope_fusion  # set late: the constructor requires TransformerEngine or Triton
    return made


def mla_of(core: Any, words: dict[str, Any]) -> list[dict[str, Any]]:
    """The further words of a call: 0.19 takes the pairing of latent attention as an argument, 0.16 by configuration."""
    if "mla_rotary_interleaved" not in inspect.signature(core.rope_utils.apply_rotary_pos_emb).parameters:
        return [{}]
    return [{}, *({"mla_rotary_interleaved": x} for x in (False, True) if "multi_latent_attention" in words)]


def rotated_by(
    core: Any, t: Tensor, freqs: Tensor, fused: bool, words: Any, *arguments: Any, cp: Any = (1, 0), **call: Any
) -> list[Tensor]:
    """The result and the gradient of Megatron's function, fused (jitrope) or not."""
    leaf = t.clone().requires_grad_()
    with group(*cp) as ranks:
        out = core.rope_utils.apply_rotary_pos_emb(
            leaf, freqs, config(core, fused, **words), *arguments, cp_group=ranks, **call
        )
    return [out, *torch.autograd.grad(out.sin().sum(), leaf)]


PADDED: list[Any] = [  # words, rotated elements, batch, mscale
    ({}, 32, 1, 1.0),
    ({"rotary_interleaved": True}, 16, 1, 1.0),
    ({}, 32, 2, 1.5),
    ({"multi_latent_attention": True}, 16, 1, 0.8),
    ({"mrope_section": [4, 6, 6]}, 32, 2, 1.0),
]


@pytest.mark.parametrize(("device", "words", "dim", "batch", "mscale"), devices(PADDED, PADDED[1:]))
def test_padded(core: Any, enabled: Any, device: str, words: Any, dim: int, batch: int, mscale: float) -> None:
    """The results of Megatron's unfused path: pairings, partial, mscale, mRoPE with a batch, and latent attention."""
    t = torch.rand(6, 2, 3, 32).to(device)
    freqs = freqs_of(6, dim, bool(words.get("rotary_interleaved")), batch).to(device)
    calls = mla_of(core, words)
    for call in calls:
        got, want = (rotated_by(core, t, freqs, fused, words, mscale=mscale, **call) for fused in (True, False))
        torch.testing.assert_close(got, want)
    assert enabled.calls == {"jitrope": len(calls), "host": len(calls)}
    assert enabled.reasons == {"apply_rope_fusion is off": len(calls)}


PAIRINGS: list[dict[str, bool]] = [{}, {"rotary_interleaved": True}, {"multi_latent_attention": True}]
PACKED = [*product(PAIRINGS, ("position", "token"), (1, 2, 4))]


@pytest.mark.parametrize(("device", "words", "table", "cp"), devices(PACKED, PACKED[1::7]))
def test_packed(core: Any, enabled: Any, device: str, words: Any, table: str, cp: int) -> None:
    """The results of the unfused path: packed, context parallel, tables by position and (mRoPE) by token."""
    # 0.19's unfused path of interleaved pairs fails on an empty sequence.
    lengths = torch.tensor([8, 8, 8, 8, 24] if "rotary_interleaved" in words else [8, 16, 0, 8, 24])
    cu_seqlens = torch.cat((torch.zeros(1), lengths.cumsum(0))).int().to(device)
    freqs = freqs_of(24 if table == "position" else 56, 16, bool(words.get("rotary_interleaved"))).to(device)
    if table == "token":
        freqs = freqs * torch.rand(56, 1, 1, 1).to(device)  # any angles, not just rising ones
    t = torch.rand(56 // cp, 3, 32).to(device)
    for rank, call in product(range(cp), mla_of(core, words)):
        both = [rotated_by(core, t, freqs, fused, words, cu_seqlens, cp=(cp, rank), **call) for fused in (True, False)]
        torch.testing.assert_close(*both)


def test_hooks(core: Any) -> None:
    """The two hooks, None without TransformerEngine, are replaced in every module that holds them."""
    rope_utils = core.rope_utils
    before = [rope_utils.fused_apply_rotary_pos_emb, rope_utils.apply_rotary_pos_emb]
    with megatron.enable() as report:
        assert core.attention.apply_rotary_pos_emb is rope_utils.apply_rotary_pos_emb is not before[1]
        assert core.rotary.apply_rotary_pos_emb is core.latent.apply_rotary_pos_emb is rope_utils.apply_rotary_pos_emb
        assert megatron.enable().replaced == report.replaced
        t, freqs = torch.rand(8, 2, 16), freqs_of(8, 16)
        cu_seqlens = torch.tensor([0, 6, 8], dtype=torch.int32)
        out = rope_utils.fused_apply_rotary_pos_emb_thd(t, cu_seqlens, freqs[:6], cp_size=1, cp_rank=0)
        with group(1, 0) as alone:
            host = rope_utils._apply_rotary_pos_emb_thd(t, cu_seqlens, freqs[:6], cp_group=alone)
        torch.testing.assert_close(out, host)
        out = rope_utils.fused_apply_rotary_pos_emb(t[:, None], freqs, interleaved=False)
        torch.testing.assert_close(out, rope_utils._apply_rotary_pos_emb_bshd(t[:, None], freqs))
        assert report.calls == {"jitrope": 2, "host": 0}
        with pytest.raises(jitrope.InvalidInput, match="float64"):  # the host has no hook
            rope_utils.fused_apply_rotary_pos_emb(t[:, None].double(), freqs)
        with pytest.raises(jitrope.InvalidInput, match="max_seqlen of fused_apply_rotary_pos_emb_thd"):
            rope_utils.fused_apply_rotary_pos_emb_thd(t, cu_seqlens, freqs[:6], max_seqlen=6)
    assert [rope_utils.fused_apply_rotary_pos_emb, rope_utils.apply_rotary_pos_emb] == before
    assert core.attention.apply_rotary_pos_emb is before[1]


def test_configuration(core: Any) -> None:
    """Without TransformerEngine Megatron refuses `apply_rope_fusion`, which jitrope makes possible; and pairs into
    halves of pairs, which jitrope refuses too."""
    made, words = core.transformer.TransformerConfig, {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    with pytest.raises(ValueError, match="apply_rope_fusion"):
        made(**words, apply_rope_fusion=True)
    with megatron.enable() as report:
        assert made(**words, apply_rope_fusion=True).apply_rope_fusion
    assert not report.left
    made = config(core, multi_latent_attention=True)
    made.rotary_interleaved = True
    with pytest.raises(jitrope.InvalidInput, match="mla_rotary_interleaved with rotary_interleaved"):
        megatron.apply_rotary_pos_emb(torch.rand(4, 1, 2, 16), freqs_of(4, 16, True), made)


# ---- layers --------------------------------------------------------------------------------------------


@pytest.fixture
def ranks(core: Any, monkeypatch: pytest.MonkeyPatch, request: Any, device: str) -> Iterator[Any]:
    """Megatron's process groups; the parameter is the context parallel (size, rank)."""
    monkeypatch.setattr(core.latent, "HAVE_TE", False)  # 0.16.1 sets it to True without TransformerEngine
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    for cls, name in ((core.norms.L2Norm, "_norm"), (core.attention.Attention, "_apply_output_gate")):
        method = getattr(cls, name)  # it would compile for seconds
        monkeypatch.setattr(cls, name, getattr(method, "_torchdynamo_orig_callable", method))
    with group(*getattr(request, "param", (1, 0))) as everyone:
        alone = torch.distributed.new_group([torch.distributed.get_rank()])
        yield core.groups.ProcessGroupCollection(tp=alone, cp=everyone, pp=alone)


class Core(torch.nn.Module):
    """Causal attention in plain torch, of [s, b, h, d] or one sequence [t, h, d]; Megatron's local one is fp32 only."""

    def __init__(self, **words: Any) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **words: Any) -> Tensor:
        self.inputs, packed = [q, k, v], q.dim() == 3
        q, k, v = (x.reshape(len(x), -1, *x.shape[-2:]).permute(1, 2, 0, 3) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(1 if packed else 2)


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


def packed_of(core: Any, cu_seqlens: Tensor) -> Any:
    longest = int(cu_seqlens.diff().max())
    return core.packed.PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest)


def results(layer: Any, x: Tensor, *arguments: Any, **words: Any) -> list[Tensor]:
    """A layer's q, k, v and output, and the gradients of the input and of all its weights."""
    leaf = x.clone().requires_grad_()
    out, _ = layer(leaf, None, *arguments, **words)
    grads = torch.autograd.grad(out.float().sin().sum(), (leaf, *layer.parameters()), allow_unused=True)
    return [*layer.core_attention.inputs, out, *(g for g in grads if g is not None)]


LATENT_LAYERS = [("yarn", False), ("yarn", True), ("rope", False), ("rope", True)]


@pytest.mark.parametrize(("device", "kind", "packed"), devices(LATENT_LAYERS, LATENT_LAYERS[:2]))
def test_latent_attention_layer(core: Any, ranks: Any, device: str, kind: str, packed: bool) -> None:
    """The layer computes what it does without jitrope: its rope is left to Megatron."""
    words = {"q_lora_rank": 24, "kv_lora_rank": 24, "qk_head_dim": 32, "qk_pos_emb_head_dim": 16, "v_head_dim": 24}
    words |= {"use_cpu_initialization": True, "normalization": "RMSNorm", "rope_type": kind}
    made = config(core, False, True, **words)
    spec = core.specs.get_gpt_layer_local_spec(multi_latent_attention=True, normalization="RMSNorm")
    layer = built(spec, made, ranks).to(device)
    x = torch.randn(12, 1 if packed else 2, 64).to(device)
    where = packed_of(core, torch.tensor([0, 5, 12], dtype=torch.int32, device=device)) if packed else None
    want = results(layer, x, packed_seq_params=where)
    with megatron.enable() as report:
        got = results(layer, x, packed_seq_params=where)
    assert report.calls == {"jitrope": 0, "host": 2}
    assert len(want) > 8
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


NORMS: dict[str, dict[str, Any]] = {
    "RMSNorm": {"normalization": "RMSNorm"},
    "LayerNorm": {"normalization": "LayerNorm"},
    "L2Norm": {"normalization": "RMSNorm", "qk_l2_norm": True},
}
CU_SEQLENS = torch.tensor([0, 8, 24], dtype=torch.int32)


def self_attention(core: Any, ranks: Any, norm: str, dtype: Any = torch.float32, size: int = 32, **words: Any) -> Any:
    """Megatron's `SelfAttention` with qk_layernorm, 4 heads of q and 2 of k. size: of a head."""
    words |= {"num_query_groups": 2, "kv_channels": size, "qk_layernorm": True, "use_cpu_initialization": True}
    made = config(core, heads=4, normalization=NORMS[norm]["normalization"], params_dtype=dtype, **words)
    return built(core.specs.get_gpt_layer_local_spec(qk_layernorm=True, **NORMS[norm]), made, ranks)


def close(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * max(1.0, float(b.detach().abs().max())))


SELF = [*product(NORMS, ("fp32", "bf16"), (False, True))]
SOME = (SELF[0], SELF[3], SELF[4], SELF[9])


@pytest.mark.parametrize(("device", "norm", "dtype", "packed"), devices(SELF, SOME))
def test_self_attention(core: Any, ranks: Any, enabled: Any, device: str, norm: str, dtype: str, packed: bool) -> None:
    """q, k and v have the bits of the host's norms before jitrope's rope; in fp32 all agrees with Megatron's code.

    On a GPU that holds for RMSNorm; the others add in another order.
    """
    layer = self_attention(core, ranks, norm, DTYPES[dtype], 64).to(device)
    x = torch.randn(24 if packed else 6, 1 if packed else 2, 64).to(device, DTYPES[dtype])
    words = {"rotary_pos_emb": freqs_of(*((24, 64) if packed else (6, 64, False, 2))).to(device)}
    words["packed_seq_params"] = packed_of(core, CU_SEQLENS.to(device)) if packed else None
    got = results(layer, x, **words)
    assert enabled.calls == {"jitrope": 0, "host": 0, "fused": 1}
    with separate(layer.q_layernorm, layer.k_layernorm):
        want = results(layer, x, **words)
    assert enabled.calls == {"jitrope": 2, "host": 0, "fused": 1}
    assert enabled.reasons == {"not fused: a norm has hooks": 1}
    bits = 4 if device == "cpu" else 3 * (norm == "RMSNorm")  # on a GPU strides choose the kernels of attention
    for a, b in zip(got[:bits], want[:bits]):
        assert torch.equal(a, b)
    tolerance = {"fp32": 2e-5 if device == "cpu" else 1e-4, "bf16": 0.05}[dtype]
    close(got[bits:], want[bits:], tolerance)
    layer.config.apply_rope_fusion = False
    stock = results(layer, x, **words)
    assert enabled.calls == {"jitrope": 2, "host": 2, "fused": 1}
    if dtype == "fp32":
        close(got, stock, tolerance)


def rows_of(cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Each token's position: a rank has the chunks `rank` and `2 cp_size - 1 - rank` of each sequence."""
    rows = []
    for length in cu_seqlens.diff().tolist():
        chunk = length // (2 * cp_size)
        chunks = (cp_rank, 2 * cp_size - 1 - cp_rank) if cp_size > 1 else (0, 1)
        rows += [torch.arange(c * chunk, (c + 1) * chunk) for c in chunks]
    return torch.cat(rows)


RANKS = [((2, 0),), ((2, 1),), ((4, 3),)]


@pytest.mark.parametrize(("device", "ranks"), devices(RANKS, RANKS[1:]), indirect=["ranks"])
def test_self_attention_with_context_parallelism(core: Any, ranks: Any, enabled: Any, device: str) -> None:
    """A rank's two chunks of packed sequences, with a factor, a partial rotation and interleaved pairs."""
    layer = self_attention(core, ranks, "RMSNorm", rotary_interleaved=True).to(device)
    layer.config.yarn_rotary_scaling_factor, layer.config.yarn_mscale, layer.config.yarn_mscale_all_dim = 8.0, 1.0, 0.0
    factor = 0.1 * math.log(8.0) + 1.0
    if hasattr(layer, "_yarn_concentration_factor"):  # made in the constructor
        layer._yarn_concentration_factor = factor
    size, x = ranks.cp.size(), torch.randn(24 // ranks.cp.size(), 1, 64).to(device)
    freqs = freqs_of(16, 16, True).to(device)
    words = {"rotary_pos_emb": freqs, "packed_seq_params": packed_of(core, CU_SEQLENS.to(device))}
    got = results(layer, x, **words)
    with separate(layer.q_layernorm, layer.k_layernorm):
        close(got, results(layer, x, **words), 1e-5)
    at = rows_of(CU_SEQLENS, size, ranks.cp.rank())
    assert not torch.equal(at, torch.arange(len(x)))
    q, k, _ = layer.get_query_key_value_tensors(x)
    for normed, ours in ((q, got[0]), (k, got[1])):
        pairs = torch.view_as_complex(normed[:, 0, :, :16].unflatten(-1, (-1, 2)).contiguous())
        angles = freqs[at.to(device), 0, :, ::2]
        turned = torch.view_as_real(pairs * torch.polar(torch.full_like(angles, factor), angles)).flatten(-2)
        torch.testing.assert_close(ours[..., :16], turned)
        torch.testing.assert_close(ours[..., 16:], normed[:, 0, :, 16:])
    assert enabled.calls == {"jitrope": 2, "host": 0, "fused": 1}


class Own(torch.nn.Identity):
    """A norm with other results, under a name that is not Megatron's."""


TABLE = freqs_of(6, 32)
LEFT = {  # a change of the layer and of the words of its call, the reason why it is not fused, and calls of rope
    "own": (lambda x, _: setattr(x, "k_layernorm", Own()), "Own is no norm that jitrope knows, or was changed", 2),
    "eps": (lambda x, _: setattr(x.k_layernorm, "eps", 1e-3), "the norms of q and k differ", 2),
    "weight": (lambda x, _: x.q_layernorm.double(), "prepare_fused_qkv: q_weight is float64; it must be (32,), "
               "float32 or float16 or bfloat16, contiguous, on cpu like q of qkv", 2),
    "tables": (lambda _, w: w.update(rotary_pos_emb=(TABLE, TABLE.clone())), "q and k have different tables", 2),
    "no table": (lambda _, w: w.update(rotary_pos_emb=None), None, 0),
    "no norm": (lambda x, _: [setattr(x, f"{name}_layernorm", None) for name in "qk"], None, 2),
    "no rope": (lambda x, _: setattr(x.config, "no_rope_freq", [1]), None, 0),
    "gate": (lambda *_: None, "the host splits QKV", 2),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_self_attention_that_is_not_fused(core: Any, ranks: Any, name: str) -> None:
    """The host's norms and jitrope's rope run, with the results of the stock layer, and the reason is told."""
    layer = self_attention(core, ranks, "RMSNorm", **({"attention_output_gate": True} if name == "gate" else {}))
    x, words = torch.randn(6, 2, 64), {"rotary_pos_emb": TABLE}
    change, reason, calls = LEFT[name]
    change(layer, words)
    with megatron.enable() as report:
        got, _ = layer(x, None, **words)
        assert report.calls == {"jitrope": calls, "host": 0}
        assert report.reasons == ({} if reason is None else {f"not fused: {reason}": 1})
    layer.config.apply_rope_fusion = False
    torch.testing.assert_close(got, layer(x, None, **words)[0], rtol=1e-4, atol=1e-4)


PATCHES = {  # the place in the host, and the reason why norms are not fused
    "rope": ("apply_rotary_pos_emb", "not fused: apply_rotary_pos_emb was replaced"),
    "norm": ("L2Norm.forward", "not fused: L2Norm is no norm that jitrope knows, or was changed"),
    "norm's part": ("L2Norm._norm", "not fused: L2Norm is no norm that jitrope knows, or was changed"),
    "method": ("SelfAttention.get_query_key_value_tensors", "get_query_key_value_tensors"),
    "method of a layer": ("layer", "not fused: SelfAttention has its own get_query_key_value_tensors"),
    "forward": ("Attention.forward", "not fused: jitrope does not know the argument 1 of forward"),
}


@pytest.mark.parametrize("when", ["before enable", "after enable", "after a call"])
@pytest.mark.parametrize("name", PATCHES)
def test_a_patch(core: Any, ranks: Any, monkeypatch: pytest.MonkeyPatch, name: str, when: str) -> None:
    """It has the effect that it has without jitrope."""
    where, reason = PATCHES[name]
    layer, x, words = self_attention(core, ranks, "L2Norm"), torch.randn(6, 2, 64), {"rotary_pos_emb": TABLE}
    place, _, last = where.rpartition(".")
    holder = {"": core.attention, "L2Norm": core.norms.L2Norm}.get(place) or getattr(core.attention, place)
    if where == "layer":
        holder, last = layer, "get_query_key_value_tensors"

    def patched(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(holder, last, doubled(getattr(holder, last), named=False))

    with monkeypatch.context() as patch:
        patch.setattr(layer.config, "apply_rope_fusion", False)
        patched(patch)
        want = layer(x, None, **words)[0]
    with monkeypatch.context() as patch:
        if when == "before enable":
            patched(patch)
        with megatron.enable() as report, monkeypatch.context() as late:
            if when == "after a call":
                layer(x, None, **words)
            fused = report.calls["fused"]
            if when != "before enable":
                patched(late)
            torch.testing.assert_close(layer(x, None, **words)[0], want, rtol=1e-4, atol=1e-4)
            around = where == "Attention.forward" and when != "before enable"  # it calls ours
            assert report.calls["fused"] - fused == int(around)
            assert around or reason in str(report) + report.table()


def test_an_argument_of_forward_that_jitrope_does_not_know(
    core: Any, ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer Megatron's: with its default the layer is fused, otherwise the host's forward gets it."""
    cls, seen = core.attention.Attention, []
    before = cls.forward

    def forward(self, hidden_states, attention_mask, rotary_pos_emb=None, rope_scale=None):
        seen.append(rope_scale)
        return before(self, hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb)

    monkeypatch.setattr(cls, "forward", forward)
    layer, x, freqs = self_attention(core, ranks, "RMSNorm"), torch.randn(6, 2, 64), TABLE
    with megatron.enable() as report:
        fused = layer(x, None, freqs)[0]
        assert report.calls == {"jitrope": 0, "host": 0, "fused": 1}
        torch.testing.assert_close(layer(x, None, rotary_pos_emb=freqs, rope_scale=2)[0], fused)
        assert report.calls == {"jitrope": 2, "host": 0, "fused": 1}
        assert report.reasons == {"not fused: jitrope does not know the argument rope_scale of forward": 1}
        with pytest.raises(TypeError, match="other"):  # the host's own
            layer(x, None, freqs, other=3)
    assert seen == [None, 2]


def test_compiled_self_attention(core: Any, ranks: Any, enabled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one graph with fused norms; a rope function that is replaced later is called."""
    layer, x, words = self_attention(core, ranks, "RMSNorm"), torch.randn(6, 2, 64), {"rotary_pos_emb": TABLE}

    def compiled() -> Tensor:
        torch._dynamo.reset()
        layer.compile(backend="eager", fullgraph=True)
        try:
            return layer(x, None, **words)[0]
        finally:
            layer._compiled_call_impl = None

    with torch.no_grad():
        got = compiled()
        assert enabled.calls == {"jitrope": 0, "host": 0, "fused": 1}
        want = layer(x, None, **words)[0]
        torch.testing.assert_close(got, want)
        with monkeypatch.context() as late:  # it ends before jitrope is disabled
            late.setattr(core.attention, "apply_rotary_pos_emb", lambda t, *_, **__: t)
            got = compiled()
            torch.testing.assert_close(got, layer(x, None, **words)[0])
    assert not torch.allclose(got, want)
