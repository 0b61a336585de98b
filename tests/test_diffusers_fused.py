"""Processors of diffusers in which RMSNorm of q and k, rope and concatenation are one launch give the host's bits."""

from __future__ import annotations

import functools
import importlib
import inspect

import pytest
import torch
from torch import nn

import jitrope
from tests.said import norm_rope

pytest.importorskip("diffusers", reason="the diffusers extra is not installed")

from jitrope.base.errors import InvalidInput
from jitrope.integrations import _host
from jitrope.integrations import diffusers as integration
from jitrope.integrations.diffusers import forms, fused, norms
from tests import diffusion_zoo as zoo

from .devices import DEVICES
from .diffusion_zoo import FUSED_CALLS

FUSED = fused.FUSED
FP32, BF16 = torch.float32, torch.bfloat16


def prepared(name, device="cpu", dtype=FP32):
    return zoo.prepared(zoo.MODELS[name], device, dtype)


def attentions(model) -> list[nn.Module]:
    """The modules with processors that jitrope can replace completely, enabled or not."""
    return [m for m in model.modules() if type(getattr(m, "processor", None)).__name__.removeprefix("Jitrope") in FUSED]


def same_as_stock(model, inputs, expected, exact=True, fuse_norm=True) -> integration.Report:
    """Run the model stock, twice with jitrope, and stock again; all outputs are the same."""
    with torch.no_grad():
        stock = zoo.forward(model, inputs)
        with integration.enable(model, fuse_norm=fuse_norm) as report:
            outputs = [zoo.forward(model, inputs) for _ in range(2)]
        outputs.append(zoo.forward(model, inputs))
    for ours in outputs:
        if exact:
            assert torch.equal(ours, stock)
        else:
            tolerance = 1e-4 if stock.dtype == FP32 else 5e-2
            torch.testing.assert_close(ours, stock, rtol=tolerance, atol=tolerance)
    assert report.calls == {"jitrope": 0, "host": 0} | {who: 2 * count for who, count in expected.items()}
    return report


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("form", ["flux", "qwen", "wan", "hunyuan"])
def test_heads_of_128_give_the_same_bits(form, dtype, device) -> None:
    """Heads of 128 give the host's bits on a GPU too."""
    changes, (cls, make, calls) = {
        "flux": ({"axes_dims_rope": (16, 56, 56)}, ("FluxTransformer2DModel", zoo.flux, 3)),
        "qwen": ({"axes_dims_rope": (16, 56, 56)}, ("QwenImageTransformer2DModel", zoo.qwen_image, 2)),
        "wan": ({}, ("WanTransformer3DModel", zoo.wan, 4)),
        "hunyuan": ({"rope_axes_dim": (16, 56, 56)}, ("HunyuanVideoTransformer3DModel", zoo.hunyuan_video, 3)),
    }[form]
    config, inputs = make()
    config = config | changes | {"attention_head_dim": 128}
    model, inputs = variant(cls, config, inputs, device, dtype)
    # Across heads, sums have torch's order with 2-byte dtypes.
    same_as_stock(model, inputs, {"fused": calls}, exact=device == "cpu" or (form, dtype) != ("wan", FP32))


def variant(cls, config, inputs, device="cpu", dtype=FP32):
    """`prepared` with another configuration; the inputs for positions stay in fp32."""
    import diffusers

    kept = zoo.MODELS[cls].fp32
    model = zoo.Model(cls, lambda: (getattr(diffusers, cls)(**config), inputs), 0, fp32=kept)
    return zoo.prepared(model, device, dtype)


