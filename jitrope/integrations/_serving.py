"""Calls of servers, in their words: heads without an axis of their own, one table, tokens without a batch axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..api import prepare_qkv
from ..base.errors import InvalidInput
from ..ops.dispatch import replay
from ..ops.kv_cache import KVCache
from ..ops.quantize import DynamicQuantize
from ..ops.stand_ins import constant
from ..ops.values import Norm
from ..ops.watch import version
from ..plan.views import FP8S

_FP8S = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""The dtypes of fp8 caches, by vLLM's names."""


def heads(name: str, x: Tensor, token_axes: int, head_size: int) -> Tensor:
    """View x, (..., H * head_size) or (..., H, head_size) after its token axes, as (..., H, head_size), or refuse it.

    Splitting the last axis never copies, so results written to the view are written to x.
    """
    axes, width = x.dim() - token_axes, x.shape[-1] if x.dim() else 0
    if axes == 1 and head_size > 0 and width % head_size == 0:
        return x.view(*x.shape[:-1], width // head_size, head_size)
    if axes == 2 and width == head_size:
        return x
    lead = "T" if token_axes == 1 else "B, S"
    raise InvalidInput(
        f"{name} has shape {tuple(x.shape)}; with positions of {token_axes} axes and head_size {head_size} it must be "
        f"({lead}, H * {head_size}) or ({lead}, H, {head_size})"
    )


def replayed(name: str, words: tuple[Any, ...], run: Callable[[], Any], **tensors: Any) -> None:
    """Run a function of a server that makes one call in place, or `replay` the call.

    Args:
        words: the function's arguments that are not tensors.
        tensors: the others, by the kernel's names; one that is a number or None is a word.
    """
    given, others = {}, []
    for label, x in tensors.items():
        if isinstance(x, Tensor):
            given[label] = x
        else:
            others.append(x)
    replay((name, *words, *given, *others), given, run)


def packed(name: str, x: Tensor, counts: Sequence[int], head_size: int, token_axes: int = 1) -> Sequence[Tensor]:
    """Views of the heads of x, (T, H * head_size): `counts` of them, or x is refused."""
    whole = heads(name, x, token_axes, head_size)
    if whole.shape[-2] != sum(counts):
        raise InvalidInput(f"{name} has {whole.shape[-2]} heads of {head_size} elements; it must have {sum(counts)}")
    return torch.split_with_sizes(whole, counts, -2)


def heads_from(name: str, x: Tensor, first: int, count: int, head_size: int) -> Tensor:
    """View `count` heads of x, (T, H * head_size), from head `first` on, or refuse x."""
    whole = heads(name, x, 1, head_size)
    if not 0 <= first <= first + count <= whole.shape[1]:
        had = f"{name} has {whole.shape[1]} heads of {head_size} elements"
        raise InvalidInput(f"{had}; it must have {first + count}, to take {count} from head {first} on")
    return whole[:, first : first + count]


@constant
def frequencies(
    device: torch.device, widths: tuple[int, ...], base: float, factor: float, low: float, high: float
) -> Tensor:
    """Radians for each position, fp32, of the pairs of each axis, whose elements are `widths`: base^(-2 i / width).

    With a factor other than 1 YaRN's ramp from pair low to pair high leads to these numbers divided by the factor
    (arXiv:2309.00071, section 3.2).
    """
    pairs = torch.cat([torch.arange(width // 2, device=device) for width in widths]).float()
    sizes = torch.cat([torch.full((width // 2,), float(width), dtype=torch.float32, device=device) for width in widths])
    found = torch.pow(base, -2.0 * pairs / sizes)
    if factor == 1.0:
        return found
    end = high + 0.001 if abs(low - high) <= 1e-6 else high
    ramp = ((pairs - low) / (end - low)).clamp(0, 1)
    return found / factor * ramp + found * (1 - ramp)


def prepare(
    q: Tensor, k: Tensor | None, v: Tensor | None, table: Tensor | None, positions: Any, is_neox: bool, **words: Any
) -> Any:
    """`prepare_qkv` of tokens without a batch axis. Without a table nothing is rotated."""
    words.update(positions=positions, interleaved=not is_neox, layout="thd")
    return prepare_qkv(q, k, v, cos_sin_cache=table, **words)


def cache_of(k_cache: Tensor, v_cache: Tensor, slots: Tensor, kind: str, k_scale: Any, v_scale: Any) -> KVCache:
    """The value for a cache that vLLM describes by the word kv_cache_dtype. k is rotated in place too."""
    scales: dict[str, Any] = {}
    if (fp8 := _FP8S.get(kind)) is not None:
        scales = {"k_scale": 1.0 if k_scale is None else k_scale, "v_scale": 1.0 if v_scale is None else v_scale}
        if k_cache.dtype == torch.uint8:
            k_cache, v_cache = k_cache.view(fp8), v_cache.view(fp8)
        if k_cache.dtype != fp8:
            raise InvalidInput(f"key_cache is {k_cache.dtype}; with kv_cache_dtype={kind!r} it must be {fp8}")
    return KVCache(k_cache, v_cache, slots, rotate_k=True, **scales)


def buffers(
    k: Tensor, k_buffer: Tensor, v_buffer: Tensor, slots: Tensor, k_scale: Any = None, v_scale: Any = None
) -> KVCache:
    """The value for SGLang's buffers, (slots, Hk * D) or (slots, Hk, D). k is rotated in place too."""
    if k_buffer.dtype in FP8S:
        k_scale, v_scale = (1.0 if scale is None else scale for scale in (k_scale, v_scale))
    k_cache, v_cache = (heads(name, x, 1, k.shape[-1]) for name, x in (("k_buffer", k_buffer), ("v_buffer", v_buffer)))
    return KVCache(k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale, rotate_k=True)


def latent_cache(name: str, rope: Tensor, latent: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, ...]:
    """Views for `KVCache` of MLA's k, (T, 1, R), of the latent in pieces of R, and of their caches."""
    width, size, found = rope.shape[-1], latent.shape[-1], (v_cache.shape[-1], k_cache.shape[-1])
    if latent.dim() != 2 or size % width or found != (size, width):
        had = f"{name} has shape {tuple(latent.shape)}, beside {width} rotated elements, and its caches hold {found}"
        raise InvalidInput(f"{had}; it must be (T, a multiple of {width}), and the caches of these widths")
    v, stored = (x.unflatten(-1, (size // width, width)) for x in (latent, v_cache))
    return rope.reshape(-1, 1, width), v, k_cache.unsqueeze(-2), stored


def norm_once(q_weight: Tensor, k_weight: Tensor, eps: float, added: float = 0.0) -> Norm:
    """An RMSNorm that is rounded before the rotation. added: the number that the host adds to the weights."""
    if added not in (0.0, 1.0):
        raise InvalidInput(f"the number that is added to the weights (norm_weight_bias, norm_beta) is {added}; 0 or 1")
    return Norm(q_weight, k_weight, eps=eps, zero_centered=added == 1.0, rounding="once")


def unit(name: str, scale: float) -> float:
    """The value of one unit of the output, for a factor of its numbers."""
    if not scale:
        raise InvalidInput(f"{name} is {scale}; it must not be 0")
    return 1 / scale


def indexer_q(
    q: Tensor, weights: Tensor, factor: float, table: Tensor, positions: Tensor, is_neox: bool, **words: Any
) -> tuple[Tensor, Tensor]:
    """(q of a sparse attention's indexer, rotated, in fp8; weights times factor times q's scales, in fp32).

    words: of `DynamicQuantize`.
    """
    if weights.shape != q.shape[:-1]:
        raise InvalidInput(f"weights has shape {tuple(weights.shape)}; it must be (T, H), {tuple(q.shape[:-1])}")
    quantize = DynamicQuantize(**words)
    (values, scale), _, _ = prepare(q, None, None, table, positions, is_neox, quantize=quantize)
    return values, weights.float() * scale * factor


_AXES: Any = WeakTensorKeyDictionary()  # of each map of axes its version, and its sections and their order, or None


def sections(axis_map: Tensor) -> tuple[tuple[int, ...], bool]:
    """The number of pairs of each axis, and whether they interleave, from the axis of each pair.

    It is read again after a write, except a map of inference mode.
    """
    unread = "mrope_axis_map must be read; call the function before the CUDA graph, and not compiled"
    if torch.compiler.is_compiling():
        raise InvalidInput(unread)
    now = 0 if axis_map.is_inference() else version(axis_map)
    if _AXES.get(axis_map, (-1,))[0] != now:
        if axis_map.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InvalidInput(unread)
        axes = axis_map.tolist()
        counts = tuple([axes.count(axis) for axis in range(3)])
        mixed = [pair % 3 if pair // 3 < counts[pair % 3] else 0 for pair in range(len(axes))]
        _AXES[axis_map] = now, (counts, axes == mixed) if axes in (mixed, sorted(axes)) else None
    found: tuple[tuple[int, ...], bool] | None = _AXES[axis_map][1]
    if found is None:
        raise InvalidInput("mrope_axis_map has another order of axes than whole sections, or axes in turn")
    return found
