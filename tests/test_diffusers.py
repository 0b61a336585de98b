"""jitrope in real diffusers transformers, tiny and random: the host's bits, on the CPU and the GPU."""

from __future__ import annotations

import copy

import pytest
import torch

import jitrope
from jitrope.integrations import diffusers as integration

diffusers = pytest.importorskip("diffusers", reason="the diffusers extra is not installed")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def flux():
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 16, 4), "encoder_hidden_states": torch.randn(2, 6, 32),
        "pooled_projections": torch.randn(2, 32), "timestep": torch.tensor([0.5, 0.5]),
        "img_ids": torch.stack(torch.meshgrid(torch.zeros(1), torch.arange(4.0), torch.arange(4.0), indexing="ij"), -1)
        .reshape(-1, 3), "txt_ids": torch.zeros(6, 3),
    }  # fmt: skip
    return model, inputs, 2 * 2


def qwen():
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 16, 16), "encoder_hidden_states": torch.randn(1, 7, 16),
        "encoder_hidden_states_mask": torch.ones(1, 7, dtype=torch.long), "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, 4, 4)]],
    }  # fmt: skip
    return model, inputs, 4 * 2


def wan():
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 4, 2, 8, 8), "encoder_hidden_states": torch.randn(1, 5, 16),
        "timestep": torch.tensor([3]),
    }  # fmt: skip
    return model, inputs, 2 * 2


MODELS = [flux, qwen, wan]


def prepared(make, device, dtype=torch.float32):
    torch.manual_seed(0)
    model, inputs, calls = make()
    # Parameters only: a buffer of fp32 tables stays what from_pretrained would leave it.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model = model.to(device).eval()

    def moved(value):
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() else None)

    return model, {name: moved(value) for name, value in inputs.items()}, calls


def forward(model, inputs):
    return model(**inputs, return_dict=False)[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", MODELS)
def test_model_gives_the_same_bits(make, dtype, device) -> None:
    model, inputs, expected_calls = prepared(make, device, dtype)
    with torch.no_grad():
        stock = forward(model, inputs)
        with integration.enable(model) as report:
            ours = forward(model, inputs)
            again = forward(model, inputs)
        back = forward(model, inputs)
    assert torch.equal(ours, stock)
    assert torch.equal(again, stock)
    assert torch.equal(back, stock)
    assert report.calls == {"jitrope": 2 * expected_calls, "host": 0}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", MODELS)
def test_gradients_are_the_hosts(make, device) -> None:
    model, inputs, _ = prepared(make, device)
    grads = []
    for ours in (False, True):
        model.zero_grad()
        if ours:
            integration.enable(model)
        forward(model, inputs).square().sum().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    integration.disable(model)
    assert grads[0].keys() == grads[1].keys()
    for name, want in grads[0].items():
        torch.testing.assert_close(grads[1][name], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", MODELS)
def test_compiled_fullgraph(make) -> None:
    model, inputs, _ = prepared(make, "cpu")
    with torch.no_grad(), integration.enable(model):
        compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(forward(compiled, inputs), forward(model, inputs))


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
    code = integration._nested(WanAttnProcessor.__call__.__code__, "apply_rotary_emb")
    host = type(test_fp32_rounding_is_wan_bit_for_bit)(code, WanAttnProcessor.__call__.__globals__)
    want = host(x, cos, sin)
    out, _ = jitrope.apply_rope(x, None, cos[..., 0::2], sin[..., 1::2], interleaved=True)
    assert torch.equal(out, want)


def test_bf16_tables_stay_the_hosts() -> None:
    """Wan's buffers after `.to(bfloat16)`: the host rounds every product, which is not ours to change."""
    model, inputs, _ = prepared(wan, "cpu", torch.bfloat16)
    model = model.to(torch.bfloat16)
    with torch.no_grad():
        stock = forward(model, inputs)
        with integration.enable(model) as report:
            assert torch.equal(forward(model, inputs), stock)
    assert report.calls["jitrope"] == 0
    assert report.calls["host"] > 0


def test_tables_are_converted_once_and_not_kept_for_ever() -> None:
    table = torch.rand(1, 8, 1, 16)
    first = integration._kept(integration._even, table)
    assert integration._kept(integration._even, table) is first
    table.mul_(2)
    second = integration._kept(integration._even, table)
    assert torch.equal(second, table[..., 0::2])
    before = len(integration._tables)
    del table
    assert len(integration._tables) == before - 1


def test_enable_twice_and_state() -> None:
    model, *_ = prepared(flux, "cpu")
    stock = {name: type(p) for name, p in model.attn_processors.items()}
    integration.enable(model)
    report = integration.enable(model)
    assert report.replaced == {"FluxAttnProcessor": 2}
    assert "FluxAttnProcessor" in str(report)
    processor = next(iter(model.attn_processors.values()))
    assert isinstance(processor, next(iter(stock.values())))
    processor._attention_backend = "native"  # what set_attention_backend does
    integration.disable(model)
    assert {name: type(p) for name, p in model.attn_processors.items()} == stock
    assert next(iter(model.attn_processors.values()))._attention_backend == "native"


def test_a_processor_with_weights_keeps_them() -> None:
    """FLUX's IP adapter is a processor and a module: its parameters stay the model's."""
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    model, *_ = prepared(flux, "cpu")
    adapter = FluxIPAdapterAttnProcessor(hidden_size=32, cross_attention_dim=16)
    name = next(iter(model.attn_processors))
    model.set_attn_processor({**model.attn_processors, name: adapter})
    before = dict(model.named_parameters())
    with integration.enable(model) as report:
        assert report.replaced == {"FluxIPAdapterAttnProcessor": 1, "FluxAttnProcessor": 1}
        assert isinstance(model.attn_processors[name], FluxIPAdapterAttnProcessor)
        inside = dict(model.named_parameters())
        assert inside.keys() == before.keys()
        assert all(inside[key] is before[key] for key in before)


def test_unknown_models_are_refused() -> None:
    model = diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, block_out_channels=(32, 64), norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    with pytest.raises(jitrope.JitropeError, match="supported are FluxAttnProcessor"):
        integration.enable(model)


def test_pipeline() -> None:
    model, *_ = prepared(flux, "cpu")
    pipeline = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=None, text_encoder=None, tokenizer=None,
        text_encoder_2=None, tokenizer_2=None, transformer=model,
    )  # fmt: skip
    with integration.enable(pipeline) as report:
        assert report.models == [model]
        assert report.replaced == {"FluxAttnProcessor": 2}
    assert not any(hasattr(type(p), "_jitrope_host") for p in model.attn_processors.values())
