"""timm's models, small and random, give the stock models' bits and gradients, with one launch for q and k."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jitrope.integrations import _host
from jitrope.integrations import timm as integration

from .devices import DEVICES
from .hosts import doubled, timm

SMALL = {"img_size": 32, "depth": 2, "embed_dim": 64, "num_heads": 4, "num_classes": 5}
SAM = {
    **{"patch_size": 8, "use_abs_pos": False, "use_rel_pos": False, "use_rope": True, "window_size": 0},
    **{"global_attn_indexes": (0, 1), "neck_chans": 16},
}


@pytest.fixture(scope="module", autouse=True)
def _timm() -> None:
    timm()


@pytest.fixture(autouse=True)
def _stock() -> Iterator[None]:
    """After each test, no function is replaced."""
    assert not _host.placed
    yield
    integration.disable()


def images(size: int) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


def registered(name: str, **words: Any) -> tuple[nn.Module, Any]:
    """A small model by timm's name."""
    words = {**SMALL, **words}
    return importlib.import_module("timm").create_model(name, **words), images(words["img_size"])


def tower(name: str, size: int) -> tuple[nn.Module, Any]:
    """The vision encoder of a language model."""
    create = importlib.import_module("timm").create_model
    return create(name, depth=2, embed_dim=64, num_heads=4), images(size)


def sam() -> tuple[nn.Module, Any]:
    cls = importlib.import_module("timm.models.vision_transformer_sam").VisionTransformerSAM
    return cls(**{**SMALL, **SAM}), images(32)


def pool() -> tuple[nn.Module, Any]:
    cls = importlib.import_module("timm.layers.attention_pool2d").RotAttentionPool2d
    return cls(32, 16, num_heads=2, ref_feat_size=4), torch.randn(2, 32, 4, 4)


def naflex(kind: str, patches: bool, **words: Any) -> tuple[nn.Module, Any]:
    """A NaFlex model that drops patches, and images, or patches of two images of 4 x 4 and 2 x 4."""
    module = importlib.import_module("timm.models.naflexvit")
    words = {"embed_dim": 64, "num_heads": 4, "depth": 2, "patch_size": 4, "reg_tokens": 2, **words}
    config = module.NaFlexVitCfg(rope_type=kind, class_token=True, pos_embed="none", patch_drop_rate=0.25, **words)
    rows = torch.arange(16)
    coord = torch.stack((rows // 4, rows % 4), -1).expand(2, -1, -1) * torch.tensor([1, 1]).view(2, 1, 1)
    valid = torch.stack((rows >= 0, rows < 8))
    inputs = {"patches": torch.randn(2, 16, 48), "patch_coord": coord * valid[..., None], "patch_valid": valid}
    return module.NaFlexVit(config, num_classes=3).train(), inputs if patches else images(16)


# a model, and the launches of a forward pass
CASES: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], int]] = {
    "eva02": (lambda: registered("eva02_tiny_patch14_224", img_size=28), 2),
    "dinov3": (lambda: registered("vit_small_patch16_dinov3"), 2),  # halves, class and register tokens
    "dinov3-qkvb": (lambda: registered("vit_small_patch16_dinov3_qkvb"), 2),
    "pe": (lambda: registered("vit_pe_core_tiny_patch16_384"), 2),
    "rope": (lambda: registered("vit_small_patch16_rope_224"), 2),
    "rope-mixed": (lambda: registered("vit_small_patch16_rope_mixed_224"), 2),  # learned tables of each head and block
    "rope-register": (lambda: registered("vit_base_patch16_rope_reg1_gap_256"), 2),
    "eva02-patch-drop": (lambda: registered("eva02_tiny_patch14_224", img_size=28, patch_drop_rate=0.5), 2),
    "qwen3": (lambda: tower("qwen3_vit_88m_enc", 64), 2),
    "deepseek": (lambda: tower("deepseek_vit_412m_enc", 56), 2),
    "sam": (sam, 2),  # images and heads are one axis
    "pool": (pool, 1),
    **{
        f"naflex-{kind}{'-patches' if patches else ''}": (lambda kind=kind, patches=patches: naflex(kind, patches), 2)
        for kind in ("axial", "mixed", "dinov3")
        for patches in (False, True)
    },
    "naflex-mrope": (lambda: naflex("mrope", True, rope_mrope_section=(2, 3, 3)), 2),
}
LEARNED = {"rope-mixed", "naflex-mixed", "naflex-mixed-patches"}


def to(inputs: Any, device: str, dtype: torch.dtype) -> Any:
    if isinstance(inputs, dict):
        return {name: to(x, device, dtype) for name, x in inputs.items()}
    return inputs.to(device, dtype if inputs.is_floating_point() else None)


def prepared(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, inputs = CASES[name][0]()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape) * 0.2
    return model.to(device, dtype), to(inputs, device, dtype)


def outcome(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """The output, and the gradient of every parameter."""
    model.zero_grad()
    torch.manual_seed(2)  # the same patches are dropped
    out = model(inputs)
    out.float().square().mean().backward()
    grads = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), **grads}


