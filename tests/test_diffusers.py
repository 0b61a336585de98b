"""`integrations.diffusers`: forms of rope, tables, replacing and giving back. The models: test_diffusion_models.py."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import jitrope
from jitrope.integrations import diffusers as integration
from jitrope.integrations.diffusers import counting, coverage, ropes, tables

diffusers = pytest.importorskip("diffusers", reason="the diffusers extra is not installed")
from .diffusion_zoo import MODELS, forward, prepared  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def rope_inputs(device, dtype, shape=(2, 96, 6, 128)):
    x = torch.randn(shape, device=device).to(dtype)
    angles = torch.rand(shape[1], shape[-1] // 2, device=device, dtype=torch.float64) * 50
    return x, angles


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp32_rounding_is_flux_bit_for_bit(dtype, device) -> None:
    from diffusers.models.embeddings import apply_rotary_emb

    x, angles = rope_inputs(device, dtype)
    tables = tuple(f(angles).repeat_interleave(2, -1).float() for f in (torch.cos, torch.sin))
    want = apply_rotary_emb(x, tables, sequence_dim=1)
    for cos, sin in (tables, tuple(t[..., ::2] for t in tables)):  # full width, and half as a view
        out, _ = jitrope.apply_rope(x, None, cos, sin, interleaved=True)
        assert torch.equal(out, want)
    halves = tuple(torch.cat((t[..., ::2],) * 2, -1) for t in tables)
    want = apply_rotary_emb(x, halves, use_real_unbind_dim=-2, sequence_dim=1)
    out, _ = jitrope.apply_rope(x, None, cos, sin)
    assert torch.equal(out, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_complex64_rounding_is_qwen_bit_for_bit(dtype, device) -> None:
    from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen

    x, angles = rope_inputs(device, dtype)
    table = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
    want = apply_rotary_emb_qwen(x, table, use_real=False)
    pairs = torch.view_as_real(table)
    out, _ = jitrope.apply_rope(x, None, pairs[..., 0], pairs[..., 1], interleaved=True, rounding="complex64")
    assert torch.equal(out, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp32_rounding_is_wan_bit_for_bit(dtype, device) -> None:
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    x, angles = rope_inputs(device, dtype)
    cos, sin = (f(angles).repeat_interleave(2, -1).float()[None, :, None] for f in (torch.cos, torch.sin))
    code = next(
        c for c in WanAttnProcessor.__call__.__code__.co_consts if getattr(c, "co_name", "") == "apply_rotary_emb"
    )
    host = type(rope_inputs)(code, WanAttnProcessor.__call__.__globals__)
    want = host(x, cos, sin)
    out, _ = jitrope.apply_rope(x, None, cos[..., 0::2], sin[..., 1::2], interleaved=True)
    assert torch.equal(out, want)


@pytest.fixture
def flux():
    return prepared(MODELS["FluxTransformer2DModel"])


@pytest.fixture
def wan():
    return prepared(MODELS["WanTransformer3DModel"])


# ---- calls that are the host's -----------------------------------------------------------------------


def shared_call(x, cos, sin, **words):
    """(what the host gives, what ours gives, why ours left it to the host)."""
    from diffusers.models.embeddings import apply_rotary_emb

    before = counting.reasons.copy()
    ours = ropes.shared(apply_rotary_emb, x, (cos, sin), **words)
    return apply_rotary_emb(x, (cos, sin), **words), ours, list(counting.reasons - before)


def full_tables(seqlen=6, head_dim=16):
    angles = torch.rand(seqlen, head_dim // 2).repeat_interleave(2, -1)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x, cos, sin: (x, cos.double(), sin.double()), "the tables' dtype"),
        (lambda x, cos, sin: (x.double(), cos, sin), "q and k are not fp32"),
        (lambda x, cos, sin: (x, cos[:1], sin[:1]), "the tables' shape"),
        (lambda x, cos, sin: (x, cos.clone().requires_grad_(), sin), "the tables take a gradient"),
        (lambda x, cos, sin: (x.repeat(1, 1, 1, 33), cos.repeat(1, 33), sin.repeat(1, 33)), "D up to 512"),
    ],
)
def test_what_is_not_ours_is_the_hosts(change, reason) -> None:
    x, cos, sin = change(torch.randn(2, 6, 3, 16), *full_tables())
    want, ours, reasons = shared_call(x, cos, sin, sequence_dim=1)
    assert torch.equal(ours, want)
    assert len(reasons) == 1
    assert reason in reasons[0]


@pytest.mark.parametrize("sequence_dim", [1, 2])
@pytest.mark.parametrize("unbind_dim", [-1, -2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_function(dtype, unbind_dim, sequence_dim) -> None:
    x = torch.randn((2, 6, 3, 16) if sequence_dim == 1 else (2, 3, 6, 16)).to(dtype)
    want, ours, reasons = shared_call(x, *full_tables(), use_real_unbind_dim=unbind_dim, sequence_dim=sequence_dim)
    assert torch.equal(ours, want)
    assert not reasons


def test_arguments_of_another_version_go_to_the_host() -> None:
    seen = []
    ropes.shared(lambda *arguments, **words: seen.append(words), torch.randn(2, 6, 3, 16), full_tables(), scale=2)
    assert seen == [{"scale": 2}]


@pytest.mark.gpu
def test_tables_that_stay_on_the_cpu() -> None:
    """With offload they do: the host moves them in every call, jitrope once."""
    x = torch.randn(2, 6, 3, 16, device="cuda")
    cos, sin = full_tables()
    want, ours, reasons = shared_call(x, cos, sin, sequence_dim=1)
    assert torch.equal(ours, want)
    assert not reasons
    assert tables.moved(cos, x.device) is tables.moved(cos, x.device)


# ---- tables -----------------------------------------------------------------------------------------


def test_tables_are_converted_once_and_not_kept_for_ever() -> None:
    table = torch.rand(8, 6, 2, 2)
    first = tables.kept(tables.columns, table)
    other = tables.kept(tables.no_turn, table, 3)
    assert tables.kept(tables.columns, table) is first
    assert tables.kept(tables.no_turn, table, 3) is other
    table.mul_(2)
    cos, sin = tables.kept(tables.columns, table)
    assert torch.equal(cos, table[..., 0, 0])
    assert torch.equal(sin, table[..., 1, 0])
    before = len(tables._tables)
    del table
    assert len(tables._tables) == before - 1


def test_tables_kept_in_inference_mode_serve_in_training() -> None:
    table = torch.rand(8, 6, 2, 2)
    with torch.inference_mode():
        kept = tables.kept(tables.columns, table)
    x = torch.rand(1, 8, 3, 12, requires_grad=True)
    jitrope.apply_rope(x, None, *tables.kept(tables.columns, table), interleaved=True)[0].sum().backward()
    assert tables.kept(tables.columns, table) is kept
    assert x.grad is not None


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_conjugated_tables(dtype) -> None:
    x, table = torch.randn(2, 4, 3, 16), torch.polar(torch.ones(1, 4, 8), torch.rand(1, 4, 8)).to(dtype)

    def host(x, freqs_cis):  # what hosts with complex tables do
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * freqs_cis.unsqueeze(2)).flatten(3).type_as(x)

    before = counting.calls["host"]
    turned = ropes.complex_rows(host, x, table.conj())
    assert torch.equal(turned, host(x, table.conj()))
    assert not torch.equal(turned, host(x, table))
    assert counting.calls["host"] == before


def test_tables_are_read_where_they_are(monkeypatch) -> None:
    """Views of the host's: of real, complex and packed ones."""
    seen = []

    def rotated(x, *arguments, **words):
        seen.extend(t for t in (*arguments, words.get("freqs_cis")) if isinstance(t, torch.Tensor))
        return jitrope.apply_rope(x, *arguments, **words)

    monkeypatch.setattr(ropes, "apply_rope", rotated)
    x, (cos, sin) = torch.randn(2, 6, 3, 16), full_tables()
    both, table = torch.cat((cos, sin), -1)[None], torch.complex(cos[:, ::2], sin[:, ::2])
    calls = (
        (ropes.wan, (x, cos[None, :, None], sin[None, :, None])),
        (ropes.helios, (x, both)),
        (ropes.qwen, (x, table, False)),
        (ropes.any_flow, (x.transpose(1, 2), table.to(torch.complex128)[None, None])),
    )
    for rope, (rotates, *host_tables) in calls:
        seen.clear()
        before = len(tables._tables)
        rope(None, rotates, *host_tables)
        assert len(tables._tables) == before
        theirs = {t.untyped_storage().data_ptr() for t in host_tables if isinstance(t, torch.Tensor)}
        assert {t.untyped_storage().data_ptr() for t in seen} == theirs