@pytest.mark.slow
def test_compiled_training() -> None:
    """Training compiles to one graph, which other inputs use too."""
    model, inputs = prepared("FluxTransformer2DModel")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with integration.enable(model) as report:
        for words in (inputs, inputs | {"hidden_states": inputs["hidden_states"] * 0.5}):
            grads = []
            for call in (model, compiled):
                model.zero_grad()
                with torch._dynamo.config.patch(error_on_recompile=words is not inputs):
                    out = zoo.forward(call, words)
                out.square().mean().backward()
                grads.append([out, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
            for ours, want in zip(*grads, strict=True):
                torch.testing.assert_close(ours, want)
    # Counted twice when the model ran, once when it was traced.
    assert report.calls == {"jitrope": 0, "host": 0, "fused": 3 * FUSED_CALLS["FluxTransformer2DModel"]}


# ---- other ways through the processors -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_wan_image_to_video(dtype) -> None:
    """Keys and values of the image have their own projection and norm; the last 512 tokens are text."""
    config = zoo.WAN | {"image_dim": 16, "added_kv_proj_dim": 32}
    inputs = zoo.wan_inputs() | {
        "encoder_hidden_states": torch.randn(2, 512, 16),
        "encoder_hidden_states_image": torch.randn(2, 3, 16),
    }
    model, inputs = variant("WanTransformer3DModel", config, inputs, dtype=dtype)
    assert any(m.add_k_proj is not None for m in attentions(model))
    same_as_stock(model, inputs, {"fused": 4})


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "WanTransformer3DModel", "Flux2Transformer2DModel"])
def test_fused_projections(name, dtype) -> None:
    """q, k and v are views of one projection."""
    model, inputs = prepared(name, dtype=dtype)
    for attention in attentions(model):
        if getattr(attention, "_supports_qkv_fusion", True):
            attention.fuse_projections()
    assert any(attention.fused_projections for attention in attentions(model))
    same_as_stock(model, inputs, {"fused": FUSED_CALLS[name]})
    same_as_stock(model, inputs, {"jitrope": zoo.MODELS[name].rotations}, fuse_norm=False)


def test_wan_with_tables_in_bf16() -> None:
    """`.to(bfloat16)` converts the tables, too; then the host's products are bf16."""
    model, inputs = prepared("WanTransformer3DModel", dtype=BF16)
    model = model.to(BF16)
    assert model.rope.freqs_cos.dtype == BF16
    same_as_stock(model, inputs, {"fused": 4})
    same_as_stock(model, inputs, {"jitrope": 4}, fuse_norm=False)


@pytest.mark.parametrize("masked", [False, True])
def test_qwen_mask_of_the_text(masked) -> None:
    model, inputs = prepared("QwenImageTransformer2DModel")
    if not masked:
        inputs["encoder_hidden_states_mask"] = None
    same_as_stock(model, inputs, {"fused": 2})


def test_the_hosts_module_is_asked_for_its_names(monkeypatch) -> None:
    """If another library replaces attention in the host's module, that attention is called."""
    model, inputs = prepared("FluxTransformer2DModel")
    module = importlib.import_module("diffusers.models.transformers.transformer_flux")
    original, seen = module.dispatch_attention_fn, []

    def attention(*arguments, **words):
        seen.append(words["backend"])
        return original(*arguments, **words)

    monkeypatch.setattr(module, "dispatch_attention_fn", attention)
    model.set_attention_backend("native")
    same_as_stock(model, inputs, {"fused": 3})
    assert len(seen) == 4 * 3
    assert all(backend == "native" for backend in seen)


def test_what_a_hook_has_seen_is_not_overwritten() -> None:
    """Without gradients q and k are overwritten, but not if a hook may hold them."""
    model, inputs = prepared("WanTransformer3DModel")
    seen = []
    hooked = attentions(model)[0]
    hooked.to_q.register_forward_hook(lambda module, args, out: seen.append((out, out.clone())))
    same_as_stock(model, inputs, {"fused": 4})
    assert seen
    assert all(torch.equal(out, before) for out, before in seen)


@pytest.mark.parametrize("grad", [False, True])
def test_in_place_without_gradients(grad, monkeypatch) -> None:
    model, inputs = prepared("WanTransformer3DModel")
    written = []
    original = norms.prepare_qkv

    def watched(*tensors, **words):
        written.extend([tensors] * words["inplace"])
        return original(*tensors, **words)

    monkeypatch.setattr(norms, "prepare_qkv", watched)
    with integration.enable(model), torch.set_grad_enabled(grad):
        zoo.forward(model, inputs)
    # Self-attention writes q and k at once, cross-attention one after the other.
    assert len(written) == (0 if grad else 2 + 2 * 2)


# ---- norms that are not fused --------------------------------------------------------------------------------


def layer_norm(attention) -> None:
    attention.norm_q = nn.LayerNorm(16)
    zoo.initialise(attention.norm_q)


