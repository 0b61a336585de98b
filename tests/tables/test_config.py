"""Frequencies of configurations as models publish them, beside those of `test_of_models`."""

from __future__ import annotations

import sys

import pytest
import torch

from jitrope import InvalidInput, tables

SIZES = {"hidden_size": 3072, "num_attention_heads": 24, "rope_theta": 1e6}
ROTATED = [
    # A part of the head, whose size follows from the widths.
    ({**SIZES, "partial_rotary_factor": 0.25, "rope_theta": 1e4}, 32, 1e4),
    # MiniMax-M2 has rotary_dim, Qwen2-VL an older name of the default type, JetMoe another name of head_dim.
    ({"head_dim": 128, "rotary_dim": 64, "rope_theta": 1e6}, 64, 1e6),
    ({**SIZES, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, 128, 1e6),
    ({**SIZES, "kv_channels": 96}, 96, 1e6),
]


@pytest.mark.parametrize(("config", "rotary_dim", "theta"), ROTATED)
def test_a_file_says_how_much_of_a_head_is_rotated(config: dict[str, object], rotary_dim: int, theta: float) -> None:
    found, factor = tables.from_config(config)
    assert torch.equal(found, tables.inv_freq(rotary_dim=rotary_dim, theta=theta)[0])
    assert factor == 1


def test_phi3_takes_its_factor_from_the_lengths() -> None:
    transformers = pytest.importorskip("transformers", reason="its frequencies are what is compared with")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = {"short_factor": [1.1] * 48, "long_factor": [2.0] * 48}
    lengths = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    config = transformers.Phi3Config(rope_parameters=rope, **lengths)
    sizes = {"hidden_size": 3072, "num_attention_heads": 32, "rope_theta": 10000.0, **lengths}
    published = {**sizes, "rope_scaling": {"type": "longrope", **factors}}
    for seq_len in (4096, 5000):
        want, attention_factor = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=seq_len)
        assert attention_factor > 1.1
        for given in (config, published):
            found, factor = tables.from_config(given, seq_len=seq_len)
            assert torch.equal(found, want)
            assert factor == attention_factor


def test_an_object_of_gemma4_has_a_head_for_each_kind_of_layer() -> None:
    """Pairs beyond a part of the large head have frequency 0. A file has heads of several sizes, so one is passed."""
    config = pytest.importorskip("transformers", reason="its object is read").Gemma4TextConfig(num_hidden_layers=6)
    frequencies, _ = tables.from_config(config, layer_type="full_attention")
    assert len(frequencies) == 256
    assert frequencies[64:].eq(0).all()
    as_dict, _ = tables.from_config(config.to_dict(), layer_type="full_attention", head_dim=512)
    assert torch.equal(as_dict, frequencies)
    assert len(tables.from_config(config, layer_type="sliding_attention")[0]) == 128


def test_a_file_of_a_model_needs_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    file = {"head_dim": 8, "rope_theta": 1e4}
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert torch.equal(tables.from_config(file)[0], tables.inv_freq(rotary_dim=8)[0])
    with pytest.raises(InvalidInput, match=r"file of 'gemma'; pass a dict without model_type .*transformers"):
        tables.from_config({"model_type": "gemma", **file})


def test_what_three_axes_leave_over_is_not_rotated() -> None:
    """MiniMax-M3's tower does not name its axes. A head of 80 rotates 78."""
    rope = {"rope_type": "axial", "rope_theta": 1e4}
    want = tables.inv_freq("axial", rotary_dim=78, axes=3)[0]
    for own, axes in (({}, {"axes": 3}), ({"model_type": "minimax_m3_vl_vision"}, {})):
        found, _ = tables.from_config({**own, "rope_parameters": {**rope, **axes}, "head_dim": 80})
        assert torch.equal(found, want)


def test_a_configuration_is_not_written_to() -> None:
    rope = {"rope_type": "linear", "factor": 2.0}
    config = {"rope_parameters": rope, "rope_theta": 10000.0, "head_dim": 64, "partial_rotary_factor": None}
    tables.from_config(config)
    assert rope == {"rope_type": "linear", "factor": 2.0}
    assert len(config) == 4
