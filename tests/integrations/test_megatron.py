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

from .. import hosts
from ..devices import devices
from ..hosts import close, freqs_of, group

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture
def enabled(core: Any) -> Iterator[Any]:
    with megatron.enable() as report:
        yield report
    assert not _host.placed


# ---- rope ----------------------------------------------------------------------------------------------


def both(core: Any, t: Tensor, freqs: Tensor, words: Any, *given: Any, cp: Any = (1, 0), **more: Any) -> int:
    """Fused (jitrope) and not, Megatron's function has one result and gradient. Returns the number of comparisons.

    0.19 takes the pairing of latent attention as an argument too, 0.16 by configuration alone.
    """
    function, calls = core.rope_utils.apply_rotary_pos_emb, [{}]
    if "mla_rotary_interleaved" in inspect.signature(function).parameters and "mla" in words:
        calls += [{"mla_rotary_interleaved": False}, {"mla_rotary_interleaved": True}]
    with group(*cp) as ranks:
        for call in calls:
            results = []
            for fusion in (True, False):
                leaf, config = t.clone().requires_grad_(), hosts.megatron_config(core, fusion=fusion, **words)
                out = function(leaf, freqs, config, *given, cp_group=ranks, **more, **call)
                results.append([out, *torch.autograd.grad(out.sin().sum(), leaf)])
            torch.testing.assert_close(*results)
    return len(calls)


PADDED: list[Any] = [  # words, rotated elements, batch, mscale
    *[({}, 32, 1, 1.0), ({"rotary_interleaved": True}, 16, 1, 1.0), ({}, 32, 2, 1.5), ({"mla": True}, 16, 1, 0.8)],
    ({"mrope_section": [4, 6, 6]}, 32, 2, 1.0),
]


@pytest.mark.parametrize(("device", "words", "dim", "batch", "mscale"), devices(PADDED, PADDED[1:]))
def test_padded(core: Any, enabled: Any, device: str, words: Any, dim: int, batch: int, mscale: float) -> None:
    """Pairings, partial, mscale, mRoPE with a batch, and latent attention."""
    freqs = freqs_of(6, dim, bool(words.get("rotary_interleaved")), batch).to(device)
    count = both(core, torch.rand(6, 2, 3, 32).to(device), freqs, words, mscale=mscale)
    assert enabled.calls == {"jitrope": count, "host": count}
    assert enabled.reasons == {"apply_rope_fusion is off": count}


PACKED = [*product(({}, {"rotary_interleaved": True}, {"mla": True}), ("position", "token"), (1, 2, 4))]


