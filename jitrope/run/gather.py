"""Gather the tensors and words of a user's call, and send its results where `out` says."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..base.arguments import flags, hint, parts, refuse, refuse_beside
from ..base.errors import InvalidInput
from ..base.views import Tensors
from ..checks.checks import require_apart
from ..checks.words import ONE_TABLE, rotates_heads, unexpected
from ..plan.options import Options
from ..sinks.cache import KVCache
from ..sinks.results import Ulysses
from ..sources.heads import OF_KV, OF_V, Heads, of_v_alone
from ..sources.operation import Operation
from ..sources.source import is_dense, joins_k
from ..stages.convert import DynamicQuantize, Quantize, Scaled, converts_v
from ..stages.norm import NO_NORM, Norm
from ..stages.positions import Positions
from ..stages.rotate import WITHOUT_TABLE
from ..stages.transform import LABEL as TRANSFORM
from ..torch_state import sharded
from ..values.constants import scales
from .dispatch import call

_TABLE_NAMES = ("cos", "sin", *ONE_TABLE)


def gather(
    op: Operation,
    tensors: Tensors,
    words: Any,
    allowed: frozenset[str],
    positions: Any = None,
    inplace: bool = False,
    norm: Any = None,
    cache: Any = None,
    quantize: Any = None,
    transform: Any = False,
) -> dict[str, Any]:
    """Add the tensors of a call's words and values to its others; return the words of all stages and sinks."""
    name, like = op.function, next(iter(tensors.values()))
    own = flags(name, **{TRANSFORM: transform})
    refuse_beside(name, own, [] if quantize is None else ["quantize"], "give it to that")
    for word in [*words]:
        if word not in allowed:
            raise unexpected(name, word)
        if word in ONE_TABLE:
            tensors[word] = words.pop(word)
        elif word == "q_scale":  # fp8 has a tensor of this name
            tensors.update(zip(["q_factor"], scales(name, like, q_scale=words.pop(word)).values()))
    if inplace is not False:
        words["inplace"] = inplace
    if positions is not None:
        words = {**placed(op, tensors, positions), **words}
    for label in [label for label, x in tensors.items() if x is None]:
        del tensors[label]
    if {*tensors}.isdisjoint(_TABLE_NAMES):  # nothing is rotated
        for label in WITHOUT_TABLE.split():
            tensors.pop(label, None)
            words.pop(label, None)
    words.update(own)
    kinds: Any = (Quantize, DynamicQuantize)
    for label, value, kind in (("norm", norm, (Norm,)), ("cache", cache, (KVCache,)), ("quantize", quantize, kinds)):
        if value is not None:
            add(name, label, value, kind, tensors, words)
    if cache is not None and quantize is not None:  # k and v go to the cache, which has its own scales
        refuse_beside(name, ["quantize"] * (op is OF_KV), ["q=None"], "leave it out")
        dynamic = "_global" * isinstance(quantize, DynamicQuantize)
        beside = [f"{letter}{dynamic}_scale" for letter in "kv" if f"{letter}_scale" in quantize.tensors]
        beside += ["v=True"] * ("dynamic_v" in quantize.words)
        refuse_beside(name, [f"{x} of quantize" for x in beside], ["a cache"], "give its scales to KVCache")
    return words  # type: ignore[no-any-return]


def placed(op: Operation, tensors: Tensors, positions: Any) -> dict[str, Any]:
    """Add the tensors of `positions` to the others; return its words."""
    if isinstance(positions, Positions):
        tensors.update(positions.tensors)
        return positions.words
    if not isinstance(positions, Tensor):
        must, n = "a tensor of ids, or a jitrope.Packed, Mrope, Shifts or Starts", positions
        row = f"; for all rows to begin at {n} pass cos[{n}:] and sin[{n}:]" * (type(n) is int)
        refuse(op.function, "positions", n, must + (row or hint("positions", n)))
    tensors["position_ids"] = positions
    return {}


def add(name: str, label: str, value: Any, kinds: Any, tensors: Tensors, words: dict[str, Any]) -> None:
    """Add the tensors and words of a value, of one of these kinds, to those of a call."""
    if not isinstance(value, kinds):
        refuse(name, label, value, " or ".join([kind.form for kind in kinds]) + hint(label, value))
    tensors.update(scales(name, next(iter(tensors.values()), None), **value.tensors))
    words.update(value.words)


