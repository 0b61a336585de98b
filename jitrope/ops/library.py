"""The torch.library ops, one for each operation, for torch.compile, checkpointing, vmap and fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from operator import itemgetter
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from ..base.errors import InvalidInput
from ..plan.options import NormOptions, Options, changed, norm_of
from ..plan.views import TABLE_NAMES, Tensors, table_pair
from . import launch, planning, watch
from .checks import LEARNED
from .operation import Operation
from .operations import OPERATIONS

_TABLES = ", ".join(f"Tensor{'?' * (name != 'cos')} {name}" for name in TABLE_NAMES)
_TYPES = {bool: "bool", int: "int", float: "float", str: "str", tuple: "int[]"}
_NORM = {"norm_" * (name in Options._fields) + name: value for name, value in NormOptions._field_defaults.items()}
_COUNTS = ("max_seqlen", "unrotated")
"""Words that change from call to call, so that torch.compile and export keep them as symbols."""
_NUMBERS = ("rotary_dim", *_COUNTS)
"""The first words of an op, which are always passed: a symbol is not compared with a default.

The first of them is an `int`, because torch caches an op's sharding by all arguments from its first int on.
"""
_ROTATED = "rotated"
"""The argument in place of "k" for a k that is rotated in place and stored in a cache; "k" is never written."""

_lib = torch.library.Library("jitrope", "DEF")
FORMS = [(op, inplace) for op in OPERATIONS for inplace in (False, True)[: 1 + op.inplace]]
"""All ops: one for each operation, and one for its form in place."""


# ---- arguments -----------------------------------------------------------------------------------


def _names(op: Operation) -> list[str]:
    """The names of an operation's tensors in torch's op, with marks."""
    names = [*op.tensors]
    if "rotate_k" in op.options:
        names[names.index("k")] = "k?"
        names.insert(names.index("k?") + 1, f"{_ROTATED}?")
    return names


def _schema(op: Operation, inplace: bool) -> str:
    """The declaration of an op. A missing result is an empty tensor."""
    written = (*op.written(Options(inplace=inplace)), *((_ROTATED,) if "rotate_k" in op.options else ()))
    tensors: list[str] = []
    for name in _names(op):
        bare, mark = name.rstrip("?"), "?" * name.endswith("?")
        alias = f"({ascii_letters[len(tensors)]}!)" if bare in written else ""
        tensors.append(f"Tensor{alias}{mark} {bare}")
    words = [
        f"{'SymInt' if name in _COUNTS else _TYPES[type(value)]} {name}={_default(value)}"
        for name, value in _WORDS[op.name].items()
    ]
    results = "()" if inplace else ", ".join(["Tensor"] * len(op.results))
    returns = results if inplace or len(op.results) == 1 else f"({results})"
    arguments = ", ".join([*tensors, _TABLES, *words])
    return f"{name_of(op, inplace)}({arguments}) -> {returns}"


def name_of(op: Operation, inplace: bool) -> str:
    """The name of torch's op."""
    return op.name + "_" * inplace


