"""Where tensors lie: shared and overlapping memory, strides, empty tensors."""

from __future__ import annotations

import itertools

import pytest
import torch

import jitrope


from .named import CACHED, FP8S, NAMED, NORMED, ONE_TABLE, SEVERAL, SLOTS, Args, Call, of, times_one

OVERLAPS = "its elements overlap in memory, so it cannot be written"
SHARES = "share memory, which is written; pass tensors that do not overlap"


@of()
def test_plain(call: Call) -> None:
    """The call that the others are compared with."""
    call.check()


# ---- memory that is shared ---------------------------------------------------------------------------


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


@of(["streams"])
def test_both_streams_are_one(call: Call) -> None:
    call.args |= {f"second_{letter}": call.args[f"first_{letter}"] for letter in "qkv"}
    call.check()


@of(CACHED)
def test_k_cache_is_v_cache(call: Call) -> None:
    call.args["v_cache"] = call.args["k_cache"]
    call.check(SHARES)


@of(CACHED)
def test_k_lies_in_its_cache(call: Call) -> None:
    call.args["k"] = call.args["k_cache"].flatten(0, 1)[:12].view_as(call.args["k"])
    call.check(SHARES)


@of(CACHED)
def test_caches_in_one_tensor(call: Call) -> None:
    both = torch.stack((call.args["k_cache"], call.args["v_cache"]), 1)
    call.args |= {"k_cache": both[:, 0], "v_cache": both[:, 1]}
    call.check()


@of(NORMED)
def test_one_weight_twice(call: Call) -> None:
    if call.name == "across":
        call.args["k"] = call.made.noise(*call.args["q"].shape)
    call.args["k_weight"] = call.args["q_weight"]
    call.check()


