"""timm's models, small and random, give the stock models' bits and gradients, with one launch for q and k."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from jitrope.integrations import _host
from jitrope.integrations import timm as integration

from ..devices import DEVICES
from ..hosts import doubled, timm

SMALL = {"img_size": 32, "depth": 2, "embed_dim": 64, "num_heads": 4, "num_classes": 5}


CASES: dict[str, tuple[str, dict[str, Any]]] = {  # a name of timm's, and words; or the kind of a NaFlex model
    "eva02": ("eva02_tiny_patch14_224", {"img_size": 28}),
    "dinov3": ("vit_small_patch16_dinov3", {}),  # halves, class and register tokens
    "dinov3-qkvb": ("vit_small_patch16_dinov3_qkvb", {}),
    "pe": ("vit_pe_core_tiny_patch16_384", {}),
    "rope-mixed": ("vit_small_patch16_rope_mixed_224", {}),  # learned tables of each head and block
    "qwen3": ("qwen3_vit_88m_enc", {"img_size": None, "num_classes": None}),  # of a language model
    "naflex-mixed": ("", {"rope_type": "mixed"}),
    "naflex-dinov3": ("", {"rope_type": "dinov3"}),
    "naflex-mrope": ("", {"rope_type": "mrope", "rope_mrope_section": (2, 3, 3)}),
}


def prepared(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    """A small random model, and images; a NaFlex model drops patches, and gets those of two images, 4 x 4 and 2 x 4."""
    torch.manual_seed(0)
    of_timm, more = CASES[name]
    if of_timm:
        words = {key: value for key, value in {**SMALL, **more}.items() if value is not None}
        size = words.get("img_size", 64)
        model = timm().create_model(of_timm, **words)
        inputs: Any = torch.randn(2, 3, size, size)
    else:
        module = timm().models.naflexvit
        words = {"embed_dim": 64, "num_heads": 4, "depth": 2, "patch_size": 4, "reg_tokens": 2, "class_token": True}
        config = module.NaFlexVitCfg(**words, pos_embed="none", patch_drop_rate=0.25, **more)
        model, rows = module.NaFlexVit(config, num_classes=3).train(), torch.arange(16)
        valid = torch.stack((rows >= 0, rows < 8))
        coord = torch.stack((rows // 4, rows % 4), -1).expand(2, -1, -1) * valid[..., None]
        inputs = {"patches": torch.randn(2, 16, 48), "patch_coord": coord, "patch_valid": valid}
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape) * 0.2
    inputs = tree_map(lambda x: x.to(device, dtype if x.is_floating_point() else None), inputs)
    return model.to(device, dtype), inputs


def outcome(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """The output, and the gradient of every parameter."""
    model.zero_grad()
    torch.manual_seed(2)  # the same patches are dropped
    out = model(inputs)
    out.float().square().mean().backward()
    return {"out": out.detach(), **{key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_model_and_gradients(name: str, device: str) -> None:
    model, inputs = prepared(name, device)
    stock = outcome(model, inputs)
    with integration.enable() as report:
        ours = outcome(model, inputs)
    back = outcome(model, inputs)
    learned = "mixed" in name  # its tables require a gradient: q, then k, of each block
    assert report.calls == ({"jitrope": 0, "host": 4} if learned else {"jitrope": 2, "host": 0})
    assert stock["out"].std() > 0.01
    assert any(key.endswith("rope.freqs") for key in stock) == learned
    for key, want in stock.items():  # strides differ, and with them the order of sums in products of matrices
        torch.testing.assert_close(ours[key], want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))
        assert torch.equal(back[key], want) or device != "cpu"
    assert torch.equal(ours["out"], stock["out"]) or device != "cpu"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["eva02", "dinov3", "rope-mixed"])
def test_16_bit_model(name: str, dtype: torch.dtype, device: str) -> None:
    """With tables in fp32, or for learned ones in the model's dtype; and the same under autocast."""
    model, inputs = prepared(name, device, dtype)
    with torch.no_grad():
        stock = model.eval()(inputs)
        with integration.enable() as report:
            ours = model(inputs)
            with torch.autocast(torch.device(device).type, dtype):
                under = model.float()(inputs.float())
        with torch.autocast(torch.device(device).type, dtype):
            want = model(inputs.float())
    assert report.calls == {"jitrope": 4, "host": 0}
    for got, expected in ((ours, stock), (under, want)):  # on a GPU strides choose the kernels of attention
        bound = 0.0 if device == "cpu" else 0.05
        torch.testing.assert_close(got, expected, rtol=bound, atol=bound * float(expected.abs().max()))