def _default(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else repr(value).replace("'", '"')


def _words(op: Operation) -> dict[str, Any]:
    """The words of an op and their defaults: the numbers, those of a norm, and the others.

    Neither we nor torch pass words behind the last one that is not a default. AOTInductor has no empty lists.
    """
    options = {name: x for name, x in Options._field_defaults.items() if name in (*op.options, "table")}
    first = {name: options[name] for name in _NUMBERS if name in options}
    return {**first, **(_NORM if op.norm else {}), **options, "mrope_section": (0,)}


def arguments(op: Operation, tensors: Tensors, options: Options) -> tuple[Any, ...]:
    """The arguments of torch's op.

    Complex tables are passed as real views, because Inductor has no complex numbers.
    """
    tensors = dict(tensors)
    if options.table == "freqs_cis":
        for stream in ("", "second_"):
            if stream + "cos" in tensors:
                pair = table_pair(tensors[stream + "cos"], tensors.get(stream + "sin"), "freqs_cis")
                tensors[stream + "cos"], tensors[stream + "sin"] = pair
        options = changed(options, table="cos_sin")
    if not options.mrope_section:
        options = changed(options, mrope_section=(0,))
    if options.rotate_k:
        tensors[_ROTATED] = tensors.pop("k")
    values = {**dict(zip(_NORM, norm_of(options))), **dict(zip(Options._fields, options))}
    words = [*_WORDS[op.name]]
    while words[-1] not in _NUMBERS and values[words[-1]] == _WORDS[op.name][words[-1]]:
        words.pop()
    return (*[tensors.get(name) for name in _GIVEN[op.name]], *[values[name] for name in words])


def read(op: Operation, arguments: Sequence[Any], inplace: bool = False) -> tuple[Tensors, Options]:
    """The tensors and the options of an op's arguments. torch passes a tuple as a list."""
    names = _GIVEN[op.name]
    tensors = _named(names, arguments)
    words = [tuple(x) if isinstance(x, list) else x for x in arguments[len(names) :]]
    try:
        return tensors, _known_options(op, inplace, *words)
    except TypeError:  # a symbolic number has no hash
        return tensors, _options(op, inplace, *words)


def _named(names: Sequence[str], arguments: Sequence[Any]) -> Tensors:
    """The tensors among an op's arguments. k is given under one of its two names."""
    tensors = {name: x for name, x in zip(names, arguments) if x is not None}
    if _ROTATED in names and (_ROTATED in tensors) == ("k" in tensors):
        raise InvalidInput(f"pass k either as k or, to rotate it in place too, as {_ROTATED}")
    return {"k" if name == _ROTATED else name: x for name, x in tensors.items()}


_GIVEN = {op.name: (*[name.rstrip("?") for name in _names(op)], *TABLE_NAMES) for op in OPERATIONS}
_WORDS = {op.name: _words(op) for op in OPERATIONS}  # the words of each op, in its order, with their defaults


def _options(op: Operation, inplace: bool, *words: Any) -> Options:
    values = {**_WORDS[op.name], **dict(zip(_WORDS[op.name], words))}
    norm = NormOptions(*[values.pop(name) for name in _NORM]) if op.norm else None
    sections = tuple(values["mrope_section"])
    values = {"interleaved_out": values["interleaved"], **values, "mrope_section": sections[sections == (0,) :]}
    return Options(**values, norm=norm, inplace=inplace)


_known_options = lru_cache(maxsize=1024)(_options)


def run_op(op: Operation, tensors: Tensors, options: Options) -> Tensors:
    """Return the results of an operation from torch's op."""
    function = getattr(torch.ops.jitrope, name_of(op, options.inplace))
    if not watch.is_compiling():  # torch gives the op lazy zeros with other strides than were checked
        tensors = {name: x.clone() if watch.is_zero(x) else x for name, x in tensors.items()}
    out = function(*arguments(op, tensors, options))
    if out is None:
        return op.outputs(tensors, options)
    results = (out,) if isinstance(out, Tensor) else out
    made = dict(zip(op.results, results))
    return op.complete({name: made[name] for name in op.made(tensors, options)}, tensors, options)


# ---- registration --------------------------------------------------------------------------------

Run = Callable[[Operation, Tensors, Options], Tensors]


def _on_cpu(op: Operation, tensors: Tensors, options: Options) -> Tensors:
    with torch.autocast("cpu", enabled=False):  # as on a GPU, the words say what is rounded
        results = op.on_cpu(tensors, options)
    watch.written([tensors[name] for name in op.written(options) if name in tensors])
    return results


def register(key: str, run: Run) -> None:
    """Make `run` the implementation of all ops for a dispatch key."""
    for op, inplace in FORMS:
        _lib.impl(name_of(op, inplace), _implementation(op, inplace, run), key)


def register_launches(key: str) -> None:
    """Make launches the implementation of all ops for a dispatch key, and for its key of autograd."""
    for op, inplace in FORMS:
        _lib.impl(name_of(op, inplace), _launches(op, inplace), key, with_keyset=True)
        if watch.records_ops and not inplace and not op.mutated:
            _lib.impl(
                op.name, _launches(op, inplace, cache(partial(_autograd, op))), f"Autograd{key}", with_keyset=True
            )


def _launches(op: Operation, inplace: bool, recorded: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """The implementation of an op on a GPU. A call like a recent one is not read again (`replay`).

    recorded: makes the implementation of calls that autograd records, or that more than autograd watches. All others
    skip torch's Python layer of autograd, which takes longer than the launch.
    """
    name, names = name_of(op, inplace), _GIVEN[op.name]
    first, sections = len(names), [*_WORDS[op.name]].index("mrope_section")
    silent = inplace or not op.results

    def call(keys: Any, *given: Any) -> Any:
        words = given[first:]
        if len(words) > sections:  # torch passes a list
            words = (*words[:sections], tuple(words[sections]), *words[sections + 1 :])
        try:
            recent = () if watch.watched() else launch.local.recent[name, words]
        except (KeyError, TypeError):  # a symbolic number has no hash
            recent = ()
        for replay in recent:
            out = replay(*given[:first])
            if out is not None:
                return None if silent else out
        tensors = _named(names, given)
        plain, wants = watch.plain(tensors), watch.wants_grad(*tensors.values())
        if recorded is not None and (wants or not plain):
            return recorded()(keys, *given)
        tensors, options = read(op, given, inplace)
        key = (name, words, *tensors)
        known = launch.find(key, tensors) or launch.prepare(op, tensors, tensors, key, options)
        outputs = None if silent else _outputs(op, op.made(tensors, options))
        if plain and not wants:
            launch.keep_in_mind(known, tensors, (name, words), outputs=outputs, arguments=_parameters(names, given))
        results = known.run(tensors)
        return None if outputs is None else outputs(results)

    return call


def _parameters(names: Sequence[str], given: Sequence[Any]) -> tuple[str, ...]:
    """The names of an op's tensors in a replay's source."""
    found = [name if x is not None else f"no_{name}" for name, x in zip(names, given)]
    return tuple(["k" if name == _ROTATED else name for name in found])


def _implementation(op: Operation, inplace: bool, run: Run) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        tensors, options = read(op, given, inplace)
        results = run(op, tensors, options)
        return _outputs(op, op.made(tensors, options))(results) if op.results and not inplace else None

    return call


def _outputs(op: Operation, made: Sequence[str]) -> Callable[[Tensors], Any]:
    """A function that makes an op's outputs, or its one output, of its results."""
    return itemgetter(*op.results) if op.function and len(made) == len(op.results) else partial(_completed, op, made)


def _completed(op: Operation, made: Sequence[str], results: Tensors) -> Any:
    """The outputs of an op, or its one output. A missing one is empty, and none may share memory with another.

    Only the gradients of weights and biases share memory, parts of one tensor of sums.
    """
    if not op.function:
        parts = [name for name in op.results if name.endswith(("_weight", "_bias"))]
        results = {**results, **{name: results[name].clone() for name in parts[1:] if name in results}}
    some = next(iter(results.values()))
    outputs = [results[name] if name in made and name in results else some.new_empty(0) for name in op.results]
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _fakes(op: Operation, tensors: Tensors, options: Options) -> Tensors:
    planning.note(op, tensors, options)
    return op.fakes(tensors, options)


# ---- the backward ----------------------------------------------------------------------------------


def keep(ctx: Any, op: Operation, names: Sequence[str], tensors: Tensors, outputs: Any, options: Options) -> None:
    """Save the tensors and names for the backward of a call. names, outputs: "" for a missing one.

    The gradients of tables need q and k too.
    """
    learned = tuple([name for name in LEARNED if name in tensors and tensors[name].requires_grad])
    saved = tensors if learned else op.saved(tensors, options)
    ctx.kept = op, tuple(saved), names, tuple(outputs), options, learned
    ctx.zeros = {}
    if watch.sharded(tensors.values()):
        from .sharding import zeros_like

        ctx.zeros = {name: zeros_like(x) for name, x in tensors.items() if name in op.names and x.requires_grad}
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*saved.values())


def gradients(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of all tensors of a call, None for those without."""
    from .dispatch import call

    op, saved, names, results, options, learned = ctx.kept
    given = {name: grad for name, grad in zip(results, grads) if name and grad is not None}
    tensors = dict(zip(saved, ctx.saved_tensors))  # a checkpoint allows one access
    needed = op.saved(tensors, options) if learned else tensors
    if learned and not torch.is_grad_enabled():  # a launch like a recent one, whose tables are not learned
        needed = {name: x.detach() if name in learned else x for name, x in needed.items()}
    found = op.gradient(call, needed, dict(given), options) if given else {}
    if learned and given:
        found.update(_of_tables(op, tensors, learned, given, options))
    zeros = ctx.zeros if given else {}
    return [zeros[name]() if found.get(name) is None and name in zeros else found.get(name) for name in names]


def _of_tables(op: Operation, t: Tensors, names: Sequence[str], grads: Tensors, o: Options) -> dict[str, Tensor | None]:
    """The gradients of the tables `names`, by torch's autograd through plain torch. grads: of the results."""
    again = torch.is_grad_enabled()  # the gradient of this gradient is wanted too
    if o.rounding != "complex128":
        o = changed(o, rounding="fp32")  # roundings do not change gradients
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


def _autograd(op: Operation) -> Callable[..., Any]:
    return watch.autograd_of(getattr(torch.ops.jitrope, op.name).default, *_recording(op))


def _recording(op: Operation) -> tuple[Callable[..., Any], Callable[..., None]]:
    """The backward of torch's op, and the function that saves what it needs."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors, options = read(op, inputs)
        made = op.made(tensors, options)
        names = [name if name in tensors else "" for name in _GIVEN[op.name]]
        keep(ctx, op, names, tensors, [name if name in made else "" for name in op.results], options)
        ctx.rest = len(inputs) - len(names)

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return *gradients(ctx, grads), *(None,) * ctx.rest

    return backward, setup


for _op, _inplace in FORMS:
    _lib.define(_schema(_op, _inplace), tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"jitrope::{name_of(_op, _inplace)}", _implementation(_op, _inplace, _fakes), lib=_lib)
    if not _inplace and not _op.mutated:
        _backward, _setup = _recording(_op)
        torch.library.register_autograd(f"jitrope::{_op.name}", _backward, setup_context=_setup, lib=_lib)
register("CPU", _on_cpu)
register_launches("CUDA")
