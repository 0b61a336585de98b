"""The kernels of a call that is described in words, planned on meta tensors: `specs_of`, and `popular` ones.

A tensor is written as its dtype, and a value object as a dict of its words. A list of values means a call with each of
them; a list of numbers is one value of heads, [32, 8].
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from jitrope import DynamicQuantize, KVCache, Mrope, Norm, Packed, Quantize, Shifts, Starts, api, planning
from jitrope.base.spec import Spec
from jitrope.base.views import BLOCK_SCALES, DTYPE_NAMES, FORMATS, SCALES, fused_shape
from jitrope.checks.words import rotary_dim_of
from jitrope.plan.options import Options

_TOKENS, _ROWS, _SEQUENCES = 4096, 1 << 20, 4
"""Sizes on which no kernel depends: tokens of a sequence, rows of a table, sequences of a packed batch."""

_FORMATS = {name: form.dtype for name, form in FORMATS.items()}
_TORCH = {**{name: dtype for dtype, name in DTYPE_NAMES.items()}, **_FORMATS, **SCALES}


# Popular models. q and k go together, except for hosts that rotate them one by one.
_WEIGHTS = {"q_weight": "bf16", "k_weight": "bf16"}
_ONCE = {**_WEIGHTS, "rounding": "once"}
_TWICE = {**_WEIGHTS, "rounding": "twice"}
_SLOTS = {"slot_mapping": "int64", "k_cache": "bf16", "v_cache": "bf16"}
_FP8_SLOTS = {**_SLOTS, "k_cache": "fp8", "v_cache": "fp8", "k_scale": 1.0, "v_scale": 1.0}
_PACKED = {"cu_seqlens": "int32"}
_SERVING = {"positions": "int64", "inplace": True}
_FLUX = {"interleaved": True, "width": "full", "norm": _ONCE}
_QWEN_IMAGE = {"interleaved": True, "rounding": "complex64", "norm": _TWICE, "table": "freqs_cis", "two_tables": True}
_WAN = {"interleaved": True, "norm": {**_ONCE, "across_heads": True}, "inplace": True, "table": "freqs_cis"}
POPULAR: list[dict[str, Any]] = [
    {"heads": [[32, 8], [32, 32], [64, 8]], "inplace": [False, True]},  # Llama, Qwen, Mistral
    {"heads": [[32, 8], [64, 8]], **_SERVING},  # vLLM, SGLang
    {"function": "prepare_qkv", "heads": [32, 8], **_SERVING, "cache": [_SLOTS, _FP8_SLOTS]},
    {"function": "prepare_qkv", "heads": [32, 8], **_SERVING, "cache": [_SLOTS, _FP8_SLOTS], "norm": _TWICE},  # Qwen3
    {"heads": [32, 8], "positions": [None, _PACKED], "backward": True},  # training
    {"heads": 24, "interleaved": True, "width": ["full", "half"]},  # FLUX, HunyuanVideo
    {"heads": [24, 24], "interleaved": True, "backward": True},
    {"heads": 24, "interleaved": True, "rounding": "complex64"},  # Qwen-Image
    # With the norm: the double and single blocks of FLUX, the blocks of Qwen-Image, Wan (14B and 1.3B) and Qwen3.
    {"function": "prepare_joint_qkv", "heads": [24, 24], **_FLUX},
    {"function": "prepare_qkv", "heads": [24, 24], **_FLUX, "inplace": True},
    {"function": "prepare_joint_qkv", "heads": [24, 24], **_QWEN_IMAGE},
    {"function": "prepare_qkv", "heads": [[40, 40], [12, 12]], **_WAN},
    {"function": "prepare_qkv", "heads": [32, 8], "norm": _TWICE, "backward": True},
    {"heads": [[12], [40]], "interleaved": True},
    # Megatron, TransformerEngine: q, then k.
    {"heads": [[8], [32]], "table": "freqs", "width": "full", "positions": [None, _PACKED], "backward": True},
    {"heads": 16, "head_dim": [80, 64, 256]},  # vision towers, Gemma
]


@cache
def popular() -> tuple[Spec, ...]:
    """The kernels of popular models, each once."""
    return tuple(dict.fromkeys(spec for call in POPULAR for spec in specs_of(**call)))


def specs_of(**call: Any) -> list[Spec]:
    """The kernels of a call of `function` ("apply_rope"), each once, for both launches; with backward the gradient's.

    heads, v_heads, head_dim (128), dtype ("bf16") and batch (1) are those of q, k and v; table is "cos_sin", "freqs",
    "cos_sin_cache" or "freqs_cis", with table_dtype ("fp32") and width ("half"). In cache, page_size are the rows of a
    page, and group the elements with one block scale. All other words are keywords of the function.
    """
    axes = []
    for name, value in call.items():
        several = isinstance(value, list) and (name != "heads" or any(isinstance(item, list) for item in value))
        axes.append(value if several else [value])
    with torch.inference_mode(False), torch.enable_grad(), planning() as specs:
        for values in itertools.product(*axes):
            _Described(**dict(zip(call, values))).make()
    return specs


class _Described:
    """A call in words, with tensors on the meta device."""

    def __init__(
        self,
        function: str = "apply_rope",
        heads: Any = (),
        head_dim: int = 128,
        dtype: str = "bf16",
        batch: int = 1,
        backward: bool = False,
        v_heads: Any = None,
        **words: Any,
    ) -> None:
        self.name, self.heads = function, heads if isinstance(heads, list) else [heads]
        self.v_heads, self.head_dim, self.batch, self.dtype = v_heads or self.heads[-1], head_dim, batch, dtype
        self.backward, self.words = backward, words
        positions = words.get("positions")
        self.packed = isinstance(positions, Mapping) and "cu_seqlens" in positions
        self.layout = "thd" if self.packed else words.get("layout", "bshd")
        self.leaves: list[Tensor] = []

    def empty(self, dtype: str, shape: Sequence[int]) -> Tensor:
        return torch.empty(shape, dtype=_TORCH[dtype], device="meta")

    def trained(self, x: Tensor) -> Tensor:
        """x as an input with a gradient, if the call has a backward."""
        if not self.backward:
            return x
        self.leaves.append(x.requires_grad_())
        return x.clone() if self.words.get("inplace") else x  # torch does not write into leaves

    def q_or_k(self, count: int, size: int) -> Tensor:
        sizes = {"b": self.batch, "s": _TOKENS, "t": _TOKENS, "h": count, "d": size}
        return self.trained(self.empty(self.dtype, [sizes[letter] for letter in self.layout]))

    def tables(
        self, table: str = "cos_sin", table_dtype: str = "fp32", width: str = "half", two_tables: bool = False
    ) -> dict[str, Any]:
        full = width == "full" or table == "cos_sin_cache"
        shape = [_ROWS, rotary_dim_of(self.name, self.words, self.head_dim) // (1 if full else 2)]
        made = self.empty(table_dtype, [*shape, 2] if table == "freqs_cis" else shape)
        made = torch.view_as_complex(made) if table == "freqs_cis" else made
        given = (made, made) if two_tables else made
        return dict.fromkeys(("cos", "sin") if table == "cos_sin" else (table,), given)

    def value(self, label: str, given: Any) -> Any:
        """A value object, made from its words; tensors are made from their dtypes."""
        tokens = _TOKENS * (2 if self.name == "prepare_joint_qkv" else 1)  # of both streams
        if label == "positions" and isinstance(given, str):
            return self.empty(given, (tokens,))
        words, across = dict(given), given.get("across_heads")
        page, k_heads, axes = words.pop("page_size", None), self.heads[-1], words.get("mrope_section")
        group = 16  # NVFP4
        if label == "cache":
            words.setdefault("v_cache", None)
            group = words.pop("group", group)
        cache = [_TOKENS, k_heads, self.head_dim]
        if page is not None:  # the pages of k and v alternate
            cache = [_TOKENS, 2, page, *cache[1:]]
        shapes: dict[str, Sequence[int]] = {
            "cu_seqlens": (_SEQUENCES + 1,),
            "start_positions": (_SEQUENCES if self.packed else self.batch,),
            "position_ids": (len(axes) if isinstance(axes, (list, tuple)) else 1, tokens),
            "slot_mapping": (self.batch * _TOKENS,),
            "k_cache": cache,
            "v_cache": [*cache[:-2], self.v_heads, self.head_dim],
            **{name: [*cache[:-1], self.head_dim // group] for name in BLOCK_SCALES},
            **dict.fromkeys(("q_weight", "q_bias"), (self.head_dim * (self.heads[0] if across else 1),)),
            "v_weight": (self.head_dim * k_heads,),
            **dict.fromkeys(("k_weight", "k_bias"), (self.head_dim * (k_heads if across else 1),)),
        }
        for word, dtype in words.items():
            if word in shapes and dtype is not None:
                *rows, last = shapes[word]
                x = self.empty(dtype, (*rows, last // 2 if dtype == "fp4" else last))
                words[word] = self.trained(x) if label == "norm" else x[:, 0] if x.dim() == 5 else x
        if label == "norm" and "mean_squares" in words:
            shape = (_TOKENS,) if self.layout == "thd" else (self.batch, _TOKENS)
            means = [self.empty(words["mean_squares"], shape) for _ in self.heads]
            words["mean_squares"] = (*means, None)[:2]
        shifts = words.pop("shifts", False)
        places = Packed if self.packed else Shifts if shifts else Mrope if "position_ids" in words else Starts
        scaled = Quantize if {"q_scale", "k_scale"} & words.keys() else DynamicQuantize
        for word in ("dtype", "scale_dtype"):
            if label == "quantize" and word in words:
                words[word] = _TORCH[words[word]]
        return {"norm": Norm, "cache": KVCache, "quantize": scaled, "positions": places}[label](**words)

    def make(self) -> None:
        """Make the call and, if asked for, its backward."""
        words = self.words
        tables = self.tables(**{x: words.pop(x) for x in ("table", "table_dtype", "width", "two_tables") if x in words})
        for label in ("positions", "norm", "cache", "quantize"):
            if words.get(label) is not None:
                words[label] = self.value(label, words[label])
        if self.name == "prepare_fused_qkv":
            words["heads"] = self.heads
            options = Options(q_per_group=self.heads[0] // self.heads[1], order=words.get("order", "qkv"))
            shape = fused_shape(self.heads[1], self.head_dim, options)
            given: list[Any] = [self.q_or_k(*shape)]
            if words.pop("bias", False):
                words["bias"] = self.trained(self.empty(self.dtype, shape))
        elif self.name == "prepare_mla_qkv":
            rotary = rotary_dim_of(self.name, {"rotary_dim": words.pop("rotary_dim", None)}, self.head_dim)
            v_dim = words.pop("v_dim", self.head_dim - rotary)
            sizes = (self.head_dim, self.head_dim - rotary + v_dim, rotary)
            given = [self.q_or_k(n, size) for n, size in zip((*self.heads, 1), sizes)]
        else:
            q_k_v = (*self.heads, *([self.v_heads] if self.heads[1:] else []))
            given = [[self.q_or_k(n, self.head_dim) for n in q_k_v] for _ in range(2)]  # for two streams
            if self.name != "prepare_joint_qkv":
                given = [*given[0], None, None][: 2 if self.name == "apply_rope" else 3]
            if isinstance(cache := words.get("cache"), KVCache) and "v_cache" not in cache.tensors:
                given[2:] = [None]
        out = getattr(api, self.name)(*given, **tables, **words)
        results = [x for x in ([out] if isinstance(out, Tensor) else out) if isinstance(x, Tensor) and x.requires_grad]
        if results:
            torch.autograd.grad(results, self.leaves, [torch.empty_like(x) for x in results], allow_unused=True)
