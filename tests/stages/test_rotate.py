"""The rotation: pairs by hand, heads of sizes that the table of calls does not have, and models' own roundings."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import jitrope

from .. import oracle
from ..devices import DEVICES, noise
from ..results import near

HALVES = [torch.bfloat16, torch.float16]
FLOATS = [*HALVES, torch.float32]


def test_a_pair_is_turned_by_hand() -> None:
    """(3, 4) rotated by 90 degrees is (-4, 3), in both pairings; the rest of the head does not change."""
    q = torch.tensor([3.0, 4.0, 7.0, 8.0]).view(1, 1, 1, 4)
    cos, sin = torch.zeros(1, 1), torch.ones(1, 1)
    out, none = jitrope.apply_rope(q, None, cos, sin, rotary_dim=2, interleaved=True)
    assert out.flatten().tolist() == [-4, 3, 7, 8]
    assert none is None
    q = torch.tensor([3.0, 5.0, 4.0, 6.0]).view(1, 1, 1, 4)
    out, _ = jitrope.apply_rope(q, None, torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
    assert out.flatten().tolist() == [-4, 5, 3, 6]


def test_positions_are_relative() -> None:
    """The product of q at position m and k at n depends only on m - n."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 64).expand(2, 1, 12, 1, 64)
    angles = torch.outer(torch.arange(12.0), 10000 ** (-torch.arange(32) / 32))
    q, k = jitrope.apply_rope(q, k, angles.cos(), angles.sin())
    scores = (q[0, :, 0] @ k[0, :, 0].T).double()
    for offset in range(-11, 12):
        diagonal = scores.diagonal(offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


MIXED: dict[str, Any] = {"interleaved": True, "interleaved_out": False}
BACK: dict[str, Any] = {"interleaved": False, "interleaved_out": True}
SIZES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {  # B, S, heads of q and of k, D
    "a token": ((1, 1, 8, 2, 128), {}),
    "6 lanes a head": ((1, 4, 3, 1, 96), {"dtype": torch.float16}),
    "pairs of scalars": ((1, 4, 3, 2, 6), {"interleaved": True, "dtype": torch.float32}),
    "scalars are reordered": ((1, 3, 2, 1, 6), MIXED),
    "a pair": ((1, 3, 2, 1, 2), {}),
    "an odd rest": ((1, 4, 3, 1, 45), {"rotary_dim": 20}),
    "a part in the middle that is not aligned": ((1, 4, 3, 1, 45), {"rotary_dim": 20, "rotary_offset": 7}),
    "latent attention": ((2, 5, 3, 1, 192), {"rotary_dim": 64, "rotary_offset": 128, **MIXED}),
    "latent attention by angles": ((1, 5, 3, 1, 96), {"angles": True, "rotary_dim": 32, "rotary_offset": 64, **MIXED}),
    "a pair is reordered": ((2, 5, 3, 2, 6), {"rotary_dim": 2, "rotary_offset": 2, **MIXED}),
    "reordered where nothing is aligned": ((2, 5, 3, 2, 67), {"rotary_dim": 64, "rotary_offset": 3, **BACK}),
    "few elements are reordered": ((2, 5, 3, 2, 64), {"rotary_dim": 16, "layout": "sbhd", **BACK}),
    "several tokens a block": ((2, 7, 1, 1, 64), {"angles": True, "interleaved": True}),
    "several tokens a block, back": ((2, 7, 1, 1, 64), {"angles": True, "inverse": True}),
}


@pytest.mark.parametrize("launch", ["token_linear", "grid_2d"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SIZES)
def test_heads_of_any_size(name: str, device: str, launch: Any) -> None:
    """Fresh results, the same bits in place, and the gradient. Elements that are not rotated keep their bits."""
    jitrope.configure(launch=launch)
    (batch, tokens, q_heads, k_heads, size), words = SIZES[name][0], dict(SIZES[name][1])
    generator, dtype = torch.Generator().manual_seed(size), words.pop("dtype", torch.bfloat16)
    first, rotary, layout = words.get("rotary_offset", 0), words.get("rotary_dim", size), words.get("layout", "bshd")
    made = [torch.randn(batch, tokens, n, size, generator=generator).to(dtype) for n in (q_heads, k_heads) * 2]
    q, k, *grads = (oracle.heads(x, layout) for x in made)
    angles = torch.rand(tokens + 2, rotary // 2, generator=generator) * 3
    table = {"freqs": angles} if words.pop("angles", False) else {"cos": angles.cos(), "sin": angles.sin()}
    exact = [x.double().requires_grad_() for x in (q, k)]
    want, _ = oracle.rope(*exact, **table, **{"rotary_dim": rotary, **words})
    want_grads = torch.autograd.grad(want, exact, [x.double() for x in grads])
    leaves = [x.to(device).requires_grad_() for x in (q, k)]
    table = {label: x.to(device) for label, x in table.items()}
    got = jitrope.apply_rope(*leaves, **table, **words)
    found = torch.autograd.grad(got, leaves, [x.to(device) for x in grads])
    for x, y in zip([*got, *found], [*want, *want_grads]):
        near(x, y.detach())
    for x, y in zip(got, leaves):
        assert x.stride() == y.stride()
        assert torch.equal(x[..., :first], y[..., :first])
        assert torch.equal(x[..., first + rotary :], y[..., first + rotary :])
    if "interleaved_out" in words and rotary & (rotary - 1):  # elements move too far for a warp
        return
    own = [x.detach().clone() for x in leaves]
    for x, y, z in zip(jitrope.apply_rope(*own, **table, **words, inplace=True), own, got):
        assert x is y
        assert torch.equal(x, z)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("interleaved", "out"), [(False, False), (True, True), (True, False)])
def test_there_and_back_is_one_rounding(interleaved: bool, out: bool, dtype: torch.dtype) -> None:
    """Rotating and rotating back returns the input within one rounding of the pair to the dtype."""
    generator = torch.Generator().manual_seed(1)
    q, angles = torch.randn(2, 5, 4, 64, generator=generator).to(dtype), torch.rand(5, 32, generator=generator) * 50
    tables = (angles.cos(), angles.sin())
    there, _ = jitrope.apply_rope(q, None, *tables, interleaved=interleaved, interleaved_out=out)
    again, _ = jitrope.apply_rope(there, None, *tables, interleaved=out, interleaved_out=interleaved, inverse=True)
    pairs, axis = ((32, 2), -1) if interleaved else ((2, 32), -2)
    x, y = (t.double().unflatten(-1, pairs) for t in (q, again))
    # Half a unit each of the pair's length there and back; in fp32 products and sums round too.
    bound = (4 if dtype == torch.float32 else 1.01) * torch.finfo(dtype).eps * x.norm(dim=axis, keepdim=True)
    assert ((y - x).abs() <= bound).all()


# ---- roundings: the hosts' own functions, bit for bit ----------------------------------------------

ANGLES = torch.rand(9, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 50
DIFFUSERS = "diffusers is not installed: pip install -e '.[diffusers]'"
SHAPES = [(1, 5, 3, 64), (2, 7, 2, 72), (1, 3, 4, 80), (1, 1, 5, 96), (2, 9, 2, 128), (1, 4, 3, 160), (1, 3, 2, 192),
          (1, 2, 1, 256)]  # fmt: skip


def inside(module: str, processor: str) -> Any:
    """`apply_rotary_emb` of a module of diffusers, which the `__call__` of a processor defines."""
    pytest.importorskip("diffusers", reason=DIFFUSERS)
    call = getattr(importlib.import_module(f"diffusers.models.transformers.{module}"), processor).__call__
    code = next(c for c in call.__code__.co_consts if getattr(c, "co_name", "") == "apply_rotary_emb")
    return type(inside)(code, call.__globals__)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_complex128_is_that_of_lumina2_and_anyflow(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    lumina2 = pytest.importorskip("diffusers.models.embeddings", reason=DIFFUSERS).apply_rotary_emb
    anyflow = pytest.importorskip("diffusers.models.transformers.transformer_anyflow", reason=DIFFUSERS)
    q, k = noise(device, dtype, shape, shape)
    angles = ANGLES[: shape[1], : shape[3] // 2].to(device)
    table = torch.polar(torch.ones_like(angles), angles)
    words: dict[str, Any] = {"interleaved": True, "rounding": "complex128"}
    by_cos = jitrope.apply_rope(q, k, angles.cos(), angles.sin(), **words)
    by_cis = jitrope.apply_rope(q, k, freqs_cis=table, **words)
    in_place = jitrope.apply_rope(q.clone(), k.clone(), freqs_cis=table, inplace=True, **words)
    for x, *found in zip((q, k), by_cos, by_cis, in_place):
        for y in found:
            assert torch.equal(y, lumina2(x, table[None], use_real=False))
            assert torch.equal(y, anyflow.apply_rotary_emb(x, table[None, :, None]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_addcmul_is_ltx2s(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    ltx2 = pytest.importorskip("diffusers.models.transformers.transformer_ltx2", reason=DIFFUSERS)
    b, s, h, d = shape
    (q,) = noise(device, dtype, shape)
    angles = torch.rand(b, h, s, d // 2, device=device) * 50
    want = ltx2.apply_split_rotary_emb(q.flatten(2), (angles.cos(), angles.sin())).view(q.shape)
    tables = [t.transpose(1, 2) for t in (angles.cos(), angles.sin())]
    out, _ = jitrope.apply_rope(q, None, *tables, rounding="addcmul")
    assert torch.equal(out, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALVES)
def test_dtype_is_wans_with_tables_in_it(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    wan = inside("transformer_wan", "WanAttnProcessor")
    q, k = noise(device, dtype, shape, shape)
    angles = ANGLES[: shape[1], : shape[3] // 2].to(device)
    cos, sin = (f(angles).repeat_interleave(2, -1).to(dtype)[None, :, None] for f in (torch.cos, torch.sin))
    got = jitrope.apply_rope(q, k, cos[..., 0::2], sin[..., 1::2], interleaved=True, rounding="dtype")
    for x, y in zip((q, k), got):
        assert torch.equal(y, wan(x, cos, sin))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rotary_dim", [128, 48])
def test_dtype_is_ernies_and_minimaxs(rotary_dim: int, dtype: torch.dtype, device: str) -> None:
    """fp32 tables that the host rounds first: in ERNIE each member of a pair has its own angle; partial too."""
    ernie = inside("transformer_ernie_image", "ErnieImageSingleStreamAttnProcessor")
    minimax = pytest.importorskip("diffusers.models.transformers.transformer_minimax_h3", reason=DIFFUSERS)
    q, k = noise(device, dtype, (2, 7, 3, 128), (2, 7, 1, 128))
    angles = ANGLES[:7, : rotary_dim // 2].float().to(device)
    repeated = angles.repeat_interleave(2, -1)[None, :, None]
    words: dict[str, Any] = {"rounding": "dtype", "rotary_dim": rotary_dim}
    cos, sin = (torch.cat((f(angles), f(angles)), -1) for f in (torch.cos, torch.sin))
    tables = (repeated.cos(), repeated.sin()), (cos, sin), (angles.cos(), angles.sin())
    for x, *got in zip((q, k), *[jitrope.apply_rope(q, k, *table, **words) for table in tables]):
        want = minimax._apply_rotary_emb(x, cos, sin)
        assert all(map(torch.equal, got, (ernie(x, repeated), want, want)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_dtype_is_llamas(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason="its bits are what is compared")
    q, k = noise(device, dtype, shape, shape)
    angles = ANGLES[: shape[1], : shape[3] // 2].to(device)
    half = [f(angles).to(dtype) for f in (torch.cos, torch.sin)]
    cos, sin = (torch.cat((x, x), -1) for x in half)
    q, k = (x.transpose(1, 2) for x in (q, k))
    words: dict[str, Any] = {"layout": "bhsd", "rounding": "dtype"}
    found = [jitrope.apply_rope(q, k, *tables, **words) for tables in ((cos, sin), half)]
    found.append(jitrope.apply_rope(q.clone(), k.clone(), cos, sin, inplace=True, **words))
    want = llama.apply_rotary_pos_emb(q, k, cos[None], sin[None])
    for got in found:
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALVES)
def test_fp32_is_qwens_vision_towers(dtype: torch.dtype, device: str) -> None:
    """One model of the library rounds differently: its products are fp32."""
    qwen = pytest.importorskip("transformers.models.qwen2_vl.modeling_qwen2_vl", reason="its bits are what is compared")
    (q,), angles = noise(device, dtype, (1, 9, 4, 80)), ANGLES[:, :40].to(device)
    cos, sin = (torch.cat((f(angles), f(angles)), -1).float() for f in (torch.cos, torch.sin))
    want, _ = qwen.apply_rotary_pos_emb_vision(q[0], q[0], cos, sin)
    out, _ = jitrope.apply_rope(q[0], None, cos, sin, layout="thd")
    assert torch.equal(out, want)
    other, _ = jitrope.apply_rope(q[0], None, cos, sin, layout="thd", rounding="dtype")
    assert not torch.equal(other, want)
