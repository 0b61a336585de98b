"""Frequencies with the bits of transformers, tables with the accuracy of fp32, refusals."""

from __future__ import annotations

import ast
import inspect
import sys
from typing import Any, NamedTuple

import pytest
import torch

import jitrope
from jitrope import tables

from .devices import DEVICES


class Case(NamedTuple):
    name: str
    rope_type: str
    rotary_dim: int
    theta: float
    parameters: dict[str, Any]

    def __str__(self) -> str:
        return self.name


def llama3(factor: float) -> dict[str, Any]:
    return {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def yarn(factor: float, original: int = 4096, **others: Any) -> dict[str, Any]:
    return {"factor": factor, "original_max_position_embeddings": original, **others}


def longrope(pairs: int = 48, **others: Any) -> dict[str, Any]:
    short = [1.0 + 0.01 * i for i in range(pairs)]
    long = [1.0 + 0.07 * i * i for i in range(pairs)]
    plain = {"factor": 32.0, "short_factor": short, "long_factor": long, "original_max_position_embeddings": 4096}
    return {**plain, **others}


def dynamic(seq_len: int | None) -> dict[str, Any]:
    return {"factor": 3.0, "max_position_embeddings": 4096, "seq_len": seq_len}


CASES = [
    Case("default", "default", 128, 10000.0, {}),
    Case("default-theta", "default", 80, 500000.0, {}),
    Case("linear", "linear", 128, 10000.0, {"factor": 4.0}),
    Case("linear-uneven", "linear", 96, 1000000.0, {"factor": 2.7}),
    Case("dynamic-at-init", "dynamic", 128, 10000.0, dynamic(None)),
    Case("dynamic-below", "dynamic", 128, 10000.0, dynamic(1000)),
    Case("dynamic-at-the-length", "dynamic", 128, 10000.0, dynamic(4096)),
    Case("dynamic-above", "dynamic", 128, 10000.0, dynamic(9001)),
    Case("yarn-qwen", "yarn", 128, 1000000.0, yarn(4.0, 32768)),
    Case("yarn-deepseek-v3", "yarn", 64, 10000, yarn(40, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0)),
    Case("yarn-deepseek-v2-lite", "yarn", 64, 10000.0, yarn(40.0, mscale=0.707, mscale_all_dim=0.707)),
    Case("yarn-two-mscales", "yarn", 64, 10000.0, yarn(40.0, mscale=0.707, mscale_all_dim=1.0)),
    Case("yarn-one-mscale-does-nothing", "yarn", 64, 10000.0, yarn(40.0, mscale=0.5)),
    Case(
        "yarn-attention-factor", "yarn", 64, 10000.0, yarn(8.0, attention_factor=1.25, mscale=1.0, mscale_all_dim=2.0)
    ),
    Case("yarn-gpt-oss", "yarn", 64, 150000.0, yarn(32.0, beta_fast=32.0, beta_slow=1.0, truncate=False)),
    Case("yarn-a-step-for-a-ramp", "yarn", 64, 10000.0, yarn(4.0, beta_fast=3.0, beta_slow=3.0, truncate=False)),
    Case("yarn-that-shrinks", "yarn", 64, 10000.0, yarn(1.0, 100)),
    Case("llama-3.1", "llama3", 128, 500000.0, llama3(8.0)),
    Case("llama-3.2", "llama3", 64, 500000.0, llama3(32.0)),
    Case("longrope-at-init", "longrope", 96, 10000.0, longrope()),
    Case("longrope-short", "longrope", 96, 10000.0, longrope(seq_len=4096)),
    Case("longrope-long", "longrope", 96, 10000.0, longrope(seq_len=4097)),
    Case("longrope-attention-factor", "longrope", 96, 10000.0, longrope(seq_len=9000, attention_factor=1.3)),
    Case("longrope-no-longer", "longrope", 96, 10000.0, longrope(factor=1.0)),
    Case("proportional-gemma-4", "proportional", 512, 1000000.0, {"partial_rotary_factor": 0.25}),
    Case("proportional-factor", "proportional", 128, 10000.0, {"partial_rotary_factor": 0.3, "factor": 8.0}),
    Case("proportional-odd", "proportional", 128, 1000000.0, {"partial_rotary_factor": 0.75}),
    Case("proportional-whole", "proportional", 128, 10000.0, {"partial_rotary_factor": 1.0}),
    Case("proportional-nothing", "proportional", 128, 10000.0, {"partial_rotary_factor": 0.0}),
]


def llama_config(case: Case) -> Any:
    transformers = pytest.importorskip("transformers", reason="its frequencies are what is compared with")
    beside = ("seq_len", "max_position_embeddings")
    rope = {name: value for name, value in case.parameters.items() if name not in beside}
    return transformers.LlamaConfig(
        head_dim=case.rotary_dim,
        max_position_embeddings=case.parameters.get("max_position_embeddings", 131072),
        rope_parameters={"rope_type": case.rope_type, "rope_theta": case.theta, **rope},
    )


def transformers_frequencies(config: Any, device: str, **options: Any) -> tuple[torch.Tensor, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    layer_type = options.get("layer_type")
    parameters = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
    if parameters["rope_type"] == "default":
        with torch.device(device):
            return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device(device), **options)


def assert_same(got: tuple[torch.Tensor, float], want: tuple[torch.Tensor, float], device: str) -> None:
    assert got[0].device.type == device
    assert got[0].dtype == torch.float32
    assert torch.equal(got[0], want[0])
    assert got[1] == want[1]
    assert isinstance(got[1], float)


# ---- frequencies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_frequencies_have_transformers_bits(case: Case, device: str) -> None:
    config, seq_len = llama_config(case), case.parameters.get("seq_len")
    want = transformers_frequencies(config, device, seq_len=seq_len)
    direct = tables.inv_freq(
        case.rope_type, rotary_dim=case.rotary_dim, theta=case.theta, device=device, **case.parameters
    )
    assert_same(direct, want, device)
    assert_same(tables.from_config(config, seq_len=seq_len, device=device), want, device)
    assert_same(tables.from_config(config.to_dict(), seq_len=seq_len, device=device), want, device)


def test_every_type_of_transformers_is_compared() -> None:
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils", reason="its types are what is covered")
    assert {case.rope_type for case in CASES} == {*rope_utils.ROPE_INIT_FUNCTIONS, "default"}
    assert set(tables.ROPE_TYPES) == {*rope_utils.ROPE_INIT_FUNCTIONS, "default", "ntk", "axial"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [100, 4097, 300001])
def test_a_tensors_length_has_the_bits_of_transformers_forward(length: int, device: str) -> None:
    """The modules pass max(position_ids) + 1, a tensor, so the base is computed in fp32."""
    for case in (Case("", "dynamic", 128, 10000.0, dynamic(None)), Case("", "longrope", 96, 10000.0, longrope())):
        config, seq_len = llama_config(case), torch.tensor(length, device=device)
        want = transformers_frequencies(config, device, seq_len=seq_len)
        assert_same(tables.from_config(config, seq_len=seq_len, device=device), want, device)


def test_static_ntk_interpolates_the_slowest_pair_only() -> None:
    plain, _ = tables.inv_freq(rotary_dim=128)
    stretched, attention_factor = tables.inv_freq("ntk", rotary_dim=128, factor=8.0)
    assert attention_factor == 1.0
    assert stretched[0] == plain[0]
    torch.testing.assert_close(stretched[-1], plain[-1] / 8)
    assert torch.equal(stretched, tables.inv_freq(rotary_dim=128, theta=10000.0 * 8.0 ** (128 / 126))[0])


def test_axial_frequencies_begin_again_for_each_axis() -> None:
    each, _ = tables.inv_freq(rotary_dim=32)
    found, factor = tables.inv_freq("axial", rotary_dim=96, axes=3)
    assert torch.equal(found, torch.cat((each, each, each)))
    assert factor == 1
    plain, _ = tables.inv_freq(rotary_dim=64)
    in_turn, _ = tables.inv_freq("axial", rotary_dim=64, in_turn=True)
    assert torch.equal(in_turn, torch.cat((plain[0::2], plain[1::2])))


def test_an_axial_table_rotates_by_each_axis() -> None:
    cos, sin = tables.cos_sin(20, tables.inv_freq("axial", rotary_dim=64)[0])
    q, ids = torch.randn(1, 6, 2, 64), torch.randint(0, 20, (2, 6))
    got, _ = jitrope.apply_rope(q, None, cos, sin, positions=jitrope.Mrope(ids, (16, 16)))
    height, width = (tables.cos_sin(at, tables.inv_freq(rotary_dim=32)[0]) for at in ids)
    both = [torch.cat(pair, -1) for pair in zip(height, width)]
    want, _ = jitrope.apply_rope(q, None, *both)
    torch.testing.assert_close(got, want)


COMPILED = {
    "inv_freq": lambda: tables.inv_freq(rotary_dim=64)[0],
    "yarn": lambda: tables.inv_freq("yarn", rotary_dim=64, **yarn(4.0))[0],
    "longrope": lambda: tables.inv_freq("longrope", rotary_dim=96, **longrope(seq_len=9000))[0],
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


def test_partial_rotation_of_a_configuration() -> None:
    config = {"rope_theta": 10000.0, "partial_rotary_factor": 0.4, "hidden_size": 2560, "num_attention_heads": 32}
    frequencies, _ = tables.from_config(config)
    assert torch.equal(frequencies, tables.inv_freq(rotary_dim=32)[0])


def test_phi3_takes_its_factor_from_the_lengths() -> None:
    transformers = pytest.importorskip("transformers", reason="its frequencies are what is compared with")
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.1] * 48, "long_factor": [2.0] * 48}
    lengths = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    config = transformers.Phi3Config(rope_parameters=rope, **lengths)
    for seq_len in (4096, 5000):
        want = transformers_frequencies(config, "cpu", seq_len=seq_len)
        assert want[1] > 1.1
        assert_same(tables.from_config(config, seq_len=seq_len), want, "cpu")
        as_published = {
            "rope_scaling": {"type": "longrope", "short_factor": [1.1] * 48, "long_factor": [2.0] * 48},
            "rope_theta": 10000.0, "hidden_size": 3072, "num_attention_heads": 32, **lengths,
        }  # fmt: skip
        assert_same(tables.from_config(as_published, seq_len=seq_len), want, "cpu")


