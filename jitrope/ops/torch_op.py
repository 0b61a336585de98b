"""The torch ops of all calls, for torch.compile, checkpointing, vmap and fake tensors.

An op takes a call as a text (`jitrope.call`), its tensors in the order of the text, and its counts. A call that writes
tensors has them in a list of their own, behind which torch looks for what changes. Its op returns nothing, so fresh
results beside them are allocated first, and are written too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from string import ascii_letters
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.errors import InvalidInput
from ..call import COUNTS, FRESH, Call
from ..plan.options import Options
from ..plan.views import Tensors, table_pair
from . import fused, latent, launch, planning, streams, watch  # noqa: F401  each source registers its operations
from .checks import LEARNED
from .operation import OF_TABLES, Operation, operation_of

lib = torch.library.Library("jitrope", "DEF")
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
lib.define("prepare(Tensor[] tensors, str call, SymInt[] sizes) -> Tensor[]", tags=TAGS)
lib.define("prepare_(Tensor[] tensors, Tensor(a!)[] written, str call, SymInt[] sizes) -> ()", tags=TAGS)
_EACH = 10  # the most tensors that a call writes
lib.define(
    f"prepare_each_(Tensor[] tensors, {', '.join([f'Tensor({x}!)? {x}' for x in ascii_letters[:_EACH]])}, str call, "
    "SymInt[] sizes) -> ()",
    tags=TAGS,
)


# ---- a call and its text -------------------------------------------------------------------------


class Read(NamedTuple):
    """What a text says."""

    op: Operation
    names: tuple[str, ...]  # of the tensors that are only read, and then of those that are written
    written: tuple[str, ...]
    options: Options


@lru_cache(maxsize=1024)
def read(text: str) -> Read:
    """The operation, names and options of a text."""
    name, tensors, options = Call.parse(text)
    op = operation_of(name, tensors, options)
    allowed = op.written(options)
    written = tuple([name for name in tensors if name in allowed])
    names = tuple([name for name in tensors if name not in allowed])
    return Read(op, names + written, written, options)


@lru_cache(maxsize=1024)
def _spelled(name: str, tensors: tuple[str, ...], options: Options) -> str:
    return str(Call.of(name, tensors, options))


def filled(op: Operation, tensors: Tensors, options: Options) -> Tensors:
    """A call's tensors, with fresh results among them if it writes others."""
    made, written = op.made(tensors, options), [name for name in op.written(options) if name in tensors]
    if options.inplace or not made or not written:
        return tensors
    fresh = op.fresh(tensors, options, 0)
    return {**tensors, **{FRESH + name: fresh[name] for name in made}}


def arguments(op: Operation, tensors: Tensors, options: Options) -> tuple[Any, ...]:
    """The arguments of a call's op: (tensors, text, sizes), or (tensors, written, text, sizes).

    Complex tables are passed as real views, because Inductor has no complex numbers.
    """
    tensors = dict(tensors)
    if options.table == "freqs_cis":
        for stream in ("", "second_"):
            if stream + "cos" in tensors:
                pair = table_pair(tensors[stream + "cos"], tensors.get(stream + "sin"), "freqs_cis")
                tensors[stream + "cos"], tensors[stream + "sin"] = pair
        options = options._replace(table="cos_sin")
    text = _spelled(op.name, tuple(tensors), options._replace(max_seqlen=0, unrotated=0))
    _, names, written, _ = read(text)
    reads, sizes = [tensors[name] for name in names if name not in written], [options.max_seqlen, options.unrotated]
    if not written:
        return reads, text, sizes
    return reads, [tensors[name] for name in written], text, sizes


def run_op(op: Operation, tensors: Tensors, options: Options) -> Tensors:
    """Return the results of an operation from its torch op."""
    # torch gives the op lazy zeros with other strides than were checked
    tensors = {name: x.clone() if watch.is_zero(x) else x for name, x in tensors.items()}
    made, full = op.made(tensors, options), filled(op, tensors, options)
    given = arguments(op, full, options)
    if len(given) == 3:
        results = dict(zip(made, torch.ops.jitrope.prepare(*given)))
    else:
        (_prepare_each if watch.tracing() else torch.ops.jitrope.prepare_)(*given)
        if options.inplace:
            return op.outputs(tensors, options)
        results = {name: full[FRESH + name] for name in made}
    return op.complete(results, tensors, options)


