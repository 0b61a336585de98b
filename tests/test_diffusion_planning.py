"""`jitrope prewarm --model` of diffusers configurations: the kernels that the models themselves ask for."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, randn, tensor
from torch.utils._python_dispatch import TorchDispatchMode

from jitrope import InvalidInput
from jitrope.base.errors import JitropeError
from jitrope.integrations import diffusers as integration
from jitrope.ops.planning import planning
from jitrope.tools.models import TRANSFORMERS, _cast, specs_of_model

from .test_planning import twin

diffusers = pytest.importorskip("diffusers", reason="the diffusers extra is not installed")
from .diffusion_zoo import MODELS, forward, moved, prepared, reloaded  # noqa: E402

KNOWN = {re.sub(r"Transformer[23]DModel$", "", name): model for name, model in MODELS.items()}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Planned(TorchDispatchMode):
    """Makes each call of jitrope's on the CPU again, on meta tensors with the same strides and offsets."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "jitrope":
            func(*(twin(x) if isinstance(x, Tensor) else x for x in args), **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def first_row(value: Any) -> Any:
    """Inputs of two samples, cut to those of the first."""
    if isinstance(value, Tensor):
        return value[: len(value) // 2] if value.dim() and len(value) in (2, 4) else value
    return value[:1] if isinstance(value, list) and len(value) == 2 else value


def asked_for(model: Any, inputs: dict[str, Any]) -> set[Any]:
    """The kernels of an enabled model's forward on the CPU, of two samples and of one."""
    with torch.no_grad(), integration.enable(model) as report, planning() as specs, Planned():
        for given in (inputs, {name: first_row(value) for name, value in inputs.items()}):
            forward(model, given)
    assert report.calls["host"] == 0
    return set(specs)


def dtypes(model: Any) -> dict[str, torch.dtype]:
    return {name: x.dtype for name, x in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_models_forward_asks_for_the_planned_kernels(name: str, tmp_path: Path) -> None:
    model, inputs = prepared(KNOWN[name], dtype=torch.bfloat16)
    model.save_config(tmp_path)
    specs = specs_of_model(tmp_path)
    assert set(specs) == asked_for(model, inputs)
    assert specs == specs_of_model(tmp_path / "config.json")
    planned = type(model).from_config(model.config)
    _cast(planned, torch.bfloat16)
    assert dtypes(planned) == dtypes(model)  # some modules stay fp32


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("name", ["Wan", "QwenImage"])
def test_another_dtype(name: str, dtype: str, tmp_path: Path) -> None:
    model, inputs = prepared(KNOWN[name], dtype=DTYPES[dtype])
    model.save_config(tmp_path)
    specs = set(specs_of_model(tmp_path, dtype))
    assert specs == asked_for(model, inputs)
    assert {spec.dtype for spec in specs} == {dtype}


WAN_IMAGE = {"image_dim": 8, "added_kv_proj_dim": 32}
WAN_TEXT = {"encoder_hidden_states": randn(2, 512, 16)}
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "guidance": ("Flux", {"guidance_embeds": True}, {"guidance": tensor([4.0, 4.0])}),
    "an image to start from": ("Wan", WAN_IMAGE, {**WAN_TEXT, "encoder_hidden_states_image": randn(2, 9, 8)}),
    "two images": (
        "Wan",
        {**WAN_IMAGE, "pos_embed_seq_len": 514},
        {**WAN_TEXT, "encoder_hidden_states_image": randn(4, 257, 8)},
    ),
    "layers": (
        "QwenImage",
        {"use_additional_t_cond": True, "use_layer3d_rope": True},
        {"additional_t_cond": tensor([0, 0]), "img_shapes": [[(1, 2, 4), (1, 2, 4)]] * 2},
    ),
    "editing": ("QwenImage", {"zero_cond_t": True}, {"img_shapes": [[(1, 2, 4), (1, 2, 4)]] * 2}),
    "a frame that is replaced": ("HunyuanVideo", {"image_condition_type": "token_replace"}, {}),
    "no guidance": ("HunyuanVideo", {"guidance_embeds": False}, {"guidance": None}),
    "heads of other sizes": ("ZImage", {"n_heads": 1, "n_kv_heads": 1, "axes_dims": [8, 12, 12]}, {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_of_a_model(variant: str, tmp_path: Path) -> None:
    """Its configuration differs from that above, and its forward takes more inputs."""
    name, changes, more = VARIANTS[variant]
    stock, inputs = prepared(KNOWN[name], dtype=torch.bfloat16)
    stock.save_config(tmp_path)
    plain = set(specs_of_model(tmp_path))
    model = type(stock).from_config({**stock.config, **changes})
    model.save_config(tmp_path)
    model = reloaded(model, torch.bfloat16)
    inputs |= moved(more, "cpu", torch.bfloat16)
    specs = set(specs_of_model(tmp_path))
    assert specs == asked_for(model, inputs)
    assert (specs == plain) == (variant not in ("an image to start from", "two images", "heads of other sizes"))


def test_a_pipelines_transformers(tmp_path: Path) -> None:
    """The folder of a pipeline: a Wan pipeline may have two transformers, or none in the place of the second."""
    classes = {"_class_name": "WanPipeline", "vae": ["diffusers", "AutoencoderKLWan"], "boundary_ratio": 0.9}
    both, alone = {}, {}
    for folder, name in (("transformer", "Wan"), ("transformer_2", "SkyReelsV2")):
        KNOWN[name].make()[0].save_config(tmp_path / folder)
        both[folder], alone[folder] = ["diffusers", KNOWN[name].name], specs_of_model(tmp_path / folder)
    index = tmp_path / "model_index.json"
    index.write_text(json.dumps({**classes, **both}))
    assert specs_of_model(tmp_path) == specs_of_model(index) == [*alone["transformer"], *alone["transformer_2"]]
    for missing in ([None, None], None):
        index.write_text(json.dumps({**classes, **both, "transformer_2": missing}))
        assert specs_of_model(tmp_path) == alone["transformer"]
    index.write_text(json.dumps(classes))
    with pytest.raises(InvalidInput, match=r"model_index.json names no transformer; record a run instead"):
        specs_of_model(tmp_path)


def test_a_model_that_is_not_known(tmp_path: Path) -> None:
    """The message says which models are, and what to do."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"_class_name": "MochiTransformer3DModel"}))
    words = r"does not know MochiTransformer3DModel; of diffusers it knows the transformers of Flux, .* JITROPE_RECORD="
    with pytest.raises(JitropeError, match=words):
        specs_of_model(file)
    file.write_text(json.dumps({"_class_name": "FluxTransformer2DModel", "axes_dims_rope": [16, 56, 57]}))
    with pytest.raises(JitropeError, match=r"^the calls of FluxTransformer2DModel are not known \(.*; record a run"):
        specs_of_model(file)


def test_without_diffusers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
    monkeypatch.setitem(sys.modules, "diffusers", None)  # as if it were not installed
    with pytest.raises(JitropeError, match=r"^--model needs diffusers \(.*\): pip install diffusers$"):
        specs_of_model(tmp_path)
