"""Where tensors lie: shared and overlapping memory, strides, empty tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import pad

import jitrope

from ..calls import NAMED
from .named import CACHED, FP8S, NO_PAGES, NORMED, ONE_TABLE, SEVERAL, SLOTS, Args, Call, of

OVERLAPS = "its elements overlap in memory, so it cannot be written"
SHARES = "share memory, which is written; pass tensors that do not overlap"
LAZY = "it must be a tensor with its numbers in memory, not torch's lazy zeros or negatives"
DENSE = "contiguous, on"
NEGATIVE: dict[str, Any] = {  # torch's lazy negative bit
    "negative in turn": lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag,
    "negative": lambda x: torch._neg_view(-x),
}

HEADS: dict[str, Any] = {  # the refusal where a changed tensor is written, and the change
    "overlapping windows":
        (OVERLAPS, lambda x: x.as_strided(x.shape, (*x.stride()[:1], x.stride(1) // 2, *x.stride()[2:]))),
    **{f"expanded {n}": (OVERLAPS, lambda x, n=n: x.narrow(n, 0, 1).expand_as(x)) for n in range(4)},
    **{kind: (LAZY, change) for kind, change in NEGATIVE.items()},
    "padded": ("", lambda x: pad(x, (0, 8, 1, 0))[:, :, 1:, :-8]),
    "unaligned": ("", lambda x: torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape)),
    "sequence-first": ("", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
    "heads-first": ("", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
    "elements-first": ("", lambda x: x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)),
    "channels-last": ("", lambda x: x.to(memory_format=torch.channels_last)),
    "every other element": ("", lambda x: x.repeat_interleave(2, -1)[..., 1::2]),
    "every other token": ("", lambda x: x.repeat_interleave(2, 1)[:, ::2]),
    "odd": ("", lambda x: pad(x, (1, 0))[..., 1:]),
}  # fmt: skip


@pytest.mark.parametrize("kind", HEADS)
@of()
def test_memory_of_heads(call: Call, kind: str) -> None:
    """All that is written, or else all that is read, and each alone; the strides of the results are promised."""
    refusal, change = HEADS[kind]
    for names in ([x for x in call.heads if x in call.written] or call.heads, *zip(call.heads)):
        call.changed(names, change).check(refusal if {*names} & {*call.written} else "")


turned = lambda x: x.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)  # noqa: E731
TABLES: dict[str, Any] = {
    "one table twice": lambda cos, sin: (cos, cos),
    "tables in turn, transposed": lambda cos, sin: [x.T for x in torch.stack((cos.T, sin.T), -1).unbind(-1)],
    "unlike tables": lambda cos, sin: (cos, sin.T.contiguous().T),
    "one angle": lambda cos, sin: (cos[:1, :1].expand_as(cos), sin[:1, :1].expand_as(sin)),
    "one row": lambda cos, sin: (cos[:1].expand_as(cos), sin[:1].expand_as(sin)),
    "one column": lambda cos, sin: (cos[:, :1].expand_as(cos), sin[:, :1].expand_as(sin)),
    **{f"tables, {kind}": lambda *tables, f=f: [*map(f, tables)] for kind, f in NEGATIVE.items()},
}
COMPLEX: dict[str, Any] = {"conjugate": torch.conj, "negative": torch._neg_view,
                           "both": lambda z: torch._neg_view(z.conj())}  # fmt: skip
WEIGHTS: dict[str, Any] = {
    "every other element": (DENSE, lambda x: x.repeat_interleave(2)[::2]),
    "expanded": (DENSE, lambda x: x[:1].expand_as(x)),
    "negative in turn": (DENSE, NEGATIVE["negative in turn"]),
    "negative": ("", NEGATIVE["negative"]),
}
# The calls, the refusal (those of memory are of calls that write one of the changed tensors), and the change.
CHANGES: dict[str, Any] = {
    "q is k": (SEVERAL, SHARES, lambda a: {  # as many heads in both streams
        y: a[y.replace("q", "k")].clone() if y == "q_out" else a[y.replace("q", "k")]
        for x in ("q", "first_q", "second_q", "q_weight", "q_out") if x in a for y in (x, x.replace("q", "k"))}),
    "k is v": ([x for x in SEVERAL if "v" in Call(x, "cpu").heads], SHARES, lambda a: {"v": a["k"], "k": a["k"]}),
    "k_cache is v_cache": (CACHED, SHARES, lambda a: {"v_cache": a["k_cache"]}),
    "k lies in its cache": (CACHED, SHARES, lambda a: {
        "k": a["k_cache"].flatten(0, 1)[:12].view_as(a["k"]), "k_cache": a["k_cache"]}),
    "windows of a cache overlap": (CACHED, OVERLAPS, lambda a: {
        "v_cache": a["v_cache"].as_strided((8, 4, 2, 64), (256, 64, 64, 1))}),
    **{f"cache, {kind}": (CACHED, LAZY, lambda a, f=f: {"k_cache": f(a["k_cache"])}) for kind, f in NEGATIVE.items()},
    "both caches in one tensor": (CACHED, "", lambda a: dict(zip(
        ("k_cache", "v_cache"), torch.stack((a["k_cache"], a["v_cache"]), 1).unbind(1)))),
    "padded and transposed caches": (CACHED, "", lambda a: {
        x: turned(torch.cat((a[x], a[x]), 3))[..., 64:] for x in ("k_cache", "v_cache")}),
    "strided slots": (SLOTS, DENSE, lambda a: {"slots": a["slots"].repeat_interleave(2)[::2]}),
    "no slots": (SLOTS, "", lambda a: {x: a[x][:0] for x in ("k_cache", "v_cache")}),
    "both streams are one": (["streams"], "", lambda a: {f"second_{x}": a[f"first_{x}"] for x in "qkv"}),
    "one stream is empty": (["streams"], "", lambda a: {f"first_{x}": a[f"first_{x}"][:, :0] for x in "qkv"}),
    "one weight twice": ([x for x in NORMED if x != "across"], "", lambda a: {"k_weight": a["q_weight"]}),
    "one weight of all heads twice": (["across"], "", lambda a: {"k_weight": a["q_weight"], "k": a["q"].flip(0)}),
    "no heads of k": ([x for x in SEVERAL if "k" in Call(x, "cpu").heads and x not in (*CACHED, "across")], "",
        lambda a: {x: a[x][:, :, :0] for x in ("k", "k_out") if x in a}),
    "no heads of k, across": (["across"], "", lambda a: {"k": a["k"][:, :, :0], "k_weight": a["k_weight"][:0]}),
    **{kind: (NAMED, "", lambda a, f=f: dict(zip(("cos", "sin"), f(a["cos"], a["sin"]))))
       for kind, f in TABLES.items()},
    **{f"complex, {kind}": (NAMED, "", lambda a, f=f: {"freqs_cis": f(torch.complex(a.pop("cos"), a.pop("sin")))})
       for kind, f in COMPLEX.items()},
    **{f"weights, {kind}": (NORMED, text, lambda a, f=f: {x: f(a[x]) for x in a if x.endswith("weight")})
       for kind, (text, f) in WEIGHTS.items()},
}  # fmt: skip


@of({kind: names for kind, (names, *_) in CHANGES.items()})
def test_memory(call: Call, kind: str) -> None:
    _, refusal, change = CHANGES[kind]
    changes = change(call.args)
    call.args |= changes
    written = {*changes} & {*call.written} - {*call.outs}
    call.check(refusal if written or refusal == DENSE else "")


@pytest.mark.parametrize("kind", ["number", "tensor"])
@of([*FP8S, *CACHED])
def test_one_scale_twice(call: Call, kind: str) -> None:
    scale = torch.tensor(0.5, device=call.device) if kind == "tensor" else 1.0
    if call.cached:
        call.args |= {x: torch.zeros_like(call.args[x], dtype=torch.float8_e4m3fn) for x in call.cached}
        call.scales = {"k_scale": scale, "v_scale": scale}
    else:
        call.made.scales = dict.fromkeys("qkv", scale)
        call.words["quantize"] = jitrope.Quantize(scale, scale)
    call.check(fake=kind == "number")


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


@of(ONE_TABLE)
def test_strided_positions(call: Call) -> None:
    """Ids may be a transposed view, or an expanded one; starts must be contiguous."""
    ids = torch.tensor([[3, 0], [5, 1], [2, 2], [7, 4], [0, 9], [1, 1]], device=call.device).T
    for view in (ids, ids[:1].expand(2, 6)):
        one = call.changed(())
        one.args["position_ids"] = view
        one.check()
    call.words["positions"] = jitrope.Starts(start_positions=ids[:, 0].repeat_interleave(2)[::2])
    call.check("start_positions is .* contiguous, on")


@of(NO_PAGES)
def test_axes_of_one_element_have_any_stride(call: Call) -> None:
    for name in call.heads:
        _, s, h, d = call.args[name].shape
        call.args[name] = call.args[name].contiguous().as_strided((1, s, h, d), (7, h * d, d, 1))
    call.args |= {x: call.args[x][:1] for x in call.outs}
    call.args |= {"slots": call.args["slots"][:6]} if call.cached else {}
    call.check()
