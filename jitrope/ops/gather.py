"""Gather the tensors and words of a user's call."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from ..base.arguments import refuse
from ..base.errors import InvalidInput
from ..plan.options import NO_NORM, NormOptions, Options
from ..plan.views import BLOCK_SCALES, Tensors, converts_v, fused_part
from ..sinks.results import empty_elements
from .dispatch import call
from .fit import require_apart
from .heads import NORM_OF_V, norm_of_v
from .kv_cache import KVCache
from .operation import Operation, operation
from .outs import is_dense, joins_k
from .quantize import DynamicQuantize, Quantize, Scaled, hadamard_words
from .source import Source
from .values import Norm, Positions, Ulysses, scales
from .watch import sharded
from .words import ONE_TABLE, parts, rotates_heads, unexpected

_TABLE_NAMES = ("cos", "sin", *ONE_TABLE)


def chosen(
    source: Source, name: str, norm: Any, cache: Any, quantize: Any, hadamard: Any
) -> tuple[Operation, dict[str, Any]]:
    """(the operation of a source with these stages, the words of its conversion or its transform)."""
    if quantize is None:
        words, convert = {} if hadamard is False else hadamard_words(name, hadamard), ""
    else:
        if not isinstance(quantize, (Quantize, DynamicQuantize)):
            refuse(name, "quantize", quantize, "a jitrope.Quantize or DynamicQuantize")
        if hadamard is not False:
            raise InvalidInput(f"{name}: hadamard is given beside quantize, which has its own; give it to that")
        computed = isinstance(quantize, DynamicQuantize) and (quantize.per == "token" or cache is not None)
        words, convert = quantize.words, "computed" if computed else "given"
    transform = "hadamard" in words
    blocks = BLOCK_SCALES[0] in getattr(cache, "tensors", ())  # storing needs all elements of a head
    whole = source.whole or norm is not None or transform or convert == "computed" or blocks
    return operation(source, norm=whole, convert=convert, transform=transform, cache=cache is not None), words


def gather(
    op: Operation, tensors: Tensors, words: Any, allowed: frozenset[str], positions: Any = None, inplace: bool = False
) -> dict[str, Any]:
    """Move tables and positions that are not None from the words to the tensors; return the remaining words."""
    for word in [*words]:
        if word not in allowed:
            raise unexpected(op.function, word)
        if word in ONE_TABLE:
            tensors[word] = words.pop(word)
        elif word == "q_scale":  # fp8 has a tensor of this name
            like = next(iter(tensors.values()))
            factor: Any = scales(op.function, like, q_scale=words.pop(word)).get(word)
            tensors["q_factor"] = factor
    if inplace is not False:
        words["inplace"] = inplace
    if positions is not None:
        words = {**placed(op, tensors, positions), **words}
    for name in [*tensors]:
        if tensors[name] is None:
            del tensors[name]
    return words  # type: ignore[no-any-return]


def placed(op: Operation, tensors: Tensors, positions: Any) -> dict[str, Any]:
    """Add the tensors of `positions` to the others; return its words."""
    if isinstance(positions, Positions):
        tensors.update(positions.tensors)
        return positions.words
    if not isinstance(positions, Tensor):
        refuse(op.function, "positions", positions, "a tensor of ids, or a jitrope.Packed, Mrope, Shifts or Starts")
    tensors["position_ids"] = positions
    return {}


def forget_positions(tensors: Tensors, words: dict[str, Any]) -> None:
    """Drop the positions of a call without a table, which rotates nothing."""
    for name in _TABLE_NAMES:
        if name in tensors:
            return
    for name in ("position_ids", "start_positions"):
        tensors.pop(name, None)
    for word in ("mrope_section", "mrope_interleaved", "shifts", "unrotated", "rotary_dim", "rotary_offset"):
        words.pop(word, None)


def add(name: str, label: str, value: Any, kind: Any, tensors: Tensors, words: dict[str, Any]) -> None:
    """Add the tensors and words of a value to those of a call."""
    if not isinstance(value, kind):
        refuse(name, label, value, f"a jitrope.{kind.__name__}")
    tensors.update(value.tensors)
    words.update(value.words)


def staged(
    op: Operation, tensors: Tensors, words: dict[str, Any], like: Any, norm: Any, cache: Any, quantize: Any
) -> None:
    """Add the tensors and words of a call's norm, cache and conversion to its others. like: a tensor on its device."""
    name = op.function
    if norm is not None:
        add(name, "norm", norm, Norm, tensors, words)
    elif op.norm:
        words["norm"] = NO_NORM
    forget_positions(tensors, words)
    if cache is not None:
        add(name, "cache", cache, KVCache, tensors, words)
    if cache is not None and quantize is not None and "dynamic_v" in quantize.words:
        raise InvalidInput(f"{name}: v=True of quantize does not go with a cache, which has v_block_scale")
    if quantize is not None and quantize.given:
        given = quantize.on(like)
        for letter in [letter for letter in "kv" if cache is not None and f"{letter}_scale" in given]:
            dynamic = isinstance(quantize, DynamicQuantize)
            label, instead = ("global_scale", "leave it out") if dynamic else ("scale", "give it to KVCache")
            raise InvalidInput(f"{name}: quantize has a {letter}_{label}, but {letter} goes to the cache; {instead}")
        tensors.update(given)