@pytest.mark.parametrize(("device", "words", "table", "cp"), devices(PACKED, PACKED[1::7]))
def test_packed(core: Any, enabled: Any, device: str, words: Any, table: str, cp: int) -> None:
    """Also context parallel; tables by position and (mRoPE) by token, of any angles, not just rising ones."""
    # 0.19's unfused path of interleaved pairs fails on an empty sequence.
    ends = [0, 8, 16, 24, 32, 56] if "rotary_interleaved" in words else [0, 8, 24, 24, 32, 56]
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
    freqs = freqs_of(24 if table == "position" else 56, 16, bool(words.get("rotary_interleaved"))).to(device)
    freqs *= torch.rand(56, 1, 1, 1).to(device) if table == "token" else 1
    for rank in range(cp):
        both(core, torch.rand(56 // cp, 3, 32).to(device), freqs, words, cu_seqlens, cp=(cp, rank))


def test_hooks(core: Any) -> None:
    """The two hooks, None without TransformerEngine."""
    hooks, t, freqs, ends = core.rope_utils, torch.rand(8, 2, 16), freqs_of(8, 16), torch.tensor([0, 6, 8]).int()
    with megatron.enable() as report, group(1, 0) as alone:
        out = hooks.fused_apply_rotary_pos_emb_thd(t, ends, freqs[:6], cp_size=1, cp_rank=0)
        torch.testing.assert_close(out, hooks._apply_rotary_pos_emb_thd(t, ends, freqs[:6], cp_group=alone))
        out = hooks.fused_apply_rotary_pos_emb(t[:, None], freqs, interleaved=False)
        torch.testing.assert_close(out, hooks._apply_rotary_pos_emb_bshd(t[:, None], freqs))
        assert report.calls == {"jitrope": 2, "host": 0}
        with pytest.raises(jitrope.InvalidInput, match="float64"):  # the host has no hook
            hooks.fused_apply_rotary_pos_emb(t[:, None].double(), freqs)


def test_configuration(core: Any) -> None:
    """Without TransformerEngine Megatron refuses `apply_rope_fusion`, which jitrope makes possible; and pairs into
    halves of pairs, which jitrope refuses too."""
    made, words = core.transformer.TransformerConfig, {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    with pytest.raises(ValueError, match="apply_rope_fusion"):
        made(**words, apply_rope_fusion=True)
    with megatron.enable():
        assert made(**words, apply_rope_fusion=True).apply_rope_fusion
    made = hosts.megatron_config(core, mla=True)
    made.rotary_interleaved = True
    with pytest.raises(jitrope.InvalidInput, match="mla_rotary_interleaved with rotary_interleaved"):
        megatron.apply_rotary_pos_emb(torch.rand(4, 1, 2, 16), freqs_of(4, 16, True), made)


# ---- layers --------------------------------------------------------------------------------------------


def packed_of(core: Any, device: str, *ends: int) -> Any:
    """Packed sequences of up to 16 tokens."""
    offsets = torch.tensor([0, *ends], dtype=torch.int32, device=device)
    return core.packed.PackedSeqParams("thd", offsets, offsets, max_seqlen_q=16, max_seqlen_kv=16)


@pytest.mark.parametrize(("device", "packed"), devices([(False,), (True,)], [(False,), (True,)]))
def test_latent_attention_layer(core: Any, ranks: Any, device: str, packed: bool) -> None:
    """The layer computes what it does without jitrope: its rope is left to Megatron."""
    words = {"q_lora_rank": 24, "kv_lora_rank": 24, "qk_head_dim": 32, "qk_pos_emb_head_dim": 16, "v_head_dim": 24}
    layer = hosts.megatron_attention(core, ranks, "latent", rope_type="yarn", **words).to(device)
    layer.config.apply_rope_fusion = False
    x = torch.randn(12, 1 if packed else 2, 64).to(device)
    where = packed_of(core, device, 5, 12) if packed else None
    want = hosts.step(layer, x, None, packed_seq_params=where)
    with megatron.enable() as report:
        got = hosts.step(layer, x, None, packed_seq_params=where)
    assert report.calls == {"jitrope": 0, "host": 2}
    assert len(want) > 8
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


SELF = [*product(("RMSNorm", "LayerNorm", "L2Norm"), ("fp32", "bf16"), (False, True))]
SOME = (SELF[0], SELF[3], SELF[4], SELF[9])


@pytest.mark.parametrize(("device", "norm", "dtype", "packed"), devices(SELF, SOME))
def test_self_attention(core: Any, ranks: Any, enabled: Any, device: str, norm: str, dtype: str, packed: bool) -> None:
    """q, k and v have the bits of the host's norms before jitrope's rope; in fp32 all agrees with Megatron's code.

    On a GPU that holds for RMSNorm; the others add in another order.
    """
    layer = hosts.megatron_attention(core, ranks, norm, DTYPES[dtype], kv_channels=64).to(device)
    x = torch.randn(24 if packed else 6, 1 if packed else 2, 64).to(device, DTYPES[dtype])
    words = {"rotary_pos_emb": freqs_of(*((24, 64) if packed else (6, 64, False, 2))).to(device)}
    words["packed_seq_params"] = packed_of(core, device, 8, 24) if packed else None
    got = hosts.step(layer, x, None, **words)
    assert enabled.calls == {"jitrope": 0, "host": 0, "fused": 1}
    with layer.k_layernorm.register_forward_hook(lambda *_: None):
        want = hosts.step(layer, x, None, **words)
    assert enabled.calls == {"jitrope": 2, "host": 0, "fused": 1}
    assert enabled.reasons == {"not fused: a norm has hooks": 1}
    bits = 4 if device == "cpu" else 3 * (norm == "RMSNorm")  # on a GPU strides choose the kernels of attention
    assert all(map(torch.equal, got[:bits], want[:bits]))
    tolerance = {"fp32": 2e-5 if device == "cpu" else 1e-4, "bf16": 0.05}[dtype]
    close(got[bits:], want[bits:], tolerance)
    layer.config.apply_rope_fusion = False
    stock = hosts.step(layer, x, None, **words)
    assert enabled.calls == {"jitrope": 2, "host": 2, "fused": 1}
    if dtype == "fp32":
        close(got, stock, tolerance)


RANKS = [  # the context parallel size and rank, and the positions of its chunks of sequences of 8 and 16 tokens
    *[((2, 0), [0, 1, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15]), ((2, 1), [2, 3, 4, 5, 4, 5, 6, 7, 8, 9, 10, 11])],
    ((4, 3), [3, 4, 6, 7, 8, 9]),
]


@pytest.mark.parametrize(("device", "ranks", "at"), devices(RANKS, RANKS[1:]), indirect=["ranks"])
def test_context_parallelism(core: Any, ranks: Any, enabled: Any, device: str, at: list[int]) -> None:
    """A rank's two chunks of packed sequences, with a factor, a partial rotation and interleaved pairs."""
    layer = hosts.megatron_attention(core, ranks, "RMSNorm", rotary_interleaved=True).to(device)
    layer.config.yarn_rotary_scaling_factor, layer.config.yarn_mscale, layer.config.yarn_mscale_all_dim = 8.0, 1.0, 0.0
    factor = 0.1 * math.log(8.0) + 1.0
    if hasattr(layer, "_yarn_concentration_factor"):  # made in the constructor
        layer._yarn_concentration_factor = factor
    x, freqs = torch.randn(len(at), 1, 64).to(device), freqs_of(16, 16, True).to(device)
    words = {"rotary_pos_emb": freqs, "packed_seq_params": packed_of(core, device, 8, 24)}
    got = hosts.step(layer, x, None, **words)
    with layer.q_layernorm.register_forward_hook(lambda *_: None):
        close(got, hosts.step(layer, x, None, **words), 1e-5)
    for normed, ours in zip(layer.get_query_key_value_tensors(x), got[:2]):
        pairs = torch.view_as_complex(normed[:, 0, :, :16].unflatten(-1, (-1, 2)).contiguous())
        angles = freqs[at, 0, :, ::2]
        turned = torch.view_as_real(pairs * torch.polar(torch.full_like(angles, factor), angles)).flatten(-2)
        torch.testing.assert_close(ours, torch.cat((turned, normed[:, 0, :, 16:]), -1))
    assert enabled.calls == {"jitrope": 2, "host": 0, "fused": 1}


TABLE, SPLIT = freqs_of(6, 32), "get_query_key_value_tensors"
LEFT = {  # a change of the layer and of the words of its call, the reason why it is not fused, and calls of rope
    "eps": (lambda x, _: setattr(x.k_layernorm, "eps", 1e-3), "the norms of q and k differ", 2),
    "weight": (lambda x, _: x.q_layernorm.double(), "prepare_fused_qkv: q_weight is float64; it must be (32,), "
               "float32 or float16 or bfloat16, contiguous, on cpu like q of qkv", 2),
    "tables": (lambda _, w: w.update(rotary_pos_emb=(TABLE, TABLE.clone())), "q and k have different tables", 2),
    "no table": (lambda _, w: w.update(rotary_pos_emb=None), None, 0),
    "no norm": (lambda x, _: [setattr(x, f"{name}_layernorm", None) for name in "qk"], None, 2),
    "no rope": (lambda x, _: setattr(x.config, "no_rope_freq", [1]), None, 0),
    "gate": (lambda *_: None, "the host splits QKV", 2),
    "own split": (lambda x, _: setattr(x, SPLIT, getattr(x, SPLIT)), f"SelfAttention has its own {SPLIT}", 2),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_self_attention_that_is_not_fused(core: Any, ranks: Any, name: str) -> None:
    """The host's norms and jitrope's rope run, with the results of the stock layer, and the reason is told."""
    layer = hosts.megatron_attention(core, ranks, "RMSNorm", attention_output_gate=name == "gate")
    (change, reason, calls), x, words = LEFT[name], torch.randn(6, 2, 64), {"rotary_pos_emb": TABLE}
    change(layer, words)
    with megatron.enable() as report:
        got, _ = layer(x, None, **words)
        assert report.calls == {"jitrope": calls, "host": 0}
        assert report.reasons == ({} if reason is None else {f"not fused: {reason}": 1})
    layer.config.apply_rope_fusion = False
    torch.testing.assert_close(got, layer(x, None, **words)[0], rtol=1e-4, atol=1e-4)


def test_an_unknown_argument_of_forward(core: Any, ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer Megatron's: with its default the layer is fused, otherwise the host's forward gets it."""
    before = core.attention.Attention.forward
    newer = lambda self, hidden_states, attention_mask, rotary_pos_emb=None, scale=1: (  # noqa: E731
        scale * before(self, hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb)[0]
    )
    newer.__name__ = "forward"
    monkeypatch.setattr(core.attention.Attention, "forward", newer)
    layer, x = hosts.megatron_attention(core, ranks, "RMSNorm"), torch.randn(6, 2, 64)
    with megatron.enable() as report:
        fused = layer(x, None, TABLE)
        assert report.calls == {"jitrope": 0, "host": 0, "fused": 1}
        torch.testing.assert_close(layer(x, None, rotary_pos_emb=TABLE, scale=2), 2 * fused)
        assert report.calls == {"jitrope": 2, "host": 0, "fused": 1}
        assert report.reasons == {"not fused: jitrope does not know the argument scale of forward": 1}
        with pytest.raises(TypeError, match="other"):  # the host's own
            layer(x, None, TABLE, other=3)


def test_compiled_self_attention(core: Any, ranks: Any, enabled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one graph with fused norms; a rope function that is replaced later is called."""
    layer = hosts.megatron_attention(core, ranks, "RMSNorm")
    x, outputs = torch.randn(6, 2, 64), []
    for replaced in (False, True):
        with torch.no_grad(), monkeypatch.context() as late:  # it ends before jitrope is disabled
            if replaced:
                late.setattr(core.attention, "apply_rotary_pos_emb", lambda t, *_, **__: t)
            torch._dynamo.reset()
            layer.compile(backend="eager", fullgraph=True)
            got = layer(x, None, rotary_pos_emb=TABLE)[0]
            assert enabled.calls["fused"] == (2 if replaced else 1)
            layer._compiled_call_impl = None
            outputs.append(layer(x, None, rotary_pos_emb=TABLE)[0])
            torch.testing.assert_close(got, outputs[-1])
    assert not torch.allclose(*outputs)