# ---- replacing --------------------------------------------------------------------------------------


def test_enable_twice_and_state(flux) -> None:
    model, _ = flux
    stock = {name: type(p) for name, p in model.attn_processors.items()}
    objects = {name: id(p) for name, p in model.attn_processors.items()}
    integration.enable(model)
    report = integration.enable(model)
    assert set(report.replaced) == {"FluxAttnProcessor"}
    assert report.replaced.total() == len(stock)
    assert "FluxAttnProcessor" in str(report)
    processor = next(iter(model.attn_processors.values()))
    assert isinstance(processor, next(iter(stock.values())))
    processor._attention_backend = "native"  # what set_attention_backend does
    integration.disable(model)
    assert {name: type(p) for name, p in model.attn_processors.items()} == stock
    assert {name: id(p) for name, p in model.attn_processors.items()} == objects
    assert next(iter(model.attn_processors.values()))._attention_backend == "native"
    integration.disable(model)


def test_class_attributes_stay(flux) -> None:
    """Where `_attention_backend` is looked for it is found: a processor without it is skipped silently."""
    model, _ = flux
    with integration.enable(model):
        for processor in model.attn_processors.values():
            assert processor._attention_backend is None
            assert processor._parallel_config is None
        model.set_attention_backend("native")
        assert all(p._attention_backend == "native" for p in model.attn_processors.values())