def with_v_out(words: dict[str, Any], v: Any) -> None:
    """Add a tensor for a converted v to the word `out`, if it has none."""
    name, out = "prepare_qkv", words.get("out")
    article, given = ("", "v=True") if "dynamic_v" in words else ("a ", "v_scale")
    if not is_dense(v):
        refuse(name, "v", v, f"a tensor, because quantize has {article}{given}")
    if isinstance(out, Ulysses):
        return
    q, k, v_out = (None,) * 3 if out is None else parts(name, "out", out, 3)
    words["out"] = (q, k, empty_elements(v, words.get("out_dtype", "fp8")) if v_out is None else v_out)


def call_fused_into(
    op: Operation, tensors: Tensors, words: dict[str, Any], out: Any, quantize: Any
) -> tuple[Any, Any, Any]:
    """q, k and v of a fused call with stages of `prepare_qkv`; k and v in a cache are None."""
    stays = words.get("copy_v") is False
    for label, refused in (("a cache; leave out= out", op.cache), ("copy_v=False; leave copy_v out", stays)):
        if isinstance(out, Ulysses) and refused:
            raise InvalidInput(f"{op.function}: Ulysses does not go with {label}")
    options = Options(q_per_group=words["q_per_group"], order=words["order"])
    wanted = "q" if op.cache else "qk" if stays else "qkv"
    found = into_given(op, tensors, words, out, quantize, options, wanted if is_dense(tensors.get("qkv")) else "")
    if "v" not in found and not op.cache:
        found["v"] = fused_part(tensors["qkv"], "v", options)
    return result(found, "q"), result(found, "k"), result(found, "v")


