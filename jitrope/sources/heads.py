"""q, k and v as tensors of their own: the source, and its gradient."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from ..base.layouts import LAYOUT_AXES
from ..base.views import MEANS, Tensors, by_rank, joined
from ..plan.options import Options
from ..stages import positions
from ..stages.norm import gradients_of_means, normed
from .backward import Backward, named_back, overwrites, turned_back
from .operation import Call, Operation
from .source import OF_TABLES, joins_k, tables_of


class Heads(Operation):
    name = "heads"
    needed = ("q",)

    def letters(self, given: Container[str], o: Options) -> tuple[str, ...]:
        return tuple([letter for letter in "qkv" if letter in given])

    def joins(self, t: Tensors) -> bool:
        return joins_k(t["v"], t.get("k"), t.get("cos"))

    def back(self, call: Call, saved: Tensors, grads: Tensors, o: Options) -> Tensors:
        """From one launch of q, k and v; but v has its own if a gradient is missing, or none if it was copied alone."""
        found, copied = {}, "v" not in saved
        if "v" in grads and (len(grads) < 3 or (copied and not o.ulysses_degree)):
            grad = grads.pop("v")
            if copied:
                again = o.ulysses_degree > 0 and grad.dim() == len(o.layout)  # a gradient's gradient
                found["v"] = by_rank(grad, o.layout, o.ulysses_degree) if again else joined(grad, o.layout)
            else:
                v = saved["v"]
                alone = Options(rotary_dim=v.shape[-1] // 2 * 2, **of_v_alone(o._asdict()), launch=o.launch)
                of_v, own = self.without_table({"q": v}, alone)
                found["v"] = self.back(call, own, {"q": grad}, of_v)["q"]
        if not grads:
            return found
        if "q" not in grads:
            o = o._replace(of={"q": "k", "k": "q"}.get(o.of, o.of))
            of_q = self.back(call, of_k(saved), {"q": grads["k"]}, o)
            return {**found, **{f"k{name[1:]}": x for name, x in of_q.items() if name[0] == "q"}}
        if not normed(o):  # a rotation of ranks' heads is its own backward
            inplace = overwrites(grads, o)
            back = call(self, {**grads, **tables_of(saved)}, turned_back(o, inplace))
            if o.inplace and not inplace:  # tokens that are not rotated keep their gradient
                back = {name: positions.spare_stays(grads[name], x, saved, o) for name, x in back.items()}
            return {**found, **back}
        own = {name: x for name, x in saved.items() if name in OF_TABLES or name[0] in grads}
        back = call(HEADS_BACKWARD, {**own, **named_back(grads)}, turned_back(o, with_v="v" in grads))
        return {**found, **back, **gradients_of_means(saved, saved, back, o)}


def of_k(tensors: Tensors) -> Tensors:
    """The tensors of a call for k alone, in the place of q; only q has a scale."""
    return {f"q{name[1:]}" if name[0] == "k" else name: x for name, x in tensors.items() if name[0] != "q"}


def of_v_alone(words: Mapping[str, Any]) -> dict[str, Any]:
    """The words of a norm of v alone, by those of a call with v_norm: it has no weight."""
    return {x: words[x] for x in ("layout", "norm_kind", "norm_rounding", "across_heads", "eps") if x in words}


HEADS = Heads()
HEADS_BACKWARD = Backward(HEADS)
ROPE = Heads(function="apply_rope")
OF_V = Heads(labels={"q": "v"}, main="v")
"""v alone, which takes the place of q and is not rotated."""


class Stored(Heads):
    """k and v that go to a cache, without q: a kernel's q has no heads."""

    name = "kv"
    needed = ("k",)
    labels = {"q": "k"}  # noqa: RUF012
    main = "k"
    lacks = ("q_factor", "q_weight", "q_bias", MEANS[0])

    def beside(self, word: str, given: Container[str], o: Options) -> list[str]:
        return ["q=None"] if word in self.lacks else super().beside(word, given, o)

    def letters(self, given: Container[str], o: Options) -> tuple[str, ...]:
        return ("q", *super().letters(given, o))

    def shaped(self, t: Tensors, o: Options) -> Tensors:
        means = {MEANS[0]: t[MEANS[1]]} if MEANS[1] in t else {}
        return {**t, **means, "q": t["k"].narrow(LAYOUT_AXES[o.layout][2], 0, 0)}

    named = shaped

    def parts(self, t: Tensors, o: Options) -> list[tuple[Tensors, Options]]:
        return [(self.shaped(t, o), o)]

    def check(self, t: Tensors, o: Options) -> None:
        """Refuse a wrong call. Sizes are those of k, which has heads."""
        like_k = {**t, "q": t["k"]}
        self.check_stages(like_k, o)
        self.check_sink(like_k, o)


OF_KV = Stored()
