"""Learned tables: the gradients of cos, sin and angles, against torch's autograd in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import InvalidInput, Norm

from . import oracle
from .devices import DEVICE, DEVICES
from .said import KINDS

B, S, D, P = 2, 6, 16, 9


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * 4 - 2


def pair(*shape: int) -> dict[str, Tensor]:
    return {"cos": rand(*shape).cos(), "sin": rand(*shape).sin()}


IDS = torch.tensor([[3, 0, 3, 8, 1, 1], [1, 4, 2, 0, 0, 7]])
AXES = torch.stack((IDS, IDS.flip(0), IDS.flip(1)))
# name: the tables, and the words; "thd": (T, H, D)
FORMS: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "half": (pair(P, D // 2), {}),
    "full-interleaved": (pair(P, D), {"interleaved": True}),
    "batch-rows": (pair(B, P, D // 2), {}),
    "per-head (Mochi)": (pair(1, S, 4, D // 2), {"interleaved": True}),
    "partial": (pair(P, 4), {"rotary_dim": 8, "rotary_offset": 4}),
    "ids": (pair(P, D // 2), {"position_ids": IDS}),
    "mrope": (pair(P, D // 2), {"position_ids": AXES, "mrope_section": (4, 2, 2)}),
    "starts": (pair(P, D // 2), {"start_positions": torch.tensor([1, 3])}),
    "angles": ({"freqs": rand(P, D // 2)}, {"mscale": 1.5}),
    "angles of each row (Megatron)": ({"freqs": rand(P, B, 1, D // 2)}, {}),
    "packed angles (RoPE-Mixed)": (
        {"freqs": rand(P, D)}, {"cu_seqlens": torch.tensor([0, 4, 4, 6]), "layout": "thd", "inverse": True}
    ),
    "cos_sin_cache": ({"cos_sin_cache": rand(P, D)}, {}),
    "freqs_cis": ({"freqs_cis": torch.polar(rand(P, D // 2) + 3, rand(P, D // 2))}, {"interleaved": True}),
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
def test_a_table_gets_its_gradient(form: str, device: str) -> None:
    """With q's gradient, without it, and compiled."""
    tables, words = FORMS[form]
    heads = 4 if "per-head" in form else 2
    shapes = ((S, 4, D), (S, heads, D)) if words.get("layout") == "thd" else ((B, S, 4, D), (B, S, heads, D))
    q, k = (rand(*shape, seed=n) for n, shape in enumerate(shapes))
    grads = [rand(*shape, seed=n + 5) for n, shape in enumerate(shapes)]
    names = [*tables]
    leaves = [
        x.to(torch.complex128 if x.is_complex() else torch.float64).requires_grad_() for x in (q, *tables.values())
    ]
    out, _ = oracle.rope(leaves[0], k, **dict(zip(names, leaves[1:])), **words)
    want = torch.autograd.grad(out, leaves, [g.double() for g in grads])

    on = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in words.items()}
    leaves = [x.to(device).requires_grad_() for x in (q, *tables.values())]

    def call(q: Tensor, *xs: Tensor) -> Any:
        return KINDS["rope"](q, k.to(device), **dict(zip(names, xs)), **on)

    sent = [g.to(device) for g in grads]
    calls = [call] if "freqs_cis" in names else [call, torch.compile(call, backend="aot_eager")]
    for each in calls:
        for got, expected in zip(torch.autograd.grad(each(*leaves), leaves, sent), want):
            torch.testing.assert_close(got.cpu().to(expected.dtype), expected, rtol=1e-5, atol=1e-5)
    alone = torch.autograd.grad(call(q.to(device), *leaves[1:]), leaves[1:], sent)
    for got, expected in zip(alone, want[1:]):
        torch.testing.assert_close(got.cpu().to(expected.dtype), expected, rtol=1e-5, atol=1e-5)


