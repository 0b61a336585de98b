"""The operation on two streams that are concatenated: its check, the same in plain torch, and its gradient."""

from __future__ import annotations

import torch

from ..plan.options import NO_NORM, Options, changed, norm_of
from ..plan.views import TABLE_NAMES, Tensors
from . import reference
from .checks import WEIGHTS as WEIGHT_NAMES
from .checks import check, check_norm
from .fit import Fail, check_factor, failing, label_of_ids, named, refuse_per_head
from .operation import BIASES, NORMED, TABLE_WORDS, WEIGHTS, Call, Normed

STREAMS = ("first", "second")


def names_of(stream: str) -> dict[str, str]:
    """The names of one stream's tensors in a joint call, by their names in a separate call."""
    weights = "second_" if stream == "second" else ""
    heads = {name: f"{stream}_{name}" for name in "qkv"}
    return {**heads, **{name: weights + name for name in ("q_weight", "k_weight", "q_bias", "k_bias")}}


def of_stream(t: Tensors, o: Options, stream: str) -> tuple[Tensors, Options]:
    """One stream of a joint call as a separate call, with its tokens' part of the tables or of their rows."""
    own = {name: t[joint] for name, joint in names_of(stream).items() if joint in t}
    second, begin = stream == "second", t["first_q"].shape[1]
    prefix = "second_" if second and "second_cos" in t else ""
    tables: Tensors = {name: t[prefix + name] for name in ("cos", "sin") if prefix + name in t}
    if second and not prefix and "position_ids" not in t:
        row = begin - o.unrotated if o.unrotated < begin else 0
        tables = {name: x[row:] if x.dim() == 2 else x[:, row:] for name, x in tables.items()}
    first, end = (begin, None) if second else (0, begin)
    of_tokens = {name: t[name] for name in ("position_ids", "q_factor") if name in t}
    tables.update({name: x[..., first:end] if x.dim() else x for name, x in of_tokens.items()})
    left = o.unrotated - begin if o.unrotated > begin else 0
    return {**own, **tables}, changed(o, unrotated=left if second else o.unrotated)


def joint(t: Tensors, o: Options) -> Tensors:
    """Concatenate q, k and v of two streams along the sequence; q and k are normalised if asked, and rotated."""
    parts = [of_stream(t, o, stream) for stream in STREAMS]
    made = [{"v": own["v"], **reference.qk_norm_rope(own, options)} for own, options in parts]
    return {name: torch.cat([part[name].contiguous() for part in made], 1) for name in "qkv"}


def check_joint(name: str, tensors: Tensors, options: Options) -> None:
    """The check of a call with two streams."""
    fail = failing(name)
    _check_streams(tensors, fail)
    given = {x.dtype for label, x in tensors.items() if label.endswith(("_weight", "_bias"))}
    if len(given) >= 2:
        fail(f"the weights are {', '.join(sorted(map(str, given)))}; they must match")
    q, cos, two = tensors["first_q"], tensors["cos"], "second_cos" in tensors
    given_ids, unrotated, angles = "position_ids" in tensors, options.unrotated > 0, options.table == "freqs"
    for word, said in ((label_of_ids(options), given_ids), ("unrotated", unrotated), ("freqs", angles)):
        if two and said:
            fail(f"{word} does not go with a table for each stream; pass one table")
    tokens = q.shape[1] + tensors["second_q"].shape[1]
    check_factor(tensors, q, tokens, "bshd", fail)
    like = q.new_empty((1, 1, 1, 1)).expand(q.shape[0], q.shape[1] if two else tokens, *q.shape[2:])
    of_both = {label: tensors[label] for label in TABLE_NAMES if label in tensors and label != "q_factor"}
    check(name, {"q": like, **of_both}, options)
    for stream in STREAMS:
        own = of_stream(tensors, options, stream)
        check(name, *own)
        check_norm(name, *own)
    other = tensors.get("second_cos", cos)
    if cos.dtype != other.dtype:
        fail(f"the first table is {cos.dtype} but the second {other.dtype}")
    if cos.shape[-1] != other.shape[-1]:
        fail(f"the first table is {cos.shape[-1]} wide but the second {other.shape[-1]}")
    if norm_of(options).across_heads:
        fail("across_heads does not go with two streams")
    for table in (cos, other):
        refuse_per_head(table, options, "two streams", fail)


