"""Tensors that calls keep: torch's process-wide settings change none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import jitrope
from jitrope import DynamicQuantize, InvalidInput, KVCache, Norm
from jitrope.values import constants

from ..devices import DEVICES

FP4 = getattr(torch, "float4_e2m1fn_x2", None)
FP4S = [{"group": 32, "scale_dtype": getattr(torch, "float8_e8m0fnu", None)},
        {"group": 16, "scale_dtype": torch.float8_e4m3fn}]  # fmt: skip
# Of q, k, cos, sin, a weight, and zeros of a cache.
CALLS: dict[str, Callable[..., Any]] = {
    "q_scale": lambda q, k, cos, sin, w, c: jitrope.apply_rope(q, k, cos, sin, q_scale=0.3),
    "cache": lambda q, k, cos, sin, w, c: (*jitrope.prepare_qkv(
        q, k, k, cos, sin, cache=KVCache(*c, torch.arange(9, device=q.device), k_scale=0.05, v_scale=0.07))[:1], *c),
    "norm without a table": lambda q, k, cos, sin, w, c: jitrope.prepare_qkv(q, k, None, norm=Norm(w, w))[:2],
    "fp4": lambda q, k, cos, sin, w, c: [x.values.view(torch.uint8) for words in FP4S for x in jitrope.prepare_qkv(
        q, k, None, cos, sin, quantize=DynamicQuantize(FP4, **words))[:2]],
    "frequencies": lambda q, *_: jitrope.tables.inv_freq(
        "dynamic", rotary_dim=64, seq_len=torch.tensor(9000, device=q.device), factor=4.0, device=q.device,
        max_position_embeddings=4096)[0],
}  # fmt: skip
NEEDS_FP4 = pytest.param("fp4", marks=pytest.mark.skipif(FP4 is None, reason="this torch has no fp4"))
NAMES = [NEEDS_FP4 if name == "fp4" else name for name in CALLS]


def made(device: str) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    q, angles, weight = (torch.randn(x, generator=generator, dtype=torch.float32) for x in ((1, 9, 4, 64), (9, 32), 64))
    cache = torch.zeros(2, 9, 4, 64, dtype=torch.float8_e4m3fn)
    found = (q.bfloat16(), q.flip(1).bfloat16(), angles.cos(), angles.sin(), 1 + weight / 8, cache)
    return tuple([x.to(device) for x in found])


def bits(found: Any) -> list[Any]:
    return [x.cpu().view(torch.uint8).tolist() for x in tree_leaves(found)]


def forget() -> None:
    constants.one_row.cache_clear()
    constants.filled.cache_clear()


def test_a_users_tensor_is_never_taken_for_a_kept_one() -> None:
    """Calls know those that are kept by their ids, which must not become free."""
    constants.filled(torch.device("cpu"), (), torch.float32, 0.125)
    forget()
    assert not any(id(torch.ones(())) in constants.CONSTANTS for _ in range(1000))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_another_default_dtype_changes_nothing(dtype: torch.dtype, name: str, device: str) -> None:
    forget()
    torch.set_default_dtype(dtype)
    try:
        under = bits(CALLS[name](*made(device)))
    finally:
        torch.set_default_dtype(torch.float32)
    assert under == bits(CALLS[name](*made(device)))
    forget()
    assert under == bits(CALLS[name](*made(device)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["q_scale", "norm without a table"])
def test_a_functionalized_call_leaves_nothing_behind(name: str, device: str) -> None:
    q, *given = made(device)
    want = bits(CALLS[name](q, *given))
    forget()
    inside = torch.func.functionalize(lambda x: CALLS[name](x, *given))(q)
    after = CALLS[name](q, *given)
    assert not any(torch._is_functional_tensor(x) for x in tree_leaves(after))
    assert bits(inside) == bits(after) == want


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_without_memory_are_no_calls_of_a_kernel(device: str) -> None:
    q, k, cos, sin, *_ = made(device)
    zeros = torch._efficientzerotensor(q.shape, dtype=q.dtype, device=device)
    got, _ = jitrope.apply_rope(zeros, k, cos, sin)
    assert got.shape == q.shape
    assert not got.any()
    weight = torch._efficientzerotensor((q.shape[-1],), dtype=q.dtype, device=device)
    got, _, _ = jitrope.prepare_qkv(q, k, None, cos, sin, norm=Norm(weight, torch.ones_like(weight)))
    assert not got.any()
    with pytest.raises(InvalidInput, match=r"not torch's lazy zeros or negatives; pass q.clone\(\)"):
        jitrope.apply_rope(zeros, k, cos, sin, inplace=True)
