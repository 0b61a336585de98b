"""Positions: rows that the table of calls does not have, moved keys, ranks' shares, and tokens without a rotation."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, tensor

import jitrope
from jitrope import KVCache, Mrope, Norm, Packed, Shifts, Starts

from .. import oracle
from ..devices import DEVICES, inputs, noise, turn
from ..results import same

IDS = tensor([[3, 0, 3, 8, 1], [1, 4, 2, 0, 7]])
AXES = torch.stack((IDS, IDS.flip(0), IDS.flip(1), 8 - IDS))  # (4, 2, 5)
LEAST, LEAST_INT32 = torch.iinfo(torch.int64).min, torch.iinfo(torch.int32).min
TURNS = Mrope(AXES[:3], (12, 10, 10), True)
CUT = Packed(tensor([0, 7, 7, 12, 22]), start_positions=tensor([0, 1, 4, 0]), cp_size=2, cp_rank=1)
CALLS: dict[str, tuple[tuple[int, ...], int, Any, dict[str, Any]]] = {
    # the shape of q, the table's rows, the positions, and the words
    "one row of ids for a batch": ((2, 5, 3, 64), 9, IDS[:1], {}),
    "a token in each row": ((5, 1, 3, 64), 9, IDS[0, :, None], {}),
    "a token in each row, by one row": ((3, 1, 3, 64), 5, None, {}),
    "ids outside of the table": ((2, 5, 3, 64), 4, IDS - 1, {"interleaved": True}),
    "ids far outside": ((1, 3, 3, 64), 9, tensor([LEAST, -LEAST - 1, 2]), {}),
    "starts outside": ((3, 4, 2, 64), 6, Starts(tensor([-2, 3, 0])), {}),
    "starts far outside": ((3, 4, 2, 64), 6, Starts(tensor([-(2**62), 2**63 - 2, -1])), {}),
    "a sequence longer than the table": ((12, 2, 64), 6, Packed(tensor([0, 9, 12])), {}),
    "no sequence": ((3, 2, 64), 3, Packed(tensor([0], dtype=torch.int32)), {}),
    "no sequence has a start": ((3, 2, 64), 3, Packed(tensor([0]), start_positions=tensor([]).long()), {}),
    "all tokens are other ranks'": ((3, 2, 64), 1, Packed(tensor([0, 0, 1, 1, 2]), cp_size=4, cp_rank=2), {}),
    "rows and columns of an image": ((2, 5, 3, 64), 9, Mrope(AXES[:2, 0], (16, 16)), {}),
    "an empty section": ((2, 5, 3, 64), 9, Mrope(AXES[:, :1], (5, 0, 20, 7)), {"interleaved": True}),
    "an axis outside of the table": ((2, 5, 3, 64), 8, Mrope(AXES[:3], (8, 12, 12)), {}),
    "axes in turn, members of a pair": ((2, 5, 3, 64), 9, TURNS, {"full": True, "interleaved": True}),
    "axes in turn, halves with their own angles": ((2, 5, 3, 64), 9, TURNS, {"full": True}),
    "differences past the table": ((1, 5, 3, 64), 9, Shifts(tensor([9, -9, LEAST, -8, 8])), {"interleaved": True}),
    "differences, int32": ((1, 5, 3, 64), 9, Shifts(tensor([9, -9, LEAST_INT32, -8, 8]).int()), {"full": True}),
    "differences, and back": ((2, 5, 3, 64), 9, Shifts(IDS - 4), {"full": True, "inverse": True}),
    "single tokens, none rotated": ((5, 1, 3, 64), 1, None, {"unrotated": 1}),
    "class tokens": ((17, 2, 64), 4, Packed(tensor([0, 5, 5, 7, 14])), {"unrotated": 3, "angles": True}),
    "class tokens on the rank that has them": ((2, 6, 3, 64), 9, Starts(cp_size=2), {"unrotated": 3}),
    "class tokens of cut sequences with starts": ((13, 2, 64), 9, CUT, {"unrotated": 2}),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CALLS)
def test_a_token_takes_its_row(name: str, device: str) -> None:
    """Results and gradients. A row outside of the table gives NaN; tokens after the last sequence are zero."""
    shape, rows, positions, words = CALLS[name]
    positions, generator, words = copy.copy(positions), torch.Generator().manual_seed(2), dict(words)
    q, grad = (torch.randn(shape, generator=generator) for _ in range(2))
    tables = torch.randn(2, rows, shape[-1] // (1 if words.pop("full", False) else 2), generator=generator)
    table = {"freqs": tables[0]} if words.pop("angles", False) else dict(zip(("cos", "sin"), tables))
    turn = {"position_ids": positions} if isinstance(positions, Tensor) else {}
    if positions is not None and not turn:
        turn = {**positions.tensors, **positions.words}
        positions.tensors = {label: x.to(device) for label, x in positions.tensors.items()}
    exact, leaf = q.double().requires_grad_(), q.to(device).requires_grad_()
    (want, _), _ = oracle.rope(exact, None, **table, **words, **turn)
    words["positions"] = positions.to(device) if isinstance(positions, Tensor) else positions
    got, _ = jitrope.apply_rope(leaf, None, **{label: x.to(device) for label, x in table.items()}, **words)
    found = torch.autograd.grad(got, leaf, grad.to(device))
    for x, y in zip((got, *found), (want, *torch.autograd.grad(want, exact, grad.double()))):
        torch.testing.assert_close(x.cpu().double(), y, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed_table", [False, True])
@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_shards_of_any_lengths_are_parts_of_the_whole(cp_size: int, packed_table: bool, device: str) -> None:
    """The results and gradients of each rank are its tokens of the results and gradients of the whole batch."""
    ends = [0, 37, 37, 78, 79, 81, 81, 170, 173]
    generator = torch.Generator().manual_seed(cp_size)
    angles = (torch.rand(ends[-1] + 7, 8, generator=generator) * 20).to(device)
    words: dict[str, Any] = {"start_positions": tensor([0, 4, 1, 0, 3, 2, 0, 7], device=device)}
    words.update(cu_seqlens=tensor(ends, device=device), packed_table=packed_table)
    q, grad = (torch.randn(ends[-1], 3, 16, generator=generator).to(device) for _ in range(2))
    leaf, positions, shares = q.clone().requires_grad_(), Packed(**words), []
    whole, _ = jitrope.apply_rope(leaf, None, angles.cos(), angles.sin(), positions=positions)
    (gradient,) = torch.autograd.grad(whole, leaf, grad)
    for rank in range(cp_size):
        spans = itertools.pairwise(ends)
        tokens = [first + n for first, end in spans for n in oracle.chunked(first, end, cp_size, rank)]
        own, positions = q[tokens].requires_grad_(), Packed(**words, cp_size=cp_size, cp_rank=rank)
        got, _ = jitrope.apply_rope(own, None, angles.cos(), angles.sin(), positions=positions)
        assert torch.equal(got, whole[tokens])
        assert torch.equal(torch.autograd.grad(got, own, grad[tokens])[0], gradient[tokens])
        shares += tokens
    assert sorted(shares) == [*range(ends[-1])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_difference_below_0_has_the_bits_of_inverse(interleaved: bool, dtype: torch.dtype, device: str) -> None:
    """Also where the members of a pair have different angles; learned tables of each head too."""
    generator = torch.Generator().manual_seed(1)
    k = torch.randn(2, 5, 3, 64, generator=generator).to(device, dtype)
    sizes, signs = IDS.to(device), tensor([[1, 1, -1, 1, -1], [-1, 1, -1, 1, 1]], device=device)
    for shape in ((12, 64), (2, 12, 3, 64), (12, 32)):
        cos, sin = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
        words: dict[str, Any] = {"cos": cos, "sin": sin, "interleaved": interleaved}
        plain = jitrope.apply_rope(k, None, positions=sizes, **words)[0]
        back = jitrope.apply_rope(k, None, positions=sizes, inverse=True, **words)[0]
        got = jitrope.apply_rope(k, None, positions=Shifts(sizes * signs), **words)[0]
        assert torch.equal(got, torch.where((signs > 0)[..., None, None], plain, back))


@pytest.mark.parametrize("device", DEVICES)
def test_the_keys_of_packed_pages(device: str) -> None:
    """K of K|V in one page, by strides, with heads before rows; v stays."""
    (pages,) = noise(device, torch.float32, (4, 3, 8, 2 * 64))  # page, head, row, K|V
    cos, sin = turn(device, 12, 32)
    before, shifts = pages.clone(), Shifts(torch.arange(32, device=device).view(4, 8) % 23 - 11)
    jitrope.apply_rope(pages[..., :64], None, cos, sin, positions=shifts, layout="bhsd", inplace=True)
    keys = before[..., :64].contiguous()
    assert torch.equal(pages[..., :64], jitrope.apply_rope(keys, None, cos, sin, positions=shifts, layout="bhsd")[0])
    assert torch.equal(pages[..., 64:], before[..., 64:])


# ---- tokens that are not rotated: the first of each sequence, and all of a layer without rope -------


LOST = tensor([-0.0, torch.inf, -1.0])
"""Elements that a rotation by 0 would change."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("words", [{}, {"interleaved": True, "rotary_dim": 32}, {"inplace": True}], ids=str)
@pytest.mark.parametrize("n", [0, 1, 5, 7, 9])
def test_the_first_tokens_keep_their_bits(n: int, words: dict[str, Any], device: str) -> None:
    """The others are turned as timm and DINOv3 turn them."""
    q, k, *_ = inputs(device, 2, 7, 4, 64)
    q[:, 0, :, :3] = k[:, 0, :, :3] = LOST
    angles = (torch.rand(max(7 - n, 1), words.get("rotary_dim", 64) // 2) * 50).to(device)
    plain = {name: x for name, x in words.items() if name != "inplace"}
    want = []
    for x in (q, k):
        others = jitrope.apply_rope(x[:, n:], None, angles.cos(), angles.sin(), **plain)[0] if n < 7 else x[:, n:]
        want.append(torch.cat((x[:, :n], others), 1))
    got = jitrope.apply_rope(q.clone(), k.clone(), angles.cos(), angles.sin(), unrotated=n, **words)
    for x, y in zip(got, want):
        assert same(x, y)
    if 0 < n < 7:  # the first tokens need no row of the table
        jitrope.apply_rope(q.clone(), None, angles.cos(), angles.sin(), unrotated=n, check=True, **words)


def test_the_number_of_first_tokens_is_not_compiled() -> None:
    q, angles = torch.empty(2, 7, 4, 64, device="meta"), torch.empty(7, 32, device="meta")
    with jitrope.planning(["auto"]) as specs:
        for n in (1, 2, 5):
            jitrope.apply_rope(q, None, freqs=angles, unrotated=n)
    assert [spec.prefixed for spec in specs] == [True]


def test_dinov3_of_transformers() -> None:
    """The bits of its function, whose tables have rows for patches alone."""
    host = pytest.importorskip("transformers.models.dinov3_vit.modeling_dinov3_vit", reason="its bits are compared")
    q, k = (torch.randn(2, n, 7, 64).bfloat16() for n in (4, 2))
    angles = (torch.rand(2, 32) * 50).repeat(1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    words: dict[str, Any] = {"layout": "bhsd", "rounding": "dtype", "unrotated": 5}
    got, want = jitrope.apply_rope(q, k, cos, sin, **words), host.apply_rotary_pos_emb(q, k, cos, sin)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("size", "tokens"), [(64, 7), (7, 7), (64, 1)])
def test_without_a_table_elements_keep_their_bits(size: int, tokens: int, device: str) -> None:
    """A pair with an infinity, and zeros with a sign, in a cache and in tensors of the caller."""
    q, k, v, *_ = inputs(device, 2, tokens, 4, size)
    q[:, 0, :, :3] = k[:, 0, :, :3] = LOST
    caches, slots = torch.zeros(2, 2 * tokens, 2, size, device=device).bfloat16(), torch.arange(2 * tokens)
    got = jitrope.prepare_qkv(q, k, v, cache=KVCache(*caches, slots.to(device)), inplace=True)
    assert got[0] is q
    assert same(caches[0], k.flatten(0, 1))
    assert same(caches[1], v.flatten(0, 1))
    outs = [torch.empty_like(x) for x in (q, k, v)]
    jitrope.prepare_qkv(q, k, v, out=outs)
    assert all(same(x, y) for x, y in zip(outs, (q, k, v)))


@pytest.mark.parametrize("device", DEVICES)
def test_without_a_table_an_element_does_not_reach_its_partner(device: str) -> None:
    """q, or k's part of a latent, keeps its bits: a rotation by zero would lose a -0.0 and make NaN of an inf."""
    q, k, v, *_ = inputs(device, 2, 7, 4, 16, dtype=torch.float32)
    q[:, 0, :, :3] = k[:, 0, :, :3] = LOST
    assert same(jitrope.prepare_qkv(q, k, None, q_scale=1.0)[0], q)
    assert same(jitrope.prepare_qkv(q, k, None, norm=Norm(of="k"))[0], q)
    rows = [x.flatten(0, 1) for x in (q, k.clone(), v)]
    rows[1][rows[1].isinf()] = 0
    cache = [torch.zeros(14, 2, 16, device=device, dtype=torch.float8_e4m3fn) for _ in range(2)]
    scales = {f"{x}_block_scale": torch.zeros(14, 2, 1, device=device) for x in "kv"}
    made = jitrope.prepare_qkv(*rows, layout="thd", cache=KVCache(*cache, torch.arange(14, device=device), **scales))
    assert same(made[0], rows[0])
    k_pe = k[:, :, :1, :8].contiguous()
    latent = jitrope.prepare_mla_qkv(q, torch.cat((k, v), -1)[..., :24].repeat(1, 1, 2, 1), k_pe)
    assert same(latent[0], q)
    assert same(latent[1][..., 8:], k_pe.expand(-1, -1, 4, -1))
