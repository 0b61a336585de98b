"""`integrations.diffusers`: small models of random weights have the stock model's bits."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import pickle
import pkgutil
import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jitrope
from jitrope.integrations import _host
from jitrope.integrations import diffusers as integration
from jitrope.integrations.diffusers import fused, ropes

from .. import fresh, hosts

diffusers = pytest.importorskip("diffusers", reason="the diffusers extra is not installed")
from diffusers.models import attention_processor, embeddings  # noqa: E402
from diffusers.models.normalization import RMSNorm  # noqa: E402
from diffusers.models.transformers import transformer_flux  # noqa: E402

from ..devices import DEVICES, slow  # noqa: E402
from . import diffusion_zoo as zoo  # noqa: E402
from .diffusion_zoo import prepared  # noqa: E402

FP32, BF16 = torch.float32, torch.bfloat16
EACH = pytest.mark.parametrize("name", list(zoo.MODELS))
FLUX, WAN, QWEN = "FluxTransformer2DModel", "WanTransformer3DModel", "QwenImageTransformer2DModel"
HUNYUAN, LTX, Z_IMAGE = "HunyuanVideoTransformer3DModel", "LTXVideoTransformer3DModel", "ZImageTransformer2DModel"
HUNYUAN_DIT, COGVIDEOX = "HunyuanDiT2DModel", "CogVideoXTransformer3DModel"
COGVIEW, SANA, FLUX2 = "CogView4Transformer2DModel", "SanaWMTransformer3DModel", "Flux2Transformer2DModel"
# Classes that rotate in their own code, by three tables (Allegro), or by tables that each call would have to convert.
LEFT = {
    *("Mochi", "Kandinsky5", "ErnieImageSingleStream", "SanaLinear", "Cosmos3", "Ideogram4", "BriaFibo2", "Allegro"),
    *("HiDream", "PRX", "Kandinsky6", "Kandinsky6SR", "StableAudio3Self", "WanAnimate2", "MiniMaxMusic3", "MiniMaxH3"),
}


def same_as_stock(model: Any, inputs: Any, expected: Any, exact: bool = True, fuse_norm: bool = True) -> Any:
    """Run the model stock, twice with jitrope, and stock again; all outputs are the same. Returns the report."""
    with torch.no_grad():
        stock = zoo.forward(model, inputs)
        with integration.enable(model, fuse_norm=fuse_norm) as report:
            outputs = [zoo.forward(model, inputs) for _ in range(2)]
        assert torch.equal(zoo.forward(model, inputs), stock)
    for ours in outputs:
        tolerance = 0 if exact else 1e-4 if stock.dtype == FP32 else 5e-2
        torch.testing.assert_close(ours, stock, rtol=tolerance, atol=tolerance)
    assert report.calls == {"jitrope": 0, "host": 0} | {who: 2 * count for who, count in expected.items()}
    return report


def attentions(model: nn.Module) -> list[Any]:
    """Those with norms of q and k."""
    return [module for module in model.modules() if getattr(module, "norm_q", None) is not None]


# ---- every model --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP32, BF16, slow(torch.float16)], ids=["fp32", "bf16", "fp16"])
@EACH
def test_the_stock_models_bits(name: str, dtype: torch.dtype, device: str) -> None:
    """With rope alone, where it is a function of the host's, and with the norm in the same launch."""
    entry = zoo.MODELS[name]
    model, inputs = prepared(name, device, dtype)
    if entry.calls:
        same_as_stock(model, inputs, {"jitrope": entry.calls}, fuse_norm=False)
    else:
        with pytest.raises(jitrope.JitropeError, match="its rope is in its own code"):
            integration.enable(model, fuse_norm=False)
    if entry.fused:
        # On a GPU, squares of heads of other sizes than powers of two are summed in another order.
        report = same_as_stock(model, inputs, {"fused": entry.fused}, exact=device == "cpu")
        assert not report.reasons