Sizes = tuple[int, int, int, int, int]
# name: (B, S, Hq, Hk, D), the kind of the tables' axes, and the words
SHAPES: dict[str, tuple[Sizes, str, dict[str, Any]]] = {
    "one sum of many rows": ((40, 3, 4, 1, 16), "shared", {}),
    "heads of many rows": ((9, 3, 5, 5, 32), "per head", {"interleaved": True}),
    "more heads than a block has": ((2, 2, 40, 40, 128), "per head", {}),
    "tables of each row": ((3, 4, 6, 2, 72), "rows", {"layout": "bhsd"}),
    "full width": ((2, 5, 3, 2, 80), "full", {"layout": "sbhd"}),
    "full width, interleaved": ((2, 5, 3, 3, 48), "full", {"interleaved": True}),
    "other pairs": ((2, 4, 8, 2, 64), "shared", {"interleaved": True, "interleaved_out": False}),
    "partial, from an odd element on": ((2, 4, 8, 2, 32), "shared", {"rotary_dim": 12, "rotary_offset": 5}),
    "six elements": ((3, 4, 2, 1, 6), "shared", {}),
    "large": ((1, 2, 3, 3, 512), "shared", {}),
    "angles, backwards": ((2, 9, 4, 2, 64), "angles", {"inverse": True, "mscale": 0.5}),
}


