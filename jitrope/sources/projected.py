"""A projection, x times a weight, whose heads go on while they are in registers: the source, and its gradient."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor

from .. import torch_state as watch
from ..base import config
from ..base.fit import Fail
from ..base.spec import ACCESS_BYTES, TILE_TOKENS, TILE_WIDTH
from ..base.views import DTYPE_NAMES, Tensors, elements_per_access
from ..jit.driver import TensorMap
from ..plan.options import Options
from ..stages.norm import NO_NORM, normed
from ..stages.transform import LABEL as TRANSFORM
from .fused import FUSED, Fused
from .operation import Call, Operation
from .source import Read

VEC = ACCESS_BYTES // 2  # neighbouring sums of a thread, stored at once
HEAD_DIMS = (64, 128)  # of which a tile of sums has whole heads
ALIGNED = ("q_out", "k_out", "v_out", "gate_out", "k_cache", "v_cache", "bias")
LEAST_FILLED = 92  # percent of the tiles' places: on an H200 two steps are slower from there on, and faster up to 91


class Projected(Fused):
    """x (..., K) times a weight, (heads, D, K) or as `order` says: its first axes are the last ones of fused QKV."""

    name = "projected"
    said, function = "a projection", "project_qkv"
    needed = heads = kept = ("x", "weight")
    labels = {"q": "x", "k": "x"}  # noqa: RUF012
    lacks = ("shifts", "inplace")
    whole = True

    def named(self, t: Tensors, o: Options) -> Tensors:
        """With a tensor of the projection's shape, whose elements are the first ones of the weight's rows."""
        if "qkv" in t:
            return t
        weight = t["weight"]
        return {**t, "qkv": weight[..., 0].expand(*t["x"].shape[:-1], *weight.shape[:-1])}

    def instead(self, t: Tensors, asked: Any) -> tuple[Operation, Tensors, Any]:
        given = {"qkv": self.project(t), **{name: x for name, x in t.items() if name not in self.heads}}
        if not isinstance(asked, Options):
            return FUSED, given, {word: x for word, x in asked.items() if word != "round_projection"}
        plain = asked.norm_kind in NO_NORM.values() and not FUSED.takes_whole(given, asked)
        return FUSED, given, asked._replace(round_projection=False, norm_kind="" if plain else asked.norm_kind)

    def project(self, t: Tensors) -> Tensor:
        """The projection in torch."""
        x, weight = t["x"], t["weight"]
        found: Tensor = of_linear(x, weight.flatten(0, 1)).unflatten(-1, weight.shape[:2])
        return found

    def fits(self, t: Tensors, o: Options) -> bool:
        """Whether there is a kernel for a call, whose other tensors are checked."""
        x, weight, head_dim = t["x"], t["weight"], self.head_dim(t, o)
        others = getattr(o, TRANSFORM) or o.per_row or o.across_heads or o.ulysses_degree or o.rotate_k
        whole = o.rotary_dim == head_dim in HEAD_DIMS and o.interleaved_out in (None, o.interleaved) and not others
        dense = x.is_contiguous() and weight.is_contiguous() and x.shape[-1] % VEC == 0
        if not (whole and dense and x.dtype in (torch.float16, torch.bfloat16) and watch.wgmma_count(x.device)):
            return False
        read = [x.flatten(0, -2), weight.flatten(0, 1), *[t[name] for name in ALIGNED if name in t and t[name].dim()]]
        real = all(type(y) in (Tensor, torch.nn.Parameter) for y in read) and not watch.transformed()  # with addresses
        return not real or elements_per_access(read) >= VEC

    def head_dim(self, t: Tensors, o: Options) -> int:
        return super().head_dim(self.named(t, o), o)

    def maps(self, t: Tensors, spec: Any) -> dict[str, TensorMap]:
        """What a kernel copies of x, and of the weight, whose rows' numbers are 32 c + 8 lane + 2 j + i."""
        x, weight = t["x"].flatten(0, -2), t["weight"].flatten(0, 1)
        (tokens, size), row, dtype = x.shape, weight.stride(0) * weight.element_size(), DTYPE_NAMES[x.dtype]
        sizes, box = (size, 2, 4, 4, len(weight) // 32), (64, 2, 4, 4, spec.head_dim // 32)
        of_x = TensorMap(dtype, (size, tokens), (x.stride(0) * x.element_size(),), (64, spec.tokens_per_block))
        return {"x": of_x, "weight": TensorMap(dtype, sizes, (row, 8 * row, 2 * row, 32 * row), box)}

    def reads(self, t: Tensors, o: Options) -> dict[str, Read]:
        return {letter: ("weight", x) for letter, (_, x) in super().reads(self.named(t, o), o).items()}

    def shaped(self, t: Tensors, o: Options) -> Tensors:
        return super().shaped(self.named(t, o), o)

    def views(self, given: Container[str], o: Options) -> tuple[str, ...]:
        return ()

    def parts(self, t: Tensors, o: Options) -> list[tuple[Tensors, Options]]:
        return super().parts({**t, "qkv": self.project(t)}, o)

    def check(self, t: Tensors, o: Options) -> None:
        fail, x = Fail(self.function), t["x"]
        fail.unlike("weight", t["weight"], x.device, (x.dtype,), (*t["weight"].shape[:2], x.shape[-1]))
        super().check(self.named(t, o), o)

    def back(self, call: Call, saved: Tensors, grads: Tensors, o: Options) -> Tensors:
        """The gradients, by torch's products with that of the projection."""
        x, weight = saved["x"], saved["weight"]
        own = self.project(saved) if normed(o) else self.named(saved, o)["qkv"]
        others = {name: y for name, y in saved.items() if name not in self.heads}
        found = FUSED.back(call, {**others, "qkv": own}, grads, o)
        grad = found.pop("qkv").flatten(-2)
        if x.requires_grad:
            found["x"] = grad @ weight.flatten(0, 1)
        if weight.requires_grad:
            found["weight"] = (grad.flatten(0, -2).t() @ x.flatten(0, -2)).view_as(weight)
        return found


PROJECTED = Projected()


def of_linear(x: Tensor, weight: Tensor) -> Tensor:
    """A projection in torch. The words alone say what is rounded."""
    with watch.without_autocast(x):
        return torch.nn.functional.linear(x, weight)


def projects(x: Tensor, weight: Tensor, norm: Any) -> bool:
    """Whether a user's call may have a kernel, before it is checked.

    A norm's gradient needs the projection's q and k, so with one it is two steps. On an H200 forward and backward take
    0.995 to 0.999 of their time if the kernel also writes q and k, which costs what it saves, and 1.30 if the backward
    projects again (8,192 x 4,096, 32 + 8 heads; 4,096 x 5,120 and 8,192, 64 + 8 heads).
    """
    blocks = watch.wgmma_count(x.device) // 2  # pairs of blocks: each block makes one tile in a wave
    if not blocks or x.shape[-1] < VEC or config.batch_invariant():
        return False
    tokens, width = math.prod(x.shape[:-1]), len(weight)
    waves = -(-(-(-tokens // (2 * TILE_TOKENS)) * -(-width // TILE_WIDTH)) // blocks)
    filled = 100 * tokens * width >= LEAST_FILLED * waves * blocks * 2 * TILE_TOKENS * TILE_WIDTH
    return filled and (norm is None or not watch.wants_grad(x, weight, *getattr(norm, "tensors", {}).values()))