@pytest.mark.slow
@EACH
def test_gradients_are_the_hosts(name: str) -> None:
    if not zoo.MODELS[name].gradients:
        pytest.skip("the stock model has no backward on a CPU")
    model, inputs = prepared(name)
    parameters, found = {key: p for key, p in model.named_parameters() if p.requires_grad}, []
    with integration.enable(model) as report:
        for _ in range(2):  # with jitrope and without
            loss = zoo.forward(model, inputs).square().mean()
            found.append(torch.autograd.grad(loss, [*parameters.values()], allow_unused=True))
            integration.disable()
    assert report.calls["fused"] == zoo.MODELS[name].fused
    assert report.calls["fused"] + report.calls["jitrope"] > 0
    for key, ours, want in zip(parameters, *found):
        assert (ours is None) == (want is None), key
        if want is not None:
            torch.testing.assert_close(ours, want, rtol=1e-3, atol=1e-4 * float(want.abs().max()) + 1e-7)


COMPILED = [(name, True) for name in (FLUX, FLUX2, QWEN, WAN, HUNYUAN, LTX, Z_IMAGE)]
COMPILED += [(name, False) for name in (FLUX, COGVIEW, SANA)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fuse_norm"), COMPILED)
def test_compiled_fullgraph_without_recompiles(name: str, fuse_norm: bool) -> None:
    """A compiled model notices `disable`."""
    model, inputs = prepared(name)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        stock = zoo.forward(model, inputs)
        with integration.enable(model, fuse_norm=fuse_norm) as report:
            want = zoo.forward(model, inputs)
            eager = report.calls
            assert torch.equal(zoo.forward(compiled, inputs), want)
            other = {key: value * 0.5 if key == "hidden_states" else value for key, value in inputs.items()}
            with torch._dynamo.config.patch(error_on_recompile=True):
                again = zoo.forward(compiled, other)
            assert report.calls == eager + eager  # once when it ran, once when it was traced
            torch.testing.assert_close(again, zoo.forward(model, other))
        assert report.calls["host"] == 0
        ended = report.calls
        torch.testing.assert_close(zoo.forward(compiled, inputs), stock)
    assert report.calls == ended


@pytest.mark.parametrize(("name", "fuse_norm"), [(QWEN, True), (WAN, True), (COGVIEW, False)])
def test_exported(name: str, fuse_norm: bool) -> None:
    model, inputs = prepared(name)
    with torch.no_grad(), integration.enable(model, fuse_norm=fuse_norm):
        want = zoo.forward(model, inputs)
        exported = torch.export.export(model, (), inputs, strict=False)
        operations = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
        torch.testing.assert_close(zoo.forward(exported.module(), inputs), want)
    assert any(operation.startswith("jitrope.") for operation in operations)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["LTX2VideoTransformer3DModel-split", "Lumina2Transformer2DModel", FLUX])
def test_autocast(name: str, device: str) -> None:
    """Autocast does not cast the operations of a rope; norms are the host's."""
    model, inputs = prepared(name, device)
    with torch.autocast(device, BF16):
        report = same_as_stock(model, inputs, {"jitrope": zoo.MODELS[name].calls})
    assert report.reasons == ({"autocast": 2 * 3} if name == FLUX else {})


def classes() -> list[tuple[str, Any, str]]:
    """The classes of all transformers, controlnets and attention processors, with their names in jitrope, and texts.

    `inspect.getsource` would parse a file for each of its classes.
    """
    packages = [importlib.import_module(f"diffusers.models.{name}") for name in ("transformers", "controlnets")]
    names = [f"{package.__name__}.{x.name}" for package in packages for x in pkgutil.iter_modules(package.__path__)]
    modules = [attention_processor, *map(importlib.import_module, names)]
    found = []
    for module in modules:
        for text in re.split(r"^(?=class |def |@|#)", inspect.getsource(module), flags=re.MULTILINE):
            if name := re.match(r"class (\w+)", text):
                found.append((name[1].partition("AttnProcessor")[0], getattr(module, name[1]), text))
    return found


