"""DTensor inputs against plain ones: the same bits on every rank, the same placements, and nothing sent.

Four processes with gloo run every case once; a test then reads what its case gave.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import jitrope
from jitrope.plan.spec import LAYOUT_AXES

if not dist.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

WORLD = 4
LIMIT_S = 240.0
R = Replicate()
B, S, D = 4, 8, 16
Case = Callable[[], None]
CASES: dict[str, Case] = {}
MESHES: dict[str, DeviceMesh] = {}  # of each process: "4", "3" and "2" ranks, "2x2"


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


# ---- what cases are made of --------------------------------------------------------------------------


def table(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    angles = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 6
    return angles.cos(), angles.sin()


def heads(n: int, *, b: int = B, s: int = S, layout: str = "bshd", seed: int = 0, dtype: Any = torch.float32) -> Tensor:
    sizes = dict(zip("bshd", (b, s, n, D)))
    shape = [b * s if letter == "t" else sizes[letter] for letter in layout]
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def place(x: Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> Any:
    """Without a word between the ranks, which all have x."""
    return DTensor.from_local(x, mesh, [R] * mesh.ndim, run_check=False).redistribute(mesh, placements)


class Silence(CommDebugMode):
    """Nothing is sent inside."""

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None:
            assert self.get_total_counts() == 0, dict(self.get_comm_counts())


def same(x: Any, expected: Tensor, placements: Sequence[Any], exact: bool = True) -> None:
    assert isinstance(x, DTensor), type(x)
    assert tuple(x.placements) == tuple(placements), (x.placements, placements)
    assert x.shape == expected.shape
    assert x.dtype == expected.dtype
    full = x.full_tensor()
    if exact:
        assert torch.equal(full.float(), expected.float()), (full.float() - expected.float()).abs().max()
    else:
        torch.testing.assert_close(full, expected)


Function = Callable[..., Sequence[Any]]


def compiled(function: Function) -> Function:
    """Compiled whole; its graphs send nothing, which CommDebugMode cannot watch."""

    def silent(graph: Any, _: Any) -> Any:
        sent = [node for node in graph.graph.nodes if "c10d" in str(node.target)]
        assert not sent, sent
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=silent))  # type: ignore[return-value]


def against_plain(
    mesh: DeviceMesh, function: Function, inputs: Sequence[tuple[Tensor, Sequence[Any]]],
    outputs: Sequence[Sequence[Any]], grads: Sequence[Sequence[Any]] | None = None, exact: Sequence[bool] = (),
    sharded: Function | None = None, watch: Any = None,
) -> None:  # fmt: skip
    """`function` of plain tensors and of DTensors, forward and backward; `sharded`: what the DTensors are given to.

    inputs: tensors with their placements. outputs, grads: the placements of the outputs and of the inputs'
    gradients, which are the inputs' where they are not given; exact: of each gradient.
    """
    plain = [x.clone().requires_grad_() for x, _ in inputs]
    placed = [place(x, mesh, p).requires_grad_() for x, p in inputs]
    expected = function(*plain)
    watch = watch or Silence
    with watch():
        out = (sharded or function)(*placed)
    assert len(out) == len(expected) == len(outputs)
    douts = [torch.randn(x.shape, generator=torch.Generator().manual_seed(9)).to(x.dtype) for x in expected]
    plain_grads = torch.autograd.grad(expected, plain, douts)
    for x, y, placements in zip(out, expected, outputs):
        same(x, y, placements)
    placed_douts = [place(d, mesh, p) for d, p in zip(douts, outputs)]
    with watch():
        placed_grads = torch.autograd.grad(out, placed, placed_douts)  # type: ignore[arg-type]
    for n, (x, y, (_, placements)) in enumerate(zip(placed_grads, plain_grads, inputs)):
        same(x, y, placements if grads is None else grads[n], exact[n] if exact else True)


def rope(**arguments: Any) -> Function:
    return lambda q, k=None: [x for x in jitrope.apply_rope(q, k, **arguments) if x is not None]


def tables_of(**shapes: Any) -> dict[str, Tensor]:
    return dict(zip(("cos", "sin"), table(*shapes["of"])))


def refuses(match: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
    with pytest.raises(jitrope.InvalidInput, match=match), Silence():
        function(*arguments, **keywords)


# ---- axes -------------------------------------------------------------------------------------------


def in_layout(layout: str, word: str, mesh: str, **sizes: Any) -> None:
    axis = dict(zip(("batch", "seq", "heads"), LAYOUT_AXES[layout]))[word]
    if axis is None or dist.get_rank() >= MESHES[mesh].size():
        return
    p = [Shard(axis)]
    cos, sin = table(sizes.get("rows", 40), D // 2)
    q, k = (heads(n, layout=layout, b=sizes.get("b", B), s=sizes.get("s", S), seed=n) for n in sizes["heads"])
    against_plain(MESHES[mesh], rope(cos=cos, sin=sin, layout=layout), [(q, p), (k, p)], [p, p])


@case
def every_axis_of_every_layout() -> None:
    # One shape for all: what a layout means may not be taken from a call before it.
    for layout, word in itertools.product(LAYOUT_AXES, ("heads", "seq", "batch")):
        in_layout(layout, word, "4", b=4, s=4, heads=(4, 4))
        in_layout(layout, word, "2", b=2, s=6, heads=(4, 2))


@case
def uneven_shards() -> None:
    for layout in ("bshd", "bhsd", "thd"):
        in_layout(layout, "heads", "3", heads=(8, 5))  # 3, 3, 2 and 2, 2, 1
        in_layout(layout, "heads", "4", heads=(8, 5))  # the last rank has no head of k
        in_layout(layout, "batch", "4", b=3, heads=(4, 2))
    for s in (10, 5, 3, 1):  # 3, 3, 3, 1; 2, 2, 1, 0; ...
        in_layout("bshd", "seq", "4", s=s, heads=(4, 2))
        in_layout("sbhd", "seq", "3", s=s, heads=(4, 2))
        in_layout("thd", "seq", "4", b=1, s=s, heads=(4, 2), rows=s)


@case
def k_replicated_beside_sharded_q() -> None:
    cos, sin = table(S, D // 2)
    against_plain(
        MESHES["4"], rope(cos=cos, sin=sin), [(heads(8), [Shard(2)]), (heads(1, seed=1), [R])], [[Shard(2)], [R]]
    )


@case
def one_tensor_alone() -> None:
    cos, sin = table(S, D // 2)
    against_plain(MESHES["4"], rope(cos=cos, sin=sin), [(heads(8), [Shard(1)])], [[Shard(1)]])


@case
def two_dimensions() -> None:
    cos, sin = table(12, D // 2)
    rows = tables_of(of=(B, 12, D // 2))
    ids = torch.randint(12, (B, S), generator=torch.Generator().manual_seed(1))
    for a, b in itertools.product((R, Shard(0), Shard(1), Shard(2)), repeat=2):
        p = [a, b]
        for tables in ({"cos": cos, "sin": sin}, rows, {"cos": cos, "sin": sin, "position_ids": ids}):
            against_plain(MESHES["2x2"], rope(**tables), [(heads(8), p), (heads(4, seed=1), p)], [p, p])
    p = [Shard(1), Shard(1)]  # 3, 2, 3, 1
    q, k = heads(4, s=9), heads(4, s=9, seed=1)
    against_plain(MESHES["2x2"], rope(cos=cos, sin=sin), [(q, p), (k, p)], [p, p])


@case
def low_precision_and_views() -> None:
    cos, sin = table(S, D // 2)
    q, k = heads(8, dtype=torch.bfloat16), heads(4, seed=1, dtype=torch.bfloat16)
    for axis in (0, 1, 2):
        against_plain(
            MESHES["4"], rope(cos=cos, sin=sin, interleaved=True, rounding="dtype"),
            [(q, [Shard(axis)]), (k, [Shard(axis)])], [[Shard(axis)]] * 2,
        )  # fmt: skip
    packed = torch.cat((q, k), 2)
    mesh = MESHES["4"]
    placed = place(packed, mesh, [Shard(1)])
    expected = jitrope.apply_rope(packed[:, :, :8], packed[:, :, 8:], cos, sin)
    with Silence():
        out = jitrope.apply_rope(placed[:, :, :8], placed[:, :, 8:], cos, sin)
    for x, y in zip(out, expected):
        same(x, y, [Shard(1)])  # type: ignore[arg-type]


# ---- tables and positions -----------------------------------------------------------------------------


@case
def every_kind_of_table() -> None:
    cos, sin = table(S + 3, D // 2)
    full = table(S, D)
    rows, shared, each = (tables_of(of=shape) for shape in ((B, S + 1, D // 2), (1, S, D), (B, S, 4, D // 2)))
    one_batch = tables_of(of=(1, S, 4, D))
    angles = torch.rand(S, D // 2)
    dist.broadcast(angles, 0)
    kinds: list[dict[str, Any]] = [
        {"cos": full[0], "sin": full[1], "interleaved": True}, rows, shared, each, one_batch,
        {"cos_sin_cache": torch.cat((cos, sin), -1)}, {"freqs": angles},
        {"freqs": angles[:, None, None].expand(S, B, 1, -1)}, {"freqs_cis": torch.complex(cos, sin)},
        {"freqs_cis": torch.complex(cos.double(), sin.double()), "rounding": "complex128"},
        {"cos": cos, "sin": sin, "inverse": True, "interleaved": True, "interleaved_out": False},
        {"cos": cos[:, :2], "sin": sin[:, :2], "rotary_dim": 4, "rotary_offset": 2},
    ]  # fmt: skip
    for arguments, axis in itertools.product(kinds, (0, 1, 2)):
        p = [Shard(axis)]
        against_plain(MESHES["4"], rope(**arguments), [(heads(4), p), (heads(4, seed=1), p)], [p, p])


@case
def tables_that_are_dtensors() -> None:
    mesh = MESHES["4"]
    cos, sin = table(S, D // 2)
    ids = torch.arange(S).flip(0)
    inputs = [(heads(8), [Shard(1)]), (heads(4, seed=1), [Shard(1)])]
    outputs = [[Shard(1)]] * 2
    for p in ([R], [Shard(0)]):
        tables = {"cos": place(cos, mesh, p), "sin": place(sin, mesh, p)}
        against_plain(mesh, rope(cos=cos, sin=sin), inputs, outputs, sharded=rope(**tables))
        placed = {"position_ids": place(ids, mesh, p), "cos": place(cos, mesh, [R]), "sin": sin}
        by_ids = rope(cos=cos, sin=sin, position_ids=ids)
        against_plain(mesh, by_ids, inputs, outputs, sharded=rope(**placed))
    whole: list[dict[str, Any]] = [
        {"cos_sin_cache": torch.cat((cos, sin), -1)},
        {"freqs_cis": torch.complex(cos, sin)},
        {"freqs": cos[:, None, None].expand(S, 1, 1, D // 2)},
    ]
    for ((word, x),), p in itertools.product((one.items() for one in whole), ([R], [Shard(0)])):
        if p == [R] or word != "freqs":  # whose positions were the first axis
            against_plain(mesh, rope(**{word: x}), inputs, outputs, sharded=rope(**{word: place(x, mesh, p)}))
    each = tables_of(of=(B, S, 4, D))
    placed = {name: place(x, mesh, [Shard(2)]) for name, x in each.items()}
    p = [Shard(2)]
    against_plain(mesh, rope(**each), [(heads(4), p), (heads(4, seed=1), p)], [p, p], sharded=rope(**placed))


@case
def positions() -> None:
    cos, sin = table(30, D // 2)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(30, (3, B, S), generator=generator)
    ids[0, 0, 0] = 0
    sections = (2, 4, 2)
    starts = torch.tensor([3, 0, 7, 1])
    kinds: list[tuple[dict[str, Any], tuple[int, ...]]] = [
        ({"position_ids": ids[0, 0]}, (0, 1, 2)),
        ({"position_ids": ids[0]}, (0, 1, 2)),
        ({"position_ids": ids[0, :1]}, (0, 1, 2)),
        ({"position_ids": ids[:, 0], "mrope_section": sections}, (0, 1, 2)),
        ({"position_ids": ids, "mrope_section": sections}, (0, 1, 2)),
        ({"start_positions": starts}, (0, 2)),
        ({"cp_size": 2, "cp_rank": 1}, (0, 2)),
    ]
    for arguments, axes in kinds:
        for axis in axes:
            p = [Shard(axis)]
            function = rope(cos=cos, sin=sin, **arguments)
            against_plain(MESHES["4"], function, [(heads(8), p), (heads(4, seed=1), p)], [p, p])


@case
def packed_sequences() -> None:
    cos, sin = table(40, D // 2)
    p = [Shard(1)]
    arguments: dict[str, Any] = {"cos": cos, "sin": sin, "layout": "thd", "cu_seqlens": torch.tensor([0, 5, 19, 30])}
    q, k = heads(8, layout="thd"), heads(4, layout="thd", seed=1)
    for more in ({}, {"start_positions": torch.tensor([1, 2, 3])}, {"packed_table": True}):
        against_plain(MESHES["4"], rope(**arguments, **more), [(q, p), (k, p)], [p, p])


@case
def a_gradient_placed_otherwise() -> None:
    """Then torch's own from_local sends what has to be sent."""
    mesh = MESHES["4"]
    cos, sin = table(S, D // 2)
    q, g = heads(8), heads(8, seed=3)
    plain = q.clone().requires_grad_()
    jitrope.apply_rope(plain, None, cos, sin)[0].backward(g)
    for placements in ([R], [Shard(1)]):
        placed = place(q, mesh, [Shard(2)]).requires_grad_()
        jitrope.apply_rope(placed, None, cos, sin)[0].backward(place(g, mesh, placements))
        same(placed.grad, plain.grad, [Shard(2)])  # type: ignore[arg-type]


# ---- the other calls ----------------------------------------------------------------------------------


@case
def in_place() -> None:
    cos, sin = table(40, D // 2)
    q, k = heads(8), heads(4, seed=1)
    expected = jitrope.apply_rope(q, k, cos, sin)
    for axis in (0, 1, 2):
        mesh, p = MESHES["4"], [Shard(axis)]
        placed = [place(x, mesh, p) for x in (q, k)]
        versions, at = [x._version for x in placed], [x.to_local().data_ptr() for x in placed]
        with Silence():
            out = jitrope.apply_rope_(*placed, cos, sin)
        assert all(x is y for x, y in zip(out, placed))
        assert at == [x.to_local().data_ptr() for x in placed]
        assert all(x._version > version for x, version in zip(placed, versions))
        for x, y in zip(placed, expected):
            same(x, y, p)  # type: ignore[arg-type]

        def step(q: Tensor, k: Tensor) -> Sequence[Any]:
            return jitrope.apply_rope_(q * 1, k * 1, cos, sin)

        against_plain(mesh, step, [(q, p), (k, p)], [p, p])


@case
def in_place_with_spare_tokens() -> None:
    cos, sin = table(40, D // 2)
    cu_seqlens = torch.tensor([0, 5, 19, 30])
    p = [Shard(1)]

    def step(q: Tensor, k: Tensor) -> Sequence[Any]:
        return jitrope.apply_rope_(q * 1, k * 1, cos, sin, layout="thd", cu_seqlens=cu_seqlens)

    against_plain(MESHES["4"], step, [(heads(8, layout="thd"), p), (heads(4, layout="thd", seed=1), p)], [p, p])


@case
def packed_qkv() -> None:
    cos, sin = table(S, D // 2)
    for layout, n in itertools.product(("bshd", "sbhd", "thd"), (1, 3)):
        shape = list(heads(4, layout=layout).shape)
        qkv = torch.randn([*shape[:-1], (n + 2) * D], generator=torch.Generator().manual_seed(n))
        arguments: dict[str, Any] = {"q_per_group": n, "layout": layout}
        rows = cos, sin
        if layout == "thd":
            rows = table(B * S, D // 2)
        for axis in range(len(shape) - 1):
            p = [Shard(axis)]
            for copy_v in (True, False):

                def split(x: Tensor) -> Sequence[Any]:
                    return jitrope.apply_rope_qkv(x, *rows, copy_v=copy_v, **arguments)  # noqa: B023

                against_plain(MESHES["4"], split, [(qkv, p)], [p] * 3)

            def whole(x: Tensor) -> Sequence[Any]:
                return [jitrope.apply_rope_qkv_(x * 1, *rows, **arguments)]  # noqa: B023

            against_plain(MESHES["4"], whole, [(qkv, p)], [p])
            placed = place(qkv, MESHES["4"], p)
            with Silence():
                assert jitrope.apply_rope_qkv_(placed, *rows, **arguments) is placed
            same(placed, jitrope.apply_rope_qkv_(qkv.clone(), *rows, **arguments), p)


@case
def v_of_packed_qkv_without_gradient() -> None:
    cos, sin = table(S, D // 2)
    qkv = torch.randn(B, S, 4, 3 * D, generator=torch.Generator().manual_seed(1))
    for rank_free in ([Shard(2)], [Shard(1)]):
        plain, placed = qkv.clone().requires_grad_(), place(qkv, MESHES["4"], rank_free).requires_grad_()
        jitrope.apply_rope_qkv(plain, cos, sin)[0].sum().backward()
        with Silence():
            q = jitrope.apply_rope_qkv(placed, cos, sin)[0]
            q.backward(place(torch.ones(q.shape), MESHES["4"], rank_free))
        same(placed.grad, plain.grad, rank_free)  # type: ignore[arg-type]


def normed(cos: Tensor, sin: Tensor, **options: Any) -> Function:
    return lambda q, k, q_weight, k_weight: jitrope.qk_norm_rope(q, k, q_weight, k_weight, cos, sin, **options)


@case
def norm_of_each_head() -> None:
    cos, sin = table(S + 2, D // 2)
    weights = [torch.rand(D, generator=torch.Generator().manual_seed(n)) + 0.5 for n in (5, 6)]
    for axis, rounding in itertools.product((0, 1, 2), ("none", "once", "twice")):
        p = [Shard(axis)]
        # Each rank has its share of the weights' gradients, which are added up where they are needed.
        against_plain(
            MESHES["4"], normed(cos, sin, norm_rounding=rounding, zero_centered=axis == 0),
            [(heads(8), p), (heads(4, seed=1), p), *((w, [R]) for w in weights)], [p, p],
            grads=[p, p, [Partial()], [Partial()]], exact=[True, True, False, False],
        )  # fmt: skip
    q, k, placements = heads(8), heads(1, seed=1), [[Shard(2)], [R]]
    against_plain(
        MESHES["4"], normed(cos, sin), [(q, [Shard(2)]), (k, [R]), *((w, [R]) for w in weights)], placements,
        grads=[*placements, [Partial()], [R]], exact=[True, True, False, True],
    )  # fmt: skip
    for p in ([Shard(0), Shard(2)], [Shard(1), Shard(2)]):
        against_plain(
            MESHES["2x2"], normed(cos, sin), [(heads(8), p), (heads(4, seed=1), p), *((w, [R, R]) for w in weights)],
            [p, p], grads=[p, p, [Partial()] * 2, [Partial()] * 2], exact=[True, True, False, False],
        )  # fmt: skip


@case
def norm_with_plain_weights() -> None:
    """A parameter that every rank has whole: every rank gets its whole gradient."""
    cos, sin = table(S, D // 2)
    q, k = heads(8), heads(8, seed=1)
    expected = None
    for placed in (False, True):
        weight = nn.Parameter(torch.linspace(0.5, 1.5, D))
        x, y = (place(t, MESHES["4"], [Shard(2)]) if placed else t for t in (q, k))
        out, _ = jitrope.qk_norm_rope(x, y, weight, None, cos, sin)
        loss = (out * out).sum()
        (loss.full_tensor() if isinstance(loss, DTensor) else loss).backward()
        assert weight.grad is not None
        if expected is not None:
            torch.testing.assert_close(weight.grad, expected)
        expected = weight.grad


@case
def norm_without_tables_and_in_place() -> None:
    q, k = heads(8), heads(4, seed=1)
    cos, sin = table(S, D // 2)
    expected = jitrope.qk_norm_rope(q, k, None, None, cos, sin)
    for axis in (0, 1, 2):
        p = [Shard(axis)]
        against_plain(MESHES["4"], jitrope.qk_norm_rope, [(q, p), (k, p)], [p, p])
        placed = [place(x, MESHES["4"], p) for x in (q, k)]
        with Silence():
            out = jitrope.qk_norm_rope_(*placed, None, None, cos, sin)
        for x, y, z in zip(placed, out, expected):
            assert x is y
            same(x, z, p)  # type: ignore[arg-type]


@case
def norm_across_heads() -> None:
    cos, sin = table(S, D // 2)
    weights = [torch.rand(n * D, generator=torch.Generator().manual_seed(n)) + 0.5 for n in (8, 4)]
    for axis in (0, 1):
        p = [Shard(axis)]
        against_plain(
            MESHES["4"], normed(cos, sin, across_heads=True),
            [(heads(8), p), (heads(4, seed=1), p), *((w, [R]) for w in weights)], [p, p],
            grads=[p, p, [Partial()], [Partial()]], exact=[True, True, False, False],
        )  # fmt: skip
    q = place(heads(8), MESHES["4"], [Shard(2)])
    refuses(r"q is placed as .*Shard\(1\) \(seq\): across_heads", jitrope.qk_norm_rope, q, None, across_heads=True)


@case
def two_streams() -> None:
    sizes = {"q": 8, "k": 4, "v": 4}
    tensors = [heads(n, s=s, seed=s + i) for s in (3, 5) for i, n in enumerate(sizes.values())]
    weights = [torch.rand(D, generator=torch.Generator().manual_seed(n)) + 0.5 for n in range(4)]
    cos, sin = table(S, D // 2)
    rows = table(B, 5, D // 2)

    def joint(*x: Tensor) -> Sequence[Any]:
        return jitrope.qk_norm_rope_joint(x[:3], x[3:6], x[6:8], x[8:10], cos, sin)

    def with_two_tables(*x: Tensor) -> Sequence[Any]:
        return jitrope.qk_norm_rope_joint(x[:3], x[3:6], x[6:8], x[8:10], (cos, rows[0]), (sin, rows[1]))

    for mesh, p in (("4", [Shard(2)]), ("4", [Shard(0)]), ("2x2", [Shard(0), Shard(2)])):
        for function in (joint, with_two_tables):
            none = [R] * len(p)
            against_plain(
                MESHES[mesh], function, [*((x, p) for x in tensors), *((w, none) for w in weights)], [p] * 3,
                grads=[p] * 6 + [[Partial()] * len(p)] * 4, exact=[True] * 6 + [False] * 4,
            )  # fmt: skip
    placed = [place(x, MESHES["4"], [Shard(1)]) for x in tensors]
    refuses(
        r"q1 is placed as .*a shard of each stream",
        jitrope.qk_norm_rope_joint,
        placed[:3],
        placed[3:],
        None,
        None,
        cos,
        sin,
    )


@case
def fp8() -> None:
    cos, sin = table(S, D // 2)
    q, k = heads(8), heads(4, seed=1)
    scale = torch.tensor(0.5)
    expected = jitrope.apply_rope_fp8(q, k, cos, sin, q_scale=0.25, k_scale=scale)
    for axis in (0, 1, 2):
        p = [Shard(axis)]
        with Silence():
            out = jitrope.apply_rope_fp8(
                *(place(x, MESHES["4"], p) for x in (q, k)), cos, sin, q_scale=0.25, k_scale=scale
            )
        for x, y in zip(out, expected):
            assert x is not None
            assert y is not None
            assert x.dtype == y.dtype == torch.float8_e4m3fn
            assert tuple(x.placements) == tuple(p)  # type: ignore[attr-defined]
            mine = place(y.view(torch.uint8), MESHES["4"], p).to_local()
            assert torch.equal(x.to_local().view(torch.uint8), mine)  # type: ignore[attr-defined]


@case
def kv_cache() -> None:
    cos, sin = table(50, D // 2)
    q, k, v = heads(8, layout="thd"), heads(4, layout="thd", seed=1), heads(4, layout="thd", seed=2)
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(3))[: B * S]
    slots[3] = -1
    ids = torch.arange(B * S) + 2
    mesh = MESHES["4"]
    for shape, dtype, kp in itertools.product(
        ((48, 4, D), (12, 4, 4, D)), (torch.float32, torch.float8_e4m3fn), (Shard(1), R)
    ):
        caches = [torch.zeros(shape, dtype=dtype) for _ in "kv"]
        scales = {"k_scale": 0.5, "v_scale": 2.0} if dtype != torch.float32 else {}
        arguments: dict[str, Any] = {"position_ids": ids, "layout": "thd", "slot_mapping": slots, **scales}
        expected = jitrope.apply_rope_kv_cache(q, k, v, cos, sin, k_cache=caches[0], v_cache=caches[1], **arguments)
        cp = Shard(len(shape) - 2) if kp != R else R
        bits = [torch.zeros(shape, dtype=dtype).view(torch.uint8) for _ in "kv"]
        for in_place in (False, True):
            placed = [place(x, mesh, [p]) for x, p in ((q, Shard(1)), (k, kp), (v, kp))]
            own = [
                DTensor.from_local(place(x, mesh, [cp]).to_local().contiguous().view(dtype), mesh, [cp]) for x in bits
            ]
            function = jitrope.apply_rope_kv_cache_ if in_place else jitrope.apply_rope_kv_cache
            with Silence():
                out = function(*placed, cos, sin, k_cache=own[0], v_cache=own[1], **arguments)
            assert (out is placed[0]) == in_place
            same(out, expected, [Shard(1)])
            for mine, whole in zip(own, caches):
                expected_bits = place(whole.view(torch.uint8), mesh, [cp]).to_local()
                assert torch.equal(mine.to_local().view(torch.uint8), expected_bits)
    q, k, v = (place(x, mesh, [Shard(1)]) for x in (q, k, v))
    whole = torch.zeros(48, 4, D)
    arguments = {"position_ids": ids, "layout": "thd", "slot_mapping": slots, "v_cache": whole}
    refuses("k_cache is a plain", jitrope.apply_rope_kv_cache, q, k, v, cos, sin, k_cache=whole, **arguments)
    replicated = place(whole, mesh, [R])
    refuses("k_cache is placed as", jitrope.apply_rope_kv_cache, q, k, v, cos, sin, k_cache=replicated, **arguments)
    q, k, v = (x.redistribute(mesh, [Shard(0)]) for x in (q, k, v))
    refuses(
        r"q is placed as .*Shard\(1\) \(heads\): a cache has the tokens of all",
        jitrope.apply_rope_kv_cache, q, k, v, cos, sin, k_cache=replicated, **arguments,
    )  # fmt: skip


# ---- what is refused ----------------------------------------------------------------------------------


@case
def refusals() -> None:
    mesh = MESHES["4"]
    cos, sin = table(S, D // 2)
    q, k = heads(8), heads(4, seed=1)
    whole, seq, by_heads = (place(q, mesh, [p]) for p in (R, Shard(1), Shard(2)))
    rope = jitrope.apply_rope
    refuses(r"q is placed as .*Shard\(0\) \(batch\).*redistribute q", rope, place(q, mesh, [Shard(3)]), None, cos, sin)
    summed = DTensor.from_local(q, mesh, [Partial()], run_check=False)
    refuses(r"q is placed as .*Partial", rope, summed, None, cos, sin)
    strided = DTensor.from_local(q[:, :, :2], MESHES["2x2"], [_StridedShard(2, split_factor=2), Shard(2)])
    refuses(r"q is placed as .*_S", rope, strided, None, cos, sin)
    refuses("k is a plain tensor beside DTensors", rope, by_heads, k, cos, sin)
    refuses("q is a plain tensor beside DTensors", rope, q, place(k, mesh, [Shard(2)]), cos, sin)
    refuses("q is a plain tensor beside DTensors", rope, q, k, place(cos, mesh, [R]), place(sin, mesh, [R]))
    ids = place(torch.arange(S), mesh, [R])
    refuses("q is a plain tensor beside DTensors", rope, q, None, cos, sin, position_ids=ids)
    refuses("only heads may differ", rope, seq, place(k, mesh, [R]), cos, sin)
    refuses("only heads may differ", rope, by_heads, place(k, mesh, [Shard(1)]), cos, sin)
    refuses("others are on", rope, place(q, MESHES["2x2"], [R, R]), place(k, mesh, [R]), cos, sin)
    refuses("others are on", rope, whole, None, place(cos, MESHES["2x2"], [R, R]), sin)
    starts = torch.zeros(B, dtype=torch.int64)
    refuses("with start_positions a shard of the seq.*position_ids", rope, seq, None, cos, sin, start_positions=starts)
    longer = table(2 * S, D // 2)
    refuses("with cp_size a shard", rope, seq, None, *longer, cp_size=2)
    packed = place(heads(4, layout="thd"), mesh, [Shard(0)])
    refuses(
        "with cu_seqlens a shard of the sequence axis", rope, packed, None, cos, sin, layout="thd",
        cu_seqlens=torch.tensor([0, 4, 8]),
    )  # fmt: skip
    for x in (whole, by_heads):
        refuses("cos is .*beside q it is replicated", rope, x, None, place(cos, mesh, [Shard(0)]), sin)
    long = table(S + 4, D // 2)
    refuses("cos is .*8 rows, one a token", rope, seq, None, place(long[0], mesh, [Shard(0)]), long[1])
    each = table(B, S, 8, D // 2)
    refuses("sharded alike", rope, by_heads, place(heads(8, seed=1), mesh, [R]), *each)
    # Errors of shapes are those of the whole tensors.
    refuses(r"q is \(B=4, S=8, H=8, D=16\) but cos has 7 rows", rope, seq, None, cos[:7], sin[:7])
    refuses("layout is 'bhds'", rope, by_heads, None, cos, sin, layout="bhds")
    qkv = place(torch.randn(B, S, 6, 4 * D), mesh, [Shard(2)])
    refuses("6 groups on 4 ranks", jitrope.apply_rope_qkv, qkv, cos, sin, q_per_group=2)
    refuses("needs 4 axes", jitrope.apply_rope_qkv, place(torch.randn(S, 6, 4 * D), mesh, [R]), cos, sin, q_per_group=2)
    refuses("qkv is placed as", jitrope.apply_rope_qkv, place(torch.randn(B, S, 6, 3 * D), mesh, [Shard(3)]), cos, sin)
    sharded_weight = place(torch.ones(D), mesh, [Shard(0)])
    refuses("q_weight is placed as", jitrope.qk_norm_rope, by_heads, None, sharded_weight)
    # Shards that are not DTensor's: positions would be wrong.
    rank = dist.get_rank()
    sizes = [1, 2, 2, 3]
    own = DTensor.from_local(q[:, : sizes[rank]], mesh, [Shard(1)], run_check=False, shape=q.shape, stride=q.stride())
    if sizes[rank] != 2:
        refuses("not in equal parts", rope, own, None, cos, sin)


# ---- a module, and torch.compile ------------------------------------------------------------------------


class Attention(nn.Module):
    """Projections, norms, rope and attention, as tensor parallelism and plain tensors both run them."""

    def __init__(self, size: int, n: int, n_kv: int, norm: bool) -> None:
        super().__init__()
        self.n, self.n_kv = n, n_kv
        self.q_proj = nn.Linear(size, n * D, bias=False)
        self.k_proj = nn.Linear(size, n_kv * D, bias=False)
        self.v_proj = nn.Linear(size, n_kv * D, bias=False)
        self.out_proj = nn.Linear(n * D, size, bias=False)
        self.q_norm = nn.Parameter(torch.linspace(0.5, 1.5, D)) if norm else None
        self.k_norm = nn.Parameter(torch.linspace(1.5, 0.5, D)) if norm else None
        self.register_buffer("cos", table(S, D // 2)[0])
        self.register_buffer("sin", table(S, D // 2)[1])

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.n, D))
        k = self.k_proj(x).unflatten(-1, (self.n_kv, D))
        v = self.v_proj(x).unflatten(-1, (self.n_kv, D))
        if self.q_norm is None:
            q, k = jitrope.apply_rope(q, k, self.cos, self.sin)
        else:
            q, k = jitrope.qk_norm_rope(q, k, self.q_norm, self.k_norm, self.cos, self.sin)
        if isinstance(q, DTensor):  # attention is on what a rank has
            mesh, placements = q.device_mesh, q.placements
            y = DTensor.from_local(attend(q.to_local(), k.to_local(), v.to_local()), mesh, placements, run_check=False)
        else:
            y = attend(q, k, v)
        return self.out_proj(y)  # type: ignore[no-any-return]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = (q @ k.transpose(-1, -2)) / D**0.5
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)


def parallel(compiled: bool, norm: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = Attention(32, 8, 4, norm)
    x = torch.randn(2, S, 32)
    plain = block(x)
    plain.square().sum().backward()
    expected = {name: p.grad.clone() for name, p in block.named_parameters() if p.grad is not None}
    block.zero_grad()
    local = ColwiseParallel(use_local_output=False)
    plan = {"q_proj": local, "k_proj": local, "v_proj": local, "out_proj": RowwiseParallel()}
    parallelize_module(block, MESHES["4"], plan)
    run: Any = torch.compile(block, fullgraph=True, backend="aot_eager") if compiled else block
    if compiled:
        y = run(x)
    else:
        with CommDebugMode() as comm:
            y = run(x)
        assert comm.get_total_counts() == 1, dict(comm.get_comm_counts())  # RowwiseParallel's
    torch.testing.assert_close(y, plain)
    y.square().sum().backward()
    for name, p in block.named_parameters():
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(grad, expected[name], msg=lambda m, name=name: f"{name}: {m}")


@case
def a_tensor_parallel_block() -> None:
    parallel(compiled=False, norm=False)


@case
def a_tensor_parallel_block_with_norms() -> None:
    parallel(compiled=False, norm=True)


@case
def a_compiled_block() -> None:
    parallel(compiled=True, norm=True)


@case
def compiled_calls() -> None:
    cos, sin = table(12, D // 2)
    q, k = heads(8, s=10), heads(4, s=10, seed=1)
    ids = torch.randint(12, (B, 10), generator=torch.Generator().manual_seed(1))
    for p, arguments in (
        ([Shard(0), Shard(2)], {}), ([Shard(1), Shard(2)], {}), ([Shard(1), Shard(1)], {"position_ids": ids})
    ):  # fmt: skip
        function = rope(cos=cos, sin=sin, **arguments)
        inputs = [(q, p), (k, p)]
        against_plain(MESHES["2x2"], function, inputs, [p, p], sharded=compiled(function), watch=nullcontext)


@case
def compiled_in_place() -> None:
    cos, sin = table(S, D // 2)
    q, k = heads(8), heads(4, seed=1)
    expected = jitrope.apply_rope(q, k, cos, sin)
    p = [Shard(1)]
    placed = [place(x, MESHES["4"], p) for x in (q, k)]

    def step(q: Tensor, k: Tensor) -> Any:
        jitrope.apply_rope_(q, k, cos, sin)
        return q + 1

    out = compiled(step)(*placed)
    for x, y in zip(placed, expected):
        same(x, y, p)  # type: ignore[arg-type]
    same(out, expected[0] + 1, p)

    def trained(q: Tensor, k: Tensor) -> Sequence[Any]:
        return jitrope.apply_rope_(q * 1, k * 1, cos, sin)

    inputs = [(q, p), (k, p)]
    against_plain(MESHES["4"], trained, inputs, [p, p], sharded=compiled(trained), watch=nullcontext)


# ---- the processes ------------------------------------------------------------------------------------


def work(rank: int, folder: str, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=timedelta(seconds=20)
    )
    for n in (4, 3, 2):
        MESHES[str(n)] = DeviceMesh("cpu", list(range(n)))
    MESHES["2x2"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = {}
    for name in names:
        begun = time.perf_counter()
        try:
            CASES[name]()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
        print(name, round(time.perf_counter() - begun, 2), flush=True)
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
        if found[name]:  # the ranks are no longer in step
            break
        dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What went wrong in each case on each rank, "" for nothing; the cases are those of this run's tests."""
    folder = tmp_path_factory.mktemp("ranks")
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    names = [name for name in CASES if name in asked]
    context = mp.start_processes(work, (str(folder), names), WORLD, join=False, start_method="spawn")
    stop = time.monotonic() + LIMIT_S
    try:
        while not context.join(timeout=1) and time.monotonic() < stop:
            pass
    except mp.ProcessException:  # what each rank found is in its file
        pass
    finally:
        for process in context.processes:
            process.kill()
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return {name: [rank.get(name, "it did not get there") for rank in ranks] for name in names}


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, found: dict[str, list[str]]) -> None:
    assert found[name] == [""] * WORLD, "\n".join(f"rank {n}: {text}" for n, text in enumerate(found[name]) if text)


def test_it_is_imported_with_the_first_dtensor() -> None:
    code = (
        "import sys, torch, jitrope; q = torch.randn(1, 2, 3, 4); t = torch.randn(2, 2);"
        "jitrope.apply_rope(q, q, t, t);"
        "assert not {'torch.distributed.tensor', 'jitrope.ops.sharding'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)