@of()
def test_cos_is_sin(call: Call) -> None:
    call.args["sin"] = call.args["cos"]
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
    for name in [x for x in call.heads if x in call.written] or call.heads:
        b, s, h, d = call.args[name].shape
        base = call.made.noise(b * s * h * d)
        call.args[name] = base.as_strided((b, s, h, d), (s * h * d, h * d // 2, d, 1))
    call.check(OVERLAPS if call.writes_heads else "")


@of(CACHED)
def test_overlapping_windows_of_a_cache(call: Call) -> None:
    size = call.args["v_cache"].shape
    call.args["v_cache"] = call.made.noise(size.numel()).as_strided(size, (256, 64, 64, 1))
    call.check(OVERLAPS)


@of(SEVERAL)
def test_q_and_k_overlap(call: Call) -> None:
    """Parts of one buffer are refused where they are written."""
    q, k = (call.args[x] for x in call.turned[:2])
    base = call.made.noise(q.numel() + 8)
    call.args |= dict(zip(call.turned, (base[8:].view_as(q), base[: k.numel()].view_as(k))))
    call.check(SHARES if call.writes_heads else "")


SIDE_BY_SIDE = {
    "in turn": lambda x, k: (x[..., 0, :], x[:, :, :k, 1, :]),
    "element by element": lambda x, k: (x.mT[..., 0], x.mT[:, :, :k, :, 1]),
    "k in the gaps of q": lambda x, k: (x.flatten(2, 3)[:, :, :4], x.flatten(2, 3)[:, :, 4 : 4 + k]),
}


@pytest.mark.parametrize("kind", SIDE_BY_SIDE)
@of(SEVERAL)
def test_q_and_k_side_by_side(call: Call, kind: str) -> None:
    """Views of one tensor that do not overlap."""
    q, k = (call.args[x] for x in call.turned[:2])
    base = call.made.noise(*q.shape[:3], 2, 64)
    base = base.mT.contiguous().mT if kind == "element by element" else base
    views = SIDE_BY_SIDE[kind](base, k.shape[2])
    call.args |= {x: y for x, y in zip(call.turned, views) if y.shape == call.args[x].shape}
    call.check()


# ---- expanded tensors --------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", range(4))
@of()
def test_expanded_heads(call: Call, axis: int) -> None:
    """All that is rotated; they are refused where they are written."""
    for name in [x for x in call.turned if x in call.written] or call.turned:
        call.args[name] = call.args[name].narrow(axis, 0, 1).expand_as(call.args[name])
    call.check(OVERLAPS if call.writes_heads else "")


@pytest.mark.parametrize("axis", range(4))
@of([x for x in SEVERAL if Call(x, "cpu").copied])
def test_an_expanded_tensor_beside_others(call: Call, axis: int) -> None:
    """v is only read; k is refused where it is written, and one head is no overlap."""
    for names in (["k" if "k" in call.args else "first_k"], call.copied):
        one = Call(call.name, call.device)
        for name in names:
            one.args[name] = one.args[name].narrow(axis, 0, 1).expand_as(one.args[name])
        one.check(OVERLAPS if {*names} & {*one.written} else "")


@pytest.mark.parametrize("axes", [(0, 1), (0,), (1,)])
@of()
def test_expanded_tables(call: Call, axes: tuple[int, ...]) -> None:
    """One angle, one row, one column."""
    for name in ("cos", "sin"):
        x = call.args[name]
        call.args[name] = x[tuple([slice(0, 1 if n in axes else None) for n in range(2)])].expand_as(x)
    call.check()


# ---- empty tensors -----------------------------------------------------------------------------------

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


PLACED = [x for x in NAMED if x != "pages"]


@pytest.mark.parametrize("axis", range(4))
@of(PLACED)
def test_no_elements(call: Call, axis: int) -> None:
    call.args |= emptied(call, axis)
    call.check(NO_HEADS if axis > 1 and "qkv" in call.args else NO_D if axis == 3 else "")


@pytest.mark.parametrize("axis", range(4))
@of(PLACED)
def test_no_elements_under_autograd(call: Call, axis: int) -> None:
    call.args |= emptied(call, axis)
    text = NO_HEADS if axis > 1 and "qkv" in call.args else NO_D if axis == 3 and call.derived else None
    call.check_gradient(refusal=text)


@of(["streams"])
def test_one_stream_is_empty(call: Call) -> None:
    call.args |= {x: call.args[x][:, :0] for x in call.args if x.startswith("first")}
    call.check()


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


@of()
def test_a_table_without_rows(call: Call) -> None:
    call.args |= {x: call.args[x][:0] for x in ("cos", "sin")}
    call.check("has 0 rows; it needs")


@of(PLACED)
def test_a_table_without_rows_and_no_tokens(call: Call) -> None:
    call.args |= {x: call.args[x][:0] for x in ("cos", "sin")} | emptied(call, 1)
    call.check()


@of()
def test_a_number_is_no_such_tensor(call: Call) -> None:
    for name in (*call.heads, "cos", *call.weights, *call.cached):
        one = Call(call.name, call.device)
        one.args[name] = one.args[name].new_zeros(())
        one.check(r"is a tensor of shape \(\)|has shape \(\)")


# ---- strides -----------------------------------------------------------------------------------------

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


@of()
def test_strided_tables(call: Call) -> None:
    """Cosines and sines in turn, transposed."""
    both = call.made.noise(call.args["cos"].shape[1], 20, 2)
    call.args |= {"cos": both[..., 0].T, "sin": both[..., 1].T}
    call.check()


@of()
def test_tables_of_unlike_strides(call: Call) -> None:
    call.args["sin"] = call.args["sin"].T.contiguous().T
    call.check()


@of(ONE_TABLE)
def test_strided_positions(call: Call) -> None:
    """A transposed view, and an expanded one."""
    ids = torch.tensor([[3, 0], [5, 1], [2, 2], [7, 4], [0, 9], [1, 1]], device=call.device).T
    for view in (ids, ids[:1].expand(2, 6)):
        one = Call(call.name, call.device)
        one.args["position_ids"] = view
        one.check()


@of(NORMED)
def test_strided_weights(call: Call) -> None:
    for change in (lambda x: x.repeat_interleave(2)[::2], lambda x: x[:1].expand_as(x)):
        one = Call(call.name, call.device)
        one.args |= {x: change(one.args[x]) for x in one.weights}
        one.check("contiguous, on")


@of(SLOTS)
def test_strided_slots(call: Call) -> None:
    call.args["slots"] = call.args["slots"].repeat_interleave(2)[::2]
    call.check("contiguous, on")


@of(ONE_TABLE)
def test_strided_starts(call: Call) -> None:
    starts = torch.tensor([1, 9, 0, 9], device=call.device)[::2]
    call.words["positions"] = jitrope.Starts(start_positions=starts)
    call.check("start_positions is .* contiguous, on")


@of(CACHED)
def test_strided_caches(call: Call) -> None:
    """Padded and transposed."""
    pages, rows, heads, size = call.args["k_cache"].shape
    for name in call.cached:
        call.args[name] = call.made.noise(heads, size + 2, rows, pages).permute(3, 2, 0, 1)[..., 2:]
    call.check()


@of(PLACED)
def test_axes_of_one_element_have_any_stride(call: Call) -> None:
    for name in call.heads:
        _, s, h, d = call.args[name].shape
        call.args[name] = call.made.noise(s * h * d).as_strided((1, s, h, d), (7, h * d, d, 1))
    call.args |= {x: call.args[x][:1] for x in call.outs}
    call.args |= {"slots": call.args["slots"][:6]} if call.cached else {}
    call.check()
