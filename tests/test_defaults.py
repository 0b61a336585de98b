"""Calls under torch's process-wide settings: another default dtype, a transform of torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import jitrope
from jitrope import DynamicQuantize, KVCache, Norm, Quantize
from jitrope.values import constants

from .devices import DEVICES

FP4 = torch.float4_e2m1fn_x2 if hasattr(torch, "float4_e2m1fn_x2") else None


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32)


def inputs(device: str) -> tuple[Tensor, ...]:
    """q, k, cos, sin, and the weights of a norm."""
    q, angles, weight = rand(1, 9, 4, 64), rand(9, 32), 1 + rand(64) / 8
    return tuple([x.to(device) for x in (q.bfloat16(), q.flip(1).bfloat16(), angles.cos(), angles.sin(), weight)])


def stored(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, w: Tensor) -> Any:
    cache = [torch.zeros(9, 4, 64, dtype=torch.float8_e4m3fn, device=q.device) for _ in "kv"]
    slots = torch.arange(9, device=q.device)
    found = jitrope.prepare_qkv(q, k, k, cos, sin, cache=KVCache(*cache, slots, k_scale=0.05, v_scale=0.07))
    return found[0], cache


def in_fp4(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, w: Tensor) -> Any:
    if FP4 is None:
        pytest.skip("this torch has no fp4")
    formats = ({"group": 32, "scale_dtype": torch.float8_e8m0fnu}, {"group": 16, "scale_dtype": torch.float8_e4m3fn})
    made = [jitrope.prepare_qkv(q, k, None, cos, sin, quantize=DynamicQuantize(FP4, **words)) for words in formats]
    return [x.values.view(torch.uint8) for found in made for x in found[:2]]


def frequencies(length: Tensor) -> Tensor:
    words: Any = {"factor": 4.0, "max_position_embeddings": 4096, "device": length.device}
    return jitrope.tables.inv_freq("dynamic", rotary_dim=64, seq_len=length, **words)[0]


CALLS: dict[str, Callable[..., Any]] = {
    "q_scale": lambda q, k, cos, sin, w: jitrope.apply_rope(q, k, cos, sin, q_scale=0.3),
    "quantize": lambda q, k, cos, sin, w: jitrope.prepare_qkv(q, k, None, cos, sin, quantize=Quantize(0.06, 0.04))[:2],
    "cache": stored,
    "norm": lambda q, k, cos, sin, w: jitrope.prepare_qkv(q, k, None, cos, sin, norm=Norm(w, w))[:2],
    "norm without a table": lambda q, k, cos, sin, w: jitrope.prepare_qkv(q, k, None, norm=Norm(w, w))[:2],
    "fp4": in_fp4,
    "frequencies": lambda q, k, cos, sin, w: frequencies(torch.tensor(9000, device=q.device)),
}


def bits(found: Any) -> list[Any]:
    return [x.cpu().view(torch.uint8).tolist() for x in tree_leaves(found)]


def forget() -> None:
    """Forget the tensors that calls keep."""
    for made in (constants.one_row, constants.filled):
        made.cache_clear()


def test_a_users_tensor_is_never_taken_for_a_kept_one() -> None:
    """Calls know those that are kept by their ids, which must not become free."""
    constants.filled(torch.device("cpu"), (), torch.float32, 0.125)
    forget()
    assert not any(id(torch.ones(())) in constants.CONSTANTS for _ in range(1000))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_another_default_dtype_changes_nothing(dtype: torch.dtype, name: str, device: str) -> None:
    """Neither a call under it, nor one after it: numbers become tensors that are kept."""
    given = inputs(device)
    forget()
    torch.set_default_dtype(dtype)
    try:
        under = bits(CALLS[name](*given))
    finally:
        torch.set_default_dtype(torch.float32)
    assert under == bits(CALLS[name](*given))
    forget()
    assert under == bits(CALLS[name](*given))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["q_scale", "norm without a table"])
def test_a_functionalized_call_leaves_nothing_behind(name: str, device: str) -> None:
    q, *given = inputs(device)
    want = bits(CALLS[name](q, *given))
    forget()
    inside = torch.func.functionalize(lambda x: CALLS[name](x, *given))(q)
    after = CALLS[name](q, *given)
    assert not any(torch._is_functional_tensor(x) for x in tree_leaves(after))
    assert bits(inside) == bits(after) == want


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_without_memory_are_no_calls_of_a_kernel(device: str) -> None:
    q, k, cos, sin, _ = inputs(device)
    zeros = torch._efficientzerotensor(q.shape, dtype=q.dtype, device=device)
    got, _ = jitrope.apply_rope(zeros, k, cos, sin)
    assert got.shape == q.shape
    assert not got.any()
    weight = torch._efficientzerotensor((q.shape[-1],), dtype=q.dtype, device=device)
    got, _, _ = jitrope.prepare_qkv(q, k, None, cos, sin, norm=jitrope.Norm(weight, torch.ones_like(weight)))
    assert not got.any()
    with pytest.raises(jitrope.InvalidInput, match=r"not torch's lazy zeros or negatives; pass q.clone\(\)"):
        jitrope.apply_rope(zeros, k, cos, sin, inplace=True)