def sent(op: Operation, tensors: Tensors, words: dict[str, Any], quantize: Any = None, letters: str = "qkv") -> Tensors:
    """The results of a call by name: fresh ones, the tensors of `out`, or with `Ulysses` a group of heads for a rank.

    letters: those of `out`.
    """
    out, given = words.pop("out", None), {}
    if isinstance(out, Ulysses) and op.name != "latent":
        refuse_beside(op.function, ["Ulysses"], ["a cache"] if "k_cache" in tensors else [], "leave out= out")
        words.update(out.words)
    elif out is not None:
        items = zip(letters, parts(op.function, "out", out, len(letters)))
        refuse_beside(op.function, [x for x in words if x == "inplace"], ["out"], "leave it out")
        given = {letter: x for letter, x in items if x is not None}
        for letter, x in given.items():
            why = "goes to the cache" if "k_cache" in tensors and letter != "q" else "is None"
            if why != "is None" or (isinstance(op, Heads) and letter not in tensors):
                refuse(op.function, f"out's {letter}", x, f"None, because {letter} {why}")
    per = "token" if quantize is None else quantize.per
    tensors.update({f"{letter}_out": x for letter, x in given.items()})
    found = {} if per == "token" else with_scales(op, tensors, words, per)
    return {**given, **call(op, tensors, words), **found}


def with_scales(op: Operation, tensors: Tensors, words: dict[str, Any], per: str) -> Tensors:
    """The scales of each head of a batch row, computed in their own launch; they are added to the tensors.

    per: a word of `DynamicQuantize`. With "kv_head" the heads of q that share a head of k have the largest of theirs.
    """
    of_cache = ["a cache"] if "k_cache" in tensors else []
    refuse_beside(op.function, [f"per={per!r}"], of_cache, "pass q's scales in Quantize")
    of_v = words.pop("dynamic_v", False)
    own = {word: x for word, x in words.items() if word != "ulysses_degree" and (of_v or word != "v_norm")}
    own = {**NO_NORM, **own, "per_row": True, "dynamic_v": of_v}
    read = {name: x for name, x in tensors.items() if not name.endswith("_out") and (of_v or name != "v")}
    if op.name == "streams":  # a launch counts its tokens by its outputs, which this one does not write
        both = op.shaped(tensors, Options())
        read.update({f"{letter}_out": both[letter] for letter in "qkv"})
    found = call(op, read, own)
    tensors.update(found)
    if per == "kv_head":
        heads, of_k = (found[name].shape[-1] if name in found else 0 for name in ("q_scale", "k_scale"))
        if not heads or not of_k or heads % of_k:
            raise InvalidInput(f"{op.function}: per='kv_head' needs a multiple of k's heads; q has {heads}, k {of_k}")
        found["q_scale"] = found["q_scale"].unflatten(-1, (of_k, -1)).amax(-1)
        tensors["q_scale"] = found["q_scale"].repeat_interleave(heads // of_k, -1)
    return found


def result(out: Tensors, name: str) -> Any:
    """A result of a call, with its scale if it has one."""
    return Scaled(out[name], out[f"{name}_scale"]) if f"{name}_scale" in out else out.get(name)


def with_v(op: Operation, tensors: Tensors, words: dict[str, Any], v: Any) -> Any:
    """Add v to the tensors if the launch of q and k reads it. Return v, normalised if that took a launch of its own.

    One launch needs a v like k, tables that the heads share, and fresh results or tensors in `out`. A v that is not
    converted also needs a rotation of whole heads: squares are then summed in the order of a launch for v alone.
    """
    name, out, normed, source = op.function, words.get("out"), "v_norm" in words, v
    converts, ranks = converts_v(tensors, "dynamic_v" in words), isinstance(out, Ulysses)
    given = isinstance(out, (list, tuple)) and out[2:] and out[2] is not None
    if converts and not is_dense(v):
        refuse(name, "v", v, f"a tensor, because quantize has {'v=True' if 'dynamic_v' in words else 'a v_scale'}")
    if normed and not isinstance(v, Tensor):
        refuse(name, "v", v, "a tensor, because the norm has v_norm")
    joins = False
    if normed:
        xs: list[Any] = [v, tensors.get("k"), *[tensors[x] for x in _TABLE_NAMES if x in tensors]]
        one = all(is_dense(x) and x.dim() > 1 for x in xs) and joins_k(*xs[:3]) and xs[1].device == v.device
        one = one and not ("across_heads" in words or "inplace" in words or sharded((v, *tensors.values())))
        staged = "out_dtype" in words or TRANSFORM in words or "q_scale" in tensors
        alone = given or not (staged or ranks)
        joins = one and bool(converts or (alone and rotates_heads(tensors, words, v.shape[-1])))
    if normed and not joins:
        v = call(OF_V, {"q": v}, of_v_alone(words))["q"]
        del words["v_norm"]
    if v is not None and (joins or converts or ranks or given):
        tensors["v"] = v
    if given and v is not source:
        items = zip("qkv", parts(name, "out", out, 3))
        require_apart(name, {f"out's {letter}": x for letter, x in items if x is not None}, {"v": source}, {})
    return v