def subclass(attention) -> None:
    class Doubled(nn.RMSNorm):
        def forward(self, x):
            return 2 * super().forward(x)

    attention.norm_k.__class__ = Doubled


def forward_hook(attention) -> None:
    attention.norm_q.register_forward_hook(lambda module, args, out: out * 2)


def forward_pre_hook(attention) -> None:
    attention.norm_q.register_forward_pre_hook(lambda module, args: (args[0] * 2 + 1,))


def accelerate_hook(attention) -> None:
    """accelerate offloads by its own `forward` in the module."""
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")

    class Shift(hooks.ModelHook):
        def pre_forward(self, module, x):
            return (x + 1,), {}

    hooks.add_hook_to_module(attention.norm_q, Shift())


def diffusers_hook(attention) -> None:
    from diffusers.hooks import HookRegistry, ModelHook

    class Shift(ModelHook):
        def new_forward(self, module, x):
            return self.fn_ref.original_forward(x + 1)

    HookRegistry.check_if_exists_or_initialize(attention.norm_q).register_hook(Shift(), "shift")


def parametrized(attention) -> None:
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    nn.utils.parametrize.register_parametrization(attention.norm_q, "weight", Doubled())


def another_eps(attention) -> None:
    attention.norm_q.eps = 0.5


CHANGES = [layer_norm, subclass, forward_hook, forward_pre_hook, accelerate_hook, diffusers_hook, parametrized]


