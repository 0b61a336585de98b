"""Two streams that are concatenated: the source, and its gradient."""

from __future__ import annotations

from ..base.fit import Fail
from ..base.views import MEANS, TABLE_NAMES, Tensors
from ..checks.checks import check
from ..plan.options import Options
from ..sinks import cache, pages
from ..stages import convert, positions, scale
from .heads import HEADS
from .operation import OUTS, Call, Operation

STREAMS = ("first", "second")

COUNTED = ("start_positions", "cu_seqlens", "max_seqlen", "packed_table", "cp_size", "cp_rank")
"""Tensors and words of positions that are counted from the first token of a sequence."""


def names_of(stream: str) -> dict[str, str]:
    """The names of one stream's tensors in a joint call, by their names in a separate call."""
    weights = "second_" if stream == "second" else ""
    heads = {name: f"{stream}_{name}" for name in "qkv"}
    return {**heads, **{name: weights + name for name in ("q_weight", "k_weight", "q_bias", "k_bias")}}


def of_stream(t: Tensors, o: Options, stream: str) -> tuple[Tensors, Options]:
    """One stream of a joint call as a separate call, with its tokens' part of the tables or of their rows."""
    own = {name: t[joint] for name, joint in names_of(stream).items() if joint in t}
    own.update({name: t[name] for name in (*convert.TENSORS, *cache.TENSORS, *pages.TENSORS) if name in t})
    second, begin = stream == "second", t["first_q"].shape[1]
    prefix = "second_" if second and "second_cos" in t else ""
    tables: Tensors = {name: t[prefix + name] for name in ("cos", "sin") if prefix + name in t}
    if second and not prefix and "position_ids" not in t:
        row, _ = positions.behind(begin, o)
        tables = {name: x[row:] if x.dim() == 2 else x[:, row:] for name, x in tables.items()}
    first, end = (begin, None) if second else (0, begin)
    of_tokens = {name: t[name] for name in ("position_ids", "q_factor") if name in t}
    tables.update({name: x[..., first:end] if x.dim() else x for name, x in of_tokens.items()})
    return {**own, **tables}, o._replace(**positions.behind(begin, o)[1]) if second else o


class Streams(Operation):
    name = "streams"
    whole = True
    said, function = "two streams", "prepare_joint_qkv"
    needed = heads = tuple([f"{stream}_{letter}" for stream in STREAMS for letter in "qkv"])
    kept = ("first_q",)  # its length is needed
    labels = {own: f"{stream}'s {name}" for stream in STREAMS for name, own in names_of(stream).items()}  # noqa: RUF012
    lacks = ("inplace", "rotate_k", "shifts", "inverse", "layout", "check", "v_weight", *COUNTED, *MEANS)

    def shaped(self, t: Tensors, o: Options) -> Tensors:
        found = {name: t[name] for name in (*convert.TENSORS, *OUTS) if name in t}
        for letter in "qkv":
            x, tokens = t[f"first_{letter}"], t["first_q"].shape[1] + t["second_q"].shape[1]
            found[letter] = x.new_empty((1, 1, 1, x.shape[3])).expand(x.shape[0], tokens, x.shape[2], -1)
        return found

    def parts(self, t: Tensors, o: Options) -> list[tuple[Tensors, Options]]:
        return [of_stream(t, o, stream) for stream in STREAMS]

    def check(self, t: Tensors, o: Options) -> None:
        """Refuse a wrong call. Each stream must also be right as a call of its own."""
        q = t["first_q"]
        fail = Fail(self.function, "first's q", q, o.layout)
        for name in self.heads:
            stream, _, letter = name.partition("_")
            heads = "H" if name == "first_k" else t["first_q" if letter == "q" else "first_k"].shape[2]
            shape = q.shape[0], t[f"{stream}_q"].shape[1], heads, q.shape[3]
            fail.unlike(self.label(name), t[name], q.device, (q.dtype,), shape)
        given = {x.dtype for label, x in t.items() if label.endswith(("_weight", "_bias"))}
        fail.when(len(given) >= 2, f"the weights are {', '.join(sorted(map(str, given)))}; they must match")
        cos, two, shaped = t["cos"], "second_cos" in t, self.shaped(t, o)
        for word, said in {**positions.apart(t, o), "freqs": o.table == "freqs"}.items():
            fail.when(two and said, f"{word} does not go with a table for each stream; pass one table")
        scale.check({**t, "q": shaped["q"]}, o, fail)
        if not two:  # the checks of streams compare each with its own
            check(self, {"q": shaped["q"], **{label: t[label] for label in TABLE_NAMES if label in t}}, o)
        if o.across_heads:
            fail("across_heads does not go with two streams; normalise before, or join them and use prepare_qkv")
        for stream in STREAMS:
            self.check_stages(*of_stream(t, o, stream))
        self.check_sink({**{name: x for name, x in t.items() if name not in self.needed}, **shaped}, o)
        second = t.get("second_cos", cos)
        width = (*map(str, second.shape[:-1]), cos.shape[-1])
        fail.unlike("the second table", second, q.device, (cos.dtype,), width, like="the first")

    def back(self, call: Call, saved: Tensors, grads: Tensors, o: Options) -> Tensors:
        """The gradients of each stream, from its tokens and its rows of the tables."""
        found: Tensors = {}
        end = saved["first_q"].shape[1]
        for stream, tokens in zip(STREAMS, (slice(0, end), slice(end, None))):
            (kept, own), names = of_stream(saved, o, stream), names_of(stream)
            of_heads = HEADS.back(call, kept, {name: x[:, tokens] for name, x in grads.items()}, own)
            found.update({names[name]: x for name, x in of_heads.items() if name in names})
        return found


STREAMED = Streams()
