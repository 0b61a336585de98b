"""`integrations.diffusers` and `integrations.xfuser`: small models of random weights have the stock model's bits."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import pickle
import pkgutil
import re
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import jitrope
from jitrope.integrations import _host
from jitrope.integrations import diffusers as integration
from jitrope.integrations.diffusers import fused, ropes

from . import fresh, hosts

diffusers = pytest.importorskip("diffusers", reason="the diffusers extra is not installed")
from diffusers.models import attention_processor, embeddings  # noqa: E402
from diffusers.models.normalization import RMSNorm  # noqa: E402
from diffusers.models.transformers import transformer_flux, transformer_qwenimage  # noqa: E402

from . import diffusion_zoo as zoo  # noqa: E402
from .devices import DEVICES, slow  # noqa: E402
from .diffusion_zoo import prepared  # noqa: E402

FP32, BF16 = torch.float32, torch.bfloat16
EACH = pytest.mark.parametrize("name", list(zoo.MODELS))
FLUX, WAN, QWEN = "FluxTransformer2DModel", "WanTransformer3DModel", "QwenImageTransformer2DModel"
# Classes that rotate in their own code, by three tables (Allegro), or by tables that each call would have to convert.
LEFT = {
    *("Mochi", "Kandinsky5", "ErnieImageSingleStream", "SanaLinear", "Cosmos3", "Ideogram4", "BriaFibo2", "Allegro"),
    *("HiDream", "PRX", "Kandinsky6", "Kandinsky6SR", "StableAudio3Self", "WanAnimate2", "MiniMaxMusic3", "MiniMaxH3"),
}
HUNYUAN, LTX, Z_IMAGE = "HunyuanVideoTransformer3DModel", "LTXVideoTransformer3DModel", "ZImageTransformer2DModel"


def seeded(model: nn.Module, inputs: Any) -> Tensor:
    """A forward with the same random numbers and order of sums: a mixture of experts sums its experts by atomics."""
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return zoo.forward(model, inputs)
    finally:
        torch.use_deterministic_algorithms(False)


def same_as_stock(model: Any, inputs: Any, expected: Any, exact: bool = True, fuse_norm: bool = True) -> Any:
    """Run the model stock, twice with jitrope, and stock again; all outputs are the same."""
    with torch.no_grad():
        stock = seeded(model, inputs)
        with integration.enable(model, fuse_norm=fuse_norm) as report:
            outputs = [seeded(model, inputs) for _ in range(2)]
        assert torch.equal(seeded(model, inputs), stock)
    for ours in outputs:
        tolerance = 0 if exact else 1e-4 if stock.dtype == FP32 else 5e-2
        torch.testing.assert_close(ours, stock, rtol=tolerance, atol=tolerance)
    assert report.calls == {"jitrope": 0, "host": 0} | {who: 2 * count for who, count in expected.items()}
    return report


def attentions(model: nn.Module) -> list[Any]:
    """The modules with processors that are replaced as a whole."""
    return [m for m in model.modules() if short(type(getattr(m, "processor", None))) in fused.FUSED]


def short(cls: type) -> str:
    return cls.__name__.partition("AttnProcessor")[0]


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


@EACH
def test_gradients_are_the_hosts(name: str) -> None:
    if not zoo.MODELS[name].gradients:
        pytest.skip("the stock model has no backward on a CPU")
    model, inputs = prepared(name)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        seeded(model, inputs).square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    stock = gradients()
    with integration.enable(model) as report:
        ours = gradients()
    assert report.calls["fused"] == zoo.MODELS[name].fused
    assert report.calls["fused"] + report.calls["jitrope"] > 0
    assert ours.keys() == stock.keys()
    for key, want in stock.items():
        torch.testing.assert_close(ours[key], want, rtol=1e-3, atol=1e-4 * float(want.abs().max()) + 1e-7)


COMPILED = [
    *((name, True) for name in (FLUX, "Flux2Transformer2DModel", QWEN, WAN, HUNYUAN, LTX, Z_IMAGE)),
    *((name, False) for name in (FLUX, "CogView4Transformer2DModel", "SanaWMTransformer3DModel")),
]


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
            calls = report.calls
            torch.testing.assert_close(again, zoo.forward(model, other))
        torch.testing.assert_close(zoo.forward(compiled, inputs), stock)
        assert report.calls["host"] == 0
    assert calls == {who: 2 * count for who, count in eager.items()}  # once when it ran, once when it was traced
    ended = report.calls
    with torch.no_grad():
        zoo.forward(compiled, inputs)
    assert report.calls == ended


@pytest.mark.parametrize(("name", "fuse_norm"), [(QWEN, True), (WAN, True), ("CogView4Transformer2DModel", False)])
def test_exported(name: str, fuse_norm: bool) -> None:
    model, inputs = prepared(name)
    with torch.no_grad(), integration.enable(model, fuse_norm=fuse_norm):
        want = zoo.forward(model, inputs)
        exported = torch.export.export(model, (), inputs, strict=False)
        operations = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
        torch.testing.assert_close(zoo.forward(exported.module(), inputs), want)
    assert any(operation.startswith("jitrope.") for operation in operations)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["LTX2VideoTransformer3DModel-split", "Lumina2Transformer2DModel"])
def test_autocast(name: str, device: str) -> None:
    """Autocast does not cast the operations of a rope."""
    model, inputs = prepared(name, device)
    with torch.autocast(device, BF16):
        same_as_stock(model, inputs, {"jitrope": zoo.MODELS[name].calls})


def classes() -> list[Any]:
    """The classes of all transformers, controlnets and attention processors."""
    packages = [importlib.import_module(f"diffusers.models.{name}") for name in ("transformers", "controlnets")]
    names = [f"{package.__name__}.{x.name}" for package in packages for x in pkgutil.iter_modules(package.__path__)]
    modules = [attention_processor, *map(importlib.import_module, names)]
    return [cls for m in modules for cls in vars(m).values() if inspect.isclass(cls) and cls.__module__ == m.__name__]


def test_every_class_that_rotates_is_known() -> None:
    """Processors and attention modules are found by the rope functions that their text names."""
    rotates = re.compile(r"apply_(\w+_)?rot|apply_rope|rope_apply|_rotate_half|_qwenimage21_prepare_qkv")
    found = {short(cls) for cls in classes() if rotates.search(inspect.getsource(cls))}
    known = {name for names in ropes.ROPES.values() for name in names.split()}
    helpers = {"SanaWMLTX2Attention", "QwenImage21Attention"}
    assert found - helpers == known | fused.FUSED | LEFT


def test_controlnets_made_of_known_blocks() -> None:
    of = {"FluxControlNetModel": FLUX, "QwenImageControlNetModel": QWEN}
    of |= {"HunyuanDiT2DControlNetModel": "HunyuanDiT2DModel", "CosmosControlNetModel": "CosmosTransformer3DModel"}
    made = []
    for name, model in of.items():
        config = {**prepared(model)[0].config, "num_layers": 1, "_class_name": name}
        made.append(getattr(diffusers, name).from_config(config))
    made += [diffusers.FluxMultiControlNetModel(made[:1]), diffusers.QwenImageMultiControlNetModel(made[1:2])]
    for model in made:
        with integration.enable(model) as report:
            assert report.replaced
            assert not report.left


# ---- enable and disable -------------------------------------------------------------------------------------


def test_enable_twice_contexts_and_reports() -> None:
    model, inputs = prepared(FLUX)
    call, rope = transformer_flux.FluxAttnProcessor.__call__, embeddings.apply_rotary_emb
    signature = inspect.signature(call)
    where = "diffusers.models.transformers.transformer_flux."
    with integration.enable(model) as report, torch.no_grad():
        assert inspect.signature(transformer_flux.FluxAttnProcessor.__call__) == signature
        assert report.replaced == {
            f"{where}FluxAttnProcessor.__call__": "norm and rope",
            f"{where}apply_rotary_emb": "rope",
        }
        assert str(report) == "2 functions replaced; 0 calls since; 0 left to diffusers"
        with integration.enable(model) as again:
            assert again.replaced == report.replaced
        zoo.forward(model, inputs)
        assert report.calls == {"jitrope": 0, "host": 0, "fused": 3}
        with integration.enable(model, fuse_norm=False):
            zoo.forward(model, inputs)
        assert report.calls == {"jitrope": 6, "host": 0, "fused": 3}
    assert "(disabled)" in str(report)
    assert (transformer_flux.FluxAttnProcessor.__call__, embeddings.apply_rotary_emb) == (call, rope)
    integration.enable(model)
    integration.disable()
    assert (transformer_flux.FluxAttnProcessor.__call__, transformer_flux.apply_rotary_emb) == (call, rope)


def test_pipeline() -> None:
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4)  # has its own processors
    nothing = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipeline = diffusers.FluxPipeline(scheduler=scheduler, vae=vae, transformer=prepared(FLUX)[0], **nothing)
    with integration.enable(pipeline) as report:
        assert len(report.replaced) == 2
        assert report.left == {
            "diffusers.models.attention_processor.AttnProcessor2_0": "jitrope knows no rope in it",
        }


def test_processors_of_others_and_those_set_later() -> None:
    class Custom:
        def __call__(self, *_: object) -> None: ...

    model, inputs = prepared(FLUX)
    model.transformer_blocks[0].attn.processor = Custom()
    report = integration.enable(model)
    assert [*report.left.values()] == ["not a processor of diffusers; call jitrope.apply_rope in it"]
    assert "1 left alone" in str(report)
    assert "Custom: left alone: not a processor of diffusers" in report.table()
    model.set_attn_processor({name: transformer_flux.FluxAttnProcessor() for name in model.attn_processors})
    with torch.no_grad():
        zoo.forward(model, inputs)
    assert report.calls["fused"] == 3


def test_models_without_anything_to_replace() -> None:
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    unet = diffusers.UNet2DModel(block_out_channels=(32, 64), norm_num_groups=8, **blocks)
    with pytest.raises(jitrope.JitropeError, match=r"UNet2DModel: .*AttnProcessor2_0: jitrope knows no rope in it"):
        integration.enable(unet)
    with pytest.raises(jitrope.JitropeError, match=f"no attention processors of diffusers {diffusers.__version__}"):
        integration.enable(nn.Linear(2, 2))
    attention = nn.Linear(2, 2)
    attention.processor = attention_processor.MochiAttnProcessor2_0()
    with pytest.raises(jitrope.JitropeError, match="MochiAttnProcessor2_0: jitrope knows no rope in it"):
        integration.enable(SimpleNamespace(components={"transformer": attention}))


@pytest.mark.parametrize("given", ["model", 3, None, diffusers.FluxPipeline])
def test_what_is_not_a_model_is_refused(given: object) -> None:
    with pytest.raises(jitrope.InvalidInput, match=r"enable: model_or_pipeline is .*; it must be a model, or a pipe"):
        integration.enable(given)


@pytest.mark.parametrize("name", [FLUX, WAN, "SanaWMTransformer3DModel"])
def test_copies_pickles_and_files_are_the_hosts(name: str, tmp_path: Path) -> None:
    model, inputs = prepared(name)
    keys = list(model.state_dict())
    with torch.no_grad():
        want = seeded(model, inputs)
        with integration.enable(model):
            assert list(model.state_dict()) == keys
            model.save_pretrained(tmp_path)
            copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), type(model).from_pretrained(tmp_path)]
            assert all(torch.equal(seeded(other, inputs), want) for other in copies)
        assert all(torch.equal(seeded(other, inputs), want) for other in copies)


@pytest.mark.parametrize("name", [FLUX, "SanaWMTransformer3DModel"])
def test_hooks_of_accelerate_and_sharding(name: str) -> None:
    """Hooks of whole modules, before and after `enable`, and classes that `fully_shard` derives."""
    accelerate = pytest.importorskip("accelerate", reason="the diffusers extra is not installed")
    from torch.distributed.fsdp import fully_shard

    model, inputs = prepared(name)
    with hosts.group(1), torch.no_grad():
        want = seeded(model, inputs)
        integration.enable(model)
        for module in model.modules():
            if short(type(getattr(module, "norm_q", None))) == "NoneType":
                accelerate.hooks.add_hook_to_module(module, accelerate.hooks.ModelHook())
        report = integration.enable(model)
        assert torch.equal(seeded(model, inputs), want)
        assert report.calls["jitrope"] + report.calls.get("fused", 0) > 0
        accelerate.hooks.remove_hook_from_module(model, recurse=True)
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        for change in (lambda: integration.enable(model), integration.disable):
            change()
            assert torch.equal(seeded(model, inputs), want)


@pytest.mark.parametrize("name", [QWEN, WAN])
def test_lora(name: str) -> None:
    """Adapters stay in the projections of q, k and v, and get gradients."""
    peft = pytest.importorskip("peft", reason="the test extra is not installed")
    model, inputs = prepared(name)
    with torch.no_grad():
        alone = zoo.forward(model, inputs)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    model.add_adapter(peft.LoraConfig(r=4, init_lora_weights=False, target_modules=targets))
    with torch.no_grad():
        assert not torch.equal(zoo.forward(model, inputs), alone)
    same_as_stock(model, inputs, {"fused": zoo.MODELS[name].fused})
    with integration.enable(model):
        zoo.forward(model, inputs).square().sum().backward()
    adapters = [p for key, p in model.named_parameters() if "lora" in key and p.requires_grad]
    assert adapters
    assert all(p.grad is not None for p in adapters)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offload", ["block_level", "leaf_level"])
@pytest.mark.parametrize("name", [FLUX, "CogView4Transformer2DModel"])
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
from tests.diffusion_zoo import MODELS, prepared

def work(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for name in ("FluxTransformer2DModel", "WanTransformer3DModel", "QwenImageTransformer2DModel"):
        check(name)
    dist.destroy_process_group()

def check(name):
    model, inputs = prepared(name)
    if "Qwen" in name:  # diffusers needs equal parts of the text
        inputs.update(encoder_hidden_states=inputs["encoder_hidden_states"][:, :6], encoder_hidden_states_mask=None)
    with torch.no_grad():
        alone = model(**inputs, return_dict=False)[0]
        model.set_attention_backend("native")
        model.enable_parallelism(config=diffusers.ContextParallelConfig(ulysses_degree=2))
        stock = model(**inputs, return_dict=False)[0]
        with integration.enable(model) as report:
            assert torch.equal(model(**inputs, return_dict=False)[0], stock)
        assert report.calls == {"jitrope": 0, "host": 0, "fused": MODELS[name].fused}, report
    torch.testing.assert_close(stock, alone)

if __name__ == "__main__":
    torch.multiprocessing.start_processes(work, (sys.argv[1],), nprocs=2, start_method="fork")  # diffusers is there
"""


