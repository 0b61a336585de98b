"""The operations on two streams that are concatenated: their check, each in plain torch, and the gradient."""

from __future__ import annotations

from collections.abc import Container

from ..plan.options import NO_NORM, Options, changed, norm_of
from ..plan.views import TABLE_NAMES, Tensors
from .checks import WEIGHTS as WEIGHT_NAMES
from .checks import check, check_into, check_norm, check_whole_head, refuse_gradients
from .fit import Fail, check_factor, failing, label_of_ids, named, refuse_per_head
from .operation import BIASES, NORMED, ROTATION, TABLE_WORDS, WEIGHTS, Call, Normed, Operation, Rule

STREAMS = ("first", "second")
_SCALES = ("q_scale", "k_scale", "v_scale")
_OUTS = {f"{letter}_out": f"out's {letter}" for letter in "qkv"}


def names_of(stream: str) -> dict[str, str]:
    """The names of one stream's tensors in a joint call, by their names in a separate call."""
    weights = "second_" if stream == "second" else ""
    heads = {name: f"{stream}_{name}" for name in "qkv"}
    return {**heads, **{name: weights + name for name in ("q_weight", "k_weight", "q_bias", "k_bias")}}


def tokens_of(tensors: Tensors) -> int:
    """The number of tokens of both streams."""
    return tensors["first_q"].shape[1] + tensors["second_q"].shape[1]


def of_stream(t: Tensors, o: Options, stream: str) -> tuple[Tensors, Options]:
    """One stream of a joint call as a separate call, with its tokens' part of the tables or of their rows."""
    own = {name: t[joint] for name, joint in names_of(stream).items() if joint in t}
    own.update({name: t[name] for name in _SCALES if name in t})
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


def check_joint(
    name: str, tensors: Tensors, options: Options, rules: tuple[Rule, ...] = (check, check_norm, check_whole_head)
) -> None:
    """The check of a call with two streams. rules: those of each stream as a separate call."""
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
    if norm_of(options).across_heads:
        fail("across_heads does not go with two streams; normalise before, or join them and use prepare_qkv")
    for stream in STREAMS:
        for rule in rules:
            rule(name, *of_stream(tensors, options, stream))
    other = tensors.get("second_cos", cos)
    if cos.dtype != other.dtype:
        fail(f"the first table is {cos.dtype} but the second {other.dtype}")
    if cos.shape[-1] != other.shape[-1]:
        fail(f"the first table is {cos.shape[-1]} wide but the second {other.shape[-1]}")
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
    tensors: tuple[str, ...] = (
        *("first_q", "first_k", "first_v", "second_q", "second_k", "second_v"),
        *WEIGHTS,
        *("second_q_weight?", "second_k_weight?", "second_cos?", "second_sin?"),
        *BIASES,
        *("second_q_bias?", "second_k_bias?"),
    )
    options: tuple[str, ...] = (*NORMED, "mscale", "hadamard")
    hidden = ("layout", "check")
    tables = frozenset((*TABLE_WORDS, "q_factor")) - {"start_positions"}
    labels = {  # noqa: RUF012
        **{f"{stream}_{letter}": f"{stream}'s {letter}" for stream in STREAMS for letter in "qkv"},
        **{name: f"first's {name}" for name in WEIGHT_NAMES},
        **{f"second_{name}": f"second's {name}" for name in WEIGHT_NAMES},
    }
    results: tuple[str, ...] = ("q", "k", "v")
    reads = ("first_q", "first_k", "first_v")
    inplace = False
    rules: tuple[Rule, ...] = (check_joint,)

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        tokens, first = tokens_of(tensors), {name: tensors[f"first_{name}"] for name in "qkv"}
        return {name: x.new_empty((x.shape[0], tokens, *x.shape[2:])) for name, x in first.items()}

    def parts(self, tensors: Tensors, options: Options) -> list[tuple[Tensors, Options]]:
        return [of_stream(tensors, options, stream) for stream in STREAMS]

    def saved(self, tensors: Tensors, options: Options) -> Tensors:
        """Without a norm only the tables, and the first stream's q, whose length is needed."""
        norm = norm_of(options)
        letters = ("v" if norm.v_norm else "") + ("qk" if norm.kind != NO_NORM.kind else "")
        kept = ("first_q", *[f"{stream}_{letter}" for stream in STREAMS for letter in letters])
        return {name: x for name, x in tensors.items() if name not in self.names[:6] or name in kept}

    def gradient(self, call: Call, saved: Tensors, grads: Tensors, options: Options) -> Tensors:
        """The gradients of each stream, from its tokens and its rows of the tables."""
        from .operations import QK_NORM_ROPE, QKV_NORM_ROPE, transformed_back

        if options.hadamard:
            grads, options = transformed_back(call, grads, options), changed(options, hadamard=False)
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


class JointInto(_Joint):
    """A form of `Into`, or the scales of `per_row` alone, that reads the heads of two streams.

    The outputs are always tensors of the call; `gather` makes those that the caller does not give.
    """

    differentiable = False

    def __init__(self, of: Operation) -> None:
        self.of, self.base = of, getattr(of, "base", of)
        self.name, self.results = f"{of.name}_joint", of.results
        converting = tuple([word for word in of.options if word not in (*ROTATION, "hadamard")])
        scales = [name for name in of.tensors if name.rstrip("?") in _SCALES]
        self.tensors = (*_Joint.tensors, *[f"{name.rstrip('?')}?" for name in scales], *[f"{name}?" for name in _OUTS])
        self.options, self.labels = (*_Joint.options, *converting), {**_Joint.labels, **_OUTS}
        self.mutated = tuple(_OUTS) if of.mutated else ()
        super().__init__()

    def separate(self, tensors: Tensors, options: Options) -> Tensors:
        """Tensors as a call on the joined streams has them. Only the shapes, dtypes and devices of heads are right."""
        found = {name: tensors[name] for name in (*_SCALES, *_OUTS) if name in tensors}
        for letter in "qkv" if self.mutated or options.dynamic_v else "qk":  # v is read for its scale alone
            x, tokens = tensors[f"first_{letter}"], tokens_of(tensors)
            found[letter] = x.new_empty((1, 1, 1, x.shape[3])).expand(x.shape[0], tokens, x.shape[2], -1)
        return found

    def check(self, name: str, tensors: Tensors, options: Options) -> None:
        read = {self.label(label): x for label, x in tensors.items() if label not in _OUTS}
        refuse_gradients(failing(name), read, *read, use="use a call without quantize and out")
        check_joint(name, tensors, options, self.base.rules)
        both = {**read, **self.separate(tensors, changed(options, dynamic_v=True))}
        check_into(name, both, options, _OUTS, self.base.converted(tensors, options))

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        return self.of.fresh(self.separate(tensors, options), options, blocks)

    def made(self, given: Container[str], options: Options) -> tuple[str, ...]:
        return self.of.made(("q", "k", *("v" if options.dynamic_v else ""), *_OUTS), options)


QK_NORM_ROPE_JOINT = _Joint()
