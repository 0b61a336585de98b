"""The kernels that a model asks for: it is made from its configuration, enabled, and run on meta tensors."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..base import arguments
from ..base.config import log
from ..base.errors import InvalidInput, JitropeError
from ..base.spec import DTYPES, Spec
from ..base.views import DTYPE_NAMES
from ..jit.trust import reason
from ..run.planning import planning
from .prewarm import TORCH_DTYPES

RECORD = "record a run instead: JITROPE_RECORD=run.json, then jitrope prewarm --from run.json"
_TEXT_ALONE = "only the part of %s for text is planned; for other parts, record a run: JITROPE_RECORD=run.json"
_NONE = (None, [None, None])  # a part that this pipeline lacks
_BATCHES = (1, 2)  # a kernel depends on whether there is one batch row, but on no other size

_GRID, _TEXT, _IMAGE = (2, 4, 6), 512, 257  # patches in frames, rows, columns; tokens
_TEXT_WIDTHS = ("joint_attention_dim", "text_dim", "text_embed_dim", "caption_channels")


def specs_of_model(path: Path, dtype: str | None = None, backward: bool = False) -> list[Spec]:
    """The kernels that a model of transformers or diffusers launches with the drop-in, for both launches.

    The model is made on the meta device, without weights, by its library. `enable` is called, and its forward runs for
    one sample and for two, in inference. The text part alone runs of a model for text and images.

    Args:
        path: config.json, or its folder; or the folder of a diffusers pipeline, for all its transformers.
        dtype: the dtype of the model, "fp32", "fp16" or "bf16", in place of the configuration's. A configuration of
            diffusers has none; the default is "bf16" there.
        backward: also run forward and backward in training, with gradients of attention in the order of q, k and v, as
            fused attention gives them.

    Raises:
        InvalidInput: the file is no configuration of transformers or diffusers, or it names no dtype.
        JitropeError: that library is missing, or the model cannot be made or run so.
    """
    name, found = "specs_of_model", dict[Spec, None]()
    path, backward = arguments.path(name, "path", path), arguments.flag(name, "backward", backward)
    named = TORCH_DTYPES[arguments.word(name, "dtype", dtype, DTYPES)] if dtype is not None else None
    for file in _files(path):
        data = _read(file)
        made = _of_diffusers if "_class_name" in data else _of_transformers
        found |= dict.fromkeys(made(file, data, named, backward))
    return [*found]


def _files(path: Path) -> list[Path]:
    """The configuration in a file or folder; of a pipeline, those of its transformers."""
    index = path / "model_index.json" if path.is_dir() else path
    if index.name != "model_index.json" or not index.is_file():
        return [path / "config.json" if path.is_dir() else path]
    parts = [name for name, value in _read(index).items() if re.match("transformer", name) and value not in _NONE]
    if not parts:
        raise InvalidInput(f"{index} names no transformer; {RECORD}")
    return [index.parent / name / "config.json" for name in parts]


def _read(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        hint = "" if file.exists() else "; nothing is downloaded: pass a config.json or its folder"
        raise InvalidInput(f"cannot read {file}: {_short(error)}{hint}") from error
    return data if isinstance(data, dict) else {}


def _short(error: Exception) -> str:
    return textwrap.shorten(reason(error), 100, placeholder=" ...") or type(error).__name__


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise JitropeError(f"--model needs {name} ({error}): pip install {name}") from error


# ---- running -------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """Fused attention of tensors without values. Gradients have the strides of q, k and v, as on a GPU."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q[..., : v.shape[-1]])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


class _AsOnGpu(TorchFunctionMode):
    """Torch's attention of meta tensors is fused, as on a GPU, unless k and v have other heads than q."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, enable_gqa: bool = False, **__: Any) -> Any:
            if query.shape[1] == key.shape[1] or enable_gqa:
                return _Attention.apply(query.clone(), key.clone(), value.clone())
            return function(query, key, value)

        return (attention if function is F.scaled_dot_product_attention else function)(*args, **(kwargs or {}))


def _planned(model: nn.Module, drop_in: Any, inputs: list[dict[str, Any]], backward: bool) -> list[Spec]:
    """The kernels of an enabled model's calls."""
    with drop_in.enable(model), planning() as specs, torch.device("meta"), _AsOnGpu():
        for training in (True, False)[not backward :]:  # the first call of all may launch rope alone, and its backward
            model.train(training)
            with torch.inference_mode(False), torch.set_grad_enabled(training):
                for given in inputs:
                    results = [*_results(model(**given))]
                    torch.autograd.backward(results, [torch.empty_like(x) for x in results])
    if not specs:
        raise JitropeError("jitrope replaces nothing that its forward calls")
    return specs


