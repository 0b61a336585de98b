"""The kernels that a model's calls will ask for, found from its configuration."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import textwrap
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..base.arguments import word
from ..base.config import log
from ..base.errors import InvalidInput, JitropeError
from ..base.spec import DTYPES, Spec
from ..ops.planning import planning
from ..plan.problem import DTYPE_NAMES

RECORD = "record a run instead: JITROPE_RECORD=run.json, then jitrope prewarm --from run.json"
_TEXT_ALONE = "only the part of %s for text is planned; for a vision tower, record a run: JITROPE_RECORD=run.json"
_NONE = (None, [None, None])  # a part that this pipeline lacks
_BATCHES, _TOKENS = (1, 2), 8  # a kernel depends on whether there is one batch row, but on no other size


TRANSFORMERS = (
    *("Flux", "Flux2", "Flux3", "Chroma", "LongCatImage", "OvisImage", "Bria", "QwenImage", "ZImage", "JoyImageEdit"),
    *("Wan", "WanVACE", "ChronoEdit", "SkyReelsV2", "HunyuanVideo", "MotifVideo", "SanaVideo", "LTXVideo"),
)
"""Classes without their ending, Transformer2DModel or Transformer3DModel. `_inputs` fits their forward."""

_GRID, _TEXT, _IMAGE = (2, 4, 6), 512, 257  # patches in frames, rows, columns; tokens
_TEXT_WIDTHS = ("joint_attention_dim", "text_dim", "text_embed_dim", "caption_channels")


def specs_of_model(path: Path, dtype: str | None = None) -> list[Spec]:
    """The kernels that a model of transformers or diffusers asks for with the drop-in, for both launches.

    Weights are not read. Of a language model they are those of forward and backward: the tables are made by the model's
    own rope module, and the call is that of the drop-in on meta tensors. Of a model for text and images only the text's
    part is planned. Of a diffusers transformer they are those of the forward in inference.

    Args:
        path: config.json, or its folder; or the folder of a diffusers pipeline, for all its transformers.
        dtype: the dtype of the model, "fp32", "fp16" or "bf16", in place of the configuration's. A configuration of
            diffusers has none; the default is "bf16" there.

    Raises:
        InvalidInput: the file is no configuration of transformers or diffusers, or it names no dtype.
        JitropeError: that library is missing, or the kernels cannot be found.
    """
    names = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    named = names[word("specs_of_model", "dtype", dtype, DTYPES)] if dtype else None
    found: dict[Spec, None] = {}
    for file in files(path):
        data = read(file)
        of_model = _of_transformer if "_class_name" in data else _of_language_model
        found |= dict.fromkeys(of_model(file, data, named))
    return [*found]


def files(path: Path) -> list[Path]:
    """The configuration in a file or folder; of a pipeline, those of its transformers."""
    index = path / "model_index.json" if path.is_dir() else path
    if index.name != "model_index.json" or not index.is_file():
        return [path / "config.json" if path.is_dir() else path]
    parts = [name for name, value in read(index).items() if re.match("transformer", name) and value not in _NONE]
    if not parts:
        raise InvalidInput(f"{index} names no transformer; {RECORD}")
    return [index.parent / name / "config.json" for name in parts]


def read(file: Path) -> dict[str, Any]:
    """A file of JSON as a table. Raises InvalidInput if it cannot be read."""
    try:
        data = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        hint = "" if file.exists() else "; nothing is downloaded: pass a config.json or its folder"
        raise InvalidInput(f"cannot read {file}: {_short(error)}{hint}") from error
    return data if isinstance(data, dict) else {}


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise JitropeError(f"--model needs {name} ({error}): pip install {name}") from error


def _of_transformer(path: Path, data: dict[str, Any], dtype: torch.dtype | None) -> list[Spec]:
    """The kernels that the forward of an enabled transformer asks for, with small inputs on the meta device."""
    name = str(data["_class_name"])
    if re.sub(r"Transformer[23]DModel$", "", name) not in TRANSFORMERS:
        known = ", ".join(TRANSFORMERS)
        raise JitropeError(f"--model does not know {name}; of diffusers it knows the transformers of {known}; {RECORD}")
    library, weights = _library("diffusers"), dtype or torch.bfloat16
    from ..integrations import diffusers as drop_in  # it imports Dynamo, which takes seconds

    try:
        with torch.no_grad(), torch.device("meta"):
            model = getattr(library, name).from_config(data).eval()
            _cast(model, weights)
            with drop_in.enable(model), planning() as specs:
                for batch in _BATCHES:
                    model(**_inputs(model, batch, weights))
    except Exception as error:  # a forward that does not fit its inputs can raise any error
        raise JitropeError(f"the calls of {name} are not known ({_short(error)}); {RECORD}") from error
    return [*specs]


def configurations(path: Path, data: dict[str, Any]) -> tuple[Any, Any]:
    """transformers' objects for a file with this table: the whole, and its part for text. They have all defaults."""
    if "model_type" not in data:
        had = "it has neither model_type nor _class_name"
        raise InvalidInput(f"{path} is no configuration of transformers or diffusers: {had}")
    library = _library("transformers")
    try:
        whole = library.AutoConfig.from_pretrained(path, trust_remote_code=False)
        return whole, whole.get_text_config()
    except Exception as error:  # of transformers, for values that it does not expect
        raise InvalidInput(f"cannot read {path}: {_short(error)}") from error


