"""An operation: where q, k and v come from, and what calls do from there, as functions of (tensors by name, options).

`launch` plans and launches a call, `dispatch` chooses its path, `op_call` makes it a call of an op of torch, and
`torch_op` has these ops, with a fake and a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from .. import chain, stages
from ..base import views
from ..base.arguments import refuse, shown
from ..base.errors import InvalidInput, JitropeError
from ..base.fit import USERS_NAMES, Fail, sizes_of
from ..base.layouts import LAYOUT_AXES
from ..base.views import BLOCK_SCALES, FORMATS, Tensors, Views
from ..call import FRESH, FRESHES
from ..call import Call as CallText
from ..checks import checks
from ..plan.options import Options
from ..sinks import results
from ..sinks.results import LETTERS, empty_scale
from ..stages import positions
from ..stages.convert import converts_v, least_scales
from ..stages.norm import NO_NORM, normed, sums_heads
from ..stages.transform import LABEL as TRANSFORM
from ..values.constants import filled, one_row
from .source import Read, Source

Call = Callable[["Operation", Tensors, Options], Tensors]  # `dispatch.call`

OPERATIONS: dict[str, Operation] = {}
"""All operations by their names."""
OUTS = {name: f"out's {name[0]}" for name in results.TENSORS}
"""The users' names of output tensors."""
WRITTEN = frozenset(("k_cache", "v_cache", "k_pe_cache", "errors", *BLOCK_SCALES, *FRESHES))
"""The tensors that each call with them writes; those of `FRESHES` are made by the caller of torch's op."""

APART = {"inplace": "quantize Ulysses", "inverse": "cache", "copy_gate": "quantize cache out Ulysses"}
APART["shifts"] = f"norm quantize {TRANSFORM} cache"
"""The words that do not go with some parts of calls, whatever the source."""


def parts_of(given: Container[str], o: Options) -> list[str]:
    """The stages and the sinks of a call."""
    out = any(x in given for x in OUTS) and not o.per_row
    sinks = {"cache": "k_cache" in given, "out": out, "Ulysses": o.ulysses_degree > 0}
    return [*stages.present(given, o), *[sink for sink, there in sinks.items() if there]]


def has(parts: str, given: Container[str], o: Options) -> bool:
    """Whether a call has one of these parts."""
    return any(part in parts.split() for part in parts_of(given, o))


