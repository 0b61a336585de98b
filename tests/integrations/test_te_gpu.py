"""TransformerEngine with its compiled part, on a GPU: its kernels and layers beside ours."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from typing import Any

import pytest
import torch

from jitrope.integrations import _host, transformer_engine

from ..hosts import close, installed, step

pytestmark = pytest.mark.gpu
TOKENS, BATCH, WIDTH, HEADS, GROUPS, HEAD_DIM = 48, 2, 256, 8, 2, 64
TE = "transformer_engine.pytorch"
LEAD = {"sbhd": (TOKENS, BATCH), "bshd": (BATCH, TOKENS), "thd": (TOKENS * BATCH,)}
UNITS = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
ROPES = product(LEAD, ("alone", "starts", "two ranks"), (False, True), (1.0, 0.5), UNITS)


@pytest.mark.parametrize(("layout", "sharing", "interleaved", "part", "dtype"), ROPES, ids=str)
def test_rope_beside_its_kernel(layout: str, sharing: str, interleaved: bool, part: float, dtype: torch.dtype) -> None:
    """Results and gradients are those of its CUDA kernel within a rounding."""
    rope = installed(f"{TE}.attention.rope")
    torch.manual_seed(0)
    size = 2 if sharing == "two ranks" else 1
    t = torch.randn(*LEAD[layout], HEADS, HEAD_DIM, device="cuda", dtype=dtype, requires_grad=True)
    freqs = rope.RotaryPositionEmbedding(HEAD_DIM, part, interleaved=interleaved)(4 * TOKENS * BATCH).cuda()
    words: dict[str, Any] = {"tensor_format": layout, "interleaved": interleaved, "cp_size": size, "cp_rank": size - 1}
    if layout == "thd":
        words["cu_seqlens"] = torch.tensor([0, 32 * size, 96 * size], dtype=torch.int32, device="cuda")
    if sharing == "starts":
        words["start_positions"] = torch.tensor([3, 0], dtype=torch.int32, device="cuda")
    results = []
    for function in (transformer_engine.apply_rotary_pos_emb, rope.apply_rotary_pos_emb):
        out = function(t, freqs, fused=True, **words)
        results.append([out.detach(), *torch.autograd.grad(out, t, torch.ones_like(out).cumsum(0) / 64)])
    close(*results, UNITS[dtype])


NORMS = [*product(("RMSNorm", "LayerNorm"), (False, True), LEAD, (False, True))]
NORMS += product(("L2Normalization",), (False, True), LEAD, (False,))


@pytest.mark.parametrize(("norm", "before", "layout", "centred"), NORMS)
def test_norms_and_rope_of_its_attention(norm: str, before: bool, layout: str, centred: bool) -> None:
    """One launch for the norms and rope: q and k of its own, results and gradients of the layer."""
    te = installed(TE)
    torch.manual_seed(0)
    layer = te.MultiheadAttention(
        WIDTH, HEADS, HEAD_DIM, 0.0, num_gqa_groups=GROUPS, qkv_format=layout, bias=False, qk_norm_type=norm,
        qk_norm_before_rope=before, params_dtype=torch.bfloat16, input_layernorm=True,
        attn_mask_type="padding_causal" if layout == "thd" else "causal",
    )  # fmt: skip
    for m in (layer.q_norm, layer.k_norm):
        if hasattr(m, "zero_centered_gamma"):
            m.zero_centered_gamma = centred
        for weight in m.parameters():
            torch.nn.init.normal_(weight, 0.0 if centred else 1.0, 0.1)
    x = torch.randn(*LEAD[layout], WIDTH, device="cuda", dtype=torch.bfloat16)
    words: dict[str, Any] = {"rotary_pos_emb": te.RotaryPositionEmbedding(HEAD_DIM)(TOKENS * BATCH).cuda()}
    if layout == "thd":
        both = torch.tensor([0, 32, 96], dtype=torch.int32, device="cuda")
        words |= {"cu_seqlens_q": both, "cu_seqlens_kv": both, "max_seqlen_q": 64, "max_seqlen_kv": 64}
    want = step(layer, x, **words)
    with transformer_engine.enable() as report:
        got = step(layer, x, **words)
    assert (report.calls["fused"], report.calls["host"], report.reasons) == (1, 0, {})
    close(got[:2], want[:2], 2**-7)
    close(got[2:], want[2:], 2**-5)


def bench(*words: str) -> list[dict[str, Any]]:
    """The rows of `jitrope bench`, with TransformerEngine."""
    installed(TE)
    command = [sys.executable, "-m", "jitrope", "bench", *words, "--smoke", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["rows"]


def test_layers_of_the_gallery() -> None:
    """Those of TransformerEngine, and of Megatron-core if it is installed."""
    rows = bench("hosts", "--only", "te-train,te-behind-train,megatron-te-train")
    rows = [row for row in rows if row["by"] == "jitrope"]
    assert len(rows) >= 4
    for row in rows:
        assert row["fused calls"] > 0 == row["jitrope calls"] == row["host calls"]
        assert row["off %"] < 2


def test_its_layer_is_timed_with_its_rope_and_ours() -> None:
    rows = [row for row in bench("layer") if row["rope"].startswith("TransformerEngine's layer")]
    assert [row["rope"] for row in rows] == ["TransformerEngine's layer", "TransformerEngine's layer with jitrope"] * 2
    for row in rows:
        assert 0 < row["rope ms"] < row["layer ms"]
        assert row["x stock"] > 0


@pytest.mark.parametrize("before", [False, True])
def test_its_transformer_layer(before: bool) -> None:
    te = installed(TE)
    torch.manual_seed(0)
    layer = te.TransformerLayer(
        WIDTH, 512, HEADS, GROUPS, hidden_dropout=0.0, attention_dropout=0.0, kv_channels=HEAD_DIM, bias=False,
        activation="swiglu", normalization="RMSNorm", qk_norm_type="RMSNorm", qk_norm_before_rope=before,
        params_dtype=torch.bfloat16,
    )  # fmt: skip
    x = torch.randn(TOKENS, BATCH, WIDTH, device="cuda", dtype=torch.bfloat16)
    freqs = te.RotaryPositionEmbedding(HEAD_DIM)(TOKENS).cuda()
    want, forward = step(layer, x, rotary_pos_emb=freqs), te.MultiheadAttention.forward
    with transformer_engine.enable() as report:
        got = step(layer, x, rotary_pos_emb=freqs)
        with te.autocast(enabled=True):
            layer(x, rotary_pos_emb=freqs)
        layer.compile()
        compiled = step(layer, x, rotary_pos_emb=freqs)
    assert (report.calls["fused"], report.calls["host"]) == (2, 0)
    assert report.reasons == {"not fused: fp8": 1}
    assert te.MultiheadAttention.forward is forward
    assert not _host.placed
    close(got, want, 2**-5)
    close(compiled, want, 2**-5)
