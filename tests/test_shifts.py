"""Differences of positions: keys in a cache move from old positions to new ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import KVCache, Norm, Quantize, Shifts

from .devices import DEVICES

ROWS = 12
OLD = torch.tensor([[0, 5, 11, 7, 3], [4, 4, 9, 1, 10]])
NEW = torch.tensor([[0, 9, 2, 7, 0], [3, 5, 10, 11, 0]])


def inputs(device: str, dtype: torch.dtype = torch.float32, **words: Any) -> tuple[Tensor, dict[str, Any]]:
    """k (2, 5, 3, 64), and tables in the words of a call."""
    k = torch.randn(2, 5, 3, 64, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    cos, sin = jitrope.tables.cos_sin(ROWS, jitrope.tables.inv_freq(rotary_dim=64)[0])
    if words.pop("full", False):
        cos, sin = (x.repeat_interleave(2, -1) if words.get("interleaved") else x.repeat(1, 2) for x in (cos, sin))
    if words.pop("single", False):
        return k, {"cos_sin_cache": torch.cat((cos, sin), -1).to(device), **words}
    return k, {"cos": cos.to(device), "sin": sin.to(device), **words}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "words", [{}, {"interleaved": True}, {"full": True}, {"full": True, "interleaved": True}, {"single": True}], ids=str
)
def test_keys_move_to_new_positions(words: dict[str, Any], device: str) -> None:
    k, words = inputs(device, **words)
    old, new = OLD.to(device), NEW.to(device)
    keys, want = (jitrope.apply_rope(k, None, positions=ids, **words)[0] for ids in (old, new))
    before = keys.clone()
    got = jitrope.apply_rope(keys, None, positions=Shifts(new - old), inplace=True, **words)[0]
    assert got is keys
    torch.testing.assert_close(keys, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(keys[new == old], before[new == old])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_difference_below_0_has_the_bits_of_inverse(interleaved: bool, dtype: torch.dtype, device: str) -> None:
    """Also where the members of a pair have different angles; learned tables of each head too."""
    k, _ = inputs(device, dtype)
    sizes = (OLD % 6).to(device)
    signs = torch.where(torch.arange(10).view(2, 5) % 3 == 0, 1, -1).to(device)
    for shape in ((ROWS, 64), (2, ROWS, 3, 64), (ROWS, 32)):
        cos, sin = (torch.randn(shape, generator=torch.Generator().manual_seed(n)).to(device) for n in (1, 2))
        plain, back = (
            jitrope.apply_rope(k, None, cos, sin, positions=sizes, interleaved=interleaved, inverse=inverse)[0]
            for inverse in (False, True)
        )
        got = jitrope.apply_rope(k, None, cos, sin, positions=Shifts(sizes * signs), interleaved=interleaved)[0]
        assert torch.equal(got, torch.where((signs > 0)[..., None, None], plain, back))


@pytest.mark.parametrize("device", DEVICES)
def test_the_keys_of_packed_pages(device: str) -> None:
    """K of K|V in one page, by strides, with heads before rows; v stays."""
    _, words = inputs(device)
    pages = torch.randn(4, 3, 8, 2 * 64, generator=torch.Generator().manual_seed(2)).to(device)  # page, head, row, K|V
    before, shifts = pages.clone(), torch.arange(32, device=device).view(4, 8) % (2 * ROWS - 1) - ROWS + 1
    jitrope.apply_rope(pages[..., :64], None, positions=Shifts(shifts), layout="bhsd", inplace=True, **words)
    want = jitrope.apply_rope(before[..., :64].contiguous(), None, positions=Shifts(shifts), layout="bhsd", **words)[0]
    assert torch.equal(pages[..., :64], want)
    assert torch.equal(pages[..., 64:], before[..., 64:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_difference_past_the_table_gives_nan(dtype: torch.dtype, device: str) -> None:
    k, words = inputs(device)
    least = torch.iinfo(dtype).min
    shifts = torch.tensor([ROWS, -ROWS, least, 1 - ROWS, ROWS - 1], dtype=dtype, device=device)
    got = jitrope.apply_rope(k, None, positions=Shifts(shifts), **words)[0]
    assert got[:, :3].isnan().all()
    assert not got[:, 3:].isnan().any()
    with pytest.raises(jitrope.InvalidInput, match=r"positions have sizes from .*, but the table has rows 0 to 11"):
        jitrope.apply_rope(k, None, positions=Shifts(shifts[:2].repeat(3)[:5]), check=True, **words)
    jitrope.apply_rope(k, None, positions=Shifts(shifts[3:].repeat(3)[:5]), check=True, **words)


K, WORDS = inputs("cpu")
V = torch.zeros_like(K)
REFUSED = {
    "angles": ({"freqs": torch.zeros(ROWS, 32), "cos": None, "sin": None}, "freqs does not go with Shifts"),
    "a norm": ({"norm": Norm()}, "shifts does not go with norm"),
    "fp8": ({"quantize": Quantize(1.0, 1.0)}, "shifts does not go with quantize"),
    "a cache": ({"cache": KVCache(V[0], V[0].clone(), torch.arange(10))}, "shifts does not go with cache"),
    "floats": (
        {"positions": Shifts(torch.zeros(5))},
        r"positions is float32; it must be \(5,\) or \(1\|2, 5\), int32 or int64",
    ),
    "two axes": (
        {"positions": Shifts(torch.zeros(2, 2, 5).long())},
        r"positions is .*; it must be \(5,\) or \(1\|2, 5\), int32 or int64",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_combination_without_a_meaning_is_refused(name: str) -> None:
    words, text = REFUSED[name]
    with pytest.raises(jitrope.InvalidInput, match=text):
        jitrope.prepare_qkv(K, K.clone(), V, **{**WORDS, "positions": Shifts(OLD), **words})


def test_fused_qkv_is_refused() -> None:
    with pytest.raises(
        jitrope.InvalidInput, match="shifts does not go with fused QKV; rotate by Shifts in a call of apply_rope"
    ):
        jitrope.prepare_fused_qkv(torch.zeros(2, 5, 3 * 64), heads=(1, 1), positions=Shifts(OLD), **WORDS)