def test_published_files_of_other_models() -> None:
    """MiniMax-M2's has rotary_dim, Qwen2-VL's an older name of the default type, JetMoe's another name of head_dim."""
    sizes = {"hidden_size": 3072, "num_attention_heads": 24, "rope_theta": 1e6}
    section = {"type": "mrope", "mrope_section": [16, 24, 24]}
    heads = {"head_dim": 128, "rotary_dim": 64}
    for own, pairs in ((heads, 32), ({"rope_scaling": section}, 64), ({"kv_channels": 96}, 48)):
        found, factor = tables.from_config({**sizes, **own})
        assert torch.equal(found, tables.inv_freq(rotary_dim=2 * pairs, theta=1e6)[0])
        assert factor == 1


def test_a_file_of_a_model_needs_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    file = {"head_dim": 8, "rope_theta": 1e4}
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert torch.equal(tables.from_config(file)[0], tables.inv_freq(rotary_dim=8)[0])
    with pytest.raises(jitrope.InvalidInput, match=r"file of 'gemma'; pass a dict without model_type .*transformers"):
        tables.from_config({"model_type": "gemma", **file})


def test_a_file_of_a_model_is_refused_as_its_object_is() -> None:
    pytest.importorskip("transformers", reason="its class reads the file")
    with pytest.raises(jitrope.InvalidInput, match="fractions of an image"):
        tables.from_config({"model_type": "dinov3_vit", "num_attention_heads": 6, "rope_theta": 1e2})
    with pytest.raises(
        jitrope.InvalidInput, match=r"does not read config, a file of 'llama'; .* without .*hidden_size"
    ):
        tables.from_config({"model_type": "llama", "hidden_size": "4096", "rope_theta": 1e4})