def test_the_signature_stays(flux) -> None:
    """diffusers passes a processor only what its signature names."""
    model, _ = flux
    processor = next(iter(model.attn_processors.values()))
    before = inspect.signature(processor.__call__)
    with integration.enable(model):
        assert inspect.signature(processor.__call__) == before


def test_nothing_of_other_models_changes(flux) -> None:
    model, inputs = flux
    other = copy.deepcopy(model)
    with integration.enable(model), torch.no_grad():
        before = counting.calls.copy()
        forward(other, inputs)
        assert counting.calls == before
    assert not any(hasattr(type(p), "_jitrope_host") for p in other.attn_processors.values())


def test_a_processor_with_weights_keeps_them(flux) -> None:
    """FLUX's IP adapter is a processor and a module: its parameters stay the model's."""
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    model, _ = flux
    attention = model.transformer_blocks[0].attn
    adapter = FluxIPAdapterAttnProcessor(hidden_size=attention.inner_dim, cross_attention_dim=16)
    attention.set_processor(adapter)
    before = dict(model.named_parameters())
    with integration.enable(model) as report:
        assert report.replaced["FluxIPAdapterAttnProcessor"] == 1
        assert report.replaced["FluxAttnProcessor"] == len(model.attn_processors) - 1
        assert isinstance(attention.processor, FluxIPAdapterAttnProcessor)
        inside = dict(model.named_parameters())
        assert inside.keys() == before.keys()
        assert all(inside[key] is before[key] for key in before)
    assert attention.processor is adapter
    assert type(adapter) is FluxIPAdapterAttnProcessor


def test_fused_projections(flux) -> None:
    model, inputs = flux
    model.fuse_qkv_projections()
    with torch.no_grad():
        stock = forward(model, inputs)
        with integration.enable(model, fuse_norm=False) as report:
            assert torch.equal(forward(model, inputs), stock)
    assert report.calls["jitrope"] == MODELS["FluxTransformer2DModel"].rotations
    assert report.calls["host"] == 0


def test_layer_skip_knows_the_twins() -> None:
    """Its hooks look the processor's class up in a table."""
    from diffusers.hooks import LayerSkipConfig, apply_layer_skip

    model, inputs = prepared(MODELS["CogView4Transformer2DModel"])
    config = {"indices": [0], "fqn": "transformer_blocks", "skip_attention_scores": True, "skip_ff": False}
    config = LayerSkipConfig(skip_attention=False, **config)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        apply_layer_skip(model, config)
        stock = forward(model, inputs)
        with integration.enable(twin, fuse_norm=False):
            apply_layer_skip(twin, config)
            assert torch.equal(forward(twin, inputs), stock)


def test_unknown_models_are_refused() -> None:
    model = diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, block_out_channels=(32, 64), norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    with pytest.raises(jitrope.JitropeError, match=r"UNet2DModel has .*AttnProcessor2_0.*FluxTransformer2DModel"):
        integration.enable(model)
    with pytest.raises(jitrope.JitropeError, match="no attention processors"):
        integration.enable(torch.nn.Linear(2, 2))


