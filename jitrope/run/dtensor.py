"""DTensors: each rank runs the op on its own shards, without communication.

The rotation or the norm of a head needs no other head and no other token. So each dimension of the mesh may shard the
batch, the sequence or the heads, as the rows of `_rows` say. Other placements would need a gather, and are refused. A
plain tensor beside q and k must be the same on all ranks; each rank takes its part of it.

`dispatch` imports this file with the first DTensor, because it imports torch.distributed.tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, zeros

from .. import torch_state as watch
from ..base.fit import Fail
from ..base.layouts import LAYOUT_AXES
from ..base.views import MEANS, TABLE_NAMES, Tensors
from ..plan.options import Options
from ..sources.operation import Call, Operation
from ..stages import positions

Row = dict[str, Any]  # the placements of a call's tensors on one dimension of a mesh


def _axes(label: str, x: Any, call: Mapping[str, Any]) -> dict[str, int]:
    """The axes of a tensor that are the batch, the sequence and the heads. An axis of size 1 is shared."""
    axes: dict[str, int | None] = {}
    if label in ("q", "k"):
        axes = dict(zip(("batch", "seq", "heads"), LAYOUT_AXES[call["layout"]]))
    elif label in ("cos", "sin"):  # (P, W), (B, P, W) or (B, P, H, W)
        axes["batch"] = 0 if x.ndim > 2 and x.shape[0] != 1 else None
        by_place = call["position_ids"] is None and not call["bare"]  # else one row serves all
        axes["seq"] = min(x.ndim - 2, 1) if by_place else None
        axes["heads"] = 2 if x.ndim > 3 and x.shape[2] != 1 else None
    elif label == "position_ids":  # (S) or (B, S), with an axis before them for axis_of_pair
        alone = x.ndim == 1 + bool(call["axis_of_pair"]) or x.shape[-2] == 1
        axes = {"batch": None if alone else x.ndim - 2, "seq": x.ndim - 1}
    elif label in ("q_factor", *MEANS):  # a number, (S) or (B, S)
        axes = {"batch": 0 if x.ndim > 1 and x.shape[0] != 1 else None, "seq": x.ndim - 1 if x.ndim else None}
    elif label == "start_positions":
        axes["batch"] = 0
    return {word: axis for word, axis in axes.items() if axis is not None}


def _unsharded(call: Mapping[str, Any]) -> dict[str, str]:
    """The axes that must not be sharded, each with the reason."""
    seq = {"seq": f"{positions.WHOLE} count tokens of whole sequences; pass positions as ids instead"}
    heads = {"heads": "across_heads does not go with sharded heads"}
    return {**(seq if call["whole"] else {}), **(heads if call["across_heads"] else {})}


def _rows(call: Mapping[str, Any]) -> list[Row]:
    """All the ways to shard a call. call: its tensors and words by name."""
    axes = {label: _axes(label, x, call) for label, x in call.items() if hasattr(x, "ndim")}
    unsharded = _unsharded(call)
    rows: list[Row] = [{label: Replicate() for label in axes}]
    for word in [word for word in axes["q"] if word not in unsharded]:
        rows.append({label: Shard(own[word]) if word in own else Replicate() for label, own in axes.items()})
    if "heads" not in unsharded and "k" in axes and "heads" not in axes["cos"]:  # each rank has all heads of k, or of q
        rows += [{label: Replicate() if label == one else p for label, p in rows[-1].items()} for one in "kq"]
    return rows


def run(call: Call, op: Operation, tensors: Tensors, options: Options) -> Tensors:
    """The results of a checked call, as DTensors placed like q and k. call: makes the call of each rank."""
    given, rows = _prepared(op, tensors, options)
    local: Tensors = {}
    for name, x in given.items():
        sums = [name.endswith(("_weight", "_bias")) and row[name[0]].is_shard() for row in rows]
        local[name] = x.to_local(grad_placements=[Partial() if s else p for s, p in zip(sums, x.placements)])
    if watch.wants_grad(*local.values()) and not (options.inplace or watch.is_compiling()):
        wanted = [name for name, x in local.items() if x.requires_grad]
        local.update(zip(wanted, _Together.apply(*[local[name] for name in wanted])))
    found = call(op, local, options)
    if options.inplace:
        return {name: given[name] for name in found}
    return {name: _whole(x, given[name]) for name, x in found.items()}


class _Together(torch.autograd.Function):
    """Gives all tensors a gradient if one has one: torch's redistribution has no backward of a missing gradient."""

    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple([x.view_as(x) for x in xs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def _whole(x: Tensor, like: Any) -> Any:
    """The DTensor of a rank's result, which is placed like a tensor of the call."""
    meta = torch.empty_like(torch.empty_strided(like.shape, like.stride(), device="meta"))
    placed = {"shape": like.shape, "stride": meta.stride(), "run_check": False}
    return DTensor.from_local(x, like.device_mesh, like.placements, **placed)


def gradients_like(tensors: Tensors) -> dict[str, Callable[[Any], Any]]:
    """For each tensor that requires a gradient, a function that places it alike, and makes a missing one of zeros."""

    def placed(x: Any) -> Callable[[Any], Any]:
        alike = {"device_mesh": x.device_mesh, "placements": x.placements}
        shape, dtype = x.shape, x.dtype
        return lambda grad: zeros(shape, dtype=dtype, **alike) if grad is None else grad.redistribute(**alike)

    return {name: placed(x) for name, x in tensors.items() if x.requires_grad}


def _prepared(op: Operation, tensors: Tensors, options: Options) -> tuple[dict[str, Any], list[Row]]:
    """(the tensors of a checked call as DTensors, the rows of the mesh's dimensions)."""
    fail = Fail(op.function)
    given: dict[str, Any] = dict(tensors)
    call = {**dict.fromkeys(TABLE_NAMES), **given, **options._asdict()}
    whole = options.cp_size > 1 or "cu_seqlens" in given or positions.counted(given, options)  # `positions.WHOLE`
    call.update(bare=positions.bare(options), whole=whole)
    heads = {label: x for label, x in given.items() if label in ("q", "k")}
    for label, x in given.items():
        if label in heads and not isinstance(x, DTensor):
            fail(f"{op.label(label)} is a plain tensor beside DTensors; use DTensor.from_local")
        if isinstance(x, DTensor) and x.device_mesh != given["q"].device_mesh:
            fail(f"{label} is on {x.device_mesh}, q on {given['q'].device_mesh}; use one mesh")
    if options.inplace and call["cu_seqlens"] is not None and any(x.requires_grad for x in heads.values()):
        fail("DTensors that require a gradient do not go with cu_seqlens; call apply_rope")
    axes = {label: _axes(label, x, call) for label, x in given.items()}
    rows = [_row(op, n, heads, call) for n in range(given["q"].device_mesh.ndim)]
    for label in [label for label in given if label not in heads]:  # the same order on all ranks, for the backward
        given[label] = _beside(label, given, [row[label] for row in rows], axes, fail)
    _check_parts(given, axes, fail)
    if options.inplace and not watch.is_compiling():  # torch only counts writes to the shards
        watch.written(list(heads.values()))
    return given, rows


def _same(placements: Sequence[Any], wanted: Sequence[Any]) -> bool:
    # In some versions of torch a strided shard equals a shard.
    return all(type(p) is type(w) and p == w for p, w in zip(placements, wanted))


def _row(op: Operation, n: int, heads: Mapping[str, Any], call: Mapping[str, Any]) -> Row:
    """The placements of a call's tensors on dimension n of the mesh, by those of q and k."""
    for row in _rows(call):
        if _same([x.placements[n] for x in heads.values()], [row[label] for label in heads]):
            return row
    unsharded, axes = _unsharded(call), _axes("q", None, call)
    shards = [f"Shard({axis}) ({word})" for word, axis in axes.items() if word not in unsharded]
    allowed = ", ".join(["Replicate()", *shards])
    said, why = {op.label(name): x for name, x in heads.items()}, "; ".join(["", *unsharded.values()])
    placed = " and ".join([_placed(*pair) for pair in said.items()])
    must = f"allowed are {allowed}, the same for q and k, or the heads of one of them{why}"
    Fail(op.function)(f"{placed}; {must}; redistribute {' and '.join(said)}")


def _beside(label: str, given: dict[str, Any], wanted: list[Any], axes: Mapping[str, Any], fail: Fail) -> Any:
    """A tensor beside q with the wanted placements. It must be plain or replicated, so nothing is sent."""
    q: Any = given["q"]
    x: Any = given[label]
    everywhere = [Replicate()] * q.device_mesh.ndim
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, q.device_mesh, everywhere, run_check=False)
    if not x.ndim:  # a number
        return x
    seq = axes[label].get("seq", -1)
    tokens = q.shape[axes["q"]["seq"]] if Shard(seq) in wanted else x.shape[seq]
    if list(x.placements) == everywhere:
        x = x if x.shape[seq] == tokens else x.narrow(seq, 0, tokens)
        return x if wanted == everywhere else x.redistribute(q.device_mesh, wanted)
    if not _same(x.placements, wanted) or x.shape[seq] != tokens:
        wish = f"{tuple(wanted)}, with {tokens} rows, one for each token" if Shard(seq) in wanted else tuple(wanted)
        fail(f"{_placed(label, x)}; beside q it must be replicated, or {wish}; redistribute {label}")
    return x


def _check_parts(given: Mapping[str, Any], axes: Mapping[str, Any], fail: Fail) -> None:
    """Refuse axes too short to shard, which torch would gather, and shards that torch would cut differently."""
    parts: dict[str, dict[str, int]] = {"batch": {}, "seq": {}, "heads": {}}
    for label, x in given.items():
        for word, axis in axes[label].items():
            ranks = math.prod([x.device_mesh.size(n) for n, p in enumerate(x.placements) if p == Shard(axis)])
            if x.shape[axis] < ranks:
                fail(f"{_placed(label, x)}; it has too few {word} for {ranks} ranks; redistribute {label}")
            if ranks > 1:
                with torch.no_grad():
                    parts[word][label] = x.to_local().shape[axis]
    for word in [word for word in ("batch", "seq") if len(set(parts[word].values())) > 1]:
        fail(f"the {word} is cut in different parts, here {parts[word]}; use distribute_tensor")


def _placed(label: str, x: Any) -> str:
    return f"{label} is {tuple(x.shape)}, placed as {tuple(x.placements)}"
