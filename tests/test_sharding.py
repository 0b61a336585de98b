"""DTensors against plain tensors: the same bits on every rank, the same placements, no communication.

Four processes with gloo run every case once; a test then reads the result of its case.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
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
from jitrope.base.layouts import LAYOUT_AXES
from tests.said import KINDS, norm_rope, said

if not dist.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

WORLD = 4
R = Replicate()
B, S, D = 4, 8, 16
CASES: dict[str, Callable[[], None]] = {}
MESHES: dict[str, DeviceMesh] = {}  # of each process: "4" ranks and "2x2"
Function = Callable[..., Any]


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


# ---- the parts of a case ---------------------------------------------------------------------------


def table(*shape: int) -> tuple[Tensor, Tensor]:
    angles = torch.rand(*shape, generator=torch.Generator().manual_seed(0)) * 6
    return angles.cos(), angles.sin()


def heads(n: int, *, b: int = B, s: int = S, layout: str = "bshd", dtype: Any = torch.float32) -> Tensor:
    sizes = {"b": b, "s": s, "h": n, "d": D, "t": b * s}
    return torch.randn([sizes[letter] for letter in layout], generator=torch.Generator().manual_seed(n)).to(dtype)


def weight(size: int = D) -> Tensor:
    return torch.linspace(0.5, 1.5, size)


def place(x: Tensor, placements: Sequence[Any]) -> Any:
    """A DTensor of x, which all ranks have, made without communication."""
    mesh = MESHES["4" if len(placements) == 1 else "2x2"]
    return DTensor.from_local(x, mesh, [R] * mesh.ndim, run_check=False).redistribute(mesh, placements)


class Silence(CommDebugMode):
    """Assert that the block does not communicate."""

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None:
            assert self.get_total_counts() == 0, dict(self.get_comm_counts())


def same(x: Any, expected: Tensor, placements: Sequence[Any], exact: bool = True) -> None:
    assert isinstance(x, DTensor), type(x)
    assert tuple(x.placements) == tuple(placements), (x.placements, placements)
    assert (x.shape, x.dtype) == (expected.shape, expected.dtype)
    full = x.full_tensor()
    assert torch.equal(full, expected) if exact else torch.allclose(full, expected, rtol=1e-5, atol=1e-5)


def compiled(function: Function) -> Function:
    """Compile the whole function, and assert that its graphs do not communicate, which CommDebugMode cannot see."""

    def silent(graph: Any, _: Any) -> Any:
        sent = [node for node in graph.graph.nodes if "c10d" in str(node.target)]
        assert not sent, sent
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=silent))  # type: ignore[return-value]


def against_plain(
    function: Function,
    inputs: Sequence[tuple[Tensor, Sequence[Any]]],
    weights: Sequence[tuple[Tensor, Sequence[Any]]] = (),
    sharded: Function | None = None,
    watch: Any = Silence,
) -> None:
    """`function` of plain tensors and of DTensors, forward and backward; `sharded` takes the DTensors, if it is given.

    inputs: tensors with their placements, which the outputs and the gradients have too. weights: replicated tensors
    with the placements of their gradients, whose sums have another order.
    """
    plain = [x.clone().requires_grad_() for x, _ in (*inputs, *weights)]
    placed = [place(x, p).requires_grad_() for x, p in (*inputs, *((w, [R] * len(p)) for w, p in weights))]
    expected = [x for x in function(*plain) if x is not None]
    with watch():
        out = [x for x in (sharded or function)(*placed) if x is not None]
    douts = [torch.randn(x.shape, generator=torch.Generator().manual_seed(9)).to(x.dtype) for x in expected]
    placed_douts = [place(d, p) for d, (_, p) in zip(douts, inputs)]
    with watch():
        placed_grads = torch.autograd.grad(out, placed, placed_douts)
    for x, y, (_, p) in zip(out, expected, inputs, strict=True):
        same(x, y, p)
    for n, (x, y, (_, p)) in enumerate(
        zip(placed_grads, torch.autograd.grad(expected, plain, douts), (*inputs, *weights))
    ):
        same(x, y, p, exact=n < len(inputs))


def rope(**arguments: Any) -> Function:
    return lambda q, k=None: jitrope.apply_rope(q, k, **said(**arguments))


def normed(cos: Tensor, sin: Tensor, **options: Any) -> Function:
    def call(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, *biases: Tensor) -> Any:
        return norm_rope(q, k, q_weight, k_weight, cos, sin, **options, **dict(zip(("q_bias", "k_bias"), biases)))

    return call


def refuses(match: str, function: Function, *arguments: Any, **keywords: Any) -> None:
    with pytest.raises(jitrope.InvalidInput, match=match), Silence():
        function(*arguments, **keywords)


# ---- shards ------------------------------------------------------------------------------------------


@case
def every_axis_of_every_layout() -> None:
    cos, sin = table(40, D // 2)
    for layout, n in itertools.product(LAYOUT_AXES, range(3)):
        axis = LAYOUT_AXES[layout][n]
        if axis is not None:
            # One shape for all layouts; then parts of 3, 3, 3 and 1 rows or tokens, and of 2, 2, 1 and 0 heads of k.
            for b, s, nq, nk in ((4, 4, 4, 4), (10, 10, 8, 5)):
                if (b, layout) != (10, "thd"):
                    q, k = heads(nq, layout=layout, b=b, s=s), heads(nk, layout=layout, b=b, s=s)
                    against_plain(rope(cos=cos, sin=sin, layout=layout), [(q, [Shard(axis)]), (k, [Shard(axis)])])


@case
def one_of_q_and_k_may_have_all_heads_on_each_rank() -> None:
    cos, sin = table(S, D // 2)
    q, k = heads(8), heads(1)
    against_plain(rope(cos=cos, sin=sin), [(q, [Shard(2)]), (k, [R])])
    against_plain(rope(cos=cos, sin=sin), [(k, [R]), (q, [Shard(2)])])
    against_plain(rope(cos=cos, sin=sin), [(q, [Shard(2)])])
    against_plain(normed(cos, sin), [(q, [Shard(2)]), (k, [R])], [(weight(), [Partial()]), (weight(), [R])])


@case
def a_result_without_a_gradient() -> None:
    """q or k alone is used; both were redistributed, and torch's backward of that takes no missing gradient."""
    cos, sin = table(S, D // 2)
    norm = normed(cos, sin)
    for call in (rope(cos=cos, sin=sin), lambda q, k: norm(q, k, weight(), weight())):
        for used in range(2):
            leaves = [place(heads(n), [R]).requires_grad_() for n in (8, 4)]
            out = call(*[x.redistribute(placements=[Shard(2)]) for x in leaves])
            grads = torch.autograd.grad(out[used].to_local().square().sum(), leaves)
            assert [bool(grad.full_tensor().any()) for grad in grads] == [used == 0, used == 1]


@case
def two_dimensions() -> None:
    cos, sin = table(12, D // 2)
    rows = dict(zip(("cos", "sin"), table(B, 12, D // 2)))
    ids = torch.randint(12, (B, S), generator=torch.Generator().manual_seed(1))
    for p in itertools.product((R, Shard(0), Shard(1), Shard(2)), repeat=2):
        for arguments in ({"cos": cos, "sin": sin}, rows, {"cos": cos, "sin": sin, "position_ids": ids}):
            against_plain(rope(**arguments), [(heads(8), p), (heads(4), p)])
    p = (Shard(1), Shard(1))  # 3, 2, 3 and 1 tokens
    against_plain(rope(cos=cos, sin=sin), [(heads(4, s=9), p), (heads(2, s=9), p)])
    p = (Shard(1), Shard(2))
    against_plain(normed(cos, sin), [(heads(8), p), (heads(4), p)], [(weight(), [Partial()] * 2)] * 2)


# ---- tables and positions ----------------------------------------------------------------------------


@case
def every_kind_of_table() -> None:
    cos, sin = table(S + 3, D // 2)
    angles = torch.linspace(0, 6, S * D // 2).view(S, D // 2)
    kinds: list[dict[str, Any]] = [
        dict(zip(("cos", "sin"), table(*shape)))
        for shape in ((B, S + 1, D // 2), (1, S, D // 2), (B, S, 4, D // 2), (1, S, 4, D // 2))
    ]
    kinds += [
        {"cos_sin_cache": torch.cat((cos, sin), -1)},
        {"freqs": angles},
        {"freqs": angles[:, None, None].expand(S, B, 1, -1)},
        {"freqs_cis": torch.complex(cos, sin)},
        {"cos": cos, "sin": sin, "inverse": True, "interleaved": True, "interleaved_out": False},
        {"cos": cos[:, :2], "sin": sin[:, :2], "rotary_dim": 4, "rotary_offset": 2},
    ]
    for arguments, axis in itertools.product(kinds, range(3)):
        against_plain(rope(**arguments), [(heads(4), [Shard(axis)])] * 2)
    low = heads(8, dtype=torch.bfloat16)
    against_plain(rope(cos=cos, sin=sin, rounding="dtype"), [(low, [Shard(1)]), (low, [Shard(1)])])


@case
def tables_that_are_dtensors() -> None:
    cos, sin = table(S, D // 2)
    ids = torch.arange(S).flip(0)
    inputs = [(heads(8), [Shard(1)]), (heads(4), [Shard(1)])]
    for p in ([R], [Shard(0)]):
        for arguments in ({"cos": cos, "sin": sin}, {"freqs_cis": torch.complex(cos, sin)}):
            placed = {label: place(x, p) for label, x in arguments.items()}
            against_plain(rope(**arguments), inputs, sharded=rope(**placed))
        by_ids = rope(cos=place(cos, [R]), sin=sin, position_ids=place(ids, p))
        against_plain(rope(cos=cos, sin=sin, position_ids=ids), inputs, sharded=by_ids)
    each = dict(zip(("cos", "sin"), table(B, S, 4, D)))
    placed = {label: place(x, [Shard(2)]) for label, x in each.items()}
    against_plain(rope(**each), [(heads(4), [Shard(2)])] * 2, sharded=rope(**placed))


@case
def positions() -> None:
    cos, sin = table(30, D // 2)
    ids = torch.randint(30, (3, B, S), generator=torch.Generator().manual_seed(2))
    kinds: list[tuple[dict[str, Any], str]] = [
        ({"position_ids": ids[0, 0]}, "012"),
        ({"position_ids": ids[0]}, "012"),
        ({"position_ids": ids[0, :1]}, "012"),
        ({"position_ids": ids[:, 0], "mrope_section": (2, 4, 2)}, "012"),
        ({"position_ids": ids, "mrope_section": (2, 4, 2)}, "012"),
        ({"start_positions": torch.tensor([3, 0, 7, 1])}, "02"),
        ({"cp_size": 2, "cp_rank": 1}, "02"),
    ]
    for arguments, axes in kinds:
        for axis in map(int, axes):
            against_plain(rope(cos=cos, sin=sin, **arguments), [(heads(8), [Shard(axis)]), (heads(4), [Shard(axis)])])
    packed = {"layout": "thd", "cu_seqlens": torch.tensor([0, 5, 19, 30])}
    q, k = heads(8, layout="thd"), heads(4, layout="thd")
    for more in ({}, {"start_positions": torch.tensor([1, 2, 3])}, {"packed_table": True}):
        against_plain(rope(cos=cos, sin=sin, **packed, **more), [(q, [Shard(1)]), (k, [Shard(1)])])


@case
def gradients_that_are_placed_otherwise() -> None:
    """torch places them, with right results. Decisions for one layout are not used for another."""
    cos, sin = table(S, D // 2)
    q, g = heads(S), heads(S + 1)[:, :, :S].contiguous()
    for layout in ("bhsd", "bshd", "bhsd"):
        function = rope(cos=cos, sin=sin, layout=layout)
        plain = q.clone().requires_grad_()
        function(plain)[0].backward(g)
        for p, of in itertools.product(([R], [Shard(1)], [Shard(2)]), ([R], [Shard(0)], [Shard(1)], [Shard(2)], None)):
            placed = place(q, p).requires_grad_()
            mesh = placed.device_mesh
            dout = place(g, of) if of else DTensor.from_local(g / WORLD, mesh, [Partial()], run_check=False)
            function(placed)[0].backward(dout)
            assert torch.equal(placed.grad.full_tensor(), plain.grad), (layout, p, of)


# ---- in place, norms ---------------------------------------------------------------------------------


@case
def in_place() -> None:
    cos, sin = table(40, D // 2)
    q, k = heads(8), heads(4)
    for (function, fresh), axis in itertools.product(
        (
            (lambda *x: jitrope.apply_rope(*x, cos, sin, inplace=True), rope(cos=cos, sin=sin)),
            (lambda *x: norm_rope(*x, None, None, cos, sin, inplace=True), lambda *x: normed(cos, sin)(*x, None, None)),
        ),
        range(3),
    ):
        placed = [place(x, [Shard(axis)]) for x in (q, k)]
        before = [(x.to_local().data_ptr(), x._version) for x in placed]
        with Silence():
            out = function(*placed)
        for x, y, expected, (address, version) in zip(placed, out, fresh(q, k), before):
            assert x is y
            assert x.to_local().data_ptr() == address
            assert x._version > version
            same(x, expected, [Shard(axis)])
    against_plain(
        lambda *x: jitrope.apply_rope(*[y * 1 for y in x], cos, sin, inplace=True), [(q, [Shard(1)]), (k, [Shard(1)])]
    )
    packed = {"layout": "thd", "cu_seqlens": torch.tensor([0, 5, 19, 30])}
    q = heads(8, layout="thd")
    placed = place(q, [Shard(1)])
    jitrope.apply_rope(placed, None, cos, sin, **said(**packed), inplace=True)
    same(placed, jitrope.apply_rope(q, None, cos, sin, **said(**packed), inplace=True)[0], [Shard(1)])
    refuses("cu_seqlens; call apply_rope", KINDS["rope_"], placed.requires_grad_() * 1, None, cos, sin, **packed)


@case
def in_place_with_a_gradient() -> None:
    """Tensors that share memory are refused, and a k without a gradient stays one."""
    cos, sin = table(40, D // 2)
    whole = heads(9).requires_grad_() * 1
    parts = [place(x, [R]) for x in (heads(8), heads(8))]
    parts = [DTensor.from_local(x, parts[0].device_mesh, [R]) for x in (whole[:, :, :8], whole[:, :, 1:])]
    refuses("share memory", lambda *x: jitrope.apply_rope(*x, cos, sin, inplace=True), *parts)
    q, k = place(heads(8), [Shard(2)]).requires_grad_() * 1, place(heads(4), [Shard(2)])
    jitrope.apply_rope(q, k, cos, sin, inplace=True)
    assert q.requires_grad
    assert not k.requires_grad


@case
def norms() -> None:
    cos, sin = table(S + 2, D // 2)
    q, k = heads(8), heads(4)
    partial = [(weight(), [Partial()])] * 2
    for axis, rounding in itertools.product(range(3), ("none", "once", "twice")):
        inputs = [(q, [Shard(axis)]), (k, [Shard(axis)])]
        against_plain(normed(cos, sin, norm_rounding=rounding, zero_centered=axis == 0), inputs, partial)
        against_plain(norm_rope, inputs)
    for axis in range(3):
        inputs = [(q, [Shard(axis)]), (k, [Shard(axis)])]
        against_plain(normed(cos, sin, norm_kind="layer_norm"), inputs, partial * 2)
        with_v = [*inputs, (k + 1, [Shard(axis)])]  # v has a launch of its own
        against_plain(lambda *x: jitrope.prepare_qkv(*x, cos, sin, norm=jitrope.Norm(v_norm=True)), with_v)
    for axis in range(2):
        inputs = [(q, [Shard(axis)]), (k, [Shard(axis)])]
        wide = [(weight(8 * D), [Partial()]), (weight(4 * D), [Partial()])]
        against_plain(normed(cos, sin, across_heads=True), inputs, wide)
        means = [(x.square().mean((-2, -1)), [Shard(axis)]) for x in (q, k)]
        with torch.no_grad():
            want = across_ranks(q, k, *[mean for mean, _ in means])
            placed = across_ranks(*[place(x, p) for x, p in (*inputs, *means)])
        for x, y in zip(placed, want):
            same(x, y, [Shard(axis)])


def across_ranks(q: Any, k: Any, *mean_squares: Any) -> Any:
    norm = jitrope.Norm(across_heads=True, mean_squares=mean_squares)
    return jitrope.prepare_qkv(q, k, None, norm=norm)[:2]


@case
def a_plain_weight_gets_its_whole_gradient() -> None:
    cos, sin = table(S, D // 2)
    plain, beside = nn.Parameter(weight()), nn.Parameter(weight())
    norm_rope(heads(8), None, plain, None, cos, sin)[0].square().sum().backward()
    out = norm_rope(place(heads(8), [Shard(2)]), None, beside, None, cos, sin)[0]
    out.square().sum().backward()
    torch.testing.assert_close(beside.grad, plain.grad)


# ---- refusals ----------------------------------------------------------------------------------------


@case
def refused_placements() -> None:
    mesh = MESHES["4"]
    cos, sin = table(S, D // 2)
    q, k, call = heads(8), heads(4), KINDS["rope"]
    whole, seq, by_heads = (place(q, [p]) for p in (R, Shard(1), Shard(2)))
    placed_q = r"apply_rope: q is \(4, 8, 8, 16\), placed as "
    allowed = (
        r"allowed are Replicate\(\), Shard\(0\) \(batch\), Shard\(1\) \(seq\), Shard\(2\) \(heads\).*redistribute q"
    )
    refuses(placed_q + r"\(Shard\(dim=3\),\); " + allowed, call, place(q, [Shard(3)]), None, cos, sin)
    summed = DTensor.from_local(q, mesh, [Partial()], run_check=False)
    refuses(placed_q + r"\(Partial\(sum\),\); " + allowed, call, summed, None, cos, sin)
    strided = DTensor.from_local(q[:, :, :2], MESHES["2x2"], [_StridedShard(2, split_factor=2), Shard(2)])
    refuses(placed_q + r".*_S.*; " + allowed, call, strided, None, cos, sin)
    for p, other in ((Shard(1), R), (Shard(2), Shard(1)), (Shard(0), Shard(2))):
        refuses(r"and k is .*the same for q and k", call, place(q, [p]), place(k, [other]), cos, sin)
    refuses("k is a plain tensor beside DTensors", call, by_heads, k, cos, sin)
    refuses("q is a plain tensor beside DTensors", call, q, None, place(cos, [R]), sin)
    refuses("q is a plain tensor", call, q, None, cos, sin, position_ids=place(torch.arange(S), [R]))
    refuses("k is on .*use one mesh", call, place(q, [R, R]), place(k, [R]), cos, sin)
    refuses("cos is on .*use one mesh", call, whole, None, place(cos, [R, R]), sin)
    too_few = r"it has too few {} for 4 ranks; redistribute {}"
    refuses(too_few.format("heads", "k"), call, by_heads, place(heads(2), [Shard(2)]), cos, sin)
    refuses(too_few.format("batch", "q"), call, place(heads(8, b=3), [Shard(0)]), None, cos, sin)
    refuses(too_few.format("seq", "q"), call, place(heads(8, s=3), [Shard(1)]), None, cos, sin)
    refuses(r"q is \(B=4, S=8, H=8, D=16\) but cos has 7 rows", call, seq, None, cos[:7], sin[:7])
    refuses("layout is 'bhds'", call, by_heads, None, cos, sin, layout="bhds")
    # Parts that torch would cut differently: positions would be wrong.
    size = [1, 2, 2, 3][dist.get_rank()]
    own = DTensor.from_local(q[:, :size], mesh, [Shard(1)], run_check=False, shape=q.shape, stride=q.stride())
    if size != 2:
        refuses("the seq is cut in different parts.*distribute_tensor", call, own, None, cos, sin)


@case
def refused_beside_q() -> None:
    cos, sin = table(S, D // 2)
    q, call = heads(8), KINDS["rope"]
    whole, seq, by_heads = (place(q, [p]) for p in (R, Shard(1), Shard(2)))
    for x in (whole, by_heads):
        refuses(
            r"cos is .*placed as .*must be replicated, or \(Rep.*redistribute cos",
            call,
            x,
            None,
            place(cos, [Shard(0)]),
            sin,
        )
    long = table(S + 4, D // 2)
    refuses("cos is .*with 8 rows, one for each token", call, seq, None, place(long[0], [Shard(0)]), long[1])
    refuses("cos is .*must be replicated", call, seq, None, place(cos, [Shard(1)]), sin)
    refuses("allowed are", call, by_heads, place(q, [R]), *table(B, S, 8, D // 2))
    counted: tuple[dict[str, Any], ...] = ({"start_positions": torch.zeros(B, dtype=torch.int64)}, {"cp_size": 2})
    for arguments in counted:
        refuses("count tokens of whole.*positions as ids", call, seq, None, *table(2 * S, D // 2), **arguments)
    packed = place(heads(4, layout="thd"), [Shard(0)])
    lengths = {"layout": "thd", "cu_seqlens": torch.tensor([0, 4, 8])}
    refuses("count tokens of whole sequences", call, packed, None, cos, sin, **lengths)
    refuses(r"Shard\(1\) \(seq\), .*across_heads", norm_rope, by_heads, None, across_heads=True)
    sequence = {"layout": "thd", "cu_seqlens": torch.tensor([0, 8]), "across_heads": True}
    refuses(r"allowed are Replicate\(\), the same", norm_rope, packed, None, **sequence)
    refuses("q_weight is .*replicated", norm_rope, by_heads, None, place(weight(), [Shard(0)]))
    norm, cut = jitrope.Norm(v_norm=True), place(q, [Shard(3)])
    refuses(r"v is .*\(Shard\(dim=3\),\); allowed .*redistribute v", jitrope.prepare_qkv, whole, whole, cut, norm=norm)


@case
def calls_that_take_local_tensors_only() -> None:
    cos, sin = table(S, D // 2)
    q, plain = place(heads(4), [Shard(2)]), heads(4)
    qkv = place(torch.randn(B, S, 4, 3 * D), [Shard(2)])
    fused, wide = {"heads": (4, 4), "order": "grouped"}, place(torch.randn(B, S, 12 * D), [Shard(2)])
    cache = torch.zeros(B * S, 4, D)
    slots = {"k_cache": cache, "v_cache": cache.clone(), "slot_mapping": torch.arange(B * S)}
    for name, arguments, keywords in (
        ("fp8", (q, None, cos, sin), {"q_scale": 1.0}),
        ("kv_cache", (q, q, q, cos, sin), slots),
        ("kv_cache_", (q, q, q, cos, sin), slots),
        ("fused_qkv", (qkv, cos, sin), fused),
        ("fused_qkv", (wide, cos, sin), {"heads": (4, 4)}),
        ("fused_qkv_", (qkv, cos, sin), fused),
        ("fused_qkv_norm", (qkv, None, None, cos, sin), fused),
        ("norm_rope_joint", ((q, q, q), (plain, plain, plain), None, None, cos, sin), {}),
    ):
        refuses("it takes no DTensors; pass x.to_local()", KINDS[name], *arguments, **keywords)


# ---- a module, and torch.compile -----------------------------------------------------------------------


class Attention(nn.Module):
    """Projections, norms and rope, with tensor parallelism and with plain tensors."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(32, 8 * D), nn.Linear(32, 4 * D)
        self.out_proj = nn.Linear(8 * D, 32)
        self.q_norm = nn.Parameter(weight()) if norm else None
        self.k_norm = nn.Parameter(weight()) if norm else None
        self.cos, self.sin = table(S, D // 2)

    def forward(self, x: Tensor) -> Any:
        q, k = (proj(x).unflatten(-1, (-1, D)) for proj in (self.q_proj, self.k_proj))
        if self.q_norm is None:
            q, k = jitrope.apply_rope(q, k, self.cos, self.sin)
        else:
            q, k = norm_rope(q, k, self.q_norm, self.k_norm, self.cos, self.sin)
        return self.out_proj((q.unflatten(2, (4, 2)) * k.unsqueeze(3)).flatten(2))


def parallel(compile_it: bool, norm: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    block, x = Attention(norm), torch.randn(2, S, 32)
    plain = block(x)
    plain.square().sum().backward()
    expected = {name: p.grad for name, p in block.named_parameters()}
    block.zero_grad()
    local = ColwiseParallel(use_local_output=False)
    parallelize_module(block, MESHES["4"], {"q_proj": local, "k_proj": local, "out_proj": RowwiseParallel()})
    if compile_it:
        y = torch.compile(block, fullgraph=True, backend="aot_eager")(x)
    else:
        with CommDebugMode() as comm:
            y = block(x)
        assert comm.get_total_counts() == 1, dict(comm.get_comm_counts())  # RowwiseParallel's
    torch.testing.assert_close(y, plain)
    y.square().sum().backward()
    for name, p in block.named_parameters():
        grad: Any = p.grad
        torch.testing.assert_close(
            grad.full_tensor() if isinstance(grad, DTensor) else grad, expected[name], msg=lambda m, n=name: f"{n}: {m}"
        )


@case
def a_tensor_parallel_block() -> None:
    for compile_it, norm in ((False, False), (False, True), (True, True)):
        parallel(compile_it, norm)


@case
def compiled_calls() -> None:
    cos, sin = table(12, D // 2)
    q, k = heads(8, s=10), heads(4, s=10)
    ids = torch.randint(12, (B, 10), generator=torch.Generator().manual_seed(1))
    for p, arguments in (((Shard(0), Shard(2)), {}), ((Shard(1), Shard(2)), {}), ([Shard(1)], {"position_ids": ids})):
        function = rope(cos=cos, sin=sin, **arguments)
        against_plain(function, [(q, p), (k, p)], sharded=compiled(function), watch=nullcontext)


@case
def compiled_in_place() -> None:
    cos, sin = table(S, D // 2)
    q, k, p = heads(8), heads(4), [Shard(1)]
    placed = [place(x, p) for x in (q, k)]

    def step(q: Tensor, k: Tensor) -> Any:
        jitrope.apply_rope(q, k, cos, sin, inplace=True)
        return q + 1

    out = compiled(step)(*placed)
    expected = rope(cos=cos, sin=sin)(q, k)
    for x, y in zip((*placed, out), (*expected, expected[0] + 1)):
        same(x, y, p)

    def trained(q: Tensor, k: Tensor) -> Any:
        return jitrope.apply_rope(q * 1, k * 1, cos, sin, inplace=True)

    against_plain(trained, [(q, p), (k, p)], sharded=compiled(trained), watch=nullcontext)


# ---- the processes -----------------------------------------------------------------------------------


def work(rank: int, folder: str, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    store, patience = f"file://{folder}/store", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD, timeout=patience)
    MESHES["4"] = init_device_mesh("cpu", (4,))
    MESHES["2x2"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = {}
    for name in names:
        try:
            CASES[name]()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
        if found[name]:  # the ranks are no longer in step
            break
        dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The error of each case of this run on each rank, or ""."""
    folder = tmp_path_factory.mktemp("ranks")
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    names = [name for name in CASES if name in asked]
    context: Any = mp.start_processes(work, (str(folder), names), WORLD, join=False, start_method="spawn")
    try:
        for _ in range(500):  # seconds
            if context.join(timeout=1):
                break
    except mp.ProcessException:  # the file of each rank has the reason
        pass
    finally:
        for process in context.processes:
            process.kill()
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return {name: [rank.get(name, "it did not get there") for rank in ranks] for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, found: dict[str, list[str]]) -> None:
    assert found[name] == [""] * WORLD, "\n".join(f"rank {n}: {text}" for n, text in enumerate(found[name]) if text)


def test_it_is_imported_with_the_first_dtensor() -> None:
    code = (
        "import sys, torch, jitrope; q = torch.randn(1, 2, 3, 4); t = torch.randn(2, 2);"
        "jitrope.apply_rope(q, q, t, t);"
        "assert not {'torch.distributed.tensor', 'jitrope.run.dtensor'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)
