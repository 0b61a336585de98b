"""Where tensors lie: shared and overlapping memory, strides, empty tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jitrope

from .named import CACHED, FP8S, NO_PAGES, NORMED, ONE_TABLE, SEVERAL, SLOTS, Args, Call, of

OVERLAPS = "its elements overlap in memory, so it cannot be written"
SHARES = "share memory, which is written; pass tensors that do not overlap"
LAZY = "it must be a tensor with its numbers in memory, not torch's lazy zeros or negatives"
NEGATIVE: dict[str, Any] = {  # torch's lazy negative bit
    "every other element": lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag,
    "dense": lambda x: torch._neg_view(-x),
}
turned = lambda x: x.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)  # noqa: E731


@of()
def test_plain(call: Call) -> None:
    """The call that the others are compared with."""
    call.check()


@of(SEVERAL)
def test_q_is_k(call: Call) -> None:
    """One tensor twice is refused where it is written."""
    q, k = call.turned[:2]
    call.args[q] = call.args[k]
    if "first_q" in call.args:
        call.args["second_q"] = call.args["second_k"]  # as many heads in both streams
    if "q_weight" in call.args:
        call.args["q_weight"] = call.args["k_weight"]
    if call.outs:
        call.args["q_out"] = torch.zeros_like(call.args["k"])
    call.check(SHARES if call.writes_heads else "")


@of([x for x in SEVERAL if "v" in Call(x, "cpu").heads])
def test_k_is_v(call: Call) -> None:
    call.args["v"] = call.args["k"]
    call.check(SHARES if "k" in call.written else "")


# What refuses it, and the changes to the arguments.
CACHES: dict[str, Any] = {
    "k_cache is v_cache": (SHARES, lambda a: {"v_cache": a["k_cache"]}),
    "k lies in its cache": (SHARES, lambda a: {"k": a["k_cache"].flatten(0, 1)[:12].view_as(a["k"])}),
    "its windows overlap": (OVERLAPS, lambda a: {"v_cache": a["v_cache"].as_strided((8, 4, 2, 64), (256, 64, 64, 1))}),
    "negative": (LAZY, lambda a: {"k_cache": NEGATIVE["dense"](a["k_cache"])}),
    "negative in turn": (LAZY, lambda a: {"k_cache": NEGATIVE["every other element"](a["k_cache"])}),
    "both in one tensor": ("", lambda a: dict(zip(a, torch.stack((a["k_cache"], a["v_cache"]), 1).unbind(1)))),
    "padded and transposed": ("", lambda a: {x: turned(torch.cat((a[x], a[x]), 3))[..., 64:] for x in a}),
}


@pytest.mark.parametrize("kind", CACHES)
@of(CACHED)
def test_memory_of_caches(call: Call, kind: str) -> None:
    refusal, change = CACHES[kind]
    caches = {x: call.args[x] for x in (*call.cached, *["k"] * ("lies" in kind))}
    call.args |= change(caches)
    call.check(refusal)


STREAMS: dict[str, Any] = {
    "both are one": lambda a: {f"second_{x}": a[f"first_{x}"] for x in "qkv"},
    "one is empty": lambda a: {f"first_{x}": a[f"first_{x}"][:, :0] for x in "qkv"},
}


@pytest.mark.parametrize("kind", STREAMS)
@of(["streams"])
def test_memory_of_streams(call: Call, kind: str) -> None:
    call.args |= STREAMS[kind](call.args)
    call.check()


@of(NORMED)
def test_one_weight_twice(call: Call) -> None:
    if call.name == "across":
        call.args["k"] = call.made.noise(*call.args["q"].shape)
    call.args["k_weight"] = call.args["q_weight"]
    call.check()


@pytest.mark.parametrize("kind", ["number", "tensor"])
@of([*FP8S, *CACHED])
def test_one_scale_twice(call: Call, kind: str) -> None:
    scale = torch.tensor(0.5, device=call.device) if kind == "tensor" else 1.0
    if call.cached:
        call.args |= {x: torch.zeros_like(call.args[x], dtype=torch.float8_e4m3fn) for x in call.cached}
        call.scales = {"k_scale": scale, "v_scale": scale}
    else:
        call.made.scale = lambda letter: scale  # type: ignore[method-assign]
        call.words["quantize"] = jitrope.Quantize(scale, scale)
    call.check(fake=kind == "number")


@of()
def test_overlapping_windows(call: Call) -> None:
    """They are refused where they are written."""
    names = [x for x in call.heads if x in call.written] or call.heads
    one = call.changed(names, lambda x: x.as_strided(x.shape, (*x.stride()[:1], x.stride(1) // 2, *x.stride()[2:])))
    one.check(OVERLAPS if call.writes_heads else "")


# Of a tensor with as many elements as q and k, and the number of heads of k.
TOGETHER: dict[str, Any] = {
    "in turn": lambda x, k: (x[..., 0, :], x[:, :, :k, 1, :]),
    "element by element": lambda x, k: (x.mT[..., 0], x.mT[:, :, :k, :, 1]),
    "k in the gaps of q": lambda x, k: (x.flatten(2, 3)[:, :, :4], x.flatten(2, 3)[:, :, 4 : 4 + k]),
    "overlapping": lambda x, k: (x.flatten(2, 3)[:, :, :4], x.flatten(2, 3)[:, :, 3 : 3 + k]),
}


@pytest.mark.parametrize("kind", TOGETHER)
@of(SEVERAL)
def test_q_and_k_in_one_tensor(call: Call, kind: str) -> None:
    """They are refused where they overlap and one is written."""
    q, k = (call.args[x] for x in call.turned[:2])
    base = call.made.noise(*q.shape[:3], 2, 64)
    base = base.mT.contiguous().mT if kind == "element by element" else base
    call.args |= zip(call.turned, TOGETHER[kind](base, k.shape[2]))
    call.check(SHARES if kind == "overlapping" and call.writes_heads else "")


@pytest.mark.parametrize("axis", range(4))
@of()
def test_expanded_heads(call: Call, axis: int) -> None:
    """All that is rotated, k, and v; they are refused where they are written, and one head is no overlap."""
    turned = [x for x in call.turned if x in call.written] or call.turned
    for names in (turned, call.turned[1:2], call.copied):
        one = call.changed(names, lambda x: x.narrow(axis, 0, 1).expand_as(x))
        one.check(OVERLAPS if {*names} & {*call.written} else "")


NO_D = "rotary_dim, by default D, is 0; it must be even and from 2 to D=0"
NO_HEADS = "with order='grouped' are 8 heads of D elements"


def emptied(call: Call, axis: int) -> Args:
    """The tensors of a call that has no elements along an axis."""
    made = {x: call.args[x].narrow(axis, 0, 0) for x in (*call.heads, *call.outs) if axis != 2 or x != "k_pe"}
    if axis == 3 or (axis == 2 and call.name == "across"):
        made |= {x: call.args[x][:0] for x in call.weights}
    if call.cached:
        made |= {"slots": call.args["slots"][:0]} if axis < 2 else {}
        made |= {x: call.args[x].narrow(axis, 0, 0) for x in call.cached} if axis > 1 else {}
    return made


@pytest.mark.parametrize("axis", range(4))
@of(NO_PAGES)
def test_no_elements(call: Call, axis: int) -> None:
    """Also under autograd: gradients of empty tensors are empty."""
    call.args |= emptied(call, axis)
    text = NO_HEADS if axis > 1 and "qkv" in call.args else NO_D if axis == 3 else ""
    call.check_gradient(refusal=((text == NO_HEADS or call.derived) and text) or None)
    call.check(text)


@of([x for x in SEVERAL if "k" in Call(x, "cpu").heads and x not in CACHED])
def test_no_heads_of_k(call: Call) -> None:
    call.args |= {x: call.args[x][:, :, :0] for x in ("k", "k_out") if x in call.args}
    if call.name == "across":
        call.args["k_weight"] = call.args["k_weight"][:0]
    call.check()


@of(SLOTS)
def test_no_slots(call: Call) -> None:
    call.args |= {x: call.args[x][:0] for x in call.cached}
    call.check()


@of(NO_PAGES)
def test_a_table_without_rows(call: Call) -> None:
    """It is enough for no tokens."""
    one = call.changed(("cos", "sin"), lambda x: x[:0])
    one.check("has 0 rows; it needs")
    one.args |= emptied(call, 1)
    one.check()


@of()
def test_a_number_is_no_such_tensor(call: Call) -> None:
    for name in (*call.heads, "cos", *call.weights, *call.cached):
        call.changed([name], lambda x: x.new_zeros(())).check(r"is a tensor of shape \(\)|has shape \(\)")


@pytest.mark.parametrize("kind", NEGATIVE)
@of()
def test_negative_heads(call: Call, kind: str) -> None:
    """The bit of each of them alone; what is written must not have it."""
    for name in call.heads:
        one = call.changed([name], NEGATIVE[kind])
        assert one.args[name].is_neg()
        one.check(LAZY if name in call.written else "")


CONJUGATE: dict[str, Any] = {
    "conjugate": torch.conj,
    "negative": torch._neg_view,
    "both": lambda z: torch._neg_view(z.conj()),
}


@pytest.mark.parametrize("kind", CONJUGATE)
@of()
def test_lazy_bits_of_a_complex_table(call: Call, kind: str) -> None:
    call.args["freqs_cis"] = CONJUGATE[kind](torch.complex(call.args.pop("cos"), call.args.pop("sin")))
    call.check()


STRIDED = {
    "padded": lambda noise, b, s, h, d: noise(b, s, h + 1, d + 8)[:, :, 1:, :-8],
    "unaligned": lambda noise, *size: noise(torch.Size(size).numel() + 1)[1:].view(size),
    "sequence-first": lambda noise, b, s, h, d: noise(s, b, h, d).transpose(0, 1),
    "heads-first": lambda noise, b, s, h, d: noise(b, h, s, d).transpose(1, 2),
    "elements-first": lambda noise, b, s, h, d: noise(d, b, s, h).permute(1, 2, 3, 0),
    "channels-last": lambda noise, *size: noise(*size).to(memory_format=torch.channels_last),
    "every other element": lambda noise, b, s, h, d: noise(b, s, h, 2 * d)[..., 1::2],
    "every other token": lambda noise, b, s, h, d: noise(b, 2 * s, h, d)[:, ::2],
    "odd": lambda noise, b, s, h, d: noise(b, s, h, d + 1)[..., 1:],
}


@pytest.mark.parametrize("kind", STRIDED)
@of()
def test_strided_heads(call: Call, kind: str) -> None:
    """All that is rotated or copied; the strides of the results are promised."""
    call.args |= {x: STRIDED[kind](call.made.noise, *call.args[x].shape) for x in call.heads}
    call.check()


TABLES: dict[str, Any] = {
    "one twice": lambda cos, sin: (cos, cos),
    "in turn, transposed": lambda cos, sin: [x.T for x in torch.stack((cos.T, sin.T), -1).unbind(-1)],
    "unlike": lambda cos, sin: (cos, sin.T.contiguous().T),
    "one angle": lambda cos, sin: (cos[:1, :1].expand_as(cos), sin[:1, :1].expand_as(sin)),
    "one row": lambda cos, sin: (cos[:1].expand_as(cos), sin[:1].expand_as(sin)),
    "one column": lambda cos, sin: (cos[:, :1].expand_as(cos), sin[:, :1].expand_as(sin)),
    "negative": lambda cos, sin: (NEGATIVE["dense"](cos), NEGATIVE["dense"](sin)),
    "negative in turn": lambda *tables: [NEGATIVE["every other element"](x) for x in tables],
}


@pytest.mark.parametrize("kind", TABLES)
@of()
def test_memory_of_tables(call: Call, kind: str) -> None:
    call.args |= zip(("cos", "sin"), TABLES[kind](call.args["cos"], call.args["sin"]))
    call.check()


WEIGHTS: dict[str, Any] = {
    "every other element": ("contiguous, on", lambda x: x.repeat_interleave(2)[::2]),
    "expanded": ("contiguous, on", lambda x: x[:1].expand_as(x)),
    "negative in turn": ("contiguous, on", NEGATIVE["every other element"]),
    "negative": ("", NEGATIVE["dense"]),
}


@pytest.mark.parametrize("kind", WEIGHTS)
@of(NORMED)
def test_memory_of_weights(call: Call, kind: str) -> None:
    refusal, change = WEIGHTS[kind]
    call.changed(call.weights, change).check(refusal)


@of(ONE_TABLE)
def test_strided_positions(call: Call) -> None:
    """Ids may be a transposed view, or an expanded one; starts must be contiguous."""
    ids = torch.tensor([[3, 0], [5, 1], [2, 2], [7, 4], [0, 9], [1, 1]], device=call.device).T
    for view in (ids, ids[:1].expand(2, 6)):
        one = call.changed([], dict)
        one.args["position_ids"] = view
        one.check()
    call.words["positions"] = jitrope.Starts(start_positions=ids[:, 0].repeat_interleave(2)[::2])
    call.check("start_positions is .* contiguous, on")


@of(SLOTS)
def test_strided_slots(call: Call) -> None:
    call.changed(["slots"], lambda x: x.repeat_interleave(2)[::2]).check("contiguous, on")


@of(NO_PAGES)
def test_axes_of_one_element_have_any_stride(call: Call) -> None:
    for name in call.heads:
        _, s, h, d = call.args[name].shape
        call.args[name] = call.args[name].contiguous().as_strided((1, s, h, d), (7, h * d, d, 1))
    call.args |= {x: call.args[x][:1] for x in call.outs}
    call.args |= {"slots": call.args["slots"][:6]} if call.cached else {}
    call.check()
