"""The kernels of a model, found without its weights, are those that the enabled model launches."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import InvalidInput, planning
from jitrope.base.config import LAUNCHES
from jitrope.base.spec import Spec
from jitrope.jit import kernels
from jitrope.run.planning import note
from jitrope.sources.backward import Backward
from jitrope.sources.operation import Operation
from jitrope.tools.models import specs_of_model
from jitrope.tools.prewarm import TORCH_DTYPES

from ..host import backend

SMALL = dict.fromkeys(("intermediate_size", "vocab_size"), 64)
SMALL |= {"num_hidden_layers": 1, "hidden_size": 512, "num_attention_heads": 8}
TWO_KV = {"num_key_value_heads": 2}
FAMILIES = {  # (name of the classes, words of the configuration)
    "Llama": {**TWO_KV, "head_dim": 128},
    "Qwen3": {"num_key_value_heads": 8, "head_dim": 64},  # with norms before the rope
    "GPTNeoX": {}, "StableLm": TWO_KV, "Persimmon": {}, "Phi": {},  # a part of the head
    "Cohere": TWO_KV,  # interleaved pairs
    "Olmo2": TWO_KV,  # norms across heads
    "HunYuanDenseV1": {**TWO_KV, "head_dim": 64},  # norms after the rope
    "Glm": {**TWO_KV, "head_dim": 64, "pad_token_id": 0},  # half of each table is not read
    "Falcon": {"multi_query": True},
    "DeepseekV3": {"first_k_dense_replace": 1, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64},
    "Mixtral": {**TWO_KV, "num_local_experts": 2},
    "Llama4Text": {**TWO_KV, "head_dim": 64, "num_local_experts": 2, "intermediate_size_mlp": 64},
}  # fmt: skip


def noting(op: Any, computed: Any, *given: Any) -> Any:
    """Notes a call with meta tensors that have the same strides and the same offset."""
    twin = lambda x: torch.empty(  # noqa: E731
        x.untyped_storage().nbytes() // x.element_size(), dtype=x.dtype, device="meta"
    ).as_strided(x.shape, x.stride(), x.storage_offset())
    *_, tensors, options = given
    note(op, {label: twin(x) if isinstance(x, Tensor) else x for label, x in tensors.items()}, options)
    return computed(op, *given)


@contextmanager
def launched() -> Iterator[list[Spec]]:
    """Yields the kernels that a GPU would launch for calls on the CPU. In a mode of torch norms stay with the host."""
    with pytest.MonkeyPatch.context() as patch, planning() as specs:
        for owner, name in ((Operation, "compute"), (Operation, "on_cpu"), (Backward, "compute")):
            patch.setattr(owner, name, partialmethod(noting, getattr(owner, name)))
        yield specs


# The gradient of Falcon's one head of k has another order of axes in each version of torch.
RUNS = [
    (family, backward) for family in FAMILIES for backward in (False, True) if (family, backward) != ("Falcon", True)
]


@pytest.mark.tenth
@pytest.mark.parametrize(("family", "backward"), RUNS)
def test_the_kernels_of_a_model_are_those_that_it_launches(family: str, backward: bool, tmp_path: Path) -> None:
    """The enabled model itself, with weights, on the CPU; for one sequence and several, of one token and more."""
    transformers = pytest.importorskip("transformers")
    from jitrope.integrations import transformers as drop_in

    config = getattr(transformers, f"{family}Config")(**SMALL, **FAMILIES[family], dtype="bfloat16")
    config.save_pretrained(tmp_path)
    model = transformers.AutoModel.from_config(config).train(backward)
    with drop_in.enable(model) as report, launched() as want, torch.set_grad_enabled(backward):
        for batch, tokens in ((1, 16), (3, 16), (1, 1), (2, 1)):
            out = model(torch.zeros(batch, tokens, dtype=torch.int64)).last_hidden_state
            if backward:
                out.sum().backward()
    assert report.calls["host"] == 0
    assert sum(report.calls.values()) == 4
    specs = specs_of_model(tmp_path, backward=backward)
    assert set(specs) == {spec for spec in want if spec.head_dim > 8}  # the drop-in tries norms with heads of 8
    assert family != "Llama" or specs == specs_of_model(tmp_path / "config.json", backward=backward)


def test_a_model_for_text_and_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The kernels of the text's part, with positions on three axes, and a line on what is left."""
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "default", "mrope_section": [12, 10, 10], "mrope_interleaved": True}
    text = {**SMALL, "num_key_value_heads": 2, "head_dim": 64, "rope_scaling": rope}
    transformers.Qwen3VLConfig(text_config=text, dtype="bfloat16").save_pretrained(tmp_path)
    assert {(spec.dtype, spec.head_dim, spec.kind) for spec in specs_of_model(tmp_path)} == {
        ("bf16", 64, "qk_norm_rope")
    }
    assert "only the part of qwen3_vl for text is planned; for other parts, record a run" in caplog.text
    assert {spec.dtype for spec in specs_of_model(tmp_path, "fp16")} == {"fp16"}


