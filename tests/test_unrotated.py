"""Tokens that are not rotated: the first of each sequence, and all of a layer without rope."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import KVCache, Mrope, Norm

from .devices import DEVICES


def inputs(device: str, dtype: torch.dtype = torch.bfloat16, dim: int = 64, tokens: int = 7) -> tuple[Tensor, ...]:
    """q, k, v of two batch rows, cos and sin. Elements that a rotation by 0 would change are among the first."""
    generator = torch.Generator().manual_seed(dim)
    q, k, v = (torch.randn(2, tokens, n, dim, generator=generator).to(device, dtype) for n in (4, 2, 2))
    angles = torch.rand(tokens, dim // 2, generator=generator).to(device) * 50
    q[:, 0, :, :3] = torch.tensor([-0.0, torch.inf, -1.0])
    return q, k, v, angles.cos(), angles.sin()


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8 if x.element_size() == 1 else torch.int16 if x.element_size() == 2 else torch.int32)


def joined(x: Tensor, n: int, turn: Any) -> Tensor:
    """The first n tokens of (B, S, H, D) as they are, and the others turned: the way of timm and of DINOv3."""
    return torch.cat((x[:, :n], turn(x[:, n:])), 1) if n < x.shape[1] else x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("words", [{}, {"interleaved": True, "rotary_dim": 32}, {"inplace": True}], ids=str)
@pytest.mark.parametrize("n", [0, 1, 5, 7, 9])
def test_the_first_tokens_keep_their_bits(n: int, words: dict[str, Any], device: str) -> None:
    q, k, _, cos, sin = inputs(device)
    tables = [x[: max(7 - n, 1), : words.get("rotary_dim", 64) // 2] for x in (cos, sin)]
    plain = {name: x for name, x in words.items() if name != "inplace"}
    want = [joined(x, n, lambda y: jitrope.apply_rope(y, None, *tables, **plain)[0]) for x in (q, k)]
    got = jitrope.apply_rope(q.clone(), k.clone(), *tables, unrotated=n, **words)
    for x, y in zip(got, want):
        assert torch.equal(bits(x), bits(y))  # type: ignore[arg-type]


@pytest.mark.parametrize("device", DEVICES)
def test_the_number_is_not_compiled(device: str) -> None:
    q, k, _, cos, sin = inputs(device)
    with jitrope.planning(["auto"]) as specs:
        for n in (1, 2, 5):
            jitrope.apply_rope(*(x.to("meta") for x in (q, k, cos, sin)), unrotated=n)
    assert [spec.prefixed for spec in specs] == [True]
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k: jitrope.apply_rope(q, k, cos, sin, unrotated=3), fullgraph=True)
    for x, y in zip(compiled(q, k), jitrope.apply_rope(q, k, cos, sin, unrotated=3)):
        assert torch.equal(bits(x), bits(y))


def test_dinov3_of_transformers() -> None:
    """The bits of its function, whose tables have rows for patches alone."""
    host = pytest.importorskip("transformers.models.dinov3_vit.modeling_dinov3_vit")
    q, k, _, cos, sin = (x.transpose(1, 2) if x.dim() == 4 else torch.cat((x, x), -1)[:2] for x in inputs("cpu"))
    want = host.apply_rotary_pos_emb(q, k, cos.bfloat16(), sin.bfloat16())
    words: dict[str, Any] = {"layout": "bhsd", "rounding": "dtype"}
    for x, y in zip(jitrope.apply_rope(q, k, cos.bfloat16(), sin.bfloat16(), unrotated=5, **words), want):
        assert torch.equal(x, y)  # type: ignore[arg-type]


# ---- layers without rope ---------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_elements_that_are_not_rotated_keep_their_bits(device: str) -> None:
    """A pair with an infinity, and zeros with a sign, in a cache and in tensors of the caller; of heads of any size."""
    for dim, tokens in ((64, 7), (7, 7), (64, 1)):
        q, k, v, *_ = inputs(device, dim=dim, tokens=tokens)
        k[:, 0, :, :3] = q[:, 0, :2, :3]
        caches, slots = torch.zeros(2, 2 * tokens, 2, dim, device=device).bfloat16(), torch.arange(2 * tokens)
        got = jitrope.prepare_qkv(q, k, v, cache=KVCache(*caches, slots.to(device)), inplace=True)
        assert got[0] is q
        assert torch.equal(bits(caches[0]), bits(k.flatten(0, 1)))
        assert torch.equal(caches[1], v.flatten(0, 1))
        outs = [torch.empty_like(x) for x in (q, k, v)]
        jitrope.prepare_qkv(q, k, v, out=outs)
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(outs, (q, k, v)))


def test_a_cache_without_a_table_is_one_launch() -> None:
    q, k, v, *_ = (x.to("meta") for x in inputs("cpu"))
    caches, slots = torch.zeros(2, 14, 2, 64, device="meta").bfloat16(), torch.arange(14, device="meta")
    for words in ({}, {"norm": Norm()}):
        with jitrope.planning(["auto"]) as specs:
            jitrope.prepare_qkv(q, k, v, cache=KVCache(*caches, slots), **words)
        assert len(specs) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_the_temperature_of_llama_4_has_its_bits(device: str) -> None:
    """transformers scales q of layers without rope: bf16 times fp32, rounded once. Its gradient is autograd's."""
    q, k, *_ = inputs(device)
    q[:, 0] = 0.5
    positions = torch.arange(7, device=device) + 8190.0
    scales = torch.log1p(torch.floor((positions + 1.0) / 8192)) * 0.1 + 1.0
    want = (q * scales.view(1, 7, 1, 1)).to(q.dtype)
    got, same, none = jitrope.prepare_qkv(q, k, None, q_scale=scales)
    assert none is None
    assert torch.equal(got, want)
    assert torch.equal(same, k)  # type: ignore[arg-type]
    x, grad = q.clone().requires_grad_(), torch.randn_like(q)
    found = torch.autograd.grad(jitrope.prepare_qkv(x, k, None, q_scale=scales)[0], x, grad)[0]
    assert torch.equal(found, (grad * scales.view(1, 7, 1, 1)).to(q.dtype))
    in_place = q.clone()
    assert jitrope.prepare_qkv(in_place, None, None, q_scale=scales, inplace=True)[0] is in_place
    assert torch.equal(in_place, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stage", ["norm", "bias", "hadamard", "q_scale"])
def test_a_stage_of_fused_qkv_in_place_needs_no_table(stage: str, device: str) -> None:
    qkv = torch.randn(2, 7, 8 * 64, generator=torch.Generator().manual_seed(1)).to(device)
    values = {"norm": Norm(), "bias": qkv[0, 0].clone(), "hadamard": True, "q_scale": 0.5}
    words: dict[str, Any] = {"heads": (4, 2), stage: values[stage]}
    parts = jitrope.prepare_fused_qkv(qkv, **words)
    assert jitrope.prepare_fused_qkv(qkv, **words, inplace=True) is qkv
    assert torch.equal(qkv, torch.cat([x.flatten(2) for x in parts], -1))


NOTHING = {
    "no stage": lambda: jitrope.prepare_qkv(Q, K, V),
    "apply_rope": lambda: jitrope.apply_rope(Q, K),
    "out of apply_rope": lambda: jitrope.apply_rope(Q, K, out=(torch.empty_like(Q), None)),
    "fused in place": lambda: jitrope.prepare_fused_qkv(Q, inplace=True, heads=(2, 1)),
    "one of two": lambda: jitrope.prepare_qkv(Q, K, V, COS, q_scale=0.5),
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_call_that_would_do_nothing_is_refused(name: str) -> None:
    with pytest.raises(jitrope.InvalidInput, match="pass cos and sin"):
        NOTHING[name]()


Q, K, V, COS, SIN = inputs("cpu")
IDS = torch.arange(7)
REFUSED = {
    "negative": ({"unrotated": -1}, "unrotated is -1; it must be a whole number of at least 0"),
    "ids": ({"unrotated": 1, "positions": IDS}, "positions does not go with unrotated"),
    "axes": ({"unrotated": 1, "positions": Mrope(IDS[None], (32,))}, "position_ids does not go with unrotated"),
    "mixed": ({"unrotated": 1, "interleaved_out": True}, "interleaved_out does not go with unrotated"),
    "rows": ({"unrotated": 1, "cos": COS[:5], "sin": SIN[:5]}, "cos has 5 rows; it needs 6"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_combination_without_a_meaning_is_refused(name: str) -> None:
    words, text = REFUSED[name]
    with pytest.raises(jitrope.InvalidInput, match=text):
        jitrope.apply_rope(Q, K, **{"cos": COS, "sin": SIN, **words})


def test_check_takes_the_first_tokens() -> None:
    jitrope.apply_rope(Q, K, COS[:5], SIN[:5], unrotated=2, check=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stage", ["norm", "block scales", "q_scale", "latent"])
def test_without_a_table_an_element_does_not_reach_its_partner(stage: str, device: str) -> None:
    """q, or k's part of a latent, keeps its bits: a rotation by zero would lose a -0.0 and make NaN of an inf."""
    q, k, v, *_ = inputs(device, torch.float32, dim=16)
    if stage == "latent":
        kept, made = q, jitrope.prepare_mla_qkv(q, torch.cat((k, v), -1)[..., :24].repeat(1, 1, 2, 1), k[:, :, :1, :8])
        assert torch.equal(bits(made[1][..., 8:]), bits(k[:, :, :1, :8].expand(-1, -1, 4, -1).contiguous()))
    elif stage == "block scales":
        cache = [torch.zeros(14, 2, 16, device=device, dtype=torch.float8_e4m3fn) for _ in range(2)]
        scales = {f"{x}_block_scale": torch.zeros(14, 2, 1, device=device) for x in "kv"}
        kept, rows = q.flatten(0, 1), [x.flatten(0, 1) for x in (q, k, v)]
        slots = torch.arange(14, device=device)
        made = jitrope.prepare_qkv(*rows, layout="thd", cache=KVCache(*cache, slots, **scales))
    else:
        words: dict[str, Any] = {"q_scale": 1.0} if stage == "q_scale" else {"norm": Norm(of="k")}
        kept, made = q, jitrope.prepare_qkv(q, k, None, **words)
    assert torch.equal(bits(made[0]), bits(kept))