def _check_streams(tensors: Tensors, fail: Fail) -> None:
    for letter in "qkv":
        for stream in STREAMS:
            x, like, q = tensors[f"{stream}_{letter}"], tensors[f"{stream}_q"], tensors["first_q"]
            if x.dim() != 4:
                fail(f"{stream}'s {letter} is not a tensor (B, S, H, D)")
            same = x.shape[:2] == like.shape[:2] and x.shape[-1] == like.shape[-1]
            if not same or x.dtype != q.dtype or x.device != q.device:
                owner, other = ("first", q) if same else (stream, like)
                had = f"{stream}'s {letter} is {named(x, 'bshd')} {x.dtype} on {x.device}"
                fail(f"{had}; {owner}'s q is {named(other, 'bshd')} {other.dtype} on {other.device}")
        a, b = tensors[f"first_{letter}"], tensors[f"second_{letter}"]
        if a.shape[0] != b.shape[0] or a.shape[2:] != b.shape[2:]:
            fail(f"first's {letter} is {named(a, 'bshd')}, second's {named(b, 'bshd')}; only S may differ")
    if tensors["first_k"].shape != tensors["first_v"].shape:
        fail("v must have as many heads as k")


class _Joint(Normed):
    name, function, stage = "qk_norm_rope_joint", "prepare_joint_qkv", "two streams"
    tensors = (
        *("first_q", "first_k", "first_v", "second_q", "second_k", "second_v"),
        *WEIGHTS,
        *("second_q_weight?", "second_k_weight?", "second_cos?", "second_sin?"),
        *BIASES,
        *("second_q_bias?", "second_k_bias?"),
    )
    options = (*NORMED, "mscale")
    hidden = ("layout", "check")
    tables = frozenset((*TABLE_WORDS, "q_factor")) - {"start_positions"}
    labels = {  # noqa: RUF012
        **{f"{stream}_{letter}": f"{stream}'s {letter}" for stream in STREAMS for letter in "qkv"},
        **{name: f"first's {name}" for name in WEIGHT_NAMES},
        **{f"second_{name}": f"second's {name}" for name in WEIGHT_NAMES},
    }
    results = ("q", "k", "v")
    reads = ("first_q", "first_k", "first_v")
    inplace = False
    rules = (check_joint,)
    reference = staticmethod(joint)

    def unrotated_rows(self, tensors: Tensors, options: Options) -> int:
        return tensors["first_q"].shape[1] + tensors["second_q"].shape[1]

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        tokens, first = self.unrotated_rows(tensors, options), {name: tensors[f"first_{name}"] for name in "qkv"}
        return {name: x.new_empty((x.shape[0], tokens, *x.shape[2:])) for name, x in first.items()}

    def saved(self, tensors: Tensors, options: Options) -> Tensors:
        """Without a norm only the tables, and the first stream's q, whose length is needed."""
        norm = norm_of(options)
        letters = ("v" if norm.v_norm else "") + ("qk" if norm.kind != NO_NORM.kind else "")
        kept = ("first_q", *[f"{stream}_{letter}" for stream in STREAMS for letter in letters])
        return {name: x for name, x in tensors.items() if name not in self.names[:6] or name in kept}

    def gradient(self, call: Call, saved: Tensors, grads: Tensors, options: Options) -> Tensors:
        """The gradients of each stream, from its tokens and its rows of the tables."""
        from .operations import QK_NORM_ROPE, QKV_NORM_ROPE

        found: Tensors = {}
        begin = 0
        for stream in STREAMS:
            (kept, own), names = of_stream(saved, options, stream), names_of(stream)
            end = saved["first_q"].shape[1] if stream == "first" else None
            given = {name: x[:, begin:end] for name, x in grads.items()}
            begin = end or 0
            op = QKV_NORM_ROPE if "v" in kept else QK_NORM_ROPE
            if "v" in given and "v" not in kept:
                found[names["v"]] = given.pop("v")
            of_heads = op.gradient(call, kept, given, own) if given else {}
            found.update({names[name]: x for name, x in of_heads.items()})
        return found


QK_NORM_ROPE_JOINT = _Joint()
