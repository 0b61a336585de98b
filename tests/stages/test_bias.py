"""The bias of a projection: its forms, by the bits of the sum, and the memory of results."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import jitrope
from jitrope import Norm, prepare_fused_qkv

from ..devices import DEVICES, noise, turn

assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", [None, Norm(rounding="once"), Norm(across_heads=True)], ids=["no", "norm", "across"])
@pytest.mark.parametrize("form", ["flat", "heads", "offset", "strided"])
@pytest.mark.parametrize(("order", "heads"), [("qkv", 10), ("grouped", 10), ("qkv_gated", 16)])
def test_a_bias_is_added_as_by_torch(order: str, heads: int, form: str, norm: Norm | None, device: str) -> None:
    """Fresh and in place, by both launches, heads of 6 too. Fresh results share no memory, and qkv stays.

    With narrow accesses of the bias a norm adds squares in another order.
    """
    for dim, dtype in ((64, torch.bfloat16), (6, torch.float32)):
        qkv, flat = noise(device, dtype, (2, 5, heads, dim), (heads * dim,))
        cos, sin = turn(device, 5, dim // 2)
        wide = torch.stack((flat, flat), -1).flatten()
        offset = torch.cat((flat[:1], flat))[1:]
        bias = {"flat": flat, "heads": flat.view(heads, dim), "strided": wide[::2], "offset": offset}[form]
        total = qkv + flat.view(heads, dim)
        if order == "grouped":
            qkv, total = (x.unflatten(2, (2, 5)).flatten(3) for x in (qkv, total))
            bias = bias.view(2, 5 * dim) if form == "heads" else bias
        words = {"cos": cos, "sin": sin, "heads": (6, 2), "order": order, "norm": norm}
        exact = norm is None or form in ("flat", "heads")
        check = assert_same if exact else partial(torch.testing.assert_close, rtol=2**-6, atol=2**-6)
        before = qkv.clone()
        for launch in ("token_linear", "grid_2d"):
            jitrope.configure(launch=launch)
            got = prepare_fused_qkv(qkv, bias=bias, **words)
            check(got, prepare_fused_qkv(total, **words))
            assert all(x.is_contiguous() for x in got)
            assert len({x.untyped_storage().data_ptr() for x in (qkv, *got)}) == 1 + len(got)
            assert_same(qkv, before)
            own = qkv.clone()
            assert prepare_fused_qkv(own, bias=bias, inplace=True, **words) is own
            check(own, prepare_fused_qkv(total.clone(), inplace=True, **words))