SOUND = {"intermediate_size": 64, "encoder_num_hidden_layers": 1, "decoder_num_hidden_layers": 1}
NO_TEXT: dict[str, tuple[dict[str, int], list[dict[str, Any]]]] = {  # words of the configuration, inputs
    "DINOv3ViT": ({"num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 64}, [
        {"pixel_values": torch.randn(batch, 3, 64, 64, dtype=torch.bfloat16)} for batch in (1, 2)]),
    "Moonshine": (SOUND, [
        {"input_values": torch.randn(batch, 16000, dtype=torch.bfloat16),
         "decoder_input_ids": torch.zeros(batch, tokens, dtype=torch.int64)}
        for batch, tokens in ((1, 8), (2, 8), (1, 1), (2, 1))]),
}  # fmt: skip


@pytest.mark.parametrize("family", NO_TEXT)
def test_a_model_of_images_or_sound(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from jitrope.integrations import transformers as drop_in

    words, inputs = NO_TEXT[family]
    config = getattr(transformers, f"{family}Config")(hidden_size=64, **words)
    config.save_pretrained(tmp_path)
    model = transformers.AutoModel.from_config(config, dtype=torch.bfloat16)
    with drop_in.enable(model), launched() as want, torch.no_grad():
        for given in inputs:
            model(**given)
    assert set(specs_of_model(tmp_path, "bf16")) == set(want) != set()


DIFFUSION = (
    *("Flux", "Flux2", "Flux3", "Chroma", "LongCatImage", "OvisImage", "Bria", "QwenImage", "ZImage", "JoyImageEdit"),
    *("Wan", "WanVACE", "ChronoEdit", "SkyReelsV2", "HunyuanVideo", "MotifVideo", "LTXVideo", "EasyAnimate"),
)


PLANNED = [*((name, "bf16", {}) for name in DIFFUSION), ("QwenImage", "fp16", {}), ("Wan", "fp32", {})]
PLANNED += [("HunyuanVideo", "bf16", {"image_condition_type": "token_replace"})]
PLANNED += [("ZImage", "bf16", {"n_heads": 1, "n_kv_heads": 1, "axes_dims": [8, 12, 12]})]
PLANNED += [("QwenImage", "bf16", {"zero_cond_t": True})]


@pytest.mark.tenth
@pytest.mark.parametrize(("name", "dtype", "changes"), PLANNED, ids=str)
def test_the_kernels_of_a_diffusion_model(name: str, dtype: str, changes: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    from jitrope.integrations import diffusers as drop_in

    from ..integrations.diffusion_zoo import MODELS, forward, prepared

    (cls,) = (cls for cls in MODELS if cls in (f"{name}Transformer2DModel", f"{name}Transformer3DModel"))
    model, inputs = prepared(cls, dtype=TORCH_DTYPES[dtype], config=changes)
    model.save_config(tmp_path)
    alone = lambda x: x[: len(x) // 2] if isinstance(x, (list, Tensor)) and len(x) in (2, 4) else x  # noqa: E731
    with torch.no_grad(), drop_in.enable(model) as report, launched() as want:
        for given in (inputs, {name: alone(value) for name, value in inputs.items()}):  # two samples, and the first
            forward(model, given)
    assert report.calls["host"] == 0
    specs = specs_of_model(tmp_path, dtype)
    assert set(specs) == set(want)
    assert name != "Flux" or specs == specs_of_model(tmp_path / "config.json")


def test_a_pipelines_transformers(tmp_path: Path) -> None:
    """The folder of a pipeline: a Wan pipeline may have two transformers, or none in the place of the second."""
    pytest.importorskip("diffusers")
    from ..integrations.diffusion_zoo import prepared

    classes = {"_class_name": "WanPipeline", "vae": ["diffusers", "AutoencoderKLWan"], "boundary_ratio": 0.9}
    both, alone = {}, {}
    for folder, name in (("transformer", "WanTransformer3DModel"), ("transformer_2", "SkyReelsV2Transformer3DModel")):
        prepared(name)[0].save_config(tmp_path / folder)
        both[folder], alone[folder] = ["diffusers", name], specs_of_model(tmp_path / folder)
    index = tmp_path / "model_index.json"
    index.write_text(json.dumps({**classes, **both}))
    assert specs_of_model(tmp_path) == specs_of_model(index) == [*dict.fromkeys(itertools.chain(*alone.values()))]
    for missing in ([None, None], None):
        index.write_text(json.dumps({**classes, **both, "transformer_2": missing}))
        assert specs_of_model(tmp_path) == alone["transformer"]
    index.write_text(json.dumps(classes))
    with pytest.raises(InvalidInput, match=r"model_index.json names no transformer; record a run instead"):
        specs_of_model(tmp_path)


ON_GPU = {  # head_dim 48, which no other test has: a prepared call does not look its kernel up
    "Llama": {"num_key_value_heads": 2, "head_dim": 48},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 48},
    "FluxTransformer2DModel": {
        **{"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 48, "axes_dims_rope": [16, 16, 16]},
        **{"num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32, "in_channels": 16},
    },
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_the_kernels_of_a_model_on_a_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that it looks up, in inference and in training, with each launch."""
    library = pytest.importorskip("diffusers" if "Transformer" in name else "transformers")
    drop_in = importlib.import_module(f"jitrope.integrations.{library.__name__}")
    if "Transformer" in name:
        model = getattr(library, name)(**ON_GPU[name])
        model.save_config(tmp_path)
    else:
        config = getattr(library, f"{name}Config")(**SMALL, **ON_GPU[name], dtype="bfloat16")
        config.save_pretrained(tmp_path)
        model = library.AutoModel.from_config(config)
    model, tokens = model.to(backend.DEVICE, torch.bfloat16), 96
    randn = partial(torch.randn, device=backend.DEVICE, dtype=torch.bfloat16)
    looked_up, get_kernel = set(), kernels.get_kernel
    monkeypatch.setattr(kernels, "get_kernel", lambda spec, device: looked_up.add(spec) or get_kernel(spec, device))
    with drop_in.enable(model) as report:
        for kind, training, batch in itertools.product(LAUNCHES, (False, True), (1, 2)):
            jitrope.configure(launch=kind)
            given = {"input_ids": torch.zeros(batch, tokens, dtype=torch.int64, device=backend.DEVICE)}
            if "Transformer" in name:
                given = {"hidden_states": randn(batch, tokens, 16), "encoder_hidden_states": randn(batch, 32, 32)}
                given |= {"img_ids": randn(tokens, 3), "txt_ids": randn(32, 3)}
                given |= {"pooled_projections": randn(batch, 32), "timestep": randn(batch)}
            with torch.set_grad_enabled(training):
                out = model(**given)
                out = next(iter(out.values())) if isinstance(out, dict) else out[0]
                if training:
                    out.sum().backward()
    jitrope.configure(launch="auto")
    assert report.calls["host"] == 0
    launched = {spec for spec in looked_up if spec.head_dim == 48}  # without the trials of `enable`
    assert launched == set(specs_of_model(tmp_path, "bf16", backward=True))
