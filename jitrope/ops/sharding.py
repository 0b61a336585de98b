"""DTensor: each rank calls with its own shards, and nothing is sent.

Rotating a head, and its norm, needs no other head and no other token. So every dimension of the mesh may shard the
batch, the tokens or the heads of q and k, and a rank takes its own part of what is there for each batch row, token or
head: tables, positions, lengths. The part of a replicated tensor, or of a plain one, which stands for a replicated one,
is a slice. Where the shards alone would not do, the call is refused: jitrope does not gather behind one's back.

The dispatching modules import this with the first DTensor they meet: it imports torch.distributed.tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..base.errors import InvalidInput
from ..plan.spec import LAYOUT_AXES, Norm, Options
from ..plan.views import Tables
from .launch import Check

Words = tuple[str, ...]
"""For each dimension of a mesh what it shards, "batch", "seq" or "heads", or "": nothing."""


def _axis(placement: Any) -> int:
    """Which axis a placement shards as torch.chunk does; -1: it does not, for subclasses of Shard have another order.

    Not by its type: what torch.compile traces may have lost that.
    """
    plain = placement.is_shard() and getattr(placement, "split_factor", None) is None
    return placement.dim if plain else -1


def _same(placements: Sequence[Any], wanted: Sequence[Any]) -> bool:
    return all(a.is_replicate() == b.is_replicate() and _axis(a) == _axis(b) for a, b in zip(placements, wanted))


class _Placed:
    """The tensors of one call that have heads, by their labels, on their mesh.

    words: what shards q, or the packed tensor; the others' are in `words_of`. allowed: what may be sharded, and why
    the rest may not.
    """

    def __init__(
        self, name: str, options: Options, allowed: Words = ("batch", "seq", "heads"), why: str = "",
        **tensors: Tensor | None,
    ) -> None:  # fmt: skip
        self.name, self.options, self.allowed, self.why = name, options, allowed, why
        self.axes = dict(zip(("batch", "seq", "heads"), LAYOUT_AXES[options.layout]))
        self.mesh: Any = None
        self.words_of = {label: self._words(label, x) for label, x in tensors.items() if x is not None}
        first = next(iter(self.words_of))
        self.words = self.words_of[first]
        for label, words in self.words_of.items():
            if any(a != b and (a + b) != "heads" for a, b in zip(self.words, words)):
                self.refuse(f"{first} is sharded as {self.words} but {label} as {words}; only heads may differ")
        q = tensors[first]
        assert q is not None
        self.tokens = q.shape[self.axes["seq"]]  # type: ignore[index]

    def refuse(self, message: str) -> NoReturn:
        raise InvalidInput(f"{self.name}: {message}")

    def _words(self, label: str, x: Tensor) -> Words:
        self._require_dtensor(label, x)
        named = {self.axes[word]: word for word in self.allowed if self.axes[word] is not None}
        words = []
        for placement in x.placements:  # type: ignore[attr-defined]
            word = "" if placement.is_replicate() else named.get(_axis(placement))
            if word is None:
                shards = ", ".join(f"Shard({axis}) ({word})" for axis, word in named.items())
                self.refuse(
                    f"{label} is placed as {x.placements}; allowed are Replicate() and {shards}{self.why}; "  # type: ignore[attr-defined]
                    f"redistribute {label}"
                )
            words.append(word)
        with torch.no_grad():
            local = x.to_local().shape  # type: ignore[attr-defined]
        for axis, word in named.items():
            # Positions are counted from the sizes of the shards, which therefore have to be DTensor's own.
            if word in words and local[axis] != self._part(x.shape[axis], word, words)[1]:  # type: ignore[index]
                self.refuse(
                    f"{label} is {tuple(x.shape)}, placed as {x.placements}, but this rank's part is {tuple(local)}, "  # type: ignore[attr-defined]
                    "which it is not in equal parts; make it with distribute_tensor, or give from_local the shape"
                )
        return tuple(words)

    def _require_dtensor(self, label: str, x: Tensor) -> None:
        if not isinstance(x, DTensor):
            self.refuse(f"{label} is a plain tensor beside DTensors; say with DTensor.from_local which part it is")
        self.mesh = x.device_mesh if self.mesh is None else self.mesh
        if x.device_mesh != self.mesh:
            self.refuse(f"{label} is on {x.device_mesh}, but others are on {self.mesh}")

    def _part(self, size: int, word: str, words: Sequence[str]) -> tuple[int, int]:
        """Where this rank's part of an axis begins, and its size: what torch.chunk gives, dimension for dimension."""
        begin = 0
        coordinate = self.mesh.get_coordinate()
        for dim, sharded in enumerate(words):
            if sharded == word:
                each = -(-size // self.mesh.size(dim))
                skipped = min(each * coordinate[dim], size)
                begin, size = begin + skipped, min(each, size - skipped)
        return begin, size

    # ---- what goes in -----------------------------------------------------------------------------

    def part(self, label: str, x: Tensor | None, axes: dict[str, int]) -> Tensor | None:
        """This rank's part of a tensor that has the axes of these words; of its tokens the call's are the first."""
        if x is None:
            return None
        words = self.words
        by_tokens = "seq" in axes and "seq" in words
        wanted = tuple(Shard(axes[word]) if word in axes else Replicate() for word in words)
        if isinstance(x, DTensor):
            self._require_dtensor(label, x)
            placements, rows = tuple(x.placements), x.shape[axes["seq"]] if by_tokens else self.tokens
            local: Tensor = x.to_local()
            if _same(placements, wanted) and rows == self.tokens:
                return local
            if not all(placement.is_replicate() for placement in placements):
                self.refuse(
                    f"{label} is {tuple(x.shape)}, placed as {placements}; beside q it is replicated, or placed as "
                    f"{wanted}" + (f" with {self.tokens} rows, one a token" if by_tokens else "")
                )
            x = local
        if by_tokens:
            x = x.narrow(axes["seq"], 0, self.tokens)
        for word, axis in axes.items():
            if word in words:
                x = x.narrow(axis, *self._part(x.shape[axis], word, words))
        return x

    def tables(self, tables: Tables) -> Tables:
        """This rank's parts of the tables, lengths, starts and positions."""
        cos, sin, cu_seqlens, starts, ids = tables
        options = self.options
        if "seq" in self.words:
            counted = {"cu_seqlens": cu_seqlens is not None, "start_positions": starts is not None,
                       "cp_size": options.cp_size > 1}  # fmt: skip
            for label, given in counted.items():
                if given:
                    self.refuse(
                        f"with {label} a shard of the sequence axis does not know its positions; give position_ids, "
                        "which say them, or redistribute q and k"
                    )
        ids_axes = {}
        if ids is not None:
            ids_axes = {"seq": ids.dim() - 1}
            if ids.dim() > 1 + bool(options.mrope_section) and ids.shape[-2] != 1:
                ids_axes["batch"] = ids.dim() - 2
        local_cos = self.table("cos", cos, ids is not None)
        local_sin = local_cos if sin is cos else self.table("sin", sin, ids is not None)
        return (
            local_cos, local_sin, self.part("cu_seqlens", cu_seqlens, {}),
            self.part("start_positions", starts, {"batch": 0}), self.part("position_ids", ids, ids_axes),
        )  # fmt: skip

    def table(self, label: str, table: Tensor, by_ids: bool) -> Tensor:
        """Of cos or sin, (P, W), (B, P, W) or (B, P, H, W); an axis of size 1 is shared."""
        axes = {} if by_ids else {"seq": 0 if table.dim() == 2 else 1}
        if table.dim() > 2 and table.shape[0] != 1:
            axes["batch"] = 0
        if table.dim() == 4 and table.shape[2] != 1:
            axes["heads"] = 2
            if len(set(self.words_of.values())) > 1:
                self.refuse(f"{label} has angles for each head, so that q and k are sharded alike")
        return self.part(label, table, axes)  # type: ignore[return-value]

    def weight(self, label: str, weight: Tensor | None, of: str) -> Tensor | None:
        """A norm's weight, whole; its gradient is a sum over the shards of q or k, whose label is `of`."""
        if weight is None:
            return None
        if not isinstance(weight, DTensor):
            weight = DTensor.from_local(weight, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        self._require_dtensor(label, weight)
        if not all(placement.is_replicate() for placement in weight.placements):
            self.refuse(f"{label} is placed as {weight.placements}; it is replicated")
        grads = [Partial() if word else Replicate() for word in self.words_of[of]]
        local: Tensor = weight.to_local(grad_placements=grads)
        return local

    def cache(self, label: str, cache: Tensor) -> Tensor:
        """A KV cache, (..., H, D), whose heads are sharded as k's."""
        self._require_dtensor(label, cache)
        wanted = tuple(Shard(cache.dim() - 2) if word else Replicate() for word in self.words_of["k"])
        if not _same(cache.placements, wanted):  # type: ignore[attr-defined]
            self.refuse(f"{label} is placed as {cache.placements}; beside k it is placed as {wanted}")  # type: ignore[attr-defined]
        return _to_write(cache)

    # ---- what comes out ---------------------------------------------------------------------------

    def whole(self, like: Tensor, local: Tensor | None, shape: Sequence[int] | None = None) -> Any:
        """The DTensor of which a rank's output is the shard, placed as an input; of its shape, if no other is given."""
        if local is None:
            return None
        shape = like.shape if shape is None else shape
        shards = dict.fromkeys(range(len(shape)), 1)
        for dim, placement in enumerate(like.placements):  # type: ignore[attr-defined]
            if placement.is_shard():
                shards[placement.dim] *= self.mesh.size(dim)
        placements = like.placements  # type: ignore[attr-defined]
        if all(size % shards[axis] == 0 for axis, size in enumerate(shape)):
            return DTensor.from_local(local, self.mesh, placements, run_check=False)
        stride, step = [0] * len(shape), 1
        for axis in sorted(range(len(shape)), key=lambda axis: (local.stride(axis), -axis)):
            stride[axis], step = step, step * shape[axis]
        return DTensor.from_local(
            local, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
        )


# ---- in place --------------------------------------------------------------------------------------


def _to_write(x: Any) -> Tensor:
    """A shard itself, for a call without gradient."""
    with torch.no_grad():
        return x.to_local()  # type: ignore[no-any-return]


def _in_place(placed: _Placed, tensors: Sequence[Tensor | None], call: Callable[..., Sequence[Tensor | None]]) -> None:
    """`call`, which writes the shards; under autograd it has copies, which are then written to the DTensors."""
    given = [x for x in tensors if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        outputs = call(*(None if x is None else x.to_local().clone() for x in tensors))  # type: ignore[attr-defined]
        for x, out in zip(tensors, outputs):
            if x is not None:
                x.copy_(placed.whole(x, out))
        return
    call(*(None if x is None else _to_write(x) for x in tensors))
    _count_writes(given)


def _count_writes(tensors: Sequence[Tensor]) -> None:
    if not torch.compiler.is_compiling():
        torch._C._increment_version(tensors)


# ---- checks ----------------------------------------------------------------------------------------
#
# The shapes of the whole tensors are checked here, so that all ranks refuse together; the call on the shards checks the
# rest.


def _outline(x: Any) -> Any:
    """For a DTensor a plain tensor of its shape, in next to no memory: checks take views, which not every torch's
    DTensor can give."""
    if not isinstance(x, DTensor):
        return x
    return torch.empty(sum(x.shape) + 1, dtype=x.dtype, device=x.device).as_strided(x.shape, (1,) * x.dim())


def _outlines(tables: Tables) -> Tables:
    return _outline(tables[0]), _outline(tables[1]), *tables[2:]


# ---- the calls, each of `dispatch` or `norm_ops`, which is handed in ----------------------------------


def rope(call: Any, q: Tensor, k: Tensor | None, tables: Tables, options: tuple[Any, ...], check: Check) -> Any:
    """`dispatch.call` on the shards."""
    o = Options(*options)
    if check is not None:
        check(q, k, _outlines(tables), options)
    placed = _Placed("apply_rope_" if o.in_place else "apply_rope", o, q=q, k=k)
    local = placed.tables(tables)
    if o.in_place:
        _in_place(placed, (q, k), lambda *shards: call(*shards, local, options, check))
        return q, k
    q_out, k_out = call(_local(q), _local(k), local, options, check)
    return placed.whole(q, q_out), placed.whole(k, k_out)  # type: ignore[arg-type]


def rope_fp8(
    call: Any, q: Tensor, k: Tensor | None, q_scale: Tensor, k_scale: Tensor | None, tables: Tables,
    options: tuple[Any, ...], check: Any,
) -> Any:  # fmt: skip
    """`dispatch.call_fp8` on the shards; the scales are every rank's."""
    check(q, k, q_scale, k_scale, _outlines(tables), options)
    placed = _Placed("apply_rope_fp8", Options(*options), q=q, k=k)
    scales = placed.part("q_scale", q_scale, {}), placed.part("k_scale", k_scale, {})
    q_out, k_out = call(_local(q), _local(k), *scales, placed.tables(tables), options, check)
    return placed.whole(q, q_out), placed.whole(k, k_out)  # type: ignore[arg-type]


def rope_kv_cache(call: Any, tensors: Sequence[Any], tables: Tables, options: tuple[Any, ...], check: Any) -> Any:
    """`dispatch.call_kv_cache` on the shards: each rank has a cache of its own heads, with every token's slot."""
    o = Options(*options)
    check(*tensors, _outlines(tables), options)
    q, k, v, k_cache, v_cache, slots, *scales = tensors
    name = "apply_rope_kv_cache_" if o.in_place else "apply_rope_kv_cache"
    placed = _Placed(name, o, ("heads",), ": a cache has the tokens of all", q=q, k=k, v=v)
    if placed.words_of["k"] != placed.words_of["v"]:
        placed.refuse("k and v are sharded in different ways")
    labels = ("q_scale", "k_scale", "v_scale")
    out = call(
        (
            _to_write(q), _to_write(k), _to_write(v), placed.cache("k_cache", k_cache),
            placed.cache("v_cache", v_cache), placed.part("slot_mapping", slots, {}),
            *(placed.part(label, scale, {}) for label, scale in zip(labels, scales)),
        ),
        placed.tables(tables), options, check,
    )  # fmt: skip
    _count_writes([k_cache, v_cache, *([q] if o.in_place else []), *([k] if o.k_too else [])])
    return q if o.in_place else placed.whole(q, out)


def rope_qkv(call: Any, qkv: Tensor, tables: Tables, options: tuple[Any, ...], check: Check) -> Any:
    """`dispatch.call_qkv` on the shards, whose heads are sharded in whole groups."""
    o = Options(*options)
    if check is not None:
        check(
            _outline(qkv), _outlines(tables), (*options[:-1], False)
        )  # an outline overlaps itself; shards are asked next
    placed = _Placed("apply_rope_qkv_" if o.in_place else "apply_rope_qkv", o, qkv=qkv)
    local = placed.tables(tables)
    if o.in_place:
        _in_place(placed, (qkv,), lambda shard: call(shard, local, options, check)[:1])
        return qkv, qkv, qkv
    *lead, groups, width = qkv.shape
    shards = 1
    for dim, word in enumerate(placed.words):
        shards *= placed.mesh.size(dim) if word == "heads" else 1
    if groups % shards:
        placed.refuse(f"qkv has {groups} groups on {shards} ranks; the parts of q would not be those of a DTensor")
    size = width // (o.q_per_group + 2)
    shapes = ((*lead, groups * o.q_per_group, size), (*lead, groups, size), (*lead, groups, size))
    return tuple(placed.whole(qkv, x, shape) for x, shape in zip(call(_local(qkv), local, options, check), shapes))


def norm(
    call: Any, q: Tensor, k: Tensor | None, weights: Sequence[Tensor | None], tables: Tables, options: tuple[Any, ...],
    norm: Norm, check: Any,
) -> Any:  # fmt: skip
    """`norm_ops.call` on the shards."""
    o = Options(*options)
    if check is not None:
        check(q, k, *weights, _outlines(tables), options, norm)
    allowed: Words = ("batch", "seq") if norm.across_heads else ("batch", "seq", "heads")
    why = ": across_heads needs all heads of a token" if norm.across_heads else ""
    placed = _Placed("qk_norm_rope_" if o.in_place else "qk_norm_rope", o, allowed, why, q=q, k=k)
    local = placed.tables(tables)
    own = (placed.weight("q_weight", weights[0], "q"), placed.weight("k_weight", weights[1], "k"))
    if o.in_place:
        _in_place(placed, (q, k), lambda *shards: call(*shards, own, local, options, norm, check))
        return q, k
    q_out, k_out = call(_local(q), _local(k), own, local, options, norm, check)
    return placed.whole(q, q_out), placed.whole(k, k_out)  # type: ignore[arg-type]


def norm_joint(
    call: Any, streams: Sequence[Tensor], weights: Sequence[Tensor | None], second_tables: Sequence[Tensor | None],
    tables: Tables, options: tuple[Any, ...], norm: Norm, check: Any,
) -> Any:  # fmt: skip
    """`norm_ops.call_joint` on the shards; the tokens of two streams cannot be sharded, for they are joined."""
    check(*streams, *weights, *(_outline(table) for table in second_tables), _outlines(tables), options, norm)
    labels = [letter + stream for stream in "12" for letter in "qkv"]
    why = ": a shard of each stream's tokens is none of the joint tokens'"
    placed = _Placed("qk_norm_rope_joint", Options(*options), ("batch", "heads"), why, **dict(zip(labels, streams)))
    words = placed.words_of
    if words["q1"] != words["q2"] or len({words[label] for label in ("k1", "v1", "k2", "v2")}) > 1:
        placed.refuse(f"the two streams, and k and v, are sharded alike; they are {words}")
    second = [None if table is None else placed.table("the second table", table, False) for table in second_tables]
    own = [placed.weight(f"weight of {of}", w, of) for of, w in zip(("q1", "k1", "q2", "k2"), weights)]
    outputs = call([_local(x) for x in streams], own, second, placed.tables(tables), options, norm, check)
    tokens = streams[0].shape[1] + streams[3].shape[1]
    return tuple(placed.whole(x, out, (x.shape[0], tokens, *x.shape[2:])) for x, out in zip(streams[:3], outputs))


def _local(x: Any) -> Any:
    return None if x is None else x.to_local()