def made(sizes: Sizes, kind: str, words: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """q, k, and the tables."""
    batch, tokens, q_heads, k_heads, dim = sizes
    order = ["bshd".index(axis) for axis in words.get("layout", "bshd")]
    heads = [rand(batch, tokens, n, dim, seed=n).permute(order).contiguous() for n in (q_heads, k_heads)]
    width = words.get("rotary_dim", dim) // (1 if kind == "full" else 2)
    shape = {"per head": (1, tokens, q_heads, width), "rows": (batch, tokens, width)}.get(kind, (tokens, width))
    return heads, {"freqs": rand(*shape)} if kind == "angles" else pair(*shape)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_every_head_and_row_that_shares_an_entry_counts(name: str, dtype: torch.dtype, device: str) -> None:
    """Also with one tensor, and with gradients of a sum, which share memory."""
    (heads, tables), words = made(*SHAPES[name]), SHAPES[name][2]
    heads = [x.to(dtype) for x in heads]
    for given, expanded in ((heads, False), (heads[:1], False), (heads, True)):
        grads = [(x[:1, :1, :1, :1] if expanded else x).roll(1, -1).expand(x.shape) for x in given]
        leaves = [x.double().requires_grad_() for x in tables.values()]
        out, _ = oracle.rope(*given, *[None] * (2 - len(given)), **dict(zip(tables, leaves)), **words)
        want = torch.autograd.grad(out[: len(given)], leaves, [g.double() for g in grads])
        leaves = [x.to(device).requires_grad_() for x in tables.values()]
        xs = [x.to(device) for x in given]
        out = KINDS["rope"](*xs, *[None] * (2 - len(given)), **dict(zip(tables, leaves)), **words)
        got = torch.autograd.grad(out[: len(given)], leaves, [g.to(device) for g in grads])
        for x, y in zip(got, want):
            torch.testing.assert_close(x.cpu().double(), y, rtol=1e-5, atol=1e-5 * y.abs().max().item())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("unrotated", [3, 12])
def test_tokens_that_are_not_rotated_count_for_no_row(unrotated: int, device: str) -> None:
    """In a batch row, and in each of two packed sequences."""
    x = rand(2, 9, 4, 32).to(device)
    tables = [table.to(device).requires_grad_() for table in pair(9, 16).values()]
    packed = jitrope.Packed(torch.tensor([0, 9, 18], device=device))
    dense = jitrope.apply_rope(x, None, *tables, unrotated=unrotated)[0]
    one = jitrope.apply_rope(x.flatten(0, 1), None, *tables, unrotated=unrotated, layout="thd", positions=packed)[0]
    others = jitrope.apply_rope(x[:, unrotated:], None, *tables)[0]
    grads = [torch.autograd.grad(y, tables, y.detach().square()) for y in (dense, one, others)]
    for found in zip(*grads):
        torch.testing.assert_close(found[0], found[2])
        torch.testing.assert_close(found[1], found[2])


@pytest.mark.parametrize("device", DEVICES)
def test_second_derivatives(device: str) -> None:
    def second(leaves: list[Tensor], rotate: Any) -> list[Tensor]:
        leaves = [x.requires_grad_() for x in leaves]
        y = rotate(leaves[0], None, *leaves[1:])[0]
        first = torch.autograd.grad(y.pow(3).sum(), leaves, create_graph=True)
        return [*torch.autograd.grad(sum(x.sin().sum() for x in first), leaves)]

    leaves = [rand(B, S, 4, D), *pair(S, D // 2).values()]
    want = second([x.double() for x in leaves], lambda *xs: oracle.rope(*xs)[0])
    for x, y in zip(second([x.to(device) for x in leaves], jitrope.apply_rope), want):
        torch.testing.assert_close(x.cpu().double(), y, rtol=1e-4, atol=1e-4 * y.abs().max().item())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("again", [False, True])
def test_layers_that_share_tables_and_a_sine_that_is_the_cosine(again: bool, device: str) -> None:
    def gradients(leaves: list[Tensor], rotate: Any) -> list[Tensor]:
        q, cos, sin = (x.requires_grad_() for x in leaves)
        y = rotate(rotate(rotate(q, None, cos, sin)[0], None, cos, sin)[0], None, cos, cos)[0]
        return [*torch.autograd.grad(y.pow(2).sum(), leaves, create_graph=again)]

    leaves = [rand(B, S, 4, D), *pair(S, D // 2).values()]
    want = gradients([x.double() for x in leaves], lambda *xs: oracle.rope(*xs)[0])
    for x, y in zip(gradients([x.to(device) for x in leaves], jitrope.apply_rope), want):
        torch.testing.assert_close(x.cpu().double(), y, rtol=1e-4, atol=1e-4 * y.abs().max().item())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_under_another_default_dtype(dtype: torch.dtype, device: str) -> None:
    q, tables = rand(2, 9, 4, 32).to(device), [x.to(device).requires_grad_() for x in pair(9, 16).values()]
    want = torch.autograd.grad(jitrope.apply_rope(q, None, *tables)[0], tables, q)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        got = torch.autograd.grad(jitrope.apply_rope(q, None, *tables)[0], tables, q)
    finally:
        torch.set_default_dtype(before)
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("device", DEVICES)
def test_tables_of_the_second_stream_alone(device: str) -> None:
    """Also after a call like it without gradients."""
    streams = [[rand(B, n, 2, D, seed=n + m).to(device) for m in range(3)] for n in (2, 4)]
    first, second = ([x.to(device) for x in pair(n, D // 2).values()] for n in (2, 4))
    second = [x.requires_grad_() for x in second]
    with torch.no_grad():
        jitrope.prepare_joint_qkv(*streams, *zip(first, second))
    joint = jitrope.prepare_joint_qkv(*streams, *zip(first, second))[0]
    alone = jitrope.apply_rope(streams[1][0], None, *second)[0]
    grad = rand(*joint.shape).to(device)
    got = torch.autograd.grad(joint, second, grad)
    for x, y in zip(got, torch.autograd.grad(alone, second, grad[:, 2:])):
        torch.testing.assert_close(x, y)


@pytest.mark.gpu
def test_strided_and_unaligned_heads() -> None:
    whole = rand(2, 5, 3, 64).to(DEVICE)
    for q in (whole[..., ::2], whole[..., 1:33], whole.transpose(1, 2).contiguous().transpose(1, 2)[..., :32]):
        tables = [x.to(DEVICE).requires_grad_() for x in pair(5, 16).values()]
        found = []
        for x in (q, q.contiguous()):
            out, _ = jitrope.apply_rope(x, None, *tables)
            found.append(torch.autograd.grad(out, tables, x))
        assert all(map(torch.equal, *found))


def test_prewarming_knows_the_kernel() -> None:
    q = torch.empty(2, 8, 4, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    cos, sin = (torch.empty(8, 32, device="meta", requires_grad=True) for _ in "cs")
    with jitrope.planning(["auto"]) as specs:
        y = jitrope.apply_rope(q, None, cos, sin)[0]
        y.backward(torch.empty_like(y))
    assert [spec.kind for spec in specs] == ["rope", "rope", "table_gradient"]
    assert specs[-1].name == "table_gradient_bf16_r64_halves_half_v8_1x2"
    with jitrope.planning(["auto"]) as specs:
        y = jitrope.prepare_qkv(q, None, None, cos, sin, norm=Norm())[0]
        y.backward(torch.empty_like(y))
    assert [spec.kind for spec in specs] == ["qk_norm_rope", "qk_norm_rope_backward", "table_gradient"]
    for words, kinds in (({}, ["rope", "rope", "table_gradient"]), ({"q_scale": 0.5}, ["rope", "rope"])):
        with jitrope.planning(["auto"]) as specs:
            y = jitrope.apply_rope(q, None, freqs=cos, **words)[0]
            y.backward(torch.empty_like(y))
        assert [spec.kind for spec in specs] == kinds


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("after_rope", [False, True])
def test_with_a_norm(after_rope: bool, device: str) -> None:
    """The gradients of tables and weights together (Mochi)."""
    q, k, weight = rand(B, S, 4, D), rand(B, S, 4, D, seed=1), rand(D)
    tables = pair(1, S, 4, D // 2)
    words = {"interleaved": True, "after_rope": after_rope}
    leaves = [x.double().requires_grad_() for x in (weight, *tables.values())]
    want_out, _ = oracle.norm_rope(q, k, leaves[0], None, *leaves[1:], **words)
    want = torch.autograd.grad(want_out, leaves, [torch.ones_like(x) for x in want_out])
    leaves = [x.to(device).requires_grad_() for x in (weight, *tables.values())]
    out = KINDS["norm_rope"](q.to(device), k.to(device), leaves[0], None, *leaves[1:], **words)
    got = torch.autograd.grad(out, leaves, [torch.ones_like(x) for x in out])
    for x, y in zip(got, want):
        torch.testing.assert_close(x.cpu().double(), y, rtol=1e-4, atol=1e-4)


NORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "weights": ({"zero_centered": True}, {}),
    "of k, heads first": ({"of": "k"}, {"layout": "bhsd"}),
    "biases": ({"kind": "layer_norm", "q_bias": rand(D), "k_bias": rand(D, seed=1)}, {"rotary_dim": 8}),
    "all heads, other pairs": ({"across_heads": True}, {"interleaved": True, "interleaved_out": False}),
    "means of all ranks": (
        {"across_heads": True, "mean_squares": (rand(B, S).abs(), rand(B, S, seed=1).abs())},
        {},
    ),
    "by ids": ({"rounding": "twice"}, {"positions": IDS}),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NORMS)
def test_behind_a_norm_the_gradient_is_that_of_the_normalised_heads(name: str, device: str) -> None:
    made, words = NORMS[name]
    on = {word: x.to(device) if isinstance(x, Tensor) else x for word, x in (*made.items(), *words.items())}
    if "mean_squares" in on:
        on["mean_squares"] = tuple(x.to(device) for x in on["mean_squares"])
    widths = [n * D if "across_heads" in made else D for n in (4, 2)]
    weights = {f"{x}_weight": rand(width, seed=n).to(device) for n, (x, width) in enumerate(zip("qk", widths))}
    if made.get("of") == "k":
        del weights["q_weight"]
    norm = Norm(**weights, **{word: x for word, x in on.items() if word not in words})
    words = {word: on[word] for word in words}
    order = ["bshd".index(axis) for axis in words.get("layout", "bshd")]
    q, k = (rand(B, S, n, D, seed=n).permute(order).contiguous().to(device) for n in (4, 2))
    leaves = [x.to(device).requires_grad_() for x in pair(P, words.get("rotary_dim", D) // 2).values()]
    heads = jitrope.prepare_qkv(q, k, None, norm=norm, layout=words.get("layout", "bshd"))[:2]
    want, got = (
        jitrope.apply_rope(*heads, *leaves, **words),
        jitrope.prepare_qkv(q, k, None, *leaves, norm=norm, **words),
    )
    for x, y in zip(*(torch.autograd.grad(out[:2], leaves, (q, k)) for out in (got, want))):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", [{}, {"norm": Norm()}], ids=["rope", "norm"])
def test_what_spare_tokens_hold_reaches_no_table(norm: dict[str, Any], device: str) -> None:
    q, leaves = rand(7, 4, D).to(device), [x.to(device).requires_grad_() for x in pair(S, D // 2).values()]
    packed = jitrope.Packed(torch.tensor([0, 2, 5], device=device))
    found = []
    for filled in (0.0, torch.nan, torch.inf):
        q[5:] = filled
        out = jitrope.prepare_qkv(q, None, None, *leaves, positions=packed, **norm)[0]
        found.append(torch.autograd.grad(out.sin().sum(), leaves))
    for got in found[1:]:
        assert all(map(torch.equal, got, found[0]))


@pytest.mark.parametrize("device", DEVICES)
def test_calls_in_turn(device: str) -> None:
    """Learned and fixed tables, with gradients and without, and tables that change."""
    q, k = (rand(B, S, 4, D, seed=n).to(device).requires_grad_(n == 0) for n in (1, 0))
    tables, sent = [x.to(device).requires_grad_() for x in pair(P, D // 2).values()], [rand(B, S, 4, D).to(device)] * 2
    for wanted in ([*tables, k], [k], tables, tables[1:], [*tables, k]):
        own = [x if any(x is y for y in wanted) else x.detach() for x in (*tables, k)]
        with torch.no_grad():
            tables[0].mul_(-1)
            still = jitrope.apply_rope(q, own[2], *own[:2])
        out = jitrope.apply_rope(q, own[2], *own[:2])
        assert all(map(torch.equal, out, still))
        assert not any(x.requires_grad for x in still)
        leaves = [x.detach().cpu().double().requires_grad_(x.requires_grad) for x in own]
        asked = [x for x in leaves if x.requires_grad]
        true, _ = oracle.rope(q.cpu().double(), leaves[2], *leaves[:2])
        loss = sum((x * y.cpu().double()).sum() for x, y in zip(true, sent))
        expected = torch.autograd.grad(loss, asked)
        for got, want in zip(torch.autograd.grad(out, [x for x in own if x.requires_grad], sent), expected):
            torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_packed_qkv_and_two_streams(device: str) -> None:
    qkv, tables = rand(B, S, 2, 4 * D).to(device), [x.to(device).requires_grad_() for x in pair(S, D // 2).values()]
    out = jitrope.prepare_packed_qkv(qkv, *tables, q_per_group=2)
    heads = qkv.unflatten(-1, (4, D))
    plain = jitrope.apply_rope(heads[..., :2, :].flatten(2, 3), heads[..., 2, :], *tables)
    for name, x, y in zip("qk", out, plain):
        for got, want in zip(
            *(torch.autograd.grad(z.square().sum() + z.sum(), tables, retain_graph=True) for z in (x, y))
        ):
            torch.testing.assert_close(got, want, msg=lambda text, n=name: f"{n}: {text}")
    text, image = ([rand(B, n, 2, D, seed=n + m).to(device) for m in range(3)] for n in (2, 4))
    second = [x.detach().clone().requires_grad_() for x in tables]
    given = tuple(zip([x[:2] for x in tables], [x[2:] for x in second]))
    joint = jitrope.prepare_joint_qkv(text, image, *given, norm=Norm())
    parts = [
        jitrope.prepare_qkv(*xs, *(x[rows] for x in own), norm=Norm())[0]
        for xs, own, rows in ((text, tables, slice(2)), (image, second, slice(2, None)))
    ]
    weight = rand(*joint[0].shape).to(device)
    got = torch.autograd.grad((joint[0] * weight).sum(), [*tables, *second])
    want = torch.autograd.grad((torch.cat(parts, 1) * weight).sum(), [*tables, *second])
    for x, y in zip(got, want):
        torch.testing.assert_close(x, y)


def test_calls_without_a_gradient_refuse_learned_tables() -> None:
    q, k, tables = rand(B, S, 4, D), rand(B, S, 4, D), [x.requires_grad_() for x in pair(S, D // 2).values()]
    caches = torch.zeros(2, 12, 4, D)
    for words in (
        {"inplace": True},
        {"quantize": jitrope.Quantize(1.0, 1.0)},
        {"quantize": jitrope.DynamicQuantize()},
        {"cache": jitrope.KVCache(*caches, torch.arange(12))},
        {"out": (torch.empty_like(q), None, None)},
    ):
        with pytest.raises(
            InvalidInput, match=r"requires a gradient, but this call has none; .*pass .*\.detach\(\)|no_grad"
        ):
            jitrope.prepare_qkv(q, k, k, *tables, **words)
        with torch.no_grad():
            jitrope.prepare_qkv(q.clone(), k.clone(), k, *tables, **words)