def test_an_unknown_version_is_refused(flux, monkeypatch) -> None:
    from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

    def call(self, attn, hidden_states):
        return hidden_states

    call.__module__ = FluxAttnProcessor.__module__
    monkeypatch.setattr(FluxAttnProcessor, "__call__", call)
    expected = rf"diffusers {diffusers.__version__}: FluxAttnProcessor does not call apply_rotary_emb"
    with pytest.raises(jitrope.JitropeError, match=expected.replace(".", r"\.")):
        integration.enable(flux[0])


def test_pipeline(flux) -> None:
    model, _ = flux
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4)  # has processors of its own
    pipeline = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=vae, text_encoder=None, tokenizer=None,
        text_encoder_2=None, tokenizer_2=None, transformer=model,
    )  # fmt: skip
    with integration.enable(pipeline) as report:
        assert report.models == [model]
        assert set(report.replaced) == {"FluxAttnProcessor"}
        assert not report.left
    assert not any(hasattr(type(p), "_jitrope_host") for p in model.attn_processors.values())


# ---- other libraries that replace a processor's `__call__` in its class --------------------------------


def patched(cls, seen):
    """What cache-dit does under context parallelism: a function of its own module in the host's class.

    Like there, the host's code with something else changed.
    """
    original = cls.__call__
    source = "from diffusers.models.transformers.transformer_wan import *\n"
    names = {**original.__globals__, "__name__": "cache_something", "seen": seen}
    exec(source, names)
    copy_of = type(rope_inputs)(original.__code__, names, "__call__", original.__defaults__, original.__closure__)
    dispatch = names["dispatch_attention_fn"]

    def counted(*arguments, **words):
        seen.append("attention")
        return dispatch(*arguments, **words)

    names["dispatch_attention_fn"] = counted
    copy_of.__module__ = "cache_something"
    return copy_of


def test_a_patch_before_enable_is_kept(wan, monkeypatch) -> None:
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    model, inputs = wan
    seen: list[str] = []
    with torch.no_grad():
        stock = forward(model, inputs)
        monkeypatch.setattr(WanAttnProcessor, "__call__", patched(WanAttnProcessor, seen))
        with integration.enable(model) as report:
            assert torch.equal(forward(model, inputs), stock)
    assert report.calls == {"jitrope": MODELS["WanTransformer3DModel"].rotations, "host": 0}
    assert len(seen) == len(model.attn_processors)


def test_a_patch_after_enable_is_kept(wan, monkeypatch) -> None:
    """It takes the calls, which the report says; enabled again, both do their part."""
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    model, inputs = wan
    seen: list[str] = []
    count = len(model.attn_processors)
    with torch.no_grad():
        stock = forward(model, inputs)
        with integration.enable(model) as report:
            monkeypatch.setattr(WanAttnProcessor, "__call__", patched(WanAttnProcessor, seen))
            assert torch.equal(forward(model, inputs), stock)
            assert report.calls == {"jitrope": 0, "host": count}
            assert len(seen) == count
            assert any("enable again" in reason for reason in report.reasons)
            again = integration.enable(model)
            assert torch.equal(forward(model, inputs), stock)
            assert again.calls == {"jitrope": MODELS["WanTransformer3DModel"].rotations, "host": 0}
            assert len(seen) == 2 * count
    assert all(type(p) is WanAttnProcessor for p in model.attn_processors.values())


def test_a_patch_after_compilation_is_noticed(wan, monkeypatch) -> None:
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    model, inputs = wan
    torch._dynamo.reset()
    with torch.no_grad(), integration.enable(model, fuse_norm=False):
        stock = forward(model, inputs)
        compiled = torch.compile(model, backend="eager")
        forward(compiled, inputs)
        original = WanAttnProcessor.__call__

        def negative(self, *arguments, **words):
            return -original(self, *arguments, **words)

        monkeypatch.setattr(WanAttnProcessor, "__call__", negative)
        want = forward(model, inputs)
        assert not torch.allclose(want, stock)
        torch.testing.assert_close(forward(compiled, inputs), want)


def test_a_patch_that_hides_the_rope_is_left_and_named(wan, monkeypatch) -> None:
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    model, _ = wan
    original = WanAttnProcessor.__call__

    @functools.wraps(original)
    def wrapper(self, *arguments, **words):
        return original(self, *arguments, **words)

    wrapper.__module__ = "cache_something"
    monkeypatch.setattr(WanAttnProcessor, "__call__", wrapper)
    with pytest.raises(jitrope.JitropeError, match="its __call__ is cache_something's"):
        integration.enable(model)


