"""The kernels that a model's calls will ask for, found from its configuration."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import textwrap
from contextlib import suppress
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
from . import diffusion

RECORD = "record a run instead: JITROPE_RECORD=run.json, then jitrope prewarm --from run.json"
_TEXT_ALONE = "only the part of %s for text is planned; for a vision tower, record a run: JITROPE_RECORD=run.json"
_NONE = (None, [None, None])  # a part that this pipeline lacks
_BATCHES, _TOKENS = (1, 2), 8  # a kernel depends on whether there is one batch row, but on no other size


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
    for file in _files(path):
        data = read(file)
        of_model = _of_transformer if "_class_name" in data else _of_language_model
        found |= dict.fromkeys(of_model(file, data, named))
    return [*found]


def _files(path: Path) -> list[Path]:
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
        data = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        hint = "" if file.exists() else "; nothing is downloaded: pass a config.json or its folder"
        raise InvalidInput(f"cannot read {file}: {_short(error)}{hint}") from error
    return data if isinstance(data, dict) else {}


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise JitropeError(f"--model needs {name} ({error}): pip install {name}") from error


def _of_transformer(path: Path, data: dict[str, Any], dtype: torch.dtype | None) -> list[Spec]:
    name = str(data["_class_name"])
    if diffusion.short(name) not in diffusion.MODELS:
        known = ", ".join(diffusion.MODELS)
        raise JitropeError(f"--model does not know {name}; of diffusers it knows the transformers of {known}; {RECORD}")
    library = _library("diffusers")
    try:
        return diffusion.specs_of_transformer(getattr(library, name), data, dtype or torch.bfloat16)
    except Exception as error:  # a forward that does not fit its inputs can raise any error
        raise JitropeError(f"the calls of {name} are not known ({_short(error)}); {RECORD}") from error


def _of_language_model(path: Path, data: dict[str, Any], dtype: torch.dtype | None) -> list[Spec]:
    if "model_type" not in data:
        had = "it has neither model_type nor _class_name"
        raise InvalidInput(f"{path} is no configuration of transformers or diffusers: {had}")
    from ..integrations import transformers as drop_in  # it imports Dynamo, which takes seconds

    library = _library("transformers")
    try:
        whole = library.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (ImportError, OSError, ValueError, TypeError) as error:
        raise InvalidInput(f"cannot read {path}: {_short(error)}") from error
    config = whole.get_text_config()
    kind = config.model_type.replace("-", "_").removesuffix("_text").removesuffix("_text_model")
    given = (getattr(c, name, None) for name in ("dtype", "torch_dtype") for c in (config, whole))
    named = dtype or next(filter(None, given), None)
    if named is None:
        raise InvalidInput(f"{path} names no dtype: pass one, as --dtype bf16")
    try:
        file = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        others = [n for n in vars(file) if re.match(r"apply_(?!rotary_pos_emb(_vision)?$)\w*rotary", n)]
        layers = _layers(file, config, named)
        with drop_in.enable(layers if len(layers) else None), planning() as specs:
            for tables in [] if others else _tables(file, config, named):
                for batch, layer in product(_BATCHES, layers or [None]):
                    _call(file, config, named, batch, tables, layer)
    except (ImportError, AttributeError, KeyError, TypeError, RuntimeError, InvalidInput) as error:
        raise JitropeError(f"the rope of {kind} models is not known ({_short(error)}); {RECORD}") from error
    except JitropeError as error:
        raise JitropeError(f"{kind} models have no rope function that jitrope replaces; {RECORD}") from error
    if others:
        raise JitropeError(f"the file of {kind} models has {', '.join(others)} too; {RECORD}")
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


def _layers(file: Any, config: Any, dtype: torch.dtype) -> nn.ModuleList:
    """A layer of each attention class for text, without its weights' values."""
    from ..integrations._attention import calls_rope

    layers = nn.ModuleList()
    for name, cls in vars(file).items():
        if isinstance(cls, type) and "Vision" not in name and cls.__module__ == file.__name__ and calls_rope(cls):
            with suppress(Exception), torch.device("meta"):  # a class of another part has another configuration
                layers.append(cls(config, layer_idx=0).to(dtype))
    return layers


def _call(file: Any, config: Any, dtype: torch.dtype, batch: int, tables: tuple[Tensor, ...], layer: Any) -> None:
    """Rotate q and k as attention has them, transposed views of a projection's output, forward and backward.

    The gradient of k is dense from fused attention. From eager attention with as many heads of k as of q it is the
    transpose of a product.
    """
    from ..integrations._attention import turned

    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    counts = heads, getattr(config, "num_key_value_heads", None) or heads
    shapes = [(batch, _TOKENS, count, size) for count in counts]
    leaves = [torch.empty(s, dtype=dtype, device="meta", requires_grad=True) for s in shapes]
    with torch.enable_grad():
        out = turned(layer, file.apply_rotary_pos_emb, *leaves, *tables)
    dense = [torch.empty_like(x) for x in out]
    leaves += [] if layer is None else [x for x in layer.parameters() if x.dim() == 1]
    torch.autograd.grad(out, leaves, dense, retain_graph=True, allow_unused=True)
    if counts[0] == counts[1]:
        eager = [torch.empty_like(dense[0]), torch.empty_like(dense[1].mT, memory_format=torch.contiguous_format).mT]
        torch.autograd.grad(out, leaves, eager, allow_unused=True)