def _prepare_each(tensors: list[Tensor], written: list[Tensor], *rest: Any) -> None:
    """`prepare_` for torch.jit.trace, which drops an op that writes the tensors of a list."""
    torch.ops.jitrope.prepare_each_(tensors, *written, *[None] * (_EACH - len(written)), *rest)


def _given(text: str, sizes: Sequence[Any], tensors: Sequence[Tensor], written: Sequence[Tensor] = ()) -> Any:
    """(operation, tensors by name, options) of an op's arguments."""
    found, both = read(text), (*tensors, *written)
    if (len(both), len(written), len(sizes)) != (len(found.names), len(found.written), len(COUNTS)):
        what = f"{len(both)} tensors, {len(written)} of them written, and {len(sizes)} sizes"
        needs = f"{len(found.names)}, {len(found.written)} and {len(COUNTS)}"
        raise InvalidInput(f"call {text!r} is given {what}; it needs {needs}")
    return found.op, dict(zip(found.names, both)), found.options._replace(**dict(zip(COUNTS, sizes)))


# ---- registration --------------------------------------------------------------------------------

Run = Callable[[Operation, Tensors, Options], Tensors]


def _on_cpu(op: Operation, tensors: Tensors, options: Options) -> Tensors:
    with torch.autocast("cpu", enabled=False):  # as on a GPU, the words say what is rounded
        results = op.on_cpu(tensors, options)
    watch.written([tensors[name] for name in op.written(options) if name in tensors])
    return results


def _fakes(op: Operation, tensors: Tensors, options: Options) -> Tensors:
    planning.note(op, tensors, options)
    return op.fakes(tensors, options)


def _by(run: Run) -> tuple[Callable[..., Any], Callable[..., None]]:
    """The implementations of both ops that call `run`."""

    def prepare(tensors: Sequence[Tensor], text: str, sizes: Sequence[Any]) -> list[Tensor]:
        op, named, options = _given(text, sizes, tensors)
        return _outputs(op, op.made(named, options))(run(op, named, options))

    def prepare_(tensors: Sequence[Tensor], written: Sequence[Tensor], text: str, sizes: Sequence[Any]) -> None:
        run(*_given(text, sizes, tensors, written))

    return prepare, prepare_


@torch.library.impl(lib, "prepare_each_", "CompositeExplicitAutograd")
def _each(tensors: list[Tensor], *rest: Any) -> None:
    torch.ops.jitrope.prepare_(tensors, [x for x in rest[:_EACH] if x is not None], *rest[_EACH:])


def register(key: str, run: Run) -> None:
    """Make `run` the implementation of both ops for a dispatch key."""
    for name, function in zip(("prepare", "prepare_"), _by(run)):
        lib.impl(name, function, key)


def register_launches(key: str) -> None:
    """Make launches the implementation of both ops for a dispatch key, and for its key of autograd."""
    lib.impl("prepare", _launches(), key, with_keyset=True)
    lib.impl("prepare_", _launches_, key)
    if watch.records_ops:
        lib.impl("prepare", _launches(_recorded), f"Autograd{key}", with_keyset=True)


def _launches_(tensors: Sequence[Tensor], written: Sequence[Tensor], text: str, sizes: Sequence[int]) -> None:
    _launch((*tensors, *written), text, sizes, len(written), None)


def _launches(recorded: Callable[[], Any] | None = None) -> Callable[..., Any]:
    """The implementation of `prepare` on a GPU.

    recorded: gives the implementation of calls that autograd records, or that more than autograd watches. All others
    skip torch's Python layer of autograd, which takes longer than the launch.
    """

    def call(keys: Any, tensors: Sequence[Tensor], text: str, sizes: Sequence[int]) -> Any:
        watching = None if recorded is None else (lambda: recorded()(keys, tensors, text, sizes))
        return _launch(tensors, text, sizes, 0, watching)

    return call