def test_deepseeks_published_configuration_rotates_a_part_of_the_head() -> None:
    published = {
        "hidden_size": 7168, "num_attention_heads": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "max_position_embeddings": 163840, "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    }  # fmt: skip
    case = next(case for case in CASES if case.name == "yarn-deepseek-v3")
    want = tables.inv_freq("yarn", rotary_dim=64, theta=10000, **case.parameters)
    assert_same(tables.from_config(published), want, "cpu")


def test_a_file_of_zamba2_has_the_sizes_of_its_object() -> None:
    config = pytest.importorskip("transformers").Zamba2Config()
    assert_same(tables.from_config(config.to_dict()), tables.from_config(config), "cpu")


@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
def test_gemma4_has_two_kinds_of_layers(layer_type: str) -> None:
    transformers = pytest.importorskip("transformers", reason="its frequencies are what is compared with")
    config = transformers.Gemma4TextConfig(num_hidden_layers=6)
    frequencies, _ = tables.from_config(config, layer_type=layer_type)
    assert len(frequencies) == {"full_attention": 256, "sliding_attention": 128}[layer_type]
    if layer_type == "full_attention":
        want, _ = transformers_frequencies(config, "cpu", layer_type=layer_type)
        assert torch.equal(frequencies, want)
        assert frequencies[64:].eq(0).all()
        as_dict, _ = tables.from_config(config.to_dict(), layer_type=layer_type, head_dim=512)
        assert torch.equal(as_dict, want)


def test_a_configuration_is_not_written_to() -> None:
    rope = {"rope_type": "linear", "factor": 2.0}
    config = {"rope_parameters": rope, "rope_theta": 10000.0, "head_dim": 64, "partial_rotary_factor": None}
    tables.from_config(config)
    assert rope == {"rope_type": "linear", "factor": 2.0}
    assert len(config) == 4


# ---- tables --------------------------------------------------------------------------------------

FAR = [0, 1, 2, 7, 4095, 2**20 - 1, 2**20, 1_000_003, 1_299_709, 2_750_159, 3_999_971, 2**22 - 1]


def exact(positions: list[int], frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the products in 120 bits, rounded to fp64."""
    mpmath = pytest.importorskip("mpmath", reason="the exact values")
    with mpmath.workprec(120):
        angles = [[mpmath.mpf(p) * mpmath.mpf(w) for w in frequencies.tolist()] for p in positions]
        cos, sin = ([[float(function(a)) for a in row] for row in angles] for function in (mpmath.cos, mpmath.sin))
    return torch.tensor(cos, dtype=torch.float64), torch.tensor(sin, dtype=torch.float64)


@pytest.mark.parametrize("device", DEVICES)
def test_tables_are_accurate_to_fp32_past_a_million_positions(device: str) -> None:
    frequencies, _ = tables.inv_freq(rotary_dim=64, device=device)
    positions = torch.tensor(FAR, device=device)
    errors = {"fp64": 0.0, "fp32": 0.0}
    for angles in errors:
        for got, want in zip(tables.cos_sin(positions, frequencies, angles=angles), exact(FAR, frequencies)):
            errors[angles] = max(errors[angles], float((got.cpu().double() - want).abs().max()))
    assert errors["fp64"] <= 2**-25 * (1 + 1e-6)
    assert errors["fp32"] > 0.01  # so angles are not computed in fp32


@pytest.mark.parametrize("device", DEVICES)
def test_angles_are_accurate_past_a_million_positions(device: str) -> None:
    frequencies, _ = tables.inv_freq(rotary_dim=64, device=device)
    positions = torch.tensor([*FAR, 2**29 - 1], device=device, dtype=torch.int32)
    angles = tables.freqs(positions, frequencies).cpu()
    assert angles.abs().max() <= 3.1415928
    for got, want in zip((angles.double().cos(), angles.double().sin()), exact(positions.tolist(), frequencies)):
        assert (got - want).abs().max() <= 1.5e-7
    near = tables.freqs(4, frequencies)
    assert torch.equal(near, torch.arange(4.0, device=device)[:, None] * frequencies)  # below pi: the plain product


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["default", "llama-3.1", "yarn-qwen", "longrope-at-init"])
def test_fp32_angles_have_the_bits_of_transformers_tables(name: str, device: str) -> None:
    config = llama_config(next(case for case in CASES if case.name == name))
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    positions = torch.tensor([[0, 1, 17, 4095], [70000, 131071, 5, 5]], device=device)
    module = LlamaRotaryEmbedding(config).to(device)
    frequencies = module.inv_freq  # made on the CPU, as a model is loaded
    if name.startswith("longrope"):
        frequencies, _ = tables.from_config(config, seq_len=131072, device=device)
    _, attention_factor = tables.from_config(config)
    for dtype in (torch.float32, torch.bfloat16):
        want = module(torch.empty(0, dtype=dtype, device=device), positions)
        got = tables.cos_sin(
            positions, frequencies, attention_factor=attention_factor, width="full", dtype=dtype, angles="fp32"
        )
        for table, expected in zip(got, want):
            assert torch.equal(table, expected)


def test_layouts_hold_the_same_numbers() -> None:
    frequencies, _ = tables.inv_freq(rotary_dim=16)
    cos, sin = tables.cos_sin(9, frequencies, attention_factor=1.5)
    assert cos.shape == sin.shape == (9, 8)
    assert cos[0].eq(1.5).all()
    halves, _ = tables.cos_sin(9, frequencies, attention_factor=1.5, width="full")
    assert torch.equal(halves, torch.cat((cos, cos), -1))
    _, repeated = tables.cos_sin(9, frequencies, attention_factor=1.5, width="full", interleaved=True)
    assert torch.equal(repeated, sin.repeat_interleave(2, -1))
    assert repeated.is_contiguous()
    cache = tables.cos_sin_cache(9, frequencies, attention_factor=1.5)
    assert torch.equal(cache, torch.cat((cos, sin), -1))
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
def test_a_long_table_needs_little_beside_itself() -> None:
    frequencies, _ = tables.inv_freq(rotary_dim=128, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = tables.cos_sin(1_000_000, frequencies)
    rows_and_tables = 8 * 1_000_000 + sum(table.nbytes for table in kept)
    assert torch.cuda.max_memory_allocated() - before < rows_and_tables + 64 * 2**20


# ---- end to end ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["default", "llama-3.1", "yarn-qwen"])
def test_rotated_as_transformers_rotates(name: str) -> None:
    config = llama_config(next(case for case in CASES if case.name == name))
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 3, 128), torch.randn(2, 2, 3, 128)  # (B, H, S, D)
    positions = torch.tensor([[0, 1, 2], [40, 1000, 4095]])
    want = apply_rotary_pos_emb(q, k, *LlamaRotaryEmbedding(config)(q, positions))
    frequencies, attention_factor = tables.from_config(config)
    for angles, tolerance in (("fp32", 0.0), ("fp64", 2e-3)):
        cos, sin = tables.cos_sin(positions, frequencies, attention_factor=attention_factor, angles=angles)
        for got, expected in zip(jitrope.apply_rope(q, k, cos, sin, layout="bhsd"), want):
            torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_angles_rotate_as_cosines_do_past_a_million_positions(device: str) -> None:
    frequencies, attention_factor = tables.inv_freq(
        "yarn", rotary_dim=64, factor=40.0, original_max_position_embeddings=4096, device=device
    )
    positions = torch.tensor(FAR, device=device)
    torch.manual_seed(0)
    q = torch.randn(1, len(FAR), 2, 64, device=device)
    cos, sin = tables.cos_sin(positions, frequencies, attention_factor=attention_factor)
    want, _ = jitrope.apply_rope(q, None, cos, sin)
    got, _ = jitrope.apply_rope(q, None, freqs=tables.freqs(positions, frequencies), mscale=attention_factor)
    torch.testing.assert_close(got, want, rtol=0, atol=4e-6)


# ---- refusals ------------------------------------------------------------------------------------


def refused(rope_type: str = "default", **parameters: Any) -> Any:
    return lambda: tables.inv_freq(rope_type, **{"rotary_dim": 8, **parameters})


def refused_config(**config: Any) -> Any:
    return lambda: tables.from_config(config)


FREQUENCIES = torch.ones(4)
REFUSALS = {
    "type": (refused("rotary"), "inv_freq: rope_type is 'rotary'; it must be one of 'default'"),
    "odd": (refused(rotary_dim=7), "rotary_dim is 7; it must be even"),
    "exponent": (refused("ntk", rotary_dim=2, factor=2.0), "rotary_dim is 2; it must be a whole number of at least 4"),
    "theta": (refused(theta=1), "theta is 1; it must be a finite number above 1"),
    "unknown": (refused("linear", factor=2.0, beta_fast=1), "beta_fast is not a parameter of 'linear', which takes"),
    "seq_len": (refused(seq_len=8), "seq_len is not a parameter of 'default', which takes no parameters"),
    "missing": (refused("llama3", factor=8.0), "'llama3' needs low_freq_factor, high_freq_factor, original_max"),
    "none-is-missing": (refused("linear", factor=None), "'linear' needs factor"),
    "factor": (refused("linear", factor=0), "factor is 0; it must be a finite number above 0"),
    "factor-words": (refused("linear", factor="4"), "factor is '4'; it must be a finite number above 0"),
    "length": (refused("yarn", **yarn(4.0, 1)), "original_max_position_embeddings is 1; it must be a finite"),
    "betas": (refused("yarn", **yarn(4.0, beta_fast=1, beta_slow=2)), "beta_fast is 1; it must be at least beta_slow"),
    "bands": (refused("llama3", **{**llama3(8.0), "low_freq_factor": 4}), "low_freq_factor is 4; it must be below"),
    "pairs": (refused("longrope", **longrope(3)), "short_factor has 3 entries for rotary_dim / 2 = 4 pairs"),
    "zero-in-list": (refused("longrope", **longrope(4, long_factor=[1, 1, 0, 1])), "long_factor.2. is 0"),
    "part": (refused("proportional", partial_rotary_factor=2), "partial_rotary_factor is 2; it must be from 0 to 1"),
    "no-config": (refused_config(hidden_size=8), "from_config: config has no rope_theta, and its default"),
    "parameter": (
        refused_config(head_dim=8, rope_theta=1e4, rope_scaling={"rope_type": "linear", "factor": 2.0, "alpha": 3.0}),
        "'linear' has no alpha; leave out what the model ignores",
    ),
    "parameter-of-another-type": (
        refused_config(head_dim=8, rope_parameters={"rope_theta": 1e4, "factor": 2.0, "beta_fast": None}),
        "'default' has no factor; leave out",
    ),
    "parameters-of-phimoe": (
        refused_config(head_dim=8, rope_theta=1e4, rope_scaling={
            **longrope(4), "rope_type": "longrope", "short_mscale": 1.2, "long_mscale": 1.2,
        }),
        "'longrope' has no short_mscale, long_mscale",
    ),
    "parameter-of-a-layer": (
        lambda: tables.from_config({"head_dim": 8, "rope_parameters": {"full": {"rope_theta": 1e4, "ratio": 2}}},
                                   layer_type="full"),
        "'default' has no ratio",
    ),
    "parameter-beside": (refused_config(head_dim=8, rope_theta=1e4, swa_rope_theta=5e4), "swa_rope_theta is unknown"),
    "ernie-vl-file": (refused_config(head_dim=8, rope_theta=1e4, rope_3d=True), "rope_3d is unknown; pass a dict"),
    "dinov3-file": (refused_config(head_dim=8, rope_theta=1e2, pos_embed_rescale=None), "fractions of an image"),
    "alpha": (
        refused_config(head_dim=8, rope_theta=1e4, rope_scaling={"type": "dynamic", "alpha": 0}),
        "factor is 0; it must be a finite number above 0",
    ),
    "no-theta": (refused_config(head_dim=8, rope_scaling={"type": "linear", "factor": 2.0}), "has no rope_theta, and"),
    "local-theta": (refused_config(head_dim=8, rope_theta=1e4, rope_local_base_freq=1e4), "base_freq is unknown; pass"),
    "one-theta": (refused_config(head_dim=8, rope_theta=1e4, layer_rope_theta=1e4), "layer_rope_theta is 10000.0; it"),
    "thetas": (refused_config(head_dim=8, rope_theta=1e4, layer_rope_theta=[1e4, 5e5]), "differ in layer_rope_theta"),
    "rotary_dim": (
        refused_config(head_dim=8, rotary_dim=4, rope_parameters={"rope_theta": 1e4}),
        "rotary_dim is not partial_rotary_factor's 1; leave it out",
    ),
    "axes": (refused("axial", rotary_dim=10), "rotary_dim is 10; it must be a multiple of 2 x axes = 4"),
    "no-head": (refused_config(rope_theta=1e4), "config has neither head_dim nor hidden_size"),
    "layers": (
        refused_config(head_dim=8, rope_parameters={"full": {}, "sliding": {}}),
        "layer_type is None; it must be one of 'full', 'sliding'",
    ),
    "no-layers": (
        lambda: tables.from_config({"head_dim": 8, "rope_parameters": {}}, layer_type="full"),
        "layer_type is 'full'; it must be one of None",
    ),
    "several-heads": (refused_config(rope_theta=1e4, head_dim=8, global_head_dim=16), "heads of several sizes; pass"),
    "positions": (lambda: tables.cos_sin(-1, FREQUENCIES), "cos_sin: positions is -1"),
    "positions-dtype": (lambda: tables.freqs(torch.ones(2), FREQUENCIES), "freqs: positions is torch.float32 on cpu"),
    "positions-device": (
        lambda: tables.cos_sin(torch.ones(2, dtype=torch.int64, device="meta"), FREQUENCIES),
        "positions is torch.int64 on meta; it must be int32 or int64 on inv_freq's cpu",
    ),
    "positions-sparse": (
        lambda: tables.cos_sin(torch.arange(3).to_sparse(), FREQUENCIES), "positions is .* must be a strided tensor",
    ),
    "frequencies-sparse": (lambda: tables.freqs(2, FREQUENCIES.to_sparse()), "inv_freq is .* must be a strided tensor"),
    "frequencies": (lambda: tables.cos_sin(2, FREQUENCIES.bfloat16()), "inv_freq .* must be of dtype float32"),
    "frequencies-shape": (lambda: tables.freqs(2, torch.ones(1, 4)), "inv_freq is .* .1, 4.* with 1 axis"),
    "width": (lambda: tables.freqs(2, FREQUENCIES, width="double"), "width is 'double'; it must be one of 'half'"),
    "dtype": (lambda: tables.cos_sin_cache(2, FREQUENCIES, dtype=torch.float64), "dtype is torch.float64; it"),
    "angles": (lambda: tables.cos_sin(2, FREQUENCIES, angles="fp16"), "angles is .fp16.; it must be one of .fp64."),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_the_argument(name: str) -> None:
    function, message = REFUSALS[name]
    with pytest.raises(jitrope.InvalidInput, match=message):
        function()


def test_nothing_but_torch_is_imported() -> None:
    """Configurations are read by transformers' names, without a dependency on it."""
    nodes = list(ast.walk(ast.parse(inspect.getsource(tables))))
    absolute = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    assert absolute <= {"functools", "inspect", "math", "numbers", "torch"}