@pytest.mark.parametrize("how", ["traced", "checkpointed", "exported", "compiled"])
def test_an_enabled_model_is(how: str) -> None:
    model, inputs = prepared("dinov3")
    stock = model.eval()(inputs)
    with integration.enable() as report:
        if how == "traced":
            got = timm().layers._fx.create_feature_extractor(model, {"head": "out"})(inputs)["out"]
        elif how == "exported":
            got = torch.export.export(model, (inputs,)).module()(inputs)
        elif how == "compiled":
            got = torch.compile(model, backend="eager")(inputs)
        else:
            model.set_grad_checkpointing()
            got = model.train()(inputs)
            got.sum().backward()
    assert torch.equal(got, stock)
    assert report.calls["jitrope"] == (4 if how == "checkpointed" else 0)  # tracers see timm's own operations


X = (2, 3, 5, 8)  # B, H, S, D


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("tables", [(5, 8), (3, 5, 8), (2, 1, 5, 8), (2, 3, 5, 8), (1, 8), (8,)], ids=str)
def test_function(tables: tuple[int, ...], half: bool) -> None:
    host = timm().layers.apply_rot_embed
    for dtype, of_tables in ((torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)):
        x, (sin, cos) = torch.randn(X).to(dtype), torch.randn(2, *tables).to(of_tables)
        outs, grads = [], []
        for function in (host, integration.apply_rot_embed):
            leaf = x.clone().requires_grad_()
            outs.append(function(leaf, sin, cos, half))
            grads += torch.autograd.grad(outs[-1].float().square().sum(), leaf)
        assert torch.equal(*outs)
        close = 1e-5 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(grads[1], grads[0], rtol=close, atol=close * float(grads[0].abs().max()))


@pytest.mark.parametrize("kind", ["fused", "separate", "biased", "grouped", "gated", "unfused", "causal"])
def test_each_path_of_attention(kind: str) -> None:
    """Output and gradients have the bits of the host's forward, with a mask, dropout and a norm of q and k."""
    words: dict[str, Any] = {"num_heads": 4, "norm_layer": nn.LayerNorm, "qk_norm": True, "attn_drop": 0.3}
    more = {"separate": {"qkv_fused": False}, "biased": {"qkv_bias_separate": True}, "gated": {"gated": True}}
    words |= more.get(kind, {})
    cls = timm().models.eva.EvaAttention
    if kind == "grouped":
        cls = timm().layers.attention.AttentionRope
        words |= {"num_kv_heads": 2, "qkv_fused": False}
    layer, x = cls(32, **words), torch.randn(2, 10, 32)
    layer.fused_attn = kind != "unfused"
    emb, mask = torch.randn(10 - layer.num_prefix_tokens, 4).repeat(1, 4), torch.rand(2, 1, 10, 10) < 0.8
    given = {"is_causal": True} if kind == "causal" else {"attn_mask": mask}

    results = []
    with integration.enable() as report:
        for _ in range(2):  # with jitrope and without
            torch.manual_seed(3)
            out = layer(x, emb, **given)
            results.append([out, *torch.autograd.grad(out.sum(), [*layer.parameters()])])
            integration.disable()
    ours, stock = results
    assert torch.equal(ours[0], stock[0])
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5)
    assert report.calls == {"jitrope": 2 if kind == "unfused" else 1, "host": 0}


def test_the_result_of_earlier_versions() -> None:
    """Before 1.0.31 it had the dtype that x and the tables promote to."""
    module = timm().layers.pos_embed_sincos
    x, sin, cos = torch.randn(X).bfloat16(), *torch.randn(2, 5, 8)
    for half, turn in ((True, module.rope_rotate_half), (False, module.rot)):
        out = integration._promoted(x, sin, cos, half)
        assert out.dtype == torch.float32
        assert torch.equal(out, x * cos + turn(x) * sin)


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward with another text is left to the host, with its keyword, and so is a class that is missing.

    `enable` replaces nothing if `apply_rot_embed` is another one than in the versions that jitrope knows.
    """
    place, attention = "timm.models.eva.EvaAttention.forward", timm().models.eva.EvaAttention
    layer = attention(32, 4, norm_layer=nn.LayerNorm)
    x, emb, stock = torch.randn(2, 10, 32), torch.randn(9, 16), attention.forward
    forward = lambda self, x, rope=None, *, times=1: times * stock(self, x, rope)  # noqa: E731
    want = layer(x, emb)
    monkeypatch.setattr(attention, "forward", forward)
    with integration.enable() as report:
        assert torch.equal(layer(x, emb, times=3), 3 * want)
        assert "its text is not that of 1.0.21 to 1.0.31" in report.left[place]
        assert report.calls == {"jitrope": 2, "host": 0}  # q and k
    monkeypatch.delattr("timm.models.eva.EvaAttention")
    with integration.enable() as report:
        assert "has no timm.models.eva:EvaAttention" in report.left[place]
    module = timm().layers.pos_embed_sincos
    monkeypatch.setattr(module, "apply_rot_embed", doubled(module.apply_rot_embed))
    with pytest.raises(integration.JitropeError, match="apply_rot_embed is not that of timm"):
        integration.enable()
    assert not _host.placed
