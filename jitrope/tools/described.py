"""A call described in words, for prewarming and files of calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import api
from ..base import arguments
from ..base.spec import DTYPES
from ..ops.kv_cache import KVCache
from ..ops.quantize import DynamicQuantize, Quantize
from ..ops.values import Mrope, Norm, Packed, Shifts, Starts
from ..ops.words import rotary_dim_of
from ..plan.options import LAYOUT_AXES, QKV_ORDERS, SCALED_DTYPES, TABLES, Options
from ..plan.problem import DTYPE_NAMES
from ..plan.views import BLOCK_SCALES, FORMATS, NVFP4_GROUP, SCALES, packed_shape

_TOKENS, _ROWS, _SEQUENCES = 4096, 1 << 20, 4
"""Sizes on which no kernel depends: tokens of a sequence, rows of a table, sequences of a packed batch."""

_FORMATS = {name: form.dtype for name, form in FORMATS.items()}
_TORCH = {**{name: dtype for dtype, name in DTYPE_NAMES.items()}, **_FORMATS, **SCALES}


class Described:
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
        self.name = name = arguments.word("call", "function", function, api.__all__)
        self.heads = arguments.wholes(name, "heads", heads if hasattr(heads, "__len__") else [heads], 1)
        if not 1 <= len(self.heads) <= 2 or (len(self.heads) < 2 and name not in ("apply_rope", "prepare_qkv")):
            arguments.refuse(name, "heads", heads, "those of q and k, as [32, 8]")
        self.v_heads = self.heads[-1] if v_heads is None else arguments.whole(name, "v_heads", v_heads, 1)
        self.head_dim = arguments.whole(name, "head_dim", head_dim, 1)
        self.batch = arguments.whole(name, "batch", batch, 1)
        self.dtype = arguments.word(name, "dtype", dtype, DTYPES)
        self.backward, self.words = arguments.flag(name, "backward", backward), words
        positions = words.get("positions")
        self.packed = isinstance(positions, Mapping) and "cu_seqlens" in positions
        layout = "thd" if self.packed else words.get("layout", "bshd")
        self.layout = arguments.word(name, "layout", layout, tuple(LAYOUT_AXES))
        self.leaves: list[Tensor] = []

    def empty(self, label: str, dtype: Any, shape: Sequence[int]) -> Tensor:
        dtype = _TORCH[arguments.word(self.name, label, dtype, tuple(_TORCH))]
        return torch.empty(shape, dtype=dtype, device="meta")

    def trained(self, x: Tensor) -> Tensor:
        """x as an input with a gradient, if the call has a backward."""
        if not self.backward:
            return x
        self.leaves.append(x.requires_grad_())
        return x.clone() if self.words.get("inplace") else x  # torch does not write into leaves

    def q_or_k(self, count: int, size: int) -> Tensor:
        sizes = {"b": self.batch, "s": _TOKENS, "t": _TOKENS, "h": count, "d": size}
        return self.trained(self.empty("dtype", self.dtype, [sizes[letter] for letter in self.layout]))

    def tables(
        self, table: str = "cos_sin", table_dtype: str = "fp32", width: str = "half", two_tables: bool = False
    ) -> dict[str, Any]:
        table = arguments.word(self.name, "table", table, TABLES)
        full = arguments.word(self.name, "width", width, ("half", "full")) == "full" or table == "cos_sin_cache"
        rotary = arguments.whole(self.name, "rotary_dim", rotary_dim_of(self.name, self.words, self.head_dim), 0)
        shape = [_ROWS, rotary // (1 if full else 2)]
        made = self.empty("table_dtype", table_dtype, [*shape, 2] if table == "freqs_cis" else shape)
        made = torch.view_as_complex(made) if table == "freqs_cis" else made
        given = (made, made) if arguments.flag(self.name, "two_tables", two_tables) else made
        return dict.fromkeys(("cos", "sin") if table == "cos_sin" else (table,), given)

    def value(self, label: str, given: Any) -> Any:
        """A value object, made from its words; tensors are made from their dtypes."""
        tokens = _TOKENS * (2 if self.name == "prepare_joint_qkv" else 1)  # of both streams
        if label == "positions" and isinstance(given, str):
            return self.empty(label, given, (tokens,))
        if not isinstance(given, Mapping):
            or_dtype = "the dtype of a tensor of ids, or " if label == "positions" else ""
            arguments.refuse(self.name, label, given, f"{or_dtype}a table of its words")
        words, across = dict(given), given.get("across_heads")
        page, k_heads, axes = words.pop("page_size", None), self.heads[-1], words.get("mrope_section")
        group = NVFP4_GROUP
        if label == "cache":
            words.setdefault("v_cache", None)
            group = arguments.whole(label, "group", words.pop("group", group), 1)
        cache = [_TOKENS, k_heads, self.head_dim]
        if page is not None:  # the pages of k and v alternate
            cache = [_TOKENS, 2, arguments.whole(label, "page_size", page, 1), *cache[1:]]
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
                x = self.empty(word, dtype, (*rows, last // 2 if dtype == "fp4" else last))
                words[word] = self.trained(x) if label == "norm" else x[:, 0] if x.dim() == 5 else x
        if label == "norm" and "mean_squares" in words:
            shape = (_TOKENS,) if self.layout == "thd" else (self.batch, _TOKENS)
            means = [self.empty("mean_squares", words["mean_squares"], shape) for _ in self.heads]
            words["mean_squares"] = (*means, None)[:2]
        shifts = words.pop("shifts", False)
        places = Packed if self.packed else Shifts if shifts else Mrope if "position_ids" in words else Starts
        scaled = Quantize if {"q_scale", "k_scale"} & words.keys() else DynamicQuantize
        for word, allowed in (("dtype", SCALED_DTYPES), ("scale_dtype", SCALES)):
            if label == "quantize" and word in words:
                words[word] = _TORCH[arguments.word(label, word, words[word], allowed)]
        return {"norm": Norm, "cache": KVCache, "quantize": scaled, "positions": places}[label](**words)

    def make(self) -> None:
        """Make the call and, if asked for, its backward."""
        words = self.words
        tables = self.tables(**{x: words.pop(x) for x in ("table", "table_dtype", "width", "two_tables") if x in words})
        for label in ("positions", "norm", "cache", "quantize"):
            if words.get(label) is not None:
                words[label] = self.value(label, words[label])
        if self.name == "prepare_packed_qkv":
            words["q_per_group"] = n = self.heads[0] // self.heads[1]
            if n * self.heads[1] != self.heads[0]:
                arguments.refuse(self.name, "heads", self.heads, "[q's, k's], with q's a multiple of k's")
            order = arguments.word(self.name, "order", words.get("order", "grouped"), tuple(QKV_ORDERS))
            packed = Options(q_per_group=n, order=order)
            shape = packed_shape(self.heads[1], self.head_dim, packed)
            given: list[Any] = [self.q_or_k(*shape)]
            if arguments.flag(self.name, "bias", words.pop("bias", False)):
                words["bias"] = self.trained(self.empty("dtype", self.dtype, shape))
        elif self.name == "prepare_mla_qkv":
            rotary = rotary_dim_of(self.name, {"rotary_dim": words.pop("rotary_dim", None)}, self.head_dim)
            v_dim = arguments.whole(self.name, "v_dim", words.pop("v_dim", self.head_dim - rotary), 1)
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