class Operation(Source):
    """A source, and all that a call does with its heads."""

    def __init__(self, **others: Any) -> None:
        """others: attributes that differ from the class's."""
        vars(self).update(others)
        OPERATIONS.setdefault(self.name, self)

    def differentiable(self, given: Container[str], o: Options) -> bool:
        """Whether a call has a gradient. In place a norm would need the old q and k."""
        return not (has(f"{stages.LAST} cache out", given, o) or (o.inplace and o.norm_kind != ""))

    def beside(self, word: str, given: Container[str], o: Options) -> list[str]:
        """What a word or a tensor does not go with: the source, and parts of the call. o: of the right types."""
        parts = [part for part in APART.get(word, "").split() if part in parts_of(given, o)]
        parts += ["fresh results"] * (word == "inplace_grad" and not o.inplace)
        return [self.said, *parts] if word in self.lacks else parts

    def takes_whole(self, given: Container[str], o: Options) -> bool:
        """Whether a kernel takes whole heads, with or without a norm."""
        return self.whole or any(x in given or getattr(o, x, False) for x in (BLOCK_SCALES[0], *stages.WHOLE))

    def label(self, name: str) -> str:
        """The user's name of a tensor."""
        return {**OUTS, **USERS_NAMES, **self.labels}.get(name, name)

    def text(self, given: Iterable[str], o: Options) -> str:
        """A call as a user sees it: without what jitrope adds, fresh results and the table of a call without one."""
        bare = positions.bare(o)
        names = [x for x in given if not (x.startswith(FRESH) or (bare and x in ("cos", "sin")))]
        return str(CallText.of(self.name, names, o._replace(rotary_dim=0) if bare else o))

    # ---- checks --------------------------------------------------------------------------------------

    def check(self, t: Tensors, o: Options) -> None:
        """Refuse a wrong call."""
        shaped = self.shaped(t, o)
        self.check_stages(shaped, o)
        self.check_sink(shaped, o)

    def check_stages(self, t: Tensors, o: Options) -> None:
        """Refuse what does not fit q, k and v, tensors of their own."""
        converted = "v" in t and converts_v(t, o.dynamic_v)
        if converted and (not self.joins(t) or sums_heads(t, o)):
            had = f"v is {shown(t['v'])}, k {shown(t.get('k'))}; quantize converts a v like k, beside neither a norm"
            Fail(self.function)(f"{had} across heads nor tables for each head; or convert v in a call as q")
        checks.check(self, t, o)
        if o.norm_kind:
            checks.check_whole_heads(self, t, o)

    def check_sink(self, t: Tensors, o: Options) -> None:
        """Refuse scales, caches and outputs that do not fit q, k and v."""
        if "k_cache" in t:
            for x in [x for x in "kv" if (x in t) != (f"{x}_cache" in t)]:
                none = "None, because the cache has no v_cache; or pass one"
                refuse(self.function, x, t.get(x), none if x in t else "a tensor")
            checks.check_kv_cache(self, t, o)
        for letter in "qkv":
            checks.check_scale(self, letter, t, o)
        checks.check_results(self, t, o)

    # ---- results -------------------------------------------------------------------------------------

    def written(self, given: Iterable[str], o: Options) -> tuple[str, ...]:
        """Names of the given tensors that a call writes."""
        names = (*given,)
        in_place = self.produced(names, o) if o.inplace else ()
        own = (*in_place, *self.heads[:2][-1 if o.rotate_k else 2 :], *(() if o.per_row else OUTS))
        return tuple([name for name in names if name in WRITTEN or name in own])

    def made(self, given: Container[str], o: Options) -> tuple[str, ...]:
        """Names of the results that torch's op makes."""
        viewed, letters = self.views(given, o), self._returned(given, o)
        letters = [x for x in letters if x not in viewed]
        heads = [x for x in letters if not o.per_row and f"{x}_out" not in given]
        scaled = [x for x in letters if (o.computed or o.per_row) and (x != "v" or o.dynamic_v)]
        return (*heads, *[f"{x}_scale" for x in scaled])

    def viewed(self, given: Container[str], o: Options) -> tuple[str, ...]:
        """Names of the results that are views of a call's fused tensor."""
        found = () if o.inplace or o.per_row else self._returned(given, o)
        return tuple([x for x in found if x in self.views(given, o)])

    def _returned(self, given: Container[str], o: Options) -> list[str]:
        """The results that do not go to a cache. A gate is neither converted nor sent elsewhere."""
        elsewhere = ("k", "v") * ("k_cache" in given) + ("gate",) * has("quantize cache out Ulysses", given, o)
        return [x for x in self.letters(given, o) if x not in elsewhere]

    def produced(self, given: Container[str], o: Options) -> tuple[str, ...]:
        """Names of all results; in place those of the tensors that a call writes."""
        if o.inplace:
            return tuple([name for name in self.heads[: 1 if "k_cache" in given else 2] if name in given])
        return (*self.made(given, o), *self.viewed(given, o))

    def complete(self, found: Tensors, t: Tensors, o: Options) -> Tensors:
        """All results, given those of torch's op."""
        return {**found, **{name: views.fused_part(t["qkv"], name, o) for name in self.viewed(t, o)}}

    def outputs(self, t: Tensors, o: Options) -> Tensors:
        """The tensors that a call writes: fresh ones, or its own in place."""
        return {name: t[name] for name in self.produced(t, o)} if o.inplace else self.fresh(t, o, 0)

    fakes = outputs
    """Tensors like the results."""

    def fresh(self, t: Tensors, o: Options, blocks: int) -> Tensors:
        """New tensors for the results, and for the sums of each of `blocks` blocks."""
        found = {name.removeprefix(FRESH): x for name, x in t.items() if name.startswith(FRESH)}
        if found:
            return found
        heads = self.shaped(t, o) if o.per_row else t
        for name in self.made(t, o):
            letter = name.removesuffix("_scale")
            if o.per_row:
                batch, _, count, _ = sizes_of(heads[letter], o.layout)
                rows = t["cu_seqlens"].shape[0] - 1 if "cu_seqlens" in t else batch
                found[name] = least_scales((rows, count), heads["q"], o)
            elif letter != name:
                like = found[letter] if letter in found else t[f"{letter}_out"]
                found[name] = empty_scale(like, o, FORMATS[o.out_dtype].per_item)
            else:
                found[name] = self._empty(letter, t, o)
        return self.complete(found, t, o)

    def _empty(self, letter: str, t: Tensors, o: Options) -> Tensor:
        """A tensor for heads. It has the strides of heads that are a tensor of their own.

        With ranks it has a group of heads for each; of such a tensor, as gradients are, it has the usual layout.
        """
        word, heads = self.format_of(letter, t, o), t if letter in t else self.shaped(t, o)
        dtype, _, per_item = FORMATS[word] if word else (None, 0, 1)
        x = heads[letter if letter in heads else "q"]  # a gate is like q
        if o.ulysses_degree and x.dim() > len(o.layout):
            x = views.joined(x.new_empty(()).expand(x.shape), o.layout)
        elif o.ulysses_degree:
            x = views.by_rank(x, o.layout, o.ulysses_degree)
        x = x if per_item == 1 else x[..., : x.shape[-1] // per_item]
        if letter in t and not o.ulysses_degree:
            return torch.empty_like(x, dtype=dtype)
        return x.new_empty(x.shape, dtype=dtype)

    def format_of(self, letter: str, t: Container[str], o: Options) -> str:
        """The format of a converted result, "" for one in the heads' dtype."""
        of_cache = "k_cache" in t and letter in "kv"
        converted = (letter in "qk" or o.dynamic_v) if o.computed or o.per_row else f"{letter}_scale" in t
        return o.out_dtype if converted and not of_cache and letter in "qkv" else ""

    def makes_empty(self, given: Sequence[str], o: Options) -> bool:
        """Whether all results are empty tensors: no views, nothing given, no sums, and no scales that need numbers."""
        filled = any(name.startswith(FRESH) for name in given)
        sums = any(name.endswith(("_weight", "_bias")) for name in self.made(given, o))
        return not (o.inplace or o.per_row or o.swizzled or filled or sums or self.viewed(given, o))

    # ---- the launch ----------------------------------------------------------------------------------

    def ways(self, named: Tensors, o: Options) -> list[tuple[Read | None, Read | None]]:
        """Of q, k and v, the heads that a launch reads, and where it writes them. An output "q" is "q_out".

        The place of v, if there is none, is that of k's rotated elements with a cache of their own.
        """
        reads = self.reads(named, o)
        paged = any(x in named for x in ("page_table", BLOCK_SCALES[0], "k_pe_cache"))
        found, viewed = {**reads} if o.inplace or o.per_row else {}, self.viewed(named, o)
        for x in [x for x in reads if f"{x}_out" in named and x not in viewed and not o.inplace]:
            out = views.head_view(named[f"{x}_out"], o.layout)
            gated = x == "q" and o.order == "qkv_gated" and reads[x][1].shape[3] == 2
            found[x] = (f"{x}_out", out.expand(-1, -1, -1, 2, -1) if gated else out)
        if "v" in found and ("v" in self.left(named, o) or (o.inplace and not ("bias" in named or o.v_norm))):
            del found["v"]
        for x in [x for x in "kv" if f"{x}_cache" in named]:
            found[x] = (f"{x}_cache", views.cache_view(named[f"{x}_cache"], paged))
        if "k_pe_cache" in named:
            reads.pop("v", None)
            found["v"] = ("k_pe_cache", views.cache_view(named["k_pe_cache"], paged))
        return [(reads.get(x), found[x]) if x in found else (None, None) for x in "qkv"]

    def head_views(self, named: Tensors, o: Options) -> tuple[Views, Views]:
        """Views of the heads of q, k and v, read and written. An output "q" is "q_out" in `named`."""
        ways = self.ways(named, o)
        inputs, outputs = (tuple([way[n] and way[n][1] for way in ways]) for n in (0, 1))  # type: ignore[index]
        return inputs, outputs  # type: ignore[return-value]

    def leaves_v(self, named: Tensors, o: Options) -> bool:
        """Whether a kernel cannot copy v, because it copies heads only as it stores those of k."""
        return sums_heads(named, o) or not self.joins(named)

    def writes_gate(self, named: Container[str], o: Options) -> bool:
        """Whether a call writes a gate, and does not return a view."""
        return o.order == "qkv_gated" and (o.inplace or "gate_out" in named) and "gate" not in self.views(named, o)

    def left(self, named: Tensors, o: Options) -> tuple[str, ...]:
        """The letters that are copied after the launch: v, and a gate with its bias."""
        copied = "bias" in named if o.inplace else "v_out" in named and o.copy_v
        return ("v", "gate")[: 1 + self.writes_gate(named, o)] if copied and self.leaves_v(named, o) else ()

    def finish(self, left: Sequence[str], outputs: Tensors, t: Tensors, o: Options) -> Tensors:
        """The results, given the outputs of a launch that has `left` letters."""
        for letter in left:
            x, given = self.part(letter, t, o), outputs.get(letter, t.get(f"{letter}_out"))
            out = views.fused_part(outputs["qkv"], letter, o) if given is None else given
            pairs = ((out, x), (x, out))  # one may have a group of heads for each rank
            copy_heads(*[views.by_rank(y, o.layout, len(z)) if y.dim() < z.dim() else y for y, z in pairs])
        return outputs

    def places(self, made: Tensors, t: Tensors, o: Options) -> Tensors:
        """The places of the results (`sinks.results`). made: those that are fresh, and own tensors in place."""
        for x in () if o.per_row else LETTERS:
            if f"{x}_out" in t:
                made = {**made, x: t[f"{x}_out"]}
        own = {"k": t["k"] if "k" in t else views.fused_part(t["qkv"], "k", o)} if o.rotate_k else {}
        found = results.places({**made, **own}, o)
        if "qkv" in made:
            whole, letters = views.canonical(made["qkv"], o.layout), self.letters(made, o)
            parts = {x: views.fused_part(whole, x, o) for x in letters if f"{x}_cache" not in t}
            found.update({letter: x if x.dim() == 5 else x.unsqueeze(3) for letter, x in parts.items()})
        return found

    # ---- without a table, and in plain torch -----------------------------------------------------------

    def goes_bare(self, t: Container[str], o: Options) -> bool:
        """Whether a call without a table, which rotates nothing, has something to do. o: of the right types."""
        split = self.name != "heads" and not o.inplace
        moved = self.function != "apply_rope" and has("out Ulysses", t, o)
        return split or moved or "k_cache" in t or bool(stages.present(t, o))

    def without_table(self, t: Tensors, o: Options) -> tuple[Options, Tensors]:
        """The options and the tensors of a call without a table: every token comes before those of the tables."""
        cos, sin = one_row(next(iter(t.values())).device, o.rotary_dim // 2)
        return o._replace(**positions.BARE), {**t, "cos": cos, "sin": sin}

    def on_cpu(self, t: Tensors, o: Options) -> Tensors:
        """The results in plain torch."""
        outputs, viewed = self.fakes(t, o), self.viewed(t, o)
        self.compute({name: x for name, x in outputs.items() if name not in viewed}, t, o)
        return outputs

    def compute(self, made: Tensors, t: Tensors, o: Options) -> None:
        """Write the results. made: as in `places`."""
        chain.run(self.parts(t, o), self.places(made, t, o), o)

    # ---- gradients -----------------------------------------------------------------------------------

    def saved(self, t: Tensors, o: Options) -> Tensors:
        """The tensors that the backward needs; of the source's q and k if one has a norm, and a v that has."""
        letters = set("" if not normed(o) else "qkv" if o.v_norm else "qk")
        left = [x for x in self.heads if letters.isdisjoint(x.rpartition("_")[2])]
        return {name: x for name, x in t.items() if name not in left or name in self.kept}

    def gradient(self, call: Call, saved: Tensors, grads: Tensors, o: Options) -> Tensors:
        """The gradients of the inputs. grads: gradients of the results, at least one."""
        if not self.differentiable(saved, o):
            if not (o.ulysses_degree and grads.keys() == {"v"}):
                raise JitropeError(f"{self.function} has no gradient")
            return {"v": views.joined(grads["v"], o.layout)}  # which is copied
        heads, transform = self.name == "heads", getattr(o, TRANSFORM)
        if o.ulysses_degree and (o.norm_kind or not heads):  # else a rotation for ranks is its own backward
            o = o._replace(ulysses_degree=0)
            if transform or not heads:
                grads = {name: views.joined(x, o.layout) for name, x in grads.items()}
        own = {name: grads[name] for name in "qk" if name in grads and transform}
        if own:  # they are transformed in their own launch: the matrix is its own transpose
            words = {name: getattr(o, name) for name in ("layout", "rotary_dim", "rotary_offset", TRANSFORM, "launch")}
            alone, tensors = self.without_table(dict(zip("qk", own.values())), Options(**words, **NO_NORM))
            grads = {**grads, **dict(zip(own, call(OPERATIONS["heads"], tensors, alone).values()))}
        return self.back(call, saved, grads, o._replace(**{TRANSFORM: False}) if transform else o)


def missing_weights(op: Operation, tensors: Tensors, options: Options) -> Tensors:
    """Factors of one and biases of zero for missing ones if some are given, because a kernel takes all or none."""
    made, tensors = {}, op.shaped(tensors, options)
    given = [name for name in tensors if name.endswith(("_weight", "_bias"))]
    biased = any(name.endswith("_bias") for name in given)
    heads = {"q": "q", "k": "k", "first_q": "q", "first_k": "k", "second_q": "second_q", "second_k": "second_k"}
    for head, owner in heads.items() if given else ():
        x = tensors.get(head)
        for ending, value in (("_weight", 0 if options.zero_centered else 1), *([("_bias", 0)] if biased else [])):
            if x is not None and owner + ending not in tensors:
                count = x.shape[-1] * (x.shape[LAYOUT_AXES[options.layout][2]] if options.across_heads else 1)
                made[owner + ending] = filled(x.device, (count,), tensors[given[0]].dtype, value)
    return made


def copy_heads(out: Tensor, x: Tensor) -> None:
    """Copy x to out, 16 bytes at a time if possible: torch's copy between layouts takes its time for each element."""
    both = [out, x]
    if out.dtype == x.dtype and not any(y.data_ptr() % 16 for y in both):
        with suppress(RuntimeError):  # 16 bytes are not always neighbours
            both = [y.view(torch.complex128) for y in both]
    both[0].copy_(both[1])


def operation_of(name: str, given: Container[str], o: Options) -> Operation:
    """The operation of a call by its name."""
    if name not in OPERATIONS or not (o.norm_kind or not OPERATIONS[name].takes_whole(given, o)):
        sources = ", ".join(OPERATIONS)
        raise InvalidInput(f"call has the source {name!r}, or stages without a kernel; the sources are {sources}")
    return OPERATIONS[name]
