"""Tables of cosines, sines and angles: accuracy, layouts, and transformers' bits where they are asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jitrope import tables

from ..devices import DEVICES

FAR = [0, 1, 2, 7, 4095, 2**20 - 1, 2**20, 1_000_003, 1_299_709, 2_750_159, 3_999_971, 2**22 - 1, 2**29 - 1]
TRAINED = {"original_max_position_embeddings": 4096}
LONG = {"short_factor": [1.0 + 0.01 * i for i in range(48)], "long_factor": [1.0 + 0.07 * i * i for i in range(48)]}
OF_LLAMA = {"rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **TRAINED}
MODELS: dict[str, tuple[int, dict[str, Any]]] = {  # the size of a head, and transformers' parameters
    **{"default": (128, {"rope_theta": 10000.0}), "llama3": (128, OF_LLAMA)},
    "yarn": (128, {"rope_theta": 1e6, "factor": 4.0, **TRAINED}),
    "longrope": (96, {"rope_theta": 10000.0, "factor": 32.0, **LONG, **TRAINED}),
}


@pytest.mark.parametrize("device", DEVICES)
def test_tables_are_accurate_past_a_million_positions(device: str) -> None:
    """Against products, cosines and sines of 120 bits. Angles from fp32 products are not."""
    mpmath = pytest.importorskip("mpmath", reason="the exact values")
    frequencies, _ = tables.inv_freq(rotary_dim=64, device=device)
    with mpmath.workprec(120):
        angles = [[mpmath.mpf(p) * mpmath.mpf(w) for w in frequencies.tolist()] for p in FAR]
        rows = [[[float(of(a)) for a in row] for row in angles] for of in (mpmath.cos, mpmath.sin)]
    exact = torch.tensor(rows, dtype=torch.float64)
    positions = torch.tensor(FAR, device=device, dtype=torch.int32)
    for got, want in zip(tables.cos_sin(positions, frequencies), exact):
        assert (got.cpu().double() - want).abs().max() <= 2**-25 * (1 + 1e-6)
    rounded = tables.cos_sin(positions[:-1], frequencies, angles="fp32")
    assert max(float((got.cpu().double() - want[:-1]).abs().max()) for got, want in zip(rounded, exact)) > 0.01
    turned = tables.freqs(positions, frequencies).cpu()
    assert turned.abs().max() <= 3.1415928
    for got, want in zip((turned.double().cos(), turned.double().sin()), exact):
        assert (got - want).abs().max() <= 1.5e-7
    near = tables.freqs(4, frequencies)
    assert torch.equal(near, torch.arange(4.0, device=device)[:, None] * frequencies)  # below pi: the plain product


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_fp32_angles_have_the_bits_of_transformers_tables(name: str, device: str) -> None:
    transformers = pytest.importorskip("transformers", reason="its tables are what is compared with")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    head_dim, rope = MODELS[name]
    rope = {"rope_type": name, **rope}
    config = transformers.LlamaConfig(head_dim=head_dim, max_position_embeddings=131072, rope_parameters=rope)
    positions = torch.tensor([[0, 1, 17, 4095], [70000, 131071, 5, 5]], device=device)
    module = LlamaRotaryEmbedding(config).to(device)
    frequencies = module.inv_freq  # made on the CPU, as a model is loaded
    if name == "longrope":
        frequencies, _ = tables.from_config(config, seq_len=131072, device=device)
    _, factor = tables.from_config(config)
    words: dict[str, Any] = {"attention_factor": factor, "width": "full", "angles": "fp32"}
    for dtype in (torch.float32, torch.bfloat16):
        want = module(torch.empty(0, dtype=dtype, device=device), positions)
        for got, expected in zip(tables.cos_sin(positions, frequencies, dtype=dtype, **words), want):
            assert torch.equal(got, expected)


def test_layouts_hold_the_same_numbers() -> None:
    frequencies, _ = tables.inv_freq(rotary_dim=16)
    words = {"positions": 9, "inv_freq": frequencies, "attention_factor": 1.5}
    cos, sin = tables.cos_sin(**words)
    assert cos.shape == sin.shape == (9, 8)
    assert cos[0].eq(1.5).all()
    assert torch.equal(tables.cos_sin(**words, width="full")[0], torch.cat((cos, cos), -1))
    _, repeated = tables.cos_sin(**words, width="full", interleaved=True)
    assert torch.equal(repeated, sin.repeat_interleave(2, -1))
    assert repeated.is_contiguous()
    assert torch.equal(tables.cos_sin_cache(**words), torch.cat((cos, sin), -1))
    angles = tables.freqs(9, frequencies, width="full", interleaved=True)
    assert torch.equal(angles, tables.freqs(9, frequencies).repeat_interleave(2, -1))


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (3, 2, 2), (0,), (2, 0)])
def test_positions_of_any_shape(shape: tuple[int, ...]) -> None:
    frequencies, _ = tables.inv_freq(rotary_dim=16)
    positions = torch.randint(0, 50, shape, dtype=torch.int32)
    cos, sin = tables.cos_sin(50, frequencies)
    got = tables.cos_sin(positions, frequencies)
    assert got[0].shape == (*shape, 8)
    assert torch.equal(got[0], cos[positions.long()])
    assert torch.equal(got[1], sin[positions.long()])
    assert torch.equal(tables.freqs(positions, frequencies), tables.freqs(50, frequencies)[positions.long()])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("angles", ["fp64", "fp32"])
def test_blocks_do_not_show(angles: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    frequencies, _ = tables.inv_freq(rotary_dim=22, device=device)  # 11 pairs: not a multiple of any vector
    whole = tables.cos_sin(1000, frequencies, angles=angles, dtype=torch.bfloat16)
    monkeypatch.setattr(tables, "BLOCK_ANGLES", 70)
    for got, want in zip(tables.cos_sin(1000, frequencies, angles=angles, dtype=torch.bfloat16), whole):
        assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.hardware
def test_a_long_table_needs_little_beside_itself() -> None:
    frequencies, _ = tables.inv_freq(rotary_dim=128, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = tables.cos_sin(1_000_000, frequencies)
    rows_and_tables = 8 * 1_000_000 + sum(table.nbytes for table in kept)
    assert torch.cuda.max_memory_allocated() - before < rows_and_tables + 64 * 2**20


COMPILED = {
    "inv_freq": lambda: tables.inv_freq(rotary_dim=64)[0],
    "yarn": lambda: tables.inv_freq("yarn", rotary_dim=64, factor=4.0, **TRAINED)[0],
    "longrope": lambda: tables.inv_freq("longrope", rotary_dim=96, factor=32.0, seq_len=9000, **LONG, **TRAINED)[0],
    "axial": lambda: tables.inv_freq("axial", rotary_dim=64)[0],
    "from_config": lambda: tables.from_config({"head_dim": 64, "rope_theta": 1e4})[0],
    "cos_sin": lambda: tables.cos_sin(16, tables.inv_freq(rotary_dim=64)[0])[1],
    "cos_sin_cache": lambda: tables.cos_sin_cache(16, tables.inv_freq(rotary_dim=64)[0]),
    "freqs": lambda: tables.freqs(16, tables.inv_freq(rotary_dim=64)[0]),
}


@pytest.mark.parametrize("name", COMPILED)
def test_tables_are_made_inside_a_compiled_function(name: str) -> None:
    torch.compiler.reset()
    got = torch.compile(COMPILED[name], fullgraph=True, backend="eager")()
    assert torch.equal(got, COMPILED[name]())
