"""Frequencies with the bits of transformers, and those of the types that transformers lacks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from jitrope import tables

from ..devices import DEVICES

trained = partial(dict, original_max_position_embeddings=4096)
LENGTHS = {"factor": 3.0, "max_position_embeddings": 4096}
LLAMA = trained(original_max_position_embeddings=8192, factor=8.0)
V3 = {"factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
LONG = {"short_factor": [1.0 + 0.01 * i for i in range(48)], "long_factor": [1.0 + 0.07 * i * i for i in range(48)]}
LONG = trained(factor=32.0, **LONG)
# Name: the type, the rotated elements of a head, theta, and the parameters of `inv_freq`. Modules pass a tensor as
# seq_len, max(position_ids) + 1, so the base is computed in fp32.
CASES: dict[str, tuple[str, int, float, dict[str, Any]]] = {
    "default": ("default", 80, 500000.0, {}),
    "linear": ("linear", 96, 1000000.0, {"factor": 2.7}),
    "dynamic-at-init": ("dynamic", 128, 10000.0, LENGTHS),
    "dynamic-at-the-length": ("dynamic", 128, 10000.0, {**LENGTHS, "seq_len": 4096}),
    "dynamic-above": ("dynamic", 128, 10000.0, {**LENGTHS, "seq_len": 9001}),
    "dynamic-tensor-below": ("dynamic", 128, 10000.0, {**LENGTHS, "seq_len": torch.tensor(100)}),
    "dynamic-tensor-far": ("dynamic", 128, 10000.0, {**LENGTHS, "seq_len": torch.tensor(300001)}),
    "yarn-qwen": ("yarn", 128, 1000000.0, trained(original_max_position_embeddings=32768, factor=4.0)),
    "yarn-deepseek-v3": ("yarn", 64, 10000, trained(**V3)),
    "yarn-two-mscales": ("yarn", 64, 10000.0, trained(factor=40.0, mscale=0.707, mscale_all_dim=1.0)),
    "yarn-one-mscale-does-nothing": ("yarn", 64, 10000.0, trained(factor=40.0, mscale=0.5)),
    "yarn-attention-factor": ("yarn", 64, 10000.0, trained(**{**V3, "attention_factor": 1.25})),
    "yarn-gpt-oss": ("yarn", 64, 150000.0, trained(factor=32.0, truncate=False)),
    "yarn-a-step": ("yarn", 64, 10000.0, trained(factor=4.0, beta_fast=3.0, beta_slow=3.0, truncate=False)),
    "yarn-that-shrinks": ("yarn", 64, 10000.0, trained(original_max_position_embeddings=100, factor=1.0)),
    "llama-3.1": ("llama3", 128, 500000.0, {**LLAMA, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    "longrope-at-init": ("longrope", 96, 10000.0, LONG),
    "longrope-short": ("longrope", 96, 10000.0, {**LONG, "seq_len": 4096}),
    "longrope-long": ("longrope", 96, 10000.0, {**LONG, "seq_len": 4097}),
    "longrope-tensor-long": ("longrope", 96, 10000.0, {**LONG, "seq_len": torch.tensor(4097)}),
    "longrope-attention-factor": ("longrope", 96, 10000.0, {**LONG, "seq_len": 9000, "attention_factor": 1.3}),
    "longrope-no-longer": ("longrope", 96, 10000.0, {**LONG, "factor": 1.0}),
    "proportional-factor": ("proportional", 128, 10000.0, {"partial_rotary_factor": 0.3, "factor": 8.0}),
    "proportional-whole": ("proportional", 512, 1000000.0, {"partial_rotary_factor": 1.0}),
    "proportional-nothing": ("proportional", 128, 10000.0, {"partial_rotary_factor": 0.0}),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_frequencies_have_transformers_bits(name: str, device: str) -> None:
    """From parameters, from the object of a configuration, and from its file."""
    transformers = pytest.importorskip("transformers", reason="its frequencies are what is compared with")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope_type, rotary_dim, theta, parameters = CASES[name]
    seq_len = parameters.get("seq_len")
    seq_len = seq_len.to(device) if isinstance(seq_len, torch.Tensor) else seq_len
    rope = {x: y for x, y in parameters.items() if x not in ("seq_len", "max_position_embeddings")}
    config = transformers.LlamaConfig(
        head_dim=rotary_dim,
        max_position_embeddings=parameters.get("max_position_embeddings", 131072),
        rope_parameters={"rope_type": rope_type, "rope_theta": theta, **rope},
    )
    if rope_type == "default":
        with torch.device(device):
            want = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        want = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device(device), seq_len=seq_len)
    own = {**parameters, "seq_len": seq_len} if "seq_len" in parameters else parameters
    for frequencies, factor in (
        tables.inv_freq(rope_type, rotary_dim=rotary_dim, theta=theta, device=device, **own),
        tables.from_config(config, seq_len=seq_len, device=device),
        tables.from_config(config.to_dict(), seq_len=seq_len, device=device),
    ):
        assert frequencies.device.type == device
        assert frequencies.dtype == torch.float32
        assert torch.equal(frequencies, want[0])
        assert factor == want[1]
        assert isinstance(factor, float)


def test_every_type_of_transformers_is_compared() -> None:
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils", reason="its types are what is covered")
    assert {rope_type for rope_type, *_ in CASES.values()} == {*rope_utils.ROPE_INIT_FUNCTIONS, "default"}
    assert set(tables.ROPE_TYPES) == {*rope_utils.ROPE_INIT_FUNCTIONS, "default", "ntk", "axial"}


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