def into_given(
    op: Operation, tensors: Tensors, words: dict[str, Any], out: Any, quantize: Any, options: Options, wanted: str
) -> Tensors:
    """The results of a call that writes to the tensors of `out`, and to fresh ones where there are none.

    options: those that say the shapes of results. wanted: the letters of fresh results; the check refuses a call
    without them. With `Ulysses` each rank has a group of heads.
    """
    ranks, out = (out.words["ulysses_degree"], None) if isinstance(out, Ulysses) else (0, out)
    found = {} if out is None else items_of_out(op, out, "qkv")
    converted = "" if quantize is None else "qkv" if converts_v(tensors, "dynamic_v" in words) else "qk"
    for letter in [letter for letter in wanted if letter not in found]:
        word = words.get("out_dtype", "fp8") if letter in converted else ""
        x = op.source.empty(letter, tensors, options, word)
        if ranks:
            *lead, heads, dim = x.shape
            x = x.new_empty((ranks, *lead, heads // ranks, dim))
        found[letter] = x
    tensors.update({f"{letter}_out": x for letter, x in found.items()})
    rows = quantize is not None and quantize.per != "token"
    of_rows = with_scales(op, tensors, words, quantize.per) if rows else {}
    return {**found, **call(op.to("given"), tensors, words), **of_rows}


def items_of_out(op: Operation, out: Any, letters: Collection[str]) -> Tensors:
    """The tensors of the word `out` by letter, without those that are None."""
    items = dict(zip(letters, parts(op.function, "out", out, len(letters))))
    for letter, x in items.items():
        if x is not None and op.cache and letter != "q":
            refuse(op.function, f"out's {letter}", x, f"None, because {letter} goes to the cache")
    return {letter: x for letter, x in items.items() if x is not None}


def given_out(
    op: Operation, asked: dict[str, Any], heads: Mapping[str, Any], tensors: Tensors, source: Any = None
) -> Tensors:
    """Move the output tensors of a call with `out` from its words to its tensors, and return them by name.

    heads: q, k and perhaps v, in the order of `out`. For q and k an item that is None is replaced by a fresh tensor.
    source: the user's v, if v is a normalised copy of it.
    """
    out = asked.pop("out", None)
    if out is None:
        return {}
    name = op.function
    found = items_of_out(op, out, heads)
    for letter, x in found.items():
        if heads[letter] is None:
            refuse(name, f"out's {letter}", x, f"None, because {letter} is None")
    if not found:
        return {}
    if "v" in found:
        tensors["v"] = heads["v"]
    words = {word: asked[word] for word in ("out_dtype", "computed", "dynamic_v") if word in asked}
    for letter in [x for x in op.made(tensors, Options()) if x in heads and x not in found and is_dense(heads[x])]:
        found[letter] = op.source.empty(letter, tensors, Options(), op.format_of(letter, tensors, Options(**words)))
    tensors.update({f"{letter}_out": x for letter, x in found.items()})
    if source is not heads.get("v"):
        require_apart(name, {f"out's {letter}": x for letter, x in found.items()}, {"v": source})
    return found


def call_into(
    op: Operation, tensors: Tensors, words: dict[str, Any], heads: Mapping[str, Any], v: Any = None
) -> Tensors:
    """The results of a call with the word `out`: `Ulysses`, or tensors; see `given_out`."""
    if isinstance(words["out"], Ulysses):
        if op.cache:
            raise InvalidInput(f"{op.function}: Ulysses does not go with {op.said}; leave out= out")
        words.update(words.pop("out").words)
        if heads.get("v") is not None:
            tensors["v"] = heads["v"]
        return call(op.to("ranks"), tensors, words)
    into = given_out(op, words, heads, tensors, v)
    return {**into, **call(op.to("given") if into or "inplace" in words else op, tensors, words)}


def with_scales(op: Operation, tensors: Tensors, words: dict[str, Any], per: str, v: Any = None) -> Tensors:
    """The scales of each head of a batch row, computed in their own launch; they are added to the tensors.

    per: a word of `DynamicQuantize`. With "kv_head" the heads of q that share a head of k have the largest of theirs.
    v: a tensor of its own, read if it has a scale too.
    """
    if "k_cache" in tensors:
        raise InvalidInput(f"{op.function}: per={per!r} does not go with a cache; pass q's scales in Quantize")
    own = {word: x for word, x in words.items() if word != "out"}
    norm = words.get("norm", NO_NORM)
    of_v = words.pop("dynamic_v", False)
    own.update(norm=norm if of_v else _without_v(norm), per_row=True)
    of_rows = operation(op.source, norm=True, convert="rows", transform=op.transform)
    joined = op.source.word == "streams"  # the outputs say how many tokens there are
    read = {name: x for name, x in tensors.items() if joined or not name.endswith("_out")}
    found = call(of_rows, {**read, "v": v} if of_v and v is not None else read, own)
    tensors.update(found)
    if per == "kv_head":
        heads, of_k = (found[name].shape[-1] if name in found else 0 for name in ("q_scale", "k_scale"))
        if not heads or not of_k or heads % of_k:
            raise InvalidInput(f"{op.function}: per='kv_head' needs a multiple of k's heads; q has {heads}, k {of_k}")
        found["q_scale"] = found["q_scale"].unflatten(-1, (of_k, -1)).amax(-1)
        tensors["q_scale"] = found["q_scale"].repeat_interleave(heads // of_k, -1)
    return found


def _without_v(norm: NormOptions) -> NormOptions:
    """The norm of q and k alone. Dynamo of torch 2.6 cannot trace `_replace`."""
    rounding, across_heads, zero_centered, after_rope, _, kind, of, eps = norm
    return NormOptions(rounding, across_heads, zero_centered, after_rope, kind=kind, of=of, eps=eps)


def result(out: Tensors, name: str) -> Any:
    """A result of a call, with its scale if it has one."""
    return Scaled(out[name], out[f"{name}_scale"]) if f"{name}_scale" in out else out.get(name)


def with_v(op: Operation, tensors: Tensors, words: dict[str, Any], v: Any) -> Any:
    """v, to be normalised in the launch of q and k, or normalised in a launch of its own.

    One launch needs a v like k, tables that the heads share, and fresh results or tensors in `out`. A v that is not
    converted also needs a rotation of whole heads: squares are then summed in the order of a launch for v alone.
    """
    if not isinstance(v, Tensor):
        refuse("prepare_qkv", "v", v, "a tensor, because the norm has v_norm")
    out = words.get("out")
    xs: list[Any] = [v, tensors.get("k"), *[tensors[name] for name in _TABLE_NAMES if name in tensors]]
    one = all(is_dense(x) and x.dim() > 1 for x in xs) and joins_k(*xs[:3]) and xs[1].device == v.device
    one = one and not (words["norm"].across_heads or "inplace" in words or sharded((v, *tensors.values())))
    if one and converts_v(tensors, "dynamic_v" in words):
        return v
    if one and rotates_heads(tensors, words, v.shape[-1]):
        if not (op.convert or op.transform or isinstance(out, Ulysses)):
            tensors["v"] = v
            return v
        if isinstance(out, (list, tuple)) and out[2:] and out[2] is not None:
            return v
    own = {"layout": words["layout"]} if "layout" in words else {}
    own["norm"] = norm_of_v(words["norm"])
    words["norm"] = _without_v(words["norm"])
    return call(NORM_OF_V, {"q": v}, own)["q"]