# ---- models --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_model_and_gradients(name: str, device: str) -> None:
    model, inputs = prepared(name, device)
    stock = outcome(model, inputs)
    with integration.enable() as report:
        ours = outcome(model, inputs)
    back = outcome(model, inputs)
    assert report.calls == {"jitrope": CASES[name][1], "host": 0}
    assert stock["out"].std() > 0.01
    assert any(key.endswith("rope.freqs") for key in stock) == (name in LEARNED)
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dinov3", "rope-mixed"])
def test_compiled_fullgraph(name: str) -> None:
    model, inputs = prepared(name)
    model.blocks = model.blocks[:1]
    stock = outcome(model, inputs)
    torch.compiler.reset()
    with integration.enable() as report:
        ours = outcome(torch.compile(model, fullgraph=True, backend="aot_eager"), inputs)
    assert report.calls == {"jitrope": 1, "host": 0}
    for key, want in stock.items():
        got = ours[key if key == "out" else f"_orig_mod.{key}"]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


def test_calls_that_jitrope_refuses_run_timms_statements() -> None:
    model, inputs = prepared("dinov3", dtype=torch.float64)
    stock = outcome(model, inputs)
    with integration.enable() as report:
        ours = outcome(model, inputs)
    assert report.calls == {"jitrope": 0, "host": 4}  # q, then k
    assert sum("float64" in reason for reason in report.reasons) == 1
    assert all(torch.equal(ours[key], want) for key, want in stock.items())


@pytest.mark.parametrize("how", ["traced", "checkpointed", "exported"])
def test_an_enabled_model_is(how: str) -> None:
    model, inputs = prepared("dinov3")
    stock = model.eval()(inputs)
    with integration.enable() as report:
        if how == "traced":
            fx = importlib.import_module("timm.layers._fx")
            got = fx.create_feature_extractor(model, {"head": "out"})(inputs)["out"]
        elif how == "exported":
            got = torch.export.export(model, (inputs,)).module()(inputs)
        else:
            model.set_grad_checkpointing()
            got = model.train()(inputs)
            got.sum().backward()
    assert torch.equal(got, stock)
    ours = {"traced": 0, "checkpointed": 4, "exported": 2}  # torch.fx traces timm's own operations
    assert report.calls["jitrope"] == ours[how]


# ---- the functions -------------------------------------------------------------------------------------

X = (2, 3, 5, 8)  # B, H, S, D
TABLES = {
    "shared": (5, 8),
    "heads": (3, 5, 8),
    "images": (2, 1, 5, 8),
    "both": (2, 3, 5, 8),
    "one": (1, 8),
    "row": (8,),
}


def stock_function(name: str) -> Any:
    return getattr(importlib.import_module("timm.layers"), name)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("tables", TABLES)
def test_function(tables: str, half: bool) -> None:
    host = stock_function("apply_rot_embed")
    made = torch.randn(2, *TABLES[tables])
    for dtype, of_tables in ((torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)):
        x, (sin, cos) = torch.randn(X).to(dtype), made.to(of_tables)
        outs, grads = [], []
        for function in (host, integration.apply_rot_embed):
            leaves = [t.clone().requires_grad_() for t in (x, sin, cos)]
            outs.append(function(*leaves, half))
            grads.append(torch.autograd.grad(outs[-1].float().square().sum(), leaves))
        assert outs[1].dtype == x.dtype
        assert torch.equal(*outs)
        for got, want in zip(grads[1], grads[0]):
            assert got.dtype == want.dtype
            close = 1e-5 if dtype == torch.float32 else 0.05
            torch.testing.assert_close(got, want, rtol=close, atol=close * float(want.abs().max()))


@pytest.mark.parametrize("axes", [2, 3, 4])
def test_functions_of_timm_use_it(axes: int) -> None:
    x, emb = torch.randn(X[4 - axes :]), torch.randn(5, 16)
    stock = stock_function("apply_rot_embed_cat")(x, emb, True)
    with integration.enable() as report:
        one = stock_function("apply_rot_embed_cat")(x, emb, half=True)
        several = stock_function("apply_rot_embed_list")([x, x], *emb.chunk(2, -1), half=True)
    assert report.calls == {"jitrope": 3, "host": 0}
    assert all(torch.equal(got, stock) for got in (one, *several))