@pytest.mark.parametrize("change", [*CHANGES, another_eps], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_norms_that_are_called(change, dtype) -> None:
    """A processor whose norm must be called is the host's, with jitrope's rope; the other blocks are fused."""
    model, inputs = prepared("FluxTransformer2DModel", dtype=dtype)
    for index in (0, 1):  # two streams, one stream
        change(attentions(model)[index])
    model = model.to(dtype)
    with torch.no_grad():
        plain = zoo.forward(prepared("FluxTransformer2DModel", dtype=dtype)[0], inputs)
        assert not torch.equal(zoo.forward(model, inputs), plain), "the change has no effect"
    report = same_as_stock(model, inputs, {"fused": 1, "jitrope": 4})
    assert sum(report.reasons.values()) == 4
    assert all("norm" in reason for reason in report.reasons)


def test_values_of_another_dtype() -> None:
    model, inputs = prepared("FluxTransformer2DModel")
    double = attentions(model)[0]
    for projection in (double.to_v, double.add_v_proj):
        projection.register_forward_hook(lambda module, args, out: out.to(BF16))
    back = importlib.import_module("diffusers.models.transformers.transformer_flux").dispatch_attention_fn

    def attention(q, k, v, **words):
        return back(q, k, v.to(q.dtype), **words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(type(double.processor).__call__.__globals__, "dispatch_attention_fn", attention)
        report = same_as_stock(model, inputs, {"fused": 2, "jitrope": 2})
    (reason,) = report.reasons
    assert "first's v" in reason


@pytest.mark.parametrize("name", ["WanTransformer3DModel", "LTXVideoTransformer3DModel"])
def test_norms_across_heads_that_are_called(name) -> None:
    model, inputs = prepared(name)
    for attention in attentions(model):
        attention.norm_q.register_forward_hook(lambda module, args, out: out * 2)
    report = same_as_stock(model, inputs, {"jitrope": 4})  # of q and k in self-attention, none in cross-attention
    assert sum(report.reasons.values()) == 2 * 4


def test_an_fp32_weight_under_bf16() -> None:
    """diffusers' own RMSNorm returns fp32 then, and rope and attention compute in fp32."""
    model, inputs = prepared("ZImageTransformer2DModel", dtype=BF16)
    for attention in attentions(model):
        attention.norm_q.float()
        attention.norm_k.float()
        attention.to_v.register_forward_hook(lambda module, args, out: out.float())
        attention.to_out[0].register_forward_pre_hook(lambda module, args: (args[0].to(BF16),))
    report = same_as_stock(model, inputs, {"jitrope": 2 * 4})
    assert set(report.reasons) == {"a norm's weight has another dtype"}


def test_without_norms() -> None:
    model, inputs = prepared("QwenImageTransformer2DModel")
    for attention in attentions(model):
        attention.norm_q = attention.norm_k = attention.norm_added_q = attention.norm_added_k = None
    same_as_stock(model, inputs, {"jitrope": 4 * 2})


def test_norms_without_weights() -> None:
    model, inputs = prepared("HunyuanVideoTransformer3DModel", dtype=BF16)
    for attention in attentions(model):
        attention.norm_q.weight = None
        if attention.norm_added_q is not None:
            attention.norm_added_q.weight = attention.norm_added_k.weight = None
    same_as_stock(model, inputs, {"fused": 3})


def test_autocast_is_not_fused() -> None:
    model, inputs = prepared("FluxTransformer2DModel")
    with torch.autocast("cpu", BF16):
        report = same_as_stock(model, inputs, {"jitrope": 6})
    assert report.reasons == {"autocast": 2 * 3}


def test_fp64_is_the_hosts() -> None:
    model, inputs = prepared("FluxTransformer2DModel")
    inputs = {key: zoo.moved(value, "cpu", torch.float64) for key, value in inputs.items()}
    report = same_as_stock(model.double(), inputs, {"host": 6})
    assert all("torch.float64" in reason for reason in report.reasons)


@pytest.mark.parametrize(
    ("name", "double"),
    [
        ("FluxTransformer2DModel", False),
        ("FluxTransformer2DModel", True),
        ("Flux2Transformer2DModel", False),
        ("QwenImageTransformer2DModel", False),
        ("WanTransformer3DModel", True),
        ("LTXVideoTransformer3DModel", True),
        ("HunyuanVideoTransformer3DModel", False),
        ("ZImageTransformer2DModel", False),
    ],
)
def test_refused_tables_do_not_repeat_the_projections(name, double) -> None:
    """Without tables, and with those in fp64, hooks of projections run once, as in the host."""
    model, inputs = prepared(name)

    def changed(_, arguments, words):
        def refused(key, x):
            tables = isinstance(x, tuple) or key.endswith(("rotary_emb", "freqs_cis"))
            return (tuple(y.double() for y in x) if double else None) if tables and x is not None else x

        return tuple(refused("", x) for x in arguments), {key: refused(key, x) for key, x in words.items()}

    seen = []
    for attention in attentions(model):
        attention.register_forward_pre_hook(changed, with_kwargs=True)
        for module in attention.children():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        zoo.forward(model, inputs)
        stock = len(seen)
        with integration.enable(model) as report:
            zoo.forward(model, inputs)
    assert report.reasons
    assert len(seen) == 2 * stock > 0


def test_without_a_twin_of_the_rope_the_host_is_called() -> None:
    """A class with only our `__call__`: calls that jitrope refuses go to the host's own code."""
    model, inputs = prepared("FluxTransformer2DModel")
    with torch.no_grad(), torch.autocast("cpu", BF16):
        stock = zoo.forward(model, inputs)
        for attention in attentions(model):
            host = type(attention.processor)
            members = {"__call__": FUSED[host.__name__].call, "_jitrope_host": host}
            attention.processor.__class__ = type(host.__name__, (host,), members)
        before = _host.calls["diffusers"].copy()
        assert torch.equal(zoo.forward(model, inputs), stock)
    assert _host.calls["diffusers"] - before == {"host": 3}


# ---- reading a norm ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("kind", "eps"), [("torch", None), ("torch", 1e-6), ("torch", 1e-3), ("diffusers", 1e-6), ("diffusers", 1e-3)]
)
def test_norm_of_says_what_the_module_does(kind, eps, dtype, device) -> None:
    from diffusers.models.normalization import RMSNorm

    module = (nn.RMSNorm if kind == "torch" else RMSNorm)(128, eps=eps).to(device, dtype)
    nn.init.normal_(module.weight, mean=1.0, std=0.2)
    weight, found_eps, rounding = norms.norm_of(module)
    assert weight is module.weight
    for scale in (1.0, 2.0**-11):  # the second is of eps' size
        x = (torch.randn(2, 5, 3, 128, device=device) * scale).to(dtype)
        ours, _ = norm_rope(x, None, weight, eps=found_eps, norm_rounding=rounding)
        assert torch.equal(ours, module(x))


def test_norm_of_refuses() -> None:
    from diffusers.models.normalization import RMSNorm

    hooked = nn.RMSNorm(8)
    handle = hooked.register_full_backward_hook(lambda *_: None)
    for module in (None, nn.LayerNorm(8), RMSNorm(8, eps=1e-6, bias=True), nn.RMSNorm((2, 8)), hooked):
        with pytest.raises(InvalidInput, match="norm"):
            norms.norm_of(module)
    handle.remove()
    assert norms.norm_of(hooked)[0] is hooked.weight
    assert norms.norm_of(nn.RMSNorm(8, elementwise_affine=False))[0] is None


# ---- tables -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Flux", "QwenImage", "Wan", "HunyuanVideo", "LTXVideo", "ZImage"])
def test_tables_are_not_copied(name, monkeypatch) -> None:
    """Every table that jitrope gets is a view of the model's own table, or a single row."""
    (name,) = [key for key in FUSED_CALLS if key.startswith(f"{name}Transformer")]
    model, inputs = prepared(name)
    seen = []

    def noted(function, *arguments, **words):
        for table in (words.get("cos"), words.get("sin"), words.get("freqs_cis")):
            seen.extend(t for t in (table if isinstance(table, tuple) else (table,)) if t is not None)
        return function(*arguments, **words)

    for call in ("prepare_qkv", "prepare_joint_qkv"):
        monkeypatch.setattr(norms, call, functools.partial(noted, getattr(norms, call)))
    given = []
    read = forms.options

    def options(form, q, tables, *rest):
        given.extend(tables)
        return read(form, q, tables, *rest)

    monkeypatch.setattr(fused, "options", options)
    same_as_stock(model, inputs, {"fused": FUSED_CALLS[name]})
    theirs = {t.untyped_storage().data_ptr() for t in given}
    own = [t for t in seen if t.untyped_storage().data_ptr() not in theirs]
    assert seen
    assert bool(own) == (name == "HunyuanVideoTransformer3DModel")  # its text is not rotated
    assert all(t.untyped_storage().nbytes() == t[:1].nbytes for t in own)


def test_a_stream_that_is_not_rotated_has_one_row() -> None:
    table = torch.rand(7, 4)
    rope = norms.no_turn({"cos": table, "sin": table, "rounding": "fp32"}, 5)
    assert torch.equal(rope["cos"], torch.ones(5, 4))
    assert torch.equal(rope["sin"], torch.zeros(5, 4))
    assert rope["cos"].untyped_storage().nbytes() == table[:1].nbytes


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_norms_of_two_streams_that_are_called(dtype) -> None:
    """Each stream has its own rope, or the second has none."""
    for name, rotated in (("QwenImageTransformer2DModel", 4), ("HunyuanVideoTransformer3DModel", 2)):
        model, inputs = prepared(name, dtype=dtype)
        forward_hook(attentions(model)[0])
        same_as_stock(model, inputs, {"fused": FUSED_CALLS[name] - 1, "jitrope": rotated})


@pytest.mark.parametrize("change", ["none", "hooked", "gradients", "called"])
def test_text_and_image_of_one_projection(change) -> None:
    """HunyuanVideo rotates the image's tokens and normalises all, in place if no other code holds them."""
    model, inputs = prepared("HunyuanVideoTransformer3DModel")
    single = [m for m in attentions(model) if m.add_q_proj is None]
    assert single
    calls = FUSED_CALLS["HunyuanVideoTransformer3DModel"]
    expected = {"fused": calls}
    for attention in single:
        if change == "hooked":
            attention.to_q.register_forward_hook(lambda *_: None)
        if change == "called":
            forward_hook(attention)
            expected = {"fused": calls - len(single), "jitrope": 2 * len(single)}
    if change == "gradients":
        with integration.enable(model) as report:
            out = zoo.forward(model, inputs)
        assert torch.equal(out, zoo.forward(model, inputs))
        assert report.calls["fused"] == calls
    else:
        same_as_stock(model, inputs, expected)


# ---- which hosts ------------------------------------------------------------------------------------------------


def hosts() -> list[type]:
    """The classes of the installed diffusers that have the name of a fused processor."""
    models = [zoo.MODELS[name].make()[0] for name in FUSED_CALLS if name in zoo.MODELS]
    found = {type(attention.processor) for model in models for attention in attentions(model)}
    return sorted(found, key=lambda cls: (cls.__name__, cls.__module__))


def test_the_installed_hosts_are_known() -> None:
    known = hosts()
    assert {cls.__name__ for cls in known} == set(FUSED)
    for cls in known:
        ours, call = FUSED[cls.__name__], vars(cls)["__call__"]
        assert ours.stands_for(call), cls
        theirs = list(inspect.signature(call).parameters.values())[2:]
        assert list(ours.names) == [p.name for p in theirs], cls
        assert all(p.default is None for p in theirs[1:]), cls


def test_another_argument_is_the_hosts() -> None:
    """A call with an argument that jitrope does not know goes to the host's code."""
    model, _ = prepared("FluxTransformer2DModel")
    attention = model.transformer_blocks[0].attn
    with integration.enable(model) as report, pytest.raises(TypeError, match="unheard"):
        attention.processor(attention, torch.randn(1, 4, 32), unheard=1)
    assert report.reasons == {"arguments that jitrope does not know": 1}


def test_fingerprints() -> None:
    assert fused.fingerprint(_One.scaled) == fused.fingerprint(_Same.scaled)
    assert fused.fingerprint(_One.scaled) != fused.fingerprint(_Other.scaled)
    assert fused.fingerprint(len) == ""
    assert fused.fingerprint(functools.wraps(_One.scaled)(lambda *a: None)) == ""


class _One:
    def scaled(self, x, scale=2):
        """A docstring."""
        return {"y": x * scale}  # and a comment


class _Same:
    def scaled(
        self,
        x: torch.Tensor,
        scale: int = 2,
    ) -> dict[str, torch.Tensor]:
        return {
            "y": x * scale,
        }


class _Other:
    def scaled(self, x, scale=2):
        return {"y": x + scale}


def test_another_version_of_the_host_gets_its_rope_replaced(monkeypatch, tmp_path) -> None:
    from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

    model, inputs = prepared("FluxTransformer2DModel")
    original = FluxAttnProcessor.__call__
    changed = inspect.getsource(original).replace("key = attn.norm_k(key)", "key = attn.norm_k(key) * 2", 1)
    assert changed != inspect.getsource(original)
    path = tmp_path / "changed.py"
    path.write_text(f"if True:\n{changed}")
    names: dict = {}
    exec(compile(path.read_text(), path, "exec"), original.__globals__, names)
    monkeypatch.setattr(FluxAttnProcessor, "__call__", names["__call__"])
    assert fused.fingerprint(FluxAttnProcessor.__call__) != ""
    assert not FUSED["FluxAttnProcessor"].stands_for(FluxAttnProcessor.__call__)
    report = same_as_stock(model, inputs, {"jitrope": 6})
    assert not report.fused
    assert "jitrope does not know its code" in report.notes["FluxAttnProcessor"]


def test_a_host_that_finds_its_rope_elsewhere_is_fused(monkeypatch, tmp_path) -> None:
    """In diffusers 0.40 and 0.41 Qwen-Image's rope comes from a table, so its name is not in the code."""
    from diffusers.models.transformers import transformer_qwenimage as module

    host = module.QwenDoubleStreamAttnProcessor2_0
    model, inputs = prepared("QwenImageTransformer2DModel")
    changed = inspect.getsource(host.__call__).replace("apply_rotary_emb_qwen(", "ROPES['any'](")
    assert "ROPES" in changed
    path = tmp_path / "changed.py"
    path.write_text(f"if True:\n{changed}")
    names: dict = {}
    exec(compile(path.read_text(), path, "exec"), host.__call__.__globals__, names)
    monkeypatch.setattr(module, "ROPES", {"any": module.apply_rotary_emb_qwen}, raising=False)
    monkeypatch.setattr(host, "__call__", names["__call__"])
    known = FUSED[host.__name__]._replace(fingerprints=fused.fingerprint(host.__call__))
    monkeypatch.setitem(FUSED, host.__name__, known)
    report = same_as_stock(model, inputs, {"fused": 2})
    assert "does not call apply_rotary_emb_qwen; calls that are not fused are the host's" in report.table()
    with torch.autocast("cpu", BF16):
        same_as_stock(model, inputs, {"host": 2})
    with pytest.raises(jitrope.JitropeError, match="apply_rotary_emb_qwen; jitrope is tested with"):
        integration.enable(model, fuse_norm=False)