def _launch(
    given: Sequence[Tensor], text: str, sizes: Sequence[int], written: int, watching: Callable[[], Any] | None
) -> Any:
    """Launch a call. One like a recent one is not read again (`replay`)."""
    key = (text, len(given), written, *sizes)
    try:
        recent = () if watch.watched() else launch.local.recent[key]
    except (KeyError, TypeError):  # a symbolic number has no hash
        recent = ()
    for replay in recent:
        out = replay(*given)
        if out is not None:
            return out
    op, tensors, options = _given(text, sizes, given[: len(given) - written], given[len(given) - written :])
    plain, wants = watch.plain(tensors), watch.wants_grad(*given)
    if watching is not None and (wants or not plain):
        return watching()
    known = launch.find(key, tensors) or launch.prepare(op, tensors, tensors, key, options)
    outputs = None if written else _outputs(op, op.made(tensors, options))
    kept = plain and not wants
    return launch.function_of(known, tensors, key, outputs=outputs, by_place=True, plain=kept)(*given)


def _outputs(op: Operation, made: Sequence[str]) -> Callable[[Tensors], list[Tensor]]:
    """A function that lists an op's outputs, of its results."""
    return (lambda results: [results[name] for name in made]) if op.function else partial(_completed, made)


def _completed(made: Sequence[str], results: Tensors) -> list[Tensor]:
    """The outputs of a gradient. A missing one is empty, and none may share memory with another.

    The gradients of weights and biases share memory, parts of one tensor of sums.
    """
    parts = [name for name in made if name.endswith(("_weight", "_bias"))]
    results = {**results, **{name: results[name].clone() for name in parts[1:] if name in results}}
    some = next(iter(results.values()))
    return [results[name] if name in results else some.new_empty(0) for name in made]


# ---- the backward ----------------------------------------------------------------------------------


def keep(ctx: Any, op: Operation, names: Sequence[str], tensors: Tensors, outputs: Any, options: Options) -> None:
    """Save the tensors and names for the backward of a call. names, outputs: "" for a missing one.

    The gradients of tables need q and k too.
    """
    learned = tuple([name for name in LEARNED if name in tensors and tensors[name].requires_grad])
    saved = tensors if learned else op.saved(tensors, options)
    ctx.kept = op, tuple(saved), names, tuple(outputs), options, learned
    ctx.like = {}
    if watch.sharded(tensors.values()):
        from .dtensor import gradient_like

        ctx.like = {name: gradient_like(x) for name, x in tensors.items() if name not in OF_TABLES and x.requires_grad}
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*saved.values())