REFUSED = {
    "fp64": (torch.randn(X).double(), torch.randn(5, 8)),
    "odd": (torch.randn(2, 3, 5, 7), torch.randn(5, 7)),
    "one angle": (torch.randn(X), torch.randn(5, 1)),
    "larger": (torch.randn(1, 3, 5, 8), torch.randn(2, 3, 5, 8)),
    "more axes": (torch.randn(X), torch.randn(2, 2, 3, 5, 8)),
    "five axes": (torch.randn(2, *X), torch.randn(5, 8)),
    "more rows": (torch.randn(X), torch.randn(6, 8)),
    "narrower": (torch.randn(X), torch.randn(5, 4)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_left_to_timm(name: str) -> None:
    """timm's result, or its error."""

    def result() -> Any:
        try:
            return stock_function("apply_rot_embed")(x, table, table, True)
        except RuntimeError as error:
            return str(error)

    x, table = REFUSED[name]
    stock = result()
    with integration.enable() as report:
        ours = result()
    assert sum(report.reasons.values()) == 1
    assert ours == stock if isinstance(stock, str) else torch.equal(ours, stock)


# ---- enable and disable --------------------------------------------------------------------------------


def test_enable_names_what_it_changed_and_disable_undoes_it() -> None:
    classes = [getattr(importlib.import_module(module), name) for module, name in integration._ATTENTION.items()]
    holders = [importlib.import_module(f"timm.layers{name}") for name in ("", ".pos_embed_sincos")]

    def state() -> list[Any]:
        return [cls.forward.__code__ for cls in classes] + [holder.apply_rot_embed for holder in holders]

    stock = state()
    report = integration.enable()
    enabled = state()
    assert len(report.replaced) == 5
    assert not report.left
    assert all(now is not before for now, before in zip(enabled, stock))
    with integration.enable() as second:
        assert state() == enabled
        assert second.replaced == report.replaced
    assert state() == enabled  # the second has changed nothing, so it undoes nothing
    integration.disable()
    assert state() == stock
    assert not _host.placed


def test_other_versions_of_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 1.0.31 the result had the dtype that x and the tables promote to; before 1.0.16 tables were for images."""
    module = importlib.import_module("timm.layers.pos_embed_sincos")

    def of_timm(function: Any) -> Any:
        return _host.with_code(function, function.__code__, __name__=module.__name__)

    @of_timm
    def promoted(x: Tensor, sin_emb: Tensor, cos_emb: Tensor, half: bool = False) -> Tensor:
        return x * cos_emb + (module.rope_rotate_half if half else module.rot)(x) * sin_emb

    @of_timm
    def images(x: Tensor, sin_emb: Tensor, cos_emb: Tensor) -> Tensor:
        return x * cos_emb.unsqueeze(1) + module.rot(x) * sin_emb.unsqueeze(1)

    monkeypatch.setattr(module, "apply_rot_embed", promoted)
    x, sin, cos = torch.randn(X).bfloat16(), *torch.randn(2, 5, 8)
    with integration.enable() as report:
        out = module.apply_rot_embed(x, sin, cos)
    assert out.dtype == torch.float32
    assert torch.equal(out, promoted(x, sin, cos))
    assert report.calls == {"jitrope": 1, "host": 0}
    for other in (images, of_timm(lambda x, sin_emb, cos_emb, half=False: x)):
        monkeypatch.setattr(module, "apply_rot_embed", other)
        with pytest.raises(integration.JitropeError, match="has other results"):
            integration.enable()
        assert module.apply_rot_embed is other
        assert not _host.placed


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["apply_rot_embed_cat", "apply_rot_embed"])
def test_a_function_of_the_user(name: str, when: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called, as without jitrope, and q and k are one launch again when it is gone."""
    eva, module = (importlib.import_module(f"timm.{at}") for at in ("models.eva", "layers.pos_embed_sincos"))
    layer, x = eva.EvaAttention(32, num_heads=4, num_prefix_tokens=1, norm_layer=nn.LayerNorm), torch.randn(2, 10, 32)
    emb = torch.randn(9, 4).repeat_interleave(2, -1).repeat(1, 2)
    torch.compiler.reset()
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    stock = layer(x, emb)

    def patch() -> None:
        for holder in (eva, module):
            if hasattr(holder, name):
                monkeypatch.setattr(holder, name, doubled(getattr(holder, name)))

    patch()
    want = layer(x, emb)
    assert not torch.equal(want, stock)
    if when == "before" and name == "apply_rot_embed":
        with pytest.raises(integration.JitropeError, match=f"apply_rot_embed is {doubled.__module__}'s"):
            integration.enable()
        return
    if when == "after":
        monkeypatch.undo()
    with integration.enable() as report:
        if when == "after":
            assert torch.equal(run(x, emb), stock)
            assert report.calls == {"jitrope": 1, "host": 0}
            patch()
        assert torch.equal(run(x, emb), want)
        assert report.reasons == {"apply_rot_embed_cat or apply_rot_embed was replaced": 1}
        if when == "after":
            monkeypatch.undo()
            before = report.calls["jitrope"]
            assert torch.equal(run(x, emb), stock)
            assert report.calls["jitrope"] == before + (not compiled)  # the compiled one needs no new trace


def test_a_forward_that_jitrope_does_not_know_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = importlib.import_module("timm.models.eva").EvaAttention
    other = importlib.import_module("timm.layers.attention").Attention.forward
    for forward, why in ((other, "statements that jitrope knows"), (eval("lambda self, x: x"), "its source")):
        monkeypatch.setattr(cls, "forward", forward)
        with integration.enable() as report:
            assert why in report.left["timm.models.eva.EvaAttention.forward"]
    monkeypatch.delattr(cls.__module__ + ".EvaAttention")
    with integration.enable() as report:
        assert "no such class" in report.left["timm.models.eva.EvaAttention.forward"]
