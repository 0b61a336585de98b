"""The kernels that a transformer of diffusers asks for, found from its configuration."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch

from ..base.spec import Spec
from ..ops.planning import planning

MODELS = (
    *("Flux", "Flux2", "Flux3", "Chroma", "LongCatImage", "OvisImage", "Bria", "QwenImage", "ZImage", "JoyImageEdit"),
    *("Wan", "WanVACE", "ChronoEdit", "SkyReelsV2", "HunyuanVideo", "MotifVideo", "SanaVideo", "LTXVideo"),
)
"""Classes without their ending, Transformer2DModel or Transformer3DModel. `_inputs` fits their forward."""

_BATCHES = (1, 2)  # a kernel depends on whether there is one batch row; it depends on no other size below
_GRID, _TEXT, _IMAGE = (2, 4, 6), 512, 257  # patches in frames, rows, columns; tokens
_TEXT_WIDTHS = ("joint_attention_dim", "text_dim", "text_embed_dim", "caption_channels")


def short(name: str) -> str:
    """The name of a class without its ending."""
    return re.sub(r"Transformer[23]DModel$", "", name)


def specs_of_transformer(cls: Any, config: dict[str, Any], dtype: torch.dtype) -> list[Spec]:
    """The kernels that the forward of an enabled transformer asks for, in inference.

    The model is made from its configuration on the meta device, and its forward runs there with small inputs.

    cls: a class of `MODELS`. dtype: as passed to `from_pretrained`.
    """
    from ..integrations import diffusers as drop_in  # it imports Dynamo, which takes seconds

    with torch.no_grad(), torch.device("meta"):
        model = cls.from_config(config).eval()
        _cast(model, dtype)
        with drop_in.enable(model), planning() as specs:
            for batch in _BATCHES:
                model(**_inputs(model, batch, dtype))
    return [*specs]


def _cast(model: Any, dtype: torch.dtype) -> None:
    """Give the weights the dtypes that they have after `from_pretrained(torch_dtype=dtype)`."""
    kept = set(model._keep_in_fp32_modules or ())
    for name, weight in model.state_dict(keep_vars=True).items():
        if weight.is_floating_point() and kept.isdisjoint(name.split(".")):
            weight.data = weight.data.to(dtype)


def _inputs(model: Any, batch: int, dtype: torch.dtype) -> dict[str, Any]:
    """Inputs of forward, by the names of its parameters. Those that this model does not take are left out."""

    def size(*keys: str) -> Any:
        return next((model.config[key] for key in keys if model.config.get(key)), 0)

    names = inspect.signature(type(model).forward).parameters
    frames, rows, columns = _GRID
    tokens, patch, ends = frames * rows * columns, size("patch_size"), 2 if size("pos_embed_seq_len") else 1
    patch = patch if isinstance(patch, (list, tuple)) else (size("patch_size_t") or 1, patch, patch)
    pixels = [n * p for n, p in zip(_GRID, patch)]
    unpacked = type(model).__name__.endswith("3DModel") and "num_frames" not in names
    text, channels, axes = size(*_TEXT_WIDTHS), size("in_channels"), len(size("axes_dims_rope") or ())
    shapes: dict[str, list[int]] = {
        "hidden_states": [batch, channels, *pixels] if unpacked else [batch, tokens, channels],
        "control_hidden_states": [batch, size("vace_in_channels"), *pixels],
        "encoder_hidden_states": [batch, _TEXT, text],
        "encoder_hidden_states_image": [batch * ends, _IMAGE, size("image_dim")],  # of the first frame and of the last
        "encoder_attention_mask": [batch, _TEXT],
        "pooled_projections": [batch, size("pooled_projection_dim")],
        "guidance": [batch] if size("guidance_embeds") else [0],
        "img_ids": [tokens, axes],
        "txt_ids": [_TEXT, axes],
        "timestep": [batch],
        "t": [batch],
    }
    lists = {"x": [channels, 1, 8, 12], "cap_feats": [_TEXT, size("cap_feat_dim")]}
    made = {
        **{name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items() if 0 not in shape},
        **{name: [torch.empty(shape, dtype=dtype)] * batch for name, shape in lists.items()},
        "num_frames": frames,
        "height": rows,
        "width": columns,
        "img_shapes": [[(1, frames * rows, columns)]] * batch,
        "additional_t_cond": torch.empty(batch, dtype=torch.int64),
        "fps": [0] * batch,
    }
    return {name: value for name, value in made.items() if name in names}