def _results(out: Any) -> Iterator[Tensor]:
    """The tensors with a gradient in a model's outputs."""
    if isinstance(out, Tensor):
        yield from [out] if out.requires_grad else []
    elif isinstance(out, (dict, list, tuple)):
        for part in out.values() if isinstance(out, dict) else out:
            yield from _results(part)


# ---- transformers --------------------------------------------------------------------------------


def _of_transformers(path: Path, data: dict[str, Any], dtype: torch.dtype | None, backward: bool) -> list[Spec]:
    library = _library("transformers")
    from ..integrations import transformers as drop_in  # it imports Dynamo, which takes seconds

    try:
        config = library.AutoConfig.from_pretrained(path, trust_remote_code=False)
        text = config.get_text_config()
    except Exception as error:  # of transformers, for values that it does not expect
        raise InvalidInput(f"cannot read {path}: {_short(error)}") from error
    named: Any = dtype or next(filter(None, (getattr(c, "dtype", None) for c in (text, config))), None)
    if DTYPE_NAMES.get(named) not in DTYPES:
        raise InvalidInput(f"{path} names {named or 'no dtype'}; pass a dtype that jitrope has, as --dtype bf16")
    name = next(iter(config.architectures or ()), None)
    try:
        with torch.device("meta"):
            make = getattr(library, name)._from_config if name else library.AutoModel.from_config
            model = make(config, dtype=named)
            inputs = [_words(model, batch, tokens, named) for batch in _BATCHES for tokens in (8, 1)]
        specs = _planned(model, drop_in, inputs, backward)
    except Exception as error:  # a forward that does not fit its inputs can raise any error
        raise JitropeError(f"the calls of {config.model_type} are not known ({_short(error)}); {RECORD}") from error
    if text is not config:
        log.warning(_TEXT_ALONE, config.model_type)
    return specs


def _words(model: Any, batch: int, tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    """The inputs of a model of transformers: tokens, pixels of its configuration's size, or a second of sound."""
    config, main = model.config, model.main_input_name
    if main == "pixel_values":
        size = config.image_size
        sides = size if isinstance(size, (list, tuple)) else (size, size)
        return {main: torch.empty(batch, config.num_channels, *sides, dtype=dtype)}
    ids = torch.zeros(batch, tokens, dtype=torch.int64)
    given = {main: torch.empty(batch, 16000, dtype=dtype)} if main == "input_values" else {"input_ids": ids}
    return {**given, **({"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {})}


# ---- diffusers -----------------------------------------------------------------------------------


def _of_diffusers(path: Path, data: dict[str, Any], dtype: torch.dtype | None, backward: bool) -> list[Spec]:
    name, weights = str(data["_class_name"]), dtype or torch.bfloat16
    library = _library("diffusers")
    from ..integrations import diffusers as drop_in  # it imports Dynamo, which takes seconds

    try:
        with torch.device("meta"):
            model = getattr(library, name).from_config(data)
            _cast(model, weights)
            inputs = [_inputs(model, batch, weights) for batch in _BATCHES]
        return _planned(model, drop_in, inputs, backward)
    except Exception as error:  # a forward that does not fit its inputs can raise any error
        raise JitropeError(f"the calls of {name} are not known ({_short(error)}); {RECORD}") from error


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
    shapes = {"hidden_states": [batch, channels, *pixels] if unpacked else [batch, tokens, channels]}
    shapes |= {"control_hidden_states": [batch, size("vace_in_channels"), *pixels], "img_ids": [tokens, axes]}
    shapes |= {"encoder_hidden_states": [batch, _TEXT, text], "encoder_attention_mask": [batch, _TEXT]}
    shapes |= {"encoder_hidden_states_image": [batch * ends, _IMAGE, size("image_dim")]}  # the first frame, the last
    shapes |= {"pooled_projections": [batch, size("pooled_projection_dim")], "timestep": [batch], "t": [batch]}
    shapes |= {"guidance": [batch] if size("guidance_embeds") else [0], "txt_ids": [_TEXT, axes]}
    lists = {"x": [channels, 1, 8, 12], "cap_feats": [_TEXT, size("cap_feat_dim")]}
    made: dict[str, Any] = {"num_frames": frames, "height": rows, "width": columns, "fps": [0] * batch}
    made |= {"img_shapes": [[(1, frames * rows, columns)]] * batch}
    made |= {"additional_t_cond": torch.empty(batch, dtype=torch.int64)}
    made |= {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items() if 0 not in shape}
    made |= {name: [torch.empty(shape, dtype=dtype)] * batch for name, shape in lists.items()}
    return {name: value for name, value in made.items() if name in names}