def test_every_class_that_rotates_is_known() -> None:
    """Processors and attention modules are found by the rope functions that their text names."""
    rotates = re.compile(r"apply_(\w+_)?rot|apply_rope|rope_apply|_rotate_half|_qwenimage21_prepare_qkv")
    found = {name for name, _, text in classes() if rotates.search(text)}
    known = {name for names in ropes.ROPES.values() for name in names.split()}
    assert found - {"SanaWMLTX2Attention", "QwenImage21Attention"} == known | fused.FUSED | LEFT


CONTROLNETS = {"FluxControlNetModel": FLUX, "QwenImageControlNetModel": QWEN, "ZImageControlNetModel": Z_IMAGE}
CONTROLNETS |= {"HunyuanDiT2DControlNetModel": HUNYUAN_DIT, "CosmosControlNetModel": "CosmosTransformer3DModel"}
Z_CONTROL = {"control_in_dim": 6, "control_layers_places": [0, 1], "control_refiner_layers_places": [0]}


@pytest.mark.parametrize("name", CONTROLNETS)
def test_controlnets_made_of_known_blocks(name: str) -> None:
    config = {**prepared(CONTROLNETS[name])[0].config, "num_layers": 1, "_class_name": name}
    model = getattr(diffusers, name).from_config(config | (Z_CONTROL if name.startswith("Z") else {}))
    with integration.enable(model) as report:
        assert report.replaced
        assert not report.left


# ---- enable and disable -------------------------------------------------------------------------------------


def test_rope_alone_within_fused_norms() -> None:
    model, inputs = prepared(FLUX)
    with integration.enable(model) as report, torch.no_grad():
        assert report.replaced == {
            f"{transformer_flux.__name__}.FluxAttnProcessor.__call__": "norm and rope",
            f"{transformer_flux.__name__}.apply_rotary_emb": "rope",
        }
        zoo.forward(model, inputs)
        with integration.enable(model, fuse_norm=False):
            zoo.forward(model, inputs)
        assert report.calls == {"jitrope": 6, "host": 0, "fused": 3}


def test_what_is_left_in_a_pipeline_and_a_model() -> None:
    """The processors of a pipeline's VAE, and of others, are told; those that are set later are found."""
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4)  # has its own processors
    nothing = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    model, inputs = prepared(FLUX)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    with integration.enable(diffusers.FluxPipeline(scheduler, vae=vae, transformer=model, **nothing)) as report:
        assert len(report.replaced) == 2
        assert report.left == {"diffusers.models.attention_processor.AttnProcessor2_0": "jitrope knows no rope in it"}
    model.transformer_blocks[0].attn.processor = type("Custom", (), {"__call__": lambda *_: None})()
    with integration.enable(model) as report, torch.no_grad():
        assert [*report.left.values()] == ["not a processor of diffusers; call jitrope.apply_rope in it"]
        assert "1 left alone" in str(report)
        assert "Custom: left alone: not a processor of diffusers" in report.table()
        model.set_attn_processor({name: transformer_flux.FluxAttnProcessor() for name in model.attn_processors})
        zoo.forward(model, inputs)
    assert report.calls["fused"] == 3


def test_models_without_anything_to_replace() -> None:
    with pytest.raises(jitrope.JitropeError, match=f"no attention processors of diffusers {diffusers.__version__}"):
        integration.enable(nn.Linear(2, 2))
    attention = nn.Linear(2, 2)
    attention.processor = attention_processor.MochiAttnProcessor2_0()
    with pytest.raises(jitrope.JitropeError, match="MochiAttnProcessor2_0: jitrope knows no rope in it"):
        integration.enable(SimpleNamespace(components={"transformer": attention}))