def gradients(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of all tensors of a call, None for those without."""
    from .dispatch import call

    op, saved, names, results, options, learned = ctx.kept
    given = {name: grad for name, grad in zip(results, grads) if name and grad is not None}
    if given and ctx.like:  # torch places gradients in its own way, and cannot place a missing one
        given = {name: ctx.like[name](given.get(name)) for name in results if name in ctx.like}
    tensors = dict(zip(saved, ctx.saved_tensors))  # a checkpoint allows one access
    needed = op.saved(tensors, options) if learned else tensors
    if learned and not torch.is_grad_enabled():  # a launch like a recent one, whose tables are not learned
        needed = {name: x.detach() if name in learned else x for name, x in needed.items()}
    found = op.gradient(call, needed, dict(given), options) if given else {}
    if learned and given:
        found.update(_of_tables(op, tensors, learned, given, options))
    return [found.get(name) for name in names]


def _of_tables(op: Operation, t: Tensors, names: Sequence[str], grads: Tensors, o: Options) -> dict[str, Tensor | None]:
    """The gradients of the tables `names`, by torch's autograd through plain torch. grads: of the results."""
    again = torch.is_grad_enabled()  # the gradient of this gradient is wanted too
    if o.rounding != "complex128":
        o = o._replace(rounding="fp32")  # roundings do not change gradients
    with torch.enable_grad(), watch.without_autocast(t[names[0]]):  # the words alone say what is rounded
        # Views: there is no way from a result to a table through q or through another table.
        inputs = {name: x.view_as(x) if again else x.detach() for name, x in t.items()}
        for name in names:  # a sum in the dtype of the table would be rounded for q, and for k again
            exact = inputs[name] if inputs[name].dtype == torch.float64 else inputs[name].float()
            inputs[name] = exact if again else exact.requires_grad_()
        results = op.on_cpu(inputs, o)
        given = [name for name in grads if results[name].requires_grad]  # k has no scale
        outputs, sent = [results[name] for name in given], [grads[name] for name in given]
        wanted = [inputs[name] for name in names]
        found = torch.autograd.grad(outputs, wanted, sent, create_graph=again, allow_unused=True)
    return {name: None if grad is None else grad.to(t[name].dtype) for name, grad in zip(names, found)}


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save what the backward of `prepare` needs."""
    given, text, sizes = inputs
    op, tensors, options = _given(text, sizes, given)
    keep(ctx, op, tuple(tensors), tensors, op.made(tensors, options), options)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    return gradients(ctx, grads), None, None


@cache
def _recorded() -> Any:
    return watch.autograd_of(torch.ops.jitrope.prepare.default, _backward, _setup)


# ---- vmap ------------------------------------------------------------------------------------------


def _one(tensors: Sequence[Tensor], dims: Sequence[int | None], n: int) -> list[Tensor]:
    """The tensors of one call of a batch."""
    return [x if dim is None else x.select(dim, n) for x, dim in zip(tensors, dims)]


def _vmap(info: Any, dims: Any, tensors: Sequence[Tensor], text: str, sizes: Sequence[Any]) -> Any:
    """torch has no batching rule for lists."""
    calls = range(info.batch_size)
    found = [torch.ops.jitrope.prepare(_one(tensors, dims[0], n), text, sizes) for n in calls]
    return [torch.stack(outputs) for outputs in zip(*found)], [0] * len(found[0])


def _vmap_(
    info: Any, dims: Any, tensors: Sequence[Tensor], written: Sequence[Tensor], text: str, sizes: Sequence[Any]
) -> Any:
    if None in dims[1]:
        raise InvalidInput(f"vmap: call {text!r} writes a tensor that all calls share; give each call its own")
    for n in range(info.batch_size):
        torch.ops.jitrope.prepare_(_one(tensors, dims[0], n), _one(written, dims[1], n), text, sizes)
    return None, None


def _batched(tensors: Sequence[Tensor], text: str, sizes: Sequence[Any]) -> list[Tensor]:
    """The same for a batch of cotangents (`is_grads_batched`), which torch hides in another kind of tensor."""
    dims = [0 if watch.is_batched(x) else None for x in tensors]
    level = next(watch.batch_level(x) for x, dim in zip(tensors, dims) if dim == 0)
    whole = [x if dim is None else watch.with_batch(x, level) for x, dim in zip(tensors, dims)]
    size = next(x.shape[0] for x, dim in zip(whole, dims) if dim == 0)
    found = [torch.ops.jitrope.prepare(_one(whole, dims, n), text, sizes) for n in range(size)]
    return [watch.without_batch(torch.stack(outputs), level) for outputs in zip(*found)]


register("CPU", _on_cpu)
register_launches("CUDA")
lib.impl("prepare", _batched, "Batched")
for _name, _fake in zip(("prepare", "prepare_"), _by(_fakes)):
    torch.library.register_fake(f"jitrope::{_name}", _fake, lib=lib)
torch.library.register_vmap("jitrope::prepare", _vmap, lib=lib)
torch.library.register_vmap("jitrope::prepare_", _vmap_, lib=lib)
torch.library.register_autograd("jitrope::prepare", _backward, setup_context=_setup, lib=lib)
