"""DTensors against plain tensors: the same bits on every rank, the same placements, no communication."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs

import jitrope
from jitrope import InvalidInput, Mrope, Norm, Packed, Starts, apply_rope
from jitrope.base.layouts import LAYOUT_AXES

from ..fresh import python
from ..ranks import on_ranks

if not dist.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

R, P = Replicate(), Partial()
B, S, D = 4, 8, 16
WEIGHT = torch.linspace(0.5, 1.5, D)
Placed = Sequence[tuple[Tensor, Sequence[Any]]]  # tensors with their placements
mesh = functools.cache(partial(init_device_mesh, "cpu"))  # of four ranks, (4,) or (2, 2)


def table(*shape: int) -> dict[str, Tensor]:
    angles = torch.rand(*shape, generator=torch.Generator().manual_seed(0)) * 6
    return {"cos": angles.cos(), "sin": angles.sin()}


TABLE = table(S, D // 2)
COS, SIN = TABLE.values()


def heads(n: int, *, b: int = B, s: int = S, layout: str = "bshd", dtype: Any = torch.float32) -> Tensor:
    sizes = {"b": b, "s": s, "h": n, "d": D, "t": b * s}
    return torch.randn([sizes[letter] for letter in layout], generator=torch.Generator().manual_seed(n)).to(dtype)


def place(x: Tensor, *placements: Any) -> Any:
    """A DTensor of x, which all ranks have, made without communication."""
    on = mesh((4,) if len(placements) == 1 else (2, 2))
    return DTensor.from_local(x, on, [R] * on.ndim, run_check=False).redistribute(on, placements)


def assert_same(x: Any, expected: Tensor, placements: Sequence[Any], exact: bool = True) -> None:
    assert isinstance(x, DTensor), type(x)
    assert tuple(x.placements) == tuple(placements), (x.placements, placements)
    assert (x.shape, x.dtype) == (expected.shape, expected.dtype)
    full = x.full_tensor()
    assert torch.equal(full, expected) if exact else torch.allclose(full, expected, rtol=1e-5, atol=1e-5)


def assert_alike(
    function: Any, inputs: Placed, weights: Placed = (), sharded: Any = None, watch: Any = CommDebugMode, **words: Any
) -> None:
    """`function` of plain tensors and of DTensors, forward and backward; `sharded` takes the DTensors, if it is given.

    words: of both. The outputs and the gradients are placed like the inputs. Weights are replicated, and are here with
    the placements of their gradients, whose sums have another order. Nothing is sent.
    """
    plain, sharded = [x.clone().requires_grad_() for x, _ in (*inputs, *weights)], sharded or function
    placed = [place(x, *p).requires_grad_() for x, p in (*inputs, *((w, [R] * len(p)) for w, p in weights))]
    expected = [x for x in function(*plain, **words) if x is not None]
    with watch() as there:
        out = [x for x in sharded(*placed, **words) if x is not None]
    douts = [torch.randn(x.shape, generator=torch.Generator().manual_seed(9)).to(x.dtype) for x in expected]
    placed_douts = [place(d, *p) for d, (_, p) in zip(douts, inputs)]
    with watch() as back:
        placed_grads = torch.autograd.grad(out, placed, placed_douts)
    for comm in filter(None, (there, back)):
        assert comm.get_total_counts() == 0, dict(comm.get_comm_counts())
    for x, y, (_, p) in zip(out, expected, inputs, strict=True):
        assert_same(x, y, p)
    grads = torch.autograd.grad(expected, plain, douts)
    for n, (x, y, (_, p)) in enumerate(zip(placed_grads, grads, (*inputs, *weights), strict=True)):
        assert_same(x, y, p, exact=n < len(inputs))


def prepared(q: Any, k: Any, *weights: Any, norm: Any = (), **words: Any) -> Any:
    """`prepare_qkv` with a norm of these weights and biases. norm: its other words."""
    of = dict(zip(("q_weight", "k_weight", "q_bias", "k_bias"), weights), **dict(norm))
    return jitrope.prepare_qkv(q, k, None, norm=Norm(**of), **words)


@on_ranks
def test_every_axis_of_every_layout() -> None:
    """Of one shape for all layouts; then parts of 3, 3, 3 and 1 rows or tokens, and of 2, 2, 1 and 0 heads of k."""
    for layout, axes in LAYOUT_AXES.items():
        for axis, (b, s, nq, nk) in itertools.product(axes[:3], ((4, 4, 4, 4), (10, 10, 8, 5))):
            if axis is not None and (b, layout) != (10, "thd"):
                inputs = [(heads(n, layout=layout, b=b, s=s), [Shard(axis)]) for n in (nq, nk)]
                assert_alike(apply_rope, inputs, **table(40, D // 2), layout=layout)


@on_ranks
def test_one_of_q_and_k_may_have_all_heads_on_each_rank() -> None:
    q, k = (heads(8), [Shard(2)]), (heads(1), [R])
    for inputs in ([q, k], [k, q]):
        assert_alike(apply_rope, inputs, **TABLE)
    assert_alike(apply_rope, [q], **TABLE, k=None)
    assert_alike(prepared, [q, k], [(WEIGHT, [P]), (WEIGHT, [R])], **TABLE)


@on_ranks
def test_a_result_without_a_gradient() -> None:
    """q or k alone is used; both were redistributed, and torch's backward of that takes no missing gradient."""
    for function, used in itertools.product((prepared, apply_rope), range(2)):
        leaves = [place(heads(n), R).requires_grad_() for n in (8, 4)]
        out = function(*[x.redistribute(placements=[Shard(2)]) for x in leaves], **TABLE)
        grads = torch.autograd.grad(out[used].to_local().square().sum(), leaves)
        assert [bool(grad.full_tensor().any()) for grad in grads] == [used == 0, used == 1]