@pytest.mark.parametrize("name", [FLUX, WAN, SANA])
def test_copies_pickles_and_files_are_the_hosts(name: str, tmp_path: Path) -> None:
    model, inputs = prepared(name)
    keys = list(model.state_dict())
    with torch.no_grad():
        want = zoo.forward(model, inputs)
        with integration.enable(model):
            assert list(model.state_dict()) == keys
            model.save_pretrained(tmp_path)
            copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), type(model).from_pretrained(tmp_path)]
            outputs = [zoo.forward(other, inputs) for other in copies]
        assert all(torch.equal(x, want) for x in (*outputs, *(zoo.forward(other, inputs) for other in copies)))


@pytest.mark.parametrize("name", [FLUX, SANA])
def test_hooks_of_accelerate_and_sharding(name: str) -> None:
    """Hooks of whole modules, before and after `enable`, and classes that `fully_shard` derives."""
    accelerate = pytest.importorskip("accelerate", reason="the diffusers extra is not installed")
    from torch.distributed.fsdp import fully_shard

    model, inputs = prepared(name)
    with hosts.group(1), torch.no_grad():
        want = zoo.forward(model, inputs)
        integration.enable(model)
        for module in model.modules():
            if getattr(module, "norm_q", None) is None:
                accelerate.hooks.add_hook_to_module(module, accelerate.hooks.ModelHook())
        report = integration.enable(model)
        assert torch.equal(zoo.forward(model, inputs), want)
        assert report.calls["jitrope"] + report.calls.get("fused", 0) > 0
        accelerate.hooks.remove_hook_from_module(model, recurse=True)
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        for change in (lambda: integration.enable(model), integration.disable):
            change()
            assert torch.equal(zoo.forward(model, inputs), want)


@pytest.mark.parametrize("name", [QWEN, WAN])
def test_lora(name: str) -> None:
    """Adapters stay in the projections of q, k and v, and get gradients."""
    peft = pytest.importorskip("peft", reason="the test extra is not installed")
    model, inputs = prepared(name)
    with torch.no_grad():
        alone = zoo.forward(model, inputs)
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        model.add_adapter(peft.LoraConfig(r=4, init_lora_weights=False, target_modules=targets))
        assert not torch.equal(zoo.forward(model, inputs), alone)
    same_as_stock(model, inputs, {"fused": zoo.MODELS[name].fused})
    with integration.enable(model):
        zoo.forward(model, inputs).square().sum().backward()
    adapters = [p for key, p in model.named_parameters() if "lora" in key and p.requires_grad]
    assert adapters
    assert all(p.grad is not None for p in adapters)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offload", ["block_level", "leaf_level"])
@pytest.mark.parametrize("name", [FLUX, COGVIEW])
def test_group_offload(name: str, offload: str, device: str) -> None:
    """On a CPU the hooks run, but move nothing. The host's own code calls norms that have a hook."""
    model, inputs = prepared(name, device)
    words = {"num_blocks_per_group": 1} if offload == "block_level" else {}
    model.enable_group_offload(torch.device(device), offload_type=offload, **words)
    entry = zoo.MODELS[name]
    calls = {"fused": entry.fused} if entry.fused and offload == "block_level" else {"jitrope": entry.calls}
    same_as_stock(model, inputs, calls, exact=device == "cpu")  # on a GPU, squares of fp32 have another order