@pytest.mark.slow
def test_context_parallel(tmp_path: Path) -> None:
    """Two processes with Ulysses: diffusers' hooks split the tables, and rope runs on a rank's rows."""
    (script := tmp_path / "work.py").write_text(CONTEXT_PARALLEL)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "GLOO_SOCKET_IFNAME": "lo"}
    done = fresh.python(str(script), str(tmp_path / "store"), env=env, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]


# ---- other versions of the host, and other libraries that change it -------------------------------------------


def test_the_installed_hosts_texts_are_known() -> None:
    """Also of the classes of the same name in other files."""
    known = [cls for cls in classes() if "__call__" in vars(cls) and short(cls) in fused.FUSED]
    assert {short(cls) for cls in known} == fused.FUSED
    for cls in known:
        assert _host.text_of(cls.__call__) in fused.COPIES
        assert inspect.signature(cls.__call__).parameters.keys() <= {*fused.Call._fields}, cls
    assert _host.text_of(RMSNorm.forward) in fused.RMS_NORM


def test_another_text_of_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rope is replaced, if it is a function."""
    monkeypatch.setattr(integration, "COPIES", {})
    report = same_as_stock(*prepared(FLUX), {"jitrope": 6})
    assert [*report.left.values()] == [f"jitrope does not know its code in diffusers {diffusers.__version__}"]
    with pytest.raises(jitrope.JitropeError, match=r"transformer_wan.WanAttnProcessor.__call__: jitrope does not know"):
        integration.enable(prepared(WAN)[0])


def test_another_text_of_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: 2 * x)
    with pytest.raises(jitrope.JitropeError, match="jitrope does not know RMSNorm of diffusers"):
        integration.enable(prepared(Z_IMAGE)[0])


def test_a_processor_with_a_new_keyword(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that uses it goes to the host's processor, which knows it; one that does not is fused."""
    original, seen = transformer_flux.FluxAttnProcessor.__call__, []

    def call(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None, gain=1):
        seen.append(gain)
        out = original(self, attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        return tuple(gain * x for x in out)

    call.__module__ = transformer_flux.__name__
    monkeypatch.setitem(fused.COPIES, _host.text_of(call), fused.COPIES[_host.text_of(original)])
    module_of = _host.module_of
    monkeypatch.setattr(_host, "module_of", lambda f: transformer_flux.__name__ if f is call else module_of(f))
    monkeypatch.setattr(transformer_flux.FluxAttnProcessor, "__call__", call)
    model, _ = prepared(FLUX)
    attention = model.transformer_blocks[0].attn
    cos, sin = torch.rand(10, 16), torch.rand(10, 16)
    given = (attention, torch.randn(1, 6, 32), torch.randn(1, 4, 32))
    with torch.no_grad(), integration.enable(model) as report:
        want = attention.processor(*given, image_rotary_emb=(cos, sin))
        assert seen == []
        got = attention.processor(*given, None, (cos, sin), gain=2)
        assert report.calls == {"jitrope": 2, "host": 0, "fused": 1}
        attention.processor(*given, None, (cos, sin), gain=1)
        assert report.calls == {"jitrope": 2, "host": 0, "fused": 2}
    assert seen == [2]
    assert report.reasons == {"jitrope does not know the argument gain of call": 1}
    for ours, single in zip(got, want):
        torch.testing.assert_close(ours, 2 * single)


@pytest.mark.parametrize("fuse_norm", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("what", ["rope", "norm", "what the norm calls"])
def test_a_patch(what: str, first: bool, fuse_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another library, before or after `enable`: it has its effect."""
    model, inputs = prepared(FLUX)
    places = {"rope": (transformer_flux, "apply_rotary_emb"), "norm": (nn.RMSNorm, "forward")}
    place, name = places.get(what, (nn.functional, "rms_norm"))
    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(place, name, hosts.doubled(getattr(place, name)))
            want = zoo.forward(model, inputs)
            if first and what == "rope":
                with pytest.raises(jitrope.JitropeError, match=f"rotary_emb: it is {hosts.doubled.__module__}'s"):
                    integration.enable(model, fuse_norm=fuse_norm)
                return
            if first:
                integration.enable(model, fuse_norm=fuse_norm)
                torch.testing.assert_close(zoo.forward(model, inputs), want)
                return
        with integration.enable(model, fuse_norm=fuse_norm) as report:
            ours = zoo.forward(model, inputs)
            with monkeypatch.context() as patch:
                patch.setattr(place, name, hosts.doubled(getattr(place, name)))
                torch.testing.assert_close(zoo.forward(model, inputs), want)
            assert torch.equal(zoo.forward(model, inputs), ours)
    if fuse_norm:
        assert report.reasons.total() > 0


@pytest.mark.parametrize("first", [False, True])
def test_a_patch_of_a_processor(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the calls, and stays after `disable`."""
    model, inputs = prepared(FLUX)
    cls = transformer_flux.FluxAttnProcessor
    patched = hosts.doubled(cls.__call__)
    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(cls, "__call__", patched)
            want = zoo.forward(model, inputs)
        monkeypatch.setattr(cls, "__call__", patched if first else cls.__call__)  # undone last
        with integration.enable(model) as report:
            monkeypatch.setattr(cls, "__call__", patched)
            assert torch.equal(zoo.forward(model, inputs), want)
    assert cls.__call__ is patched
    assert report.calls == {"jitrope": 6, "host": 0}
    assert [*report.left.values()] == [f"it is {hosts.doubled.__module__}'s"] * first


def test_the_hosts_module_is_asked_for_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """If another library replaces attention in the host's module, that attention is called."""
    model, inputs = prepared(FLUX)
    original, seen = transformer_flux.dispatch_attention_fn, []

    def attention(*arguments: Any, **words: Any) -> Any:
        seen.append(words["backend"])
        return original(*arguments, **words)

    monkeypatch.setattr(transformer_flux, "dispatch_attention_fn", attention)
    model.set_attention_backend("native")
    same_as_stock(model, inputs, {"fused": 3})
    assert len(seen) == 4 * 3
    assert all(backend == "native" for backend in seen)


@pytest.mark.parametrize("first", ["cache-dit", "jitrope"])
def test_cache_dit(first: str) -> None:
    """cache-dit skips blocks of later steps. With jitrope FLUX has the same bits under it, whichever comes first."""
    try:
        import cache_dit
    except ImportError:
        hosts.missing("pip install --no-deps cache-dit==1.5.3")
    torch.manual_seed(0)
    config, given = zoo.flux()
    config |= {"num_layers": 4, "num_single_layers": 4}
    models = [diffusers.FluxTransformer2DModel(**config).eval() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    cache = cache_dit.DBCacheConfig(
        Fn_compute_blocks=1, Bn_compute_blocks=0, residual_diff_threshold=0.5, max_warmup_steps=1, num_inference_steps=4
    )
    x = given.pop("hidden_states")

    def steps(model: Any) -> list[Tensor]:
        with torch.no_grad():
            return [model(hidden_states=x * (1 + step / 1000), **given)[0] for step in range(4)]

    cache_dit.enable_cache(models[1], cache_config=cache)
    stock = steps(models[1])
    if first == "jitrope":
        report = integration.enable(models[0])
    cache_dit.enable_cache(models[0], cache_config=cache)
    if first == "cache-dit":
        report = integration.enable(models[0])
    assert all(torch.equal(a, b) for a, b in zip(steps(models[0]), stock))
    assert 0 < report.calls["fused"] < 4 * 8
    assert report.calls["host"] == 0


# ---- norm and rope in one launch ------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    ("name", "make", "axes"),
    [
        (FLUX, zoo.flux, "axes_dims_rope"),
        (QWEN, zoo.qwen_image, "axes_dims_rope"),
        (WAN, zoo.wan, None),
        (HUNYUAN, zoo.hunyuan_video, "rope_axes_dim"),
    ],
)
def test_heads_of_128_give_the_same_bits(name: str, make: Any, axes: Any, dtype: torch.dtype, device: str) -> None:
    """Heads of 128 give the host's bits on a GPU too."""
    config, inputs = make()
    config = {**config, "attention_head_dim": 128, **({axes: (16, 56, 56)} if axes else {})}
    model, inputs = prepared(name, device, dtype, (config, inputs))
    # Across heads, sums have torch's order with 2-byte dtypes.
    exact = device == "cpu" or (name, dtype) != (WAN, FP32)
    same_as_stock(model, inputs, {"fused": zoo.MODELS[name].fused}, exact=exact)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_wan_image_to_video(dtype: torch.dtype) -> None:
    """Keys and values of the image have their own projection and norm; the last 512 tokens are text."""
    config = zoo.WAN | {"image_dim": 16, "added_kv_proj_dim": 32}
    text, image = torch.randn(2, 512, 16), torch.randn(2, 3, 16)
    inputs = zoo.wan_inputs() | {"encoder_hidden_states": text, "encoder_hidden_states_image": image}
    model, inputs = prepared(WAN, "cpu", dtype, (config, inputs))
    assert any(m.add_k_proj is not None for m in attentions(model))
    same_as_stock(model, inputs, {"fused": 4})


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    "name", [FLUX, WAN, "Flux2Transformer2DModel", "CogVideoXTransformer3DModel", "HunyuanDiT2DModel"]
)
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


# ---- nothing that another code holds is written ---------------------------------------------------------------


@pytest.mark.parametrize("how", ["nn.Linear.forward", "F.linear", "a function mode", "a hook of each module"])
@pytest.mark.parametrize("name", [FLUX, WAN, HUNYUAN, LTX, Z_IMAGE])
def test_projections_that_something_keeps(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As calibration and captures of activations do: what they see, they have after the forward too."""
    model, inputs = prepared(name)
    kept: list[Tensor] = []

    def keeping(function: Any) -> Any:
        def run(*arguments: Any, **words: Any) -> Any:
            kept.append(function(*arguments, **words))
            return kept[-1]

        return run

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function: Any, _: Any, arguments: Any = (), words: Any = None) -> Any:
            linear = getattr(function, "__name__", "") == "linear"
            return (keeping(function) if linear else function)(*arguments, **(words or {}))

    def hook(module: nn.Module, _: Any, out: Tensor) -> None:
        if isinstance(module, nn.Linear):
            kept.append(out)

    def run() -> list[Tensor]:
        kept.clear()
        with monkeypatch.context() as patch, ExitStack() as stack:
            if how == "nn.Linear.forward":
                patch.setattr(nn.Linear, "forward", keeping(nn.Linear.forward))
            elif how == "F.linear":
                patch.setattr(nn.functional, "linear", keeping(nn.functional.linear))
            elif how == "a function mode":
                stack.enter_context(Mode())
            else:
                stack.callback(nn.modules.module.register_module_forward_hook(hook).remove)
            zoo.forward(model, inputs)
        return [x.clone() for x in kept]

    with torch.no_grad():
        want = run()
        with integration.enable(model):
            got = run()
    assert want
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ---- norms that are not fused ---------------------------------------------------------------------------------


class Doubled(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def offloaded(norm: nn.Module) -> None:
    """accelerate offloads by its own `forward` in the module."""
    accelerate = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")

    class Shift(accelerate.ModelHook):
        def pre_forward(self, module: Any, x: Tensor) -> Any:
            return (x + 1,), {}

    accelerate.add_hook_to_module(norm, Shift())


CHANGES: dict[str, Any] = {
    "subclass": lambda norm: setattr(norm, "__class__", Doubled),
    "hook": lambda norm: norm.register_forward_hook(lambda module, args, out: out * 2),
    "accelerate": offloaded,
    "parametrized": lambda norm: nn.utils.parametrize.register_parametrization(norm, "weight", hosts.Twice()),
    "eps": lambda norm: setattr(norm, "eps", 0.5),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_norms_that_are_called(change: str, dtype: torch.dtype) -> None:
    """A processor whose norm must be called is the host's, with jitrope's rope; the other blocks are fused."""
    model, inputs = prepared(FLUX, dtype=dtype)
    for index in (0, 1):  # two streams, one stream
        CHANGES[change](attentions(model)[index].norm_q)
    model = model.to(dtype)
    with torch.no_grad():
        plain = zoo.forward(prepared(FLUX, dtype=dtype)[0], inputs)
        assert not torch.equal(zoo.forward(model, inputs), plain), "the change has no effect"
    report = same_as_stock(model, inputs, {"fused": 1, "jitrope": 4})
    assert sum(report.reasons.values()) == 4
    assert all("norm" in reason for reason in report.reasons)


def test_no_norms_and_norms_without_weights() -> None:
    model, inputs = prepared(QWEN)
    for attention in attentions(model):
        attention.norm_q = attention.norm_k = attention.norm_added_q = attention.norm_added_k = None
    same_as_stock(model, inputs, {"jitrope": 4 * 2})
    model, inputs = prepared(HUNYUAN, dtype=BF16)
    for attention in attentions(model):
        attention.norm_q.weight = None
        if attention.norm_added_q is not None:
            attention.norm_added_q.weight = attention.norm_added_k.weight = None
    same_as_stock(model, inputs, {"fused": 3})


def test_autocast_and_fp64_are_not_fused() -> None:
    model, inputs = prepared(FLUX)
    with torch.autocast("cpu", BF16):
        report = same_as_stock(model, inputs, {"jitrope": 6})
    assert report.reasons == {"autocast": 2 * 3}
    inputs = {key: zoo.moved(value, "cpu", torch.float64) for key, value in inputs.items()}
    report = same_as_stock(model.double(), inputs, {"host": 6})
    assert all("is float64; it must be" in reason for reason in report.reasons)


@pytest.mark.parametrize(
    ("name", "double"),
    [(FLUX, False), (FLUX, True), (QWEN, False), (WAN, True), (LTX, True), (HUNYUAN, False), (Z_IMAGE, False)],
)
def test_refused_tables_do_not_repeat_the_projections(name: str, double: bool) -> None:
    """Without tables, and with those in fp64, hooks of projections run once, as in the host."""
    model, inputs = prepared(name)

    def changed(_: Any, arguments: Any, words: Any) -> Any:
        def refused(key: str, x: Any) -> Any:
            tables = isinstance(x, tuple) or key.endswith(("rotary_emb", "freqs_cis"))
            return (tuple(y.double() for y in x) if double else None) if tables and x is not None else x

        return tuple(refused("", x) for x in arguments), {key: refused(key, x) for key, x in words.items()}

    seen: list[int] = []
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


# ---- rope alone -------------------------------------------------------------------------------------------------


def full_tables(seqlen: int = 6, head_dim: int = 16) -> tuple[Tensor, Tensor]:
    angles = torch.rand(seqlen, head_dim // 2).repeat_interleave(2, -1)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x, cos, sin: (x, cos.double(), sin.double()), "cos is torch.float64"),
        (lambda x, cos, sin: (x.double(), cos, sin), "q is float64"),
        (lambda x, cos, sin: (x, cos[:1], sin[:1]), "the tables' shape"),
        (lambda x, cos, sin: (x.repeat(1, 1, 1, 33), cos.repeat(1, 33), sin.repeat(1, 33)), "at most 512 is possible"),
    ],
)
def test_what_is_not_ours_is_the_hosts(change: Any, reason: str) -> None:
    x, cos, sin = change(torch.randn(2, 6, 3, 16), *full_tables())
    want = embeddings.apply_rotary_emb(x, (cos, sin), sequence_dim=1)
    with integration.enable(prepared(FLUX)[0]) as report:
        assert torch.equal(embeddings.apply_rotary_emb(x, (cos, sin), sequence_dim=1), want)
    assert report.calls == {"jitrope": 0, "host": 1}
    assert reason in next(iter(report.reasons))


# ---- xDiT -----------------------------------------------------------------------------------------------------


def test_xdit() -> None:
    """Its FLUX.1 as on one rank: the processors call diffusers' functions, which are jitrope's then."""
    from jitrope.integrations import xfuser

    with hosts.xdit():
        file = importlib.import_module("xfuser.model_executor.models.transformers.transformer_flux")
        x, (cos, sin) = torch.randn(2, 6, 3, 16).bfloat16(), full_tables()
        want = file.apply_rotary_emb(x, (cos, sin), sequence_dim=1)
        with xfuser.enable() as report:
            assert set(report.replaced) == {
                "diffusers.models.embeddings.apply_rotary_emb",
                "diffusers.models.transformers.transformer_qwenimage.apply_rotary_emb_qwen",
            }
            assert torch.equal(file.apply_rotary_emb(x, (cos, sin), sequence_dim=1), want)
            assert report.calls == {"jitrope": 1, "host": 0}
            table = torch.complex(cos[:, ::2], sin[:, ::2])
            transformer_qwenimage.apply_rotary_emb_qwen(x, table, use_real=False)
            assert report.calls == {"jitrope": 2, "host": 0}
        assert file.apply_rotary_emb is embeddings.apply_rotary_emb