def test_a_hooked_forward_is_left_and_named() -> None:
    """Sana-WM rotates in modules' `forward`, which a hook on the module itself has already taken."""
    model, _ = prepared(MODELS["SanaWMTransformer3DModel"])
    modules = [m for m in model.modules() if type(m).__name__ in coverage.SITES]
    for module in modules[1:]:
        module.forward = functools.partial(type(module).forward, module)
    with integration.enable(model) as report:
        assert report.replaced.total() == 1
        hooked = {type(m).__name__ for m in modules[1:]}
        assert {name for name in report.left if name in coverage.SITES} == hooked
        assert all("hooked" in report.notes[name] for name in hooked)
    assert not any(hasattr(type(m), "_jitrope_host") for m in model.modules())


# ---- offload and parallelism ---------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offload", ["block_level", "leaf_level"])
@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "WanTransformer3DModel"])
def test_group_offload(name, offload, device) -> None:
    """On a CPU its hooks run, and move nothing."""
    model, inputs = prepared(MODELS[name], device)
    with torch.no_grad():
        stock = forward(model, inputs)
        words = {"num_blocks_per_group": 1} if offload == "block_level" else {}
        model.enable_group_offload(torch.device(device), offload_type=offload, **words)
        with integration.enable(model, fuse_norm=False) as report:
            assert torch.equal(forward(model, inputs), stock)
    assert report.calls == {"jitrope": MODELS[name].rotations, "host": 0}


CONTEXT_PARALLEL = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing
torch.accelerator.device_count = lambda: 2  # diffusers asks for it even where gloo and a CPU do
import diffusers
from jitrope.integrations import diffusers as integration
from tests.diffusion_zoo import MODELS, prepared

def work(rank, name, store, fuse_norm):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model, inputs = prepared(MODELS[name])
    with torch.no_grad():
        alone = model(**inputs, return_dict=False)[0]
        model.set_attention_backend("native")
        model.enable_parallelism(config=diffusers.ContextParallelConfig(ulysses_degree=2))
        stock = model(**inputs, return_dict=False)[0]
        with integration.enable(model, fuse_norm=fuse_norm) as report:
            assert torch.equal(model(**inputs, return_dict=False)[0], stock)
    torch.testing.assert_close(stock, alone)
    assert all(p._parallel_config is not None for p in model.attn_processors.values() if hasattr(p, "_parallel_config"))
    assert report.calls["host"] == 0, report
    assert report.calls["jitrope"] == (0 if report.fused else MODELS[name].rotations), report
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (sys.argv[1], sys.argv[2], sys.argv[3] == "fused"), nprocs=2)
"""


@pytest.mark.parametrize("kind", ["rope", "fused"])
@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "WanTransformer3DModel"])
def test_context_parallel(name, kind, tmp_path) -> None:
    """Two processes, Ulysses: the tables are split by diffusers' hooks, rope runs on a rank's rows."""
    script = tmp_path / "work.py"
    script.write_text(CONTEXT_PARALLEL)
    done = subprocess.run(
        [sys.executable, script, name, tmp_path / "store", kind], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "QwenImageTransformer2DModel", "WanTransformer3DModel"])
def test_lora(name) -> None:
    """Adapters stay in q's, k's and v's projections, and learn."""
    peft = pytest.importorskip("peft", reason="the test extra is not installed")
    from .diffusion_zoo import MODELS as ZOO
    from .diffusion_zoo import forward as run
    from .diffusion_zoo import prepared as prepare

    model, inputs = prepare(ZOO[name])
    with torch.no_grad():
        alone = run(model, inputs)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    model.add_adapter(peft.LoraConfig(r=4, init_lora_weights=False, target_modules=targets))
    with torch.no_grad():
        stock = run(model, inputs)
        with integration.enable(model) as report:
            assert torch.equal(run(model, inputs), stock)
    assert not torch.equal(stock, alone)
    assert report.calls["host"] == 0
    assert report.calls["fused"] > 0
    with integration.enable(model):
        run(model, inputs).square().sum().backward()
    adapters = [p for key, p in model.named_parameters() if "lora" in key and p.requires_grad]
    assert adapters
    assert all(p.grad is not None for p in adapters)