CONTEXT_PARALLEL = """
import sys
import torch, torch.distributed as dist, torch.multiprocessing
torch.accelerator.device_count = lambda: 2  # diffusers asks for it even where gloo and a CPU do
import diffusers
from jitrope.integrations import diffusers as integration
from tests.integrations.diffusion_zoo import MODELS, prepared

@torch.no_grad
def work(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for name in ("FluxTransformer2DModel", "WanTransformer3DModel", "QwenImageTransformer2DModel"):
        model, inputs = prepared(name)
        if "Qwen" in name:  # diffusers needs equal parts of the text
            inputs.update(encoder_hidden_states=inputs["encoder_hidden_states"][:, :6], encoder_hidden_states_mask=None)
        alone = model(**inputs, return_dict=False)[0]
        model.set_attention_backend("native")
        model.enable_parallelism(config=diffusers.ContextParallelConfig(ulysses_degree=2))
        stock = model(**inputs, return_dict=False)[0]
        with integration.enable(model) as report:
            assert torch.equal(model(**inputs, return_dict=False)[0], stock)
        assert report.calls == {"jitrope": 0, "host": 0, "fused": MODELS[name].fused}, report
        torch.testing.assert_close(stock, alone)
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.start_processes(work, (sys.argv[1],), nprocs=2, start_method="fork")  # diffusers is there
"""


@pytest.mark.slow
def test_context_parallel(tmp_path: Path) -> None:
    """Two processes with Ulysses: diffusers' hooks split the tables, and rope runs on a rank's rows."""
    (script := tmp_path / "work.py").write_text(CONTEXT_PARALLEL)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "GLOO_SOCKET_IFNAME": "lo"}
    done = fresh.python(str(script), str(tmp_path / "store"), env=env, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]


# ---- other versions of the host, and other libraries that change it -------------------------------------------


def test_the_installed_hosts_texts_are_known() -> None:
    """Also of the classes of the same name in other files."""
    known = [(name, cls) for name, cls, _ in classes() if "__call__" in vars(cls) and name in fused.FUSED]
    assert {name for name, _ in known} == fused.FUSED
    for _, cls in known:
        assert _host.text_of(cls.__call__) in fused.COPIES
        assert inspect.signature(cls.__call__).parameters.keys() <= {*fused.Call._fields}, cls
    assert _host.text_of(RMSNorm.forward) in fused.RMS_NORM