@on_ranks
def test_two_dimensions() -> None:
    ids, shared = torch.randint(12, (B, S), generator=torch.Generator().manual_seed(1)), table(12, D // 2)
    for p in itertools.product((R, Shard(0), Shard(1), Shard(2)), repeat=2):
        for words in (shared, table(B, 12, D // 2), {**shared, "positions": ids}):
            assert_alike(apply_rope, [(heads(8), p), (heads(4), p)], **words)
    p = (Shard(1), Shard(1))  # 3, 2, 3 and 1 tokens
    assert_alike(apply_rope, [(heads(4, s=9), p), (heads(2, s=9), p)], **shared)
    p = (Shard(1), Shard(2))
    assert_alike(prepared, [(heads(8), p), (heads(4), p)], [(WEIGHT, [P, P])] * 2, **shared)


@on_ranks
def test_tables_that_are_dtensors() -> None:
    inputs, every = [(heads(8), [Shard(1)]), (heads(4), [Shard(1)])], [(heads(4), [Shard(2)])] * 2
    ids = torch.arange(S).flip(0)
    for words, given, places in (
        *[(TABLE, inputs, (R, Shard(0))), ({"freqs_cis": torch.complex(COS, SIN)}, inputs, (R, Shard(0)))],
        (table(B, S, 4, D), every, (Shard(2),)),
    ):
        for p in places:
            placed = {name: place(x, p) for name, x in words.items()}
            assert_alike(partial(apply_rope, **words), given, sharded=partial(apply_rope, **placed))
    for p in (R, Shard(0)):
        by_ids = partial(apply_rope, cos=place(COS, R), sin=SIN, positions=place(ids, p))
        assert_alike(partial(apply_rope, **TABLE, positions=ids), inputs, sharded=by_ids)


@on_ranks
def test_tables_and_positions() -> None:
    (cos, sin), far = table(S + 3, D // 2).values(), table(30, D // 2)
    angles = torch.linspace(0, 6, S * D // 2).view(S, D // 2)
    ids = torch.randint(30, (3, B, S), generator=torch.Generator().manual_seed(2))
    q, k, half = heads(4), heads(4) + 1, heads(8, dtype=torch.bfloat16)
    kinds: list[dict[str, Any]] = [
        *[table(*shape, D // 2) for shape in ((B, S + 1), (1, S), (B, S, 4), (1, S, 4))],
        *[{"freqs": x} for x in (angles, angles[:, None, None].expand(S, B, 1, -1))],
        *[{"cos_sin_cache": torch.cat((cos, sin), -1)}, {"freqs_cis": torch.complex(cos, sin)}],
        {"cos": cos, "sin": sin, "inverse": True, "interleaved": True, "interleaved_out": False},
        {"cos": cos[:, :2], "sin": sin[:, :2], "rotary_dim": 4, "rotary_offset": 2},
        *[{**far, "positions": x} for x in (ids[0, 0], ids[0], ids[0, :1])],
        *[{**far, "positions": Mrope(x, (2, 4, 2))} for x in (ids[:, 0], ids)],
        *[{**far, "positions": x} for x in (Starts(torch.tensor([3, 0, 7, 1])), Starts(cp_size=2, cp_rank=1))],
    ]
    for words in kinds:
        for axis in (0, 2) if isinstance(words.get("positions"), Starts) else range(3):
            assert_alike(apply_rope, [(q, [Shard(axis)]), (k, [Shard(axis)])], **words)
    assert_alike(apply_rope, [(half, [Shard(1)])] * 2, cos=cos, sin=sin, rounding="dtype")
    inputs = [(heads(n, layout="thd"), [Shard(1)]) for n in (8, 4)]
    for words in ({}, {"start_positions": torch.tensor([1, 2, 3])}, {"packed_table": True}):
        assert_alike(apply_rope, inputs, **far, positions=Packed(torch.tensor([0, 5, 19, 30]), **words))


@on_ranks
def test_gradients_that_are_placed_otherwise() -> None:
    """torch places them, with right results. Decisions for one layout are not used for another."""
    q, g = heads(S), heads(S + 1)[:, :, :S].contiguous()
    for layout in ("bhsd", "bshd", "bhsd"):
        plain = q.clone().requires_grad_()
        apply_rope(plain, None, **TABLE, layout=layout)[0].backward(g)
        for p, of in itertools.product((R, Shard(1), Shard(2)), (R, Shard(0), Shard(1), Shard(2), P)):
            placed = place(q, p).requires_grad_()
            dout = DTensor.from_local(g / 4, mesh((4,)), [P], run_check=False) if of is P else place(g, of)
            apply_rope(placed, None, **TABLE, layout=layout)[0].backward(dout)
            assert torch.equal(placed.grad.full_tensor(), plain.grad), (layout, p, of)


@on_ranks
def test_in_place() -> None:
    """The DTensors are the results, in their memory, and autograd sees the writes.

    Tensors that share memory are refused, and a k without a gradient stays one.
    """
    q, k, words = heads(8), heads(4), table(40, D // 2)
    for function, axis in itertools.product((apply_rope, prepared), range(3)):
        placed = [place(x, Shard(axis)) for x in (q, k)]
        before = [(x.to_local().data_ptr(), x._version) for x in placed]
        with CommDebugMode() as comm:
            out = function(*placed, **words, inplace=True)
        assert comm.get_total_counts() == 0
        for x, y, expected, (address, version) in zip(placed, out, function(q, k, **words), before):
            assert x is y
            assert x.to_local().data_ptr() == address
            assert x._version > version
            assert_same(x, expected, [Shard(axis)])
    inputs = [(q, [Shard(1)]), (k, [Shard(1)])]
    assert_alike(lambda q, k: apply_rope(q * 1, k * 1, **words, inplace=True), inputs)
    words |= {"k": None, "positions": Packed(torch.tensor([0, 5, 19, 30])), "inplace": True}
    plain = heads(8, layout="thd")
    placed = place(plain, Shard(1))
    apply_rope(placed, **words)
    assert_same(placed, apply_rope(plain, **words)[0], [Shard(1)])
    with pytest.raises(InvalidInput, match="cu_seqlens; call apply_rope"):
        apply_rope(placed.requires_grad_() * 1, **words)
    whole = heads(9).requires_grad_() * 1
    parts = [DTensor.from_local(x, mesh((4,)), [R]) for x in (whole[:, :, :8], whole[:, :, 1:])]
    with pytest.raises(InvalidInput, match="share memory"):
        apply_rope(*parts, **TABLE, inplace=True)
    q, k = place(q, Shard(2)).requires_grad_() * 1, place(k, Shard(2))
    apply_rope(q, k, **TABLE, inplace=True)
    assert q.requires_grad
    assert not k.requires_grad


@on_ranks
def test_norms() -> None:
    """Of heads, of layers, of v, which has a launch of its own, and across heads, which stay on one rank."""
    q, k, far = heads(8), heads(4), table(S + 2, D // 2)
    for axis in range(3):
        inputs, weights = [(q, [Shard(axis)]), (k, [Shard(axis)])], [(WEIGHT, [P])] * 4
        for rounding in ("none", "once", "twice"):
            assert_alike(prepared, inputs, weights[:2], **far, norm={"rounding": rounding, "zero_centered": axis == 0})
        assert_alike(prepared, inputs)
        assert_alike(prepared, inputs, weights, **far, norm={"kind": "layer_norm"})
        assert_alike(jitrope.prepare_qkv, [*inputs, (k + 1, [Shard(axis)])], **TABLE, norm=Norm(v_norm=True))
        if axis < 2:
            wide = [(torch.linspace(0.5, 1.5, n * D), [P]) for n in (8, 4)]
            assert_alike(prepared, inputs, wide, **far, norm={"across_heads": True})
            found, means = [], [x.square().mean((-2, -1)) for x in (q, k)]
            for given in ([q, k, *means], [place(x, Shard(axis)) for x in (q, k, *means)]):
                found.append(prepared(*given[:2], norm={"across_heads": True, "mean_squares": given[2:]}))
            for want, x in zip(found[0][:2], found[1]):
                assert_same(x, want, [Shard(axis)])


@on_ranks
def test_a_plain_weight_gets_its_whole_gradient() -> None:
    found, compiled = [], torch.compile(prepared, fullgraph=True, backend="aot_eager")
    for function, placed in ((prepared, False), (prepared, True), (compiled, True)):
        weight = nn.Parameter(WEIGHT.clone())
        q = place(heads(8), Shard(2)) if placed else heads(8)
        function(q, None, weight, **TABLE)[0].square().sum().backward()
        found.append(weight.grad)
    torch.testing.assert_close(found[1:], found[:1] * 2)


@on_ranks
def test_placements_that_are_refused() -> None:
    """On all ranks, and nothing is sent."""
    q, k, cos, sin = heads(8), heads(4), COS, SIN
    whole, batch, seq, by_heads = (place(q, p) for p in (R, Shard(0), Shard(1), Shard(2)))
    packed, lengths = place(heads(4, layout="thd"), Shard(0)), Packed(torch.tensor([0, 4, 8]))
    summed, of_tokens = DTensor.from_local(q, mesh((4,)), [P], run_check=False), place(cos, Shard(0))
    strided = DTensor.from_local(q[:, :, :2], mesh((2, 2)), [_StridedShard(2, split_factor=2), Shard(2)])
    long, wide, each = table(S + 4, D // 2), table(2 * S, D // 2), table(B, S, 8, D // 2)
    is_q, few = r"apply_rope: q is \(4, 8, 8, 16\), placed as ", r"it has too few {} for 4 ranks; redistribute {}"
    allowed = r"; allowed are Rep.*\(\), Shard\(0\) \(batch\), Shard\(1\) \(seq\), Shard\(2\) \(heads\).*redistribute q"
    refused: list[tuple[str, Any, Any, dict[str, Any]]] = [
        (is_q + r"\(Shard\(dim=3\),\)" + allowed, place(q, Shard(3)), None, {}),
        *[(is_q + r"\(Partial\(sum\),\)" + allowed, summed, None, {}), (is_q + r".*_S.*" + allowed, strided, None, {})],
        ("and k is .*the same for q and k", seq, place(k, R), {}),
        ("and k is .*the same for q and k", batch, place(k, Shard(2)), {}),
        ("k is a plain tensor beside DTensors", by_heads, k, {}),
        ("q is a plain tensor beside DTensors", q, None, {"cos": place(cos, R)}),
        ("q is a plain tensor", q, None, {"positions": place(torch.arange(S), R)}),
        ("k is on .*use one mesh", place(q, R, R), place(k, R), {}),
        ("cos is on .*use one mesh", whole, None, {"cos": place(cos, R, R)}),
        (few.format("heads", "k"), by_heads, place(heads(2), Shard(2)), {}),
        (few.format("batch", "q"), place(heads(8, b=3), Shard(0)), None, {}),
        (few.format("seq", "q"), place(heads(8, s=3), Shard(1)), None, {}),
        (r"q is \(B=4, S=8, H=8, D=16\) but cos has 7 rows", seq, None, {"cos": cos[:7], "sin": sin[:7]}),
        ("layout is 'bhds'", by_heads, None, {"layout": "bhds"}),
        (r"cos is .*placed.*must be replicated, or \(Rep.*redistribute cos", whole, None, {"cos": of_tokens}),
        (r"cos is .*placed.*must be replicated, or \(Rep.*redistribute cos", by_heads, None, {"cos": of_tokens}),
        ("cos is .*with 8 rows, one for each", seq, None, {**long, "cos": place(long["cos"], Shard(0))}),
        ("cos is .*must be replicated", seq, None, {"cos": place(cos, Shard(1))}),
        ("allowed are", by_heads, place(q, R), each),
        ("count tokens of whole.*as ids", seq, None, {**wide, "positions": Starts(torch.zeros(B, dtype=torch.int64))}),
        ("count tokens of whole.*positions as ids", seq, None, {**wide, "positions": Starts(cp_size=2)}),
        ("count tokens of whole sequences", packed, None, {"positions": lengths}),
    ]
    # Parts that torch would cut differently: positions would be wrong.
    if (size := [1, 2, 2, 3][dist.get_rank()]) != 2:
        own = {"run_check": False, "shape": q.shape, "stride": q.stride()}
        odd = DTensor.from_local(q[:, :size], mesh((4,)), [Shard(1)], **own)
        refused.append(("the seq is cut in different parts.*distribute_tensor", odd, None, {}))
    odd_norms: list[tuple[str, Any, Any, dict[str, Any]]] = [
        (r"Shard\(1\) \(seq\), .*across_heads", by_heads, None, {"norm": Norm(across_heads=True)}),
        (r"allowed are Rep.*\(\), the same", packed, None, {"norm": Norm(across_heads=True), "positions": lengths}),
        ("q_weight is .*replicated", by_heads, None, {"norm": Norm(place(WEIGHT, Shard(0)))}),
        (r"v is .*dim=3\),\); allowed .*redistribute v", whole, place(q, Shard(3)), {"norm": Norm(v_norm=True)}),
    ]
    calls = [(partial(apply_rope, q, other, **{**TABLE, **words}), match) for match, q, other, words in refused]
    for match, q, v, words in odd_norms:
        calls.append((partial(jitrope.prepare_qkv, q, None if v is None else q, v, **words), match))
    for call, match in calls:
        with pytest.raises(InvalidInput, match=match), CommDebugMode() as comm:
            call()
        assert comm.get_total_counts() == 0, match


@on_ranks
def test_calls_that_take_local_tensors_only() -> None:
    q, plain = place(heads(4), Shard(2)), heads(4)
    qkv, wide = place(torch.randn(B, S, 4, 3 * D), Shard(2)), place(torch.randn(B, S, 12 * D), Shard(2))
    cache = jitrope.KVCache(*torch.zeros(2, B * S, 4, D), torch.arange(B * S))
    prepare, fused = jitrope.prepare_qkv, partial(jitrope.prepare_fused_qkv, qkv, order="grouped")
    calls = [partial(prepare, q, None, None, quantize=jitrope.Quantize(1.0)), partial(prepare, q, q, q, cache=cache)]
    calls += [partial(prepare, q, q, q, cache=cache, inplace=True), partial(fused, heads=(4, 4), inplace=True)]
    calls += [partial(fused, heads=(4, 4), **words) for words in ({}, {"norm": Norm()})]
    calls += [partial(jitrope.prepare_fused_qkv, wide, heads=(4, 4))]
    calls += [partial(jitrope.prepare_joint_qkv, (q, q, q), (plain, plain, plain), norm=Norm())]
    for call in calls:
        with pytest.raises(InvalidInput, match=r"it takes no DTensors; pass x.to_local\(\)"), CommDebugMode() as comm:
            call(**TABLE)
        assert comm.get_total_counts() == 0


@on_ranks
def test_compiled_calls() -> None:
    q, k, far = heads(8, s=10), heads(4, s=10), table(12, D // 2)
    ids = torch.randint(12, (B, 10), generator=torch.Generator().manual_seed(1))
    graphs = AotEagerAndRecordGraphs()
    for p, words in (((Shard(0), Shard(2)), {}), ((Shard(1), Shard(2)), {}), ([Shard(1)], {"positions": ids})):
        torch._dynamo.reset()
        function = partial(apply_rope, **far, **words)
        compiled = torch.compile(function, fullgraph=True, backend=graphs)
        assert_alike(function, [(q, p), (k, p)], sharded=compiled, watch=nullcontext)
    nodes = [str(node.target) for graph in (*graphs.fw_graphs, *graphs.bw_graphs) for node in graph.graph.nodes]
    assert sum("jitrope" in node for node in nodes) == 2 * 3
    assert not any("c10d" in node for node in nodes)  # CommDebugMode does not see them
    torch._dynamo.reset()
    norm, inputs = partial(prepared, **far), [(q, [Shard(2)]), (k, [Shard(2)])]
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    assert_alike(norm, inputs, [(WEIGHT, [P])] * 2, sharded=compiled, watch=nullcontext)


@on_ranks
def test_compiled_in_place() -> None:
    inputs, backend = [(heads(n), [Shard(1)]) for n in (8, 4)], AotEagerAndRecordGraphs()
    placed, rope = [place(x, *p) for x, p in inputs], partial(apply_rope, **TABLE, inplace=True)
    torch._dynamo.reset()
    written = torch.compile(lambda q, k: (rope(q, k), q + 1)[1], fullgraph=True, backend=backend)
    out, expected = written(*placed), apply_rope(*[x for x, _ in inputs], **TABLE)
    for x, y in zip((*placed, out), (*expected, expected[0] + 1)):
        assert_same(x, y, [Shard(1)])
    trained = lambda q, k: rope(q * 1, k * 1)  # noqa: E731
    compiled = torch.compile(trained, fullgraph=True, backend=backend)
    assert_alike(trained, inputs, sharded=compiled, watch=nullcontext)
    nodes = [str(node.target) for x in (*backend.fw_graphs, *backend.bw_graphs) for node in x.graph.nodes]
    assert any("jitrope" in node for node in nodes)
    assert not any("c10d" in node for node in nodes)


def test_it_is_imported_with_the_first_dtensor() -> None:
    code = (
        "import sys, torch, jitrope; q = torch.randn(1, 2, 3, 4); t = torch.randn(2, 2);"
        "jitrope.apply_rope(q, q, t, t);"
        "assert not {'torch.distributed.tensor', 'jitrope.run.dtensor'} & set(sys.modules)"
    )
    python("-c", code, check=True)
