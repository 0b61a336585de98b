"""The contract of an operation. The operations themselves are in `operations`.

A call is an operation, its tensors by name, and its options. `launch` plans and launches it, `dispatch` chooses its
path, and `library` makes it an op of torch, with a fake and a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import chain
from ..base.errors import JitropeError
from ..plan.options import ALL_TOKENS, HEAD_WORDS, Options, changed, norm_of
from ..plan.problem import Views
from ..plan.views import FORMATS, MEANS, Tensors, converts_v, head_view
from ..sinks import results
from ..stages import positions
from . import checks
from .fit import USERS_NAMES
from .stand_ins import one_row

Call = Callable[["Operation", Tensors, Options], Tensors]  # `dispatch.call`

Rule = Callable[[str, Tensors, Options], None]
"""(the user's function, tensors, options): raises InvalidInput if they do not fit."""

empty_like = torch.empty_like
NORMED = (*HEAD_WORDS, "interleaved_out", "layout", "mrope_section", "mrope_interleaved", "unrotated", "launch")
TABLE_WORDS = ("cos", "sin", "cos_sin_cache", "freqs_cis", "position_ids", "start_positions", "freqs")
PLACED = ("mscale", "max_seqlen", "packed_table", "cp_size", "cp_rank")
ROTATION = (*NORMED, *PLACED, "inverse")
WEIGHTS = ("q_weight?", "k_weight?")
BIASES = ("q_bias?", "k_bias?")
GIVEN_MEANS = tuple([f"{name}?" for name in MEANS])


class Operation:
    """An operation: names, and a few functions of (tensors by name, options)."""

    name: str  # of torch's op; "_" at the end marks the op in place
    function: str = ""  # the user's
    tensors: tuple[str, ...] = ("q", "k?")  # in the op's order, before those of the tables; "?": it may be missing
    options: tuple[str, ...] = ROTATION  # fields of `Options` that the op has, beside `table` and the norm
    hidden: tuple[str, ...] = ()  # words among `options` and "check" that a user's call may not have
    words: tuple[str, ...]  # those that it may have beside `tensors`
    names: tuple[str, ...]  # of `tensors`, without marks
    stage: str = ""  # the reason why it lacks the other words, for messages
    tables: frozenset[str] = frozenset((*TABLE_WORDS, "cu_seqlens", "q_factor"))  # those it may have beside `tensors`
    labels: dict[str, str] = {}  # noqa: RUF012  users' names of tensors, for messages, where they differ
    results: tuple[str, ...] = ("q", "k")  # names of the outputs; one with an input's name is missing if the input is
    reads: tuple[str, ...] = ("q", "k", "v")  # tensors with the heads of q, k and v
    writes: tuple[str, ...] = ("q_out", "k_out", "v_out")  # "q_out" is the output "q"
    mutated: tuple[str, ...] = ()  # inputs that are always written
    norm = False  # it normalises
    inplace = differentiable = True  # it has an op in place; it has a gradient
    shards = False  # it takes DTensors
    into: Operation  # its form that writes tensors of the caller, if there is one
    by_rank: Operation  # its form for Ulysses
    rules: tuple[Rule, ...] = (checks.check,)  # of its `check`

    def __init__(self) -> None:
        own = ("norm",) if self.norm else ()
        given = (*self.options, *own, "check", *(("inplace",) if self.inplace else ()))
        self.words = tuple([word for word in given if word not in self.hidden])
        self.names = tuple([name.rstrip("?") for name in self.tensors])

    def check(self, name: str, tensors: Tensors, options: Options) -> None:
        """Refuse a wrong call. name: the user's function."""
        for rule in self.rules:
            rule(name, tensors, options)

    def label(self, name: str) -> str:
        """The user's name of a tensor."""
        return self.labels.get(name, USERS_NAMES.get(name, name))

    def written(self, options: Options) -> tuple[str, ...]:
        """Names of the inputs that a call writes."""
        if not options.inplace:
            return self.mutated
        return (*self.mutated, *(self.results if self.results[0] in self.names else self.names))

    def outputs(self, tensors: Tensors, options: Options) -> Tensors:
        """The tensors that a call writes: fresh ones, or its own in place."""
        if options.inplace:
            return {name: tensors[name] for name in self.produced(tensors, options)}
        return self.fresh(tensors, options, 0)

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        """New tensors for the results, and for the sums of each of `blocks` blocks."""
        return {name: empty_like(tensors[name]) for name in self.results if name in tensors}

    def made(self, given: Container[str], options: Options) -> tuple[str, ...]:
        """Names of the results that torch's op makes."""
        return tuple([name for name in self.results if name in given or name not in self.names])

    def produced(self, given: Container[str], options: Options) -> tuple[str, ...]:
        """Names of all results."""
        return self.made(given, options)

    def complete(self, results: Tensors, tensors: Tensors, options: Options) -> Tensors:
        """All results, given those of torch's op."""
        return results

    def converted(self, tensors: Tensors, options: Options) -> dict[str, torch.dtype]:
        """The dtypes of the results that differ from the inputs'."""
        dtype = FORMATS[options.out_dtype].dtype
        wanted = [name for name in ("q", "k") if name in self.results and f"{name}_scale" in tensors]
        return dict.fromkeys((*wanted, *(("v",) if converts_v(tensors, False) else ())), dtype)

    def fakes(self, tensors: Tensors, options: Options) -> Tensors:
        """Tensors like the results."""
        return self.outputs(tensors, options)

    def finishes(self, tensors: Tensors, options: Options) -> bool:
        """Whether a call has something to `finish`."""
        return type(self).finish is not Operation.finish

    def finish(self, outputs: Tensors, tensors: Tensors, options: Options) -> Tensors:
        """The results, given the outputs of a launch."""
        return outputs

    def heads(self, tensors: Tensors, options: Options) -> tuple[Views, Views]:
        """Views of the heads of q, k and v, read and written. `tensors` has the output "q" as "q_out"."""
        inputs, outputs = (
            [head_view(tensors[name], options.layout) if name in tensors else None for name in names]
            for names in (self.reads, self.writes)
        )
        return tuple(inputs), tuple(outputs)  # type: ignore[return-value]

    def places(self, options: Options) -> tuple[str, ...]:
        """The names of the tensors of `heads`, inputs and outputs."""
        pairs = zip(self.reads, self.writes)
        written = [read if options.inplace and write.endswith("_out") else write for read, write in pairs]
        return (*self.reads, *written)

    def goes_bare(self, tensors: Container[str], asked: Mapping[str, Any]) -> bool:
        """Whether a call without a table, which rotates nothing, has another stage."""
        return self.function != "apply_rope" and (bool(self.stage) or "q_factor" in tensors)

    def unrotated(self, tensors: Tensors, options: Options) -> tuple[Options, Tensors]:
        """The options and the tensors of a call without a table: every token comes before those of the tables."""
        cos, sin = one_row(next(iter(tensors.values())).device, options.rotary_dim // 2)
        return changed(options, unrotated=ALL_TOKENS), {**tensors, "cos": cos, "sin": sin}

    def on_cpu(self, tensors: Tensors, options: Options) -> Tensors:
        """The results in plain torch."""
        outputs = self.fakes(tensors, options)
        self.compute(self.sink(outputs, tensors, options), tensors, options)
        return {name: outputs[name] for name in self.produced(tensors, options)}

    def compute(self, places: Tensors, tensors: Tensors, options: Options) -> None:
        """Write the results to their places (`results.places`)."""
        chain.run(self.parts(tensors, options), places, options)

    def parts(self, tensors: Tensors, options: Options) -> list[tuple[Tensors, Options]]:
        """Of each stream, its heads by letter beside its other tensors, and its options."""
        return [(tensors, options)]

    def sink(self, outputs: Tensors, tensors: Tensors, options: Options) -> Tensors:
        """The places of a call's results."""
        given = {name[0]: tensors[name] for name in self.mutated if name.endswith("_out") and name in tensors}
        given.update({name: outputs[name] for name in self.made(tensors, options)})
        return results.places({**given, "k": tensors["k"]} if options.rotate_k else given, options)

    def put(self, tensors: Tensors, results: Tensors, options: Options) -> Tensors:
        """Copy fresh results to the tensors of a call in place."""
        for name, result in results.items():
            tensors[name].copy_(spare_stays(tensors[name], result, tensors, options))
        return {name: tensors[name] for name in results}

    def saved(self, tensors: Tensors, options: Options) -> Tensors:
        """The tensors that the backward needs."""
        return {name: x for name, x in tensors.items() if name not in self.names}

    def gradient(self, call: Call, saved: Tensors, grads: Tensors, options: Options) -> Tensors:
        """The gradients of the inputs. grads: gradients of the results, at least one."""
        if self.norm and self.differentiable:
            hint = "compute the norm by itself; with a drop-in, enable(model, fuse_norm=False)"
            raise JitropeError(f"a norm of q or k has no second derivative; {hint}")
        raise JitropeError(f"{self.function or self.name} has no gradient")


class Normed(Operation):
    """An operation that normalises q, k or v."""

    norm = True

    def saved(self, tensors: Tensors, options: Options) -> Tensors:
        return dict(tensors)


def spare_stays(x: Tensor, rotated: Tensor, tensors: Tensors, options: Options) -> Tensor:
    """`rotated`, but with x's tokens after the last sequence."""
    spare = positions.spare(x.shape[0], tensors, options)
    return rotated if spare is None else torch.where(spare[:, None, None], x, rotated)


def turned_back(options: Options, inplace: bool = False) -> Options:
    """The options of the gradient: the transpose of a rotation rotates back, from output to input."""
    o = options
    return changed(
        o, inverse=not o.inverse, interleaved=o.interleaved_out, interleaved_out=o.interleaved, inplace=inplace
    )


def rotated_back(op: Operation, call: Call, saved: Tensors, grads: Tensors, options: Options) -> Tensors:
    """The gradients of a rotation. That of k alone takes the place of q's, without q's scale."""
    back = turned_back(options)
    if "q" in grads:
        return call(op, {**grads, **saved}, back)
    return {"k": call(op, {"q": grads["k"], **of_k(saved)}, back)["q"]}


def norm_turned_back(options: Options) -> Options:
    """The options of the gradient of a norm of q, k and v. The pairs of the output stay those of the output's gradient.

    Roundings do not change gradients, so one kernel serves all. Its products are contracted, which is fastest.
    """
    norm = norm_of(options)._replace(rounding="none")
    return changed(options, inverse=not options.inverse, inplace=False, rounding="complex64", norm=norm)


def of_k(tensors: Tensors) -> Tensors:
    """The tensors of a call for k alone, in the place of q; only q has a scale."""
    return {name: x for name, x in tensors.items() if name != "q_factor"}