def test_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a processor: its rope is replaced, if it is a function."""
    monkeypatch.setattr(integration, "COPIES", {})
    report = same_as_stock(*prepared(FLUX), {"jitrope": 6})
    assert [*report.left.values()] == [f"jitrope does not know its code in diffusers {diffusers.__version__}"]
    with pytest.raises(jitrope.JitropeError, match=r"transformer_wan.WanAttnProcessor.__call__: jitrope does not know"):
        integration.enable(prepared(WAN)[0])


def test_a_processor_with_a_new_keyword(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that uses it goes to the host's processor, which knows it; one that does not is fused."""
    original, module_of = transformer_flux.FluxAttnProcessor.__call__, _host.module_of

    def call(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None, gain=1):
        out = original(self, attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        return tuple(gain * x for x in out)

    monkeypatch.setitem(fused.COPIES, _host.text_of(call), fused.COPIES[_host.text_of(original)])
    monkeypatch.setattr(_host, "module_of", lambda f: transformer_flux.__name__ if f is call else module_of(f))
    monkeypatch.setattr(transformer_flux.FluxAttnProcessor, "__call__", call)
    model, _ = prepared(FLUX)
    attention, table = model.transformer_blocks[0].attn, (torch.rand(10, 16), torch.rand(10, 16))
    given = (attention, torch.randn(1, 6, 32), torch.randn(1, 4, 32))
    with torch.no_grad(), integration.enable(model) as report:
        want = attention.processor(*given, image_rotary_emb=table)
        got = attention.processor(*given, None, table, gain=2)
        assert report.calls == {"jitrope": 2, "host": 0, "fused": 1}
        attention.processor(*given, None, table, gain=1)
        assert report.calls == {"jitrope": 2, "host": 0, "fused": 2}
    assert report.reasons == {"jitrope does not know the argument gain of call": 1}
    torch.testing.assert_close(got, tuple(2 * x for x in want))


def test_the_hosts_module_is_asked_for_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """If another library replaces attention in the host's module, that attention is called."""
    (model, inputs), original, seen = prepared(FLUX), transformer_flux.dispatch_attention_fn, []
    attention = lambda *given, **words: seen.append(words["backend"]) or original(*given, **words)  # noqa: E731
    monkeypatch.setattr(transformer_flux, "dispatch_attention_fn", attention)
    model.set_attention_backend("native")
    same_as_stock(model, inputs, {"fused": 3})
    assert seen == ["native"] * 4 * 3


@pytest.mark.parametrize("first", ["cache-dit", "jitrope"])
def test_cache_dit(first: str) -> None:
    """cache-dit skips blocks of later steps. With jitrope FLUX has the same bits under it, whichever comes first."""
    cache_dit = hosts.installed("cache_dit")
    layers = {"num_layers": 4, "num_single_layers": 4}
    (model, given), (other, _) = (prepared(FLUX, config=layers) for _ in range(2))
    cache = cache_dit.DBCacheConfig(
        Fn_compute_blocks=1, Bn_compute_blocks=0, residual_diff_threshold=0.5, max_warmup_steps=1, num_inference_steps=4
    )
    x = given.pop("hidden_states")
    with torch.no_grad():
        cache_dit.enable_cache(other, cache_config=cache)
        stock = [other(hidden_states=x * (1 + step / 1000), **given)[0] for step in range(4)]
        if first == "cache-dit":
            cache_dit.enable_cache(model, cache_config=cache)
        report = integration.enable(model)
        if first == "jitrope":
            cache_dit.enable_cache(model, cache_config=cache)
        results = [model(hidden_states=x * (1 + step / 1000), **given)[0] for step in range(4)]
    assert all(map(torch.equal, results, stock))
    assert 0 < report.calls["fused"] < 4 * 8
    assert report.calls["host"] == 0


# ---- norm and rope in one launch ------------------------------------------------------------------------------

AXES = {FLUX: "axes_dims_rope", QWEN: "axes_dims_rope", WAN: None, HUNYUAN: "rope_axes_dim"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(("name", "axes"), AXES.items())
def test_heads_of_128_give_the_same_bits(name: str, axes: Any, dtype: torch.dtype, device: str) -> None:
    config = {"attention_head_dim": 128, **({axes: (16, 56, 56)} if axes else {})}
    model, inputs = prepared(name, device, dtype, config)
    # Across heads, sums have torch's order with 2-byte dtypes.
    exact = device == "cpu" or (name, dtype) != (WAN, FP32)
    same_as_stock(model, inputs, {"fused": zoo.MODELS[name].fused}, exact=exact)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_wan_image_to_video(dtype: torch.dtype) -> None:
    """Keys and values of the image have their own projection and norm; the last 512 tokens are text."""
    more = {"encoder_hidden_states": torch.randn(2, 512, 16), "encoder_hidden_states_image": torch.randn(2, 3, 16)}
    model, inputs = prepared(WAN, "cpu", dtype, {"image_dim": 16, "added_kv_proj_dim": 32}, more)
    assert any(m.add_k_proj is not None for m in attentions(model))
    same_as_stock(model, inputs, {"fused": 4})


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", [FLUX, WAN, FLUX2, COGVIDEOX, HUNYUAN_DIT])
def test_fused_projections(name: str, dtype: torch.dtype) -> None:
    """q, k and v are views of one projection, and some models have other processors meanwhile."""
    model, inputs = prepared(name, dtype=dtype)
    entry = zoo.MODELS[name]
    with torch.no_grad():
        want = zoo.forward(model, inputs)
        with integration.enable(model):
            model.fuse_qkv_projections()
            assert any(getattr(m, "fused_projections", False) for m in model.modules())
            ours = zoo.forward(model, inputs)
        assert torch.equal(ours, zoo.forward(model, inputs))
        same_as_stock(model, inputs, {"fused": entry.fused} if entry.fused else {"jitrope": entry.calls})
        model.unfuse_qkv_projections()
        assert torch.equal(zoo.forward(model, inputs), want)


@pytest.mark.parametrize("name", [FLUX, WAN, HUNYUAN, LTX, Z_IMAGE])
def test_projections_that_something_keeps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As calibration and captures of activations do: what they see, they have after the forward too."""
    (model, inputs), linear, results = prepared(name), nn.functional.linear, []
    for enable in (nullcontext, partial(integration.enable, model)):
        kept: list[Tensor] = []
        monkeypatch.setattr(nn.functional, "linear", lambda *x, kept=kept: kept.append(linear(*x)) or kept[-1])
        with torch.no_grad(), enable():
            zoo.forward(model, inputs)
        results.append(kept)
    assert results[0]
    torch.testing.assert_close(*results, rtol=0, atol=0)


# ---- norms that are not fused ---------------------------------------------------------------------------------


def test_norms_that_are_called() -> None:
    """A processor whose norm must be called is the host's, with jitrope's rope; the other blocks are fused."""
    model, inputs = prepared(FLUX, dtype=BF16)
    for attention in attentions(model)[:2]:  # two streams, one stream
        attention.norm_q.register_forward_hook(lambda module, args, out: out * 2)
    report = same_as_stock(model, inputs, {"fused": 1, "jitrope": 4})
    assert report.reasons == {"a norm has hooks": 4}


def test_norms_that_are_absent() -> None:
    model, inputs = prepared(QWEN)
    for attention in attentions(model):
        attention.norm_q = attention.norm_k = attention.norm_added_q = attention.norm_added_k = None
    same_as_stock(model, inputs, {"jitrope": 4 * 2})


def test_norms_without_weights() -> None:
    model, inputs = prepared(HUNYUAN, dtype=BF16)
    for attention in attentions(model):
        attention.norm_q.weight = None
        if attention.norm_added_q is not None:
            attention.norm_added_q.weight = attention.norm_added_k.weight = None
    same_as_stock(model, inputs, {"fused": 3})


REFUSED = [*((name, False) for name in (FLUX, QWEN, HUNYUAN, Z_IMAGE)), *((name, True) for name in (FLUX, WAN, LTX))]


@pytest.mark.parametrize(("name", "double"), REFUSED)
def test_refused_tables_do_not_repeat_the_projections(name: str, double: bool) -> None:
    """Without tables, and with those in fp64, hooks of projections run once, as in the host."""
    (model, inputs), seen, names = prepared(name), [], ("image_rotary_emb", "rotary_emb", "freqs_cis")
    to = lambda tables: tuple(x.double() for x in tables) if double else None  # noqa: E731
    changed = lambda _, given, words: (  # noqa: E731
        tuple(to(x) if isinstance(x, tuple) else x for x in given),
        {key: to(x) if key in names and x is not None else x for key, x in words.items()},
    )
    for attention in attentions(model):
        attention.register_forward_pre_hook(changed, with_kwargs=True)
        for module in attention.children():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        zoo.forward(model, inputs)
        stock = len(seen)
        with integration.enable(model) as report:
            zoo.forward(model, inputs)
    assert report.reasons
    assert len(seen) == 2 * stock > 0


@pytest.mark.parametrize("reason", ["cos is torch.float64", "the tables' shape"])
def test_a_rope_that_is_not_ours_is_the_hosts(reason: str) -> None:
    x, angles = torch.randn(2, 6, 3, 16), torch.rand(6, 8).repeat_interleave(2, -1)
    cos, sin = (f(angles.double() if "64" in reason else angles[:1]) for f in (torch.cos, torch.sin))
    want = embeddings.apply_rotary_emb(x, (cos, sin), sequence_dim=1)
    with integration.enable(prepared(FLUX)[0]) as report:
        assert torch.equal(embeddings.apply_rotary_emb(x, (cos, sin), sequence_dim=1), want)
    assert report.calls == {"jitrope": 0, "host": 1}
    assert reason in next(iter(report.reasons))