def heads_of(config: Any, layer: Any = None) -> tuple[int, int, int]:
    """The heads of q and of k, and their size, of an attention layer or as the configuration says."""
    q = getattr(config, "num_attention_heads", None) or 0
    k = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or q
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        k = 1  # Falcon
    size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // max(q, 1)
    widths = [getattr(getattr(layer, name, None), "out_features", 0) for name in ("q_proj", "k_proj")]
    if all(widths) and not any(width % size for width in widths):
        gated = widths[0] == 2 * q * size  # q has its output gate beside it
        q, k = q if gated else widths[0] // size, widths[1] // size
    return q, k, size


def modeling(config: Any) -> tuple[str, Any]:
    """A model's name, and its file."""
    kind = config.model_type.replace("-", "_").removesuffix("_text").removesuffix("_text_model")
    return kind, importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")


def _of_language_model(path: Path, data: dict[str, Any], dtype: torch.dtype | None) -> list[Spec]:
    whole, config = configurations(path, data)
    from ..integrations import transformers as drop_in  # it imports Dynamo, which takes seconds

    named = dtype or next(filter(None, (getattr(c, "dtype", None) for c in (config, whole))), None)
    if named is None:
        raise InvalidInput(f"{path} names no dtype: pass one, as --dtype bf16")
    if DTYPE_NAMES.get(named) not in DTYPES:
        raise InvalidInput(f"{path} names {named}; pass a dtype that jitrope has, as --dtype bf16")
    kind = config.model_type
    try:
        kind, file = modeling(config)
        others = [n for n in vars(file) if re.match(r"apply_(?!rotary_pos_emb(_vision)?$)\w*rotary", n)]
        layers = layers_of(file, config, named)
        with drop_in.enable(layers if len(layers) else None), planning() as specs:
            for tables in [] if others else _tables(file, config, named):
                for batch, layer in product(_BATCHES, layers or [None]):
                    _call(file, config, named, batch, tables, layer)
    except (ImportError, AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise JitropeError(f"the rope of {kind} models is not known ({_short(error)}); {RECORD}") from error
    except JitropeError as error:
        raise JitropeError(f"{kind} models have no rope function that jitrope replaces; {RECORD}") from error
    if others:
        unknown = f"the file of {kind} models has {', '.join(others)} too, and which one a layer calls is not known"
        raise JitropeError(f"{unknown}; {RECORD}")
    projections = [getattr(layer, "qkv_proj", None) for layer in layers]
    if not all(module is None or isinstance(module, nn.Linear) for module in projections):
        raise JitropeError(f"q and k of {kind} models are not those of linear layers; {RECORD}")
    if getattr(config, "kv_lora_rank", None):
        raise JitropeError(f"{kind} models have multi-head latent attention, whose calls are not known; {RECORD}")
    if not specs:
        raise JitropeError(f"jitrope does not replace the rope of {kind} models; {RECORD}")
    if config is not whole:
        log.warning(_TEXT_ALONE, kind)
    return [*specs]


def _short(error: Exception) -> str:
    return textwrap.shorten(str(error), 100, placeholder=" ...")


def _tables(file: Any, config: Any, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    """(cos, sin) as the model's rope modules make them; several if they differ between kinds of layers."""
    classes = [c for name, c in vars(file).items() if name.endswith("RotaryEmbedding") and "Vision" not in name]
    x, ids, found = torch.empty(1, _TOKENS, 1, dtype=dtype), torch.arange(_TOKENS)[None], []
    for rope in (c(config) for c in classes if c.__module__ == file.__name__):
        by_layer = "layer_type" in inspect.signature(rope.forward).parameters
        for words in [{"layer_type": kind} for kind in sorted(set(config.layer_types))] if by_layer else [{}]:
            found.append(tuple(t.to("meta") for t in rope(x, ids, **words)))
    return found


def layers_of(file: Any, config: Any, dtype: torch.dtype) -> nn.ModuleList:
    """A layer of each attention class for text and of each kind of layer, without its weights' values."""
    from ..integrations._waiting import ropes_of

    layers, unknown, kinds = nn.ModuleList(), "", getattr(config, "layer_types", None) or [None]
    for name, cls in vars(file).items():
        if not (isinstance(cls, type) and "Vision" not in name and cls.__module__ == file.__name__ and ropes_of(cls)):
            continue
        numbered = "layer_idx" in inspect.signature(cls).parameters
        for kind in dict.fromkeys(kinds) if numbered else [None]:
            words = {"layer_idx": kinds.index(kind)} if numbered else {}
            try:
                with torch.device("meta"):
                    layers.append(cls(config, **words).to(dtype))
            except Exception:  # a class of another part has another configuration
                unknown = name if "q_norm" in cls.__init__.__code__.co_names else unknown  # type: ignore[misc]
    if unknown and not len(layers):  # rope without its norms would be wrong
        raise TypeError(f"{unknown} cannot be made from the configuration alone")
    return layers


def _turned(layer: Any, rope: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """q and k, (B, S, H, D), with the norms of a layer whose norms of heads come before rope."""
    norms = [getattr(layer, name, None) for name in ("q_norm", "k_norm")]

    def normed(norm: Any, x: Tensor) -> Any:
        if norm is None:
            return x.transpose(1, 2)
        across = getattr(norm, "weight", None) is not None and norm.weight.numel() != x.shape[-1]
        return (norm(x.flatten(2)).view(x.shape) if across else norm(x)).transpose(1, 2)

    return rope(normed(norms[0], q), normed(norms[1], k), cos, sin)


def _call(file: Any, config: Any, dtype: torch.dtype, batch: int, tables: tuple[Tensor, ...], layer: Any) -> None:
    """Rotate q and k as attention has them, transposed views of a projection's output, forward and backward.

    The gradient of k is dense from fused attention. From eager attention with as many heads of k as of q, or with one
    in Falcon, it is the transpose of a product.
    """
    *counts, size = heads_of(config, layer)
    if getattr(config, "new_decoder_architecture", False):
        counts[1] = counts[0]  # Falcon expands k to the heads of q before rope
    shapes = [(batch, _TOKENS, count, size) for count in counts]
    leaves = [torch.empty(s, dtype=dtype, device="meta", requires_grad=True) for s in shapes]
    with torch.enable_grad():
        out = _turned(layer, file.apply_rotary_pos_emb, *leaves, *tables)
    dense = [torch.empty_like(x) for x in out]
    leaves += [] if layer is None else [x for x in layer.parameters() if x.dim() == 1]
    torch.autograd.grad(out, leaves, dense, retain_graph=True, allow_unused=True)
    if counts[0] == counts[1] or getattr(config, "multi_query", False):
        eager = [torch.empty_like(dense[0]), torch.empty_like(dense[1].mT, memory_format=torch.contiguous_format).mT]
        torch.autograd.grad(out, leaves, eager, allow_unused=True)


# ---- a transformer of diffusers ------------------------------------------------------------------


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
