"""torchtitan: jitrope's overrides against its own rope modules and attention, alone and in small models."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope.integrations import _layers, torchtitan

from .devices import DEVICES, devices, slow
from .hosts import doubled, group, missing, triton

OURS = [f"jitrope.integrations.torchtitan.{name}" for name in ("cos_sin_rope", "complex_rope")]
ATTENTION = "jitrope.integrations.torchtitan.attention"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOKENS = torch.randint(0, 2048, (2, 12), generator=torch.Generator().manual_seed(1))
IDS = torch.cat((torch.arange(5), torch.arange(7)))[None].expand(2, -1)


@pytest.fixture(scope="module")
def host() -> Any:
    """torchtitan's rope.py."""
    if importlib.util.find_spec("torchtitan") is None:
        command = "pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3 && pip install tyro"
        missing(command)
    with triton():
        for name in ("llama3", "qwen3", "qwen3_5", "deepseek_v3", "gpt_oss", "muse_glimmer"):
            importlib.import_module(f"torchtitan.models.{name}")
        torchtitan.register()
        return importlib.import_module("torchtitan.models.common.rope")


@pytest.fixture
def counted() -> Iterator[dict[str, int]]:
    torch.compiler.reset()
    torchtitan.calls.clear()
    torchtitan.reasons.clear()
    yield torchtitan.calls
    torchtitan.calls.clear()
    torchtitan.reasons.clear()


def pair(host: Any, kind: str, **words: Any) -> tuple[Any, Any]:
    """The host's module and ours, from one configuration."""
    config = getattr(host, kind).Config(**{"dim": 32, "max_seq_len": 64, **words})
    factory = torchtitan.complex_rope if kind == "ComplexRoPE" else torchtitan.cos_sin_rope
    ours = factory(config).build()
    assert isinstance(ours, getattr(host, kind))
    return config.build(), ours


def outputs_and_gradients(rope: Any, q: Tensor, k: Tensor, positions: Tensor | None) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k)]
    out = rope(*leaves, positions)
    ramp = torch.arange(32, device=q.device)
    grads = torch.autograd.grad(sum((x.float() * ramp).sum() for x in out), leaves)
    return [*out, *grads]


POSITIONS = {
    "none": None,
    "one-row": torch.arange(6)[None].flip(1),
    "rows": torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 63]]),
    "int32": torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]], dtype=torch.int32),
}


SCALINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "yarn": {"scaling": "yarn", "rope_factor": 4.0},
    "llama": {"scaling": "llama", "theta": 500000.0},
}
ROPES = (("CosSinRoPE", "none"), ("CosSinRoPE", "yarn"), ("ComplexRoPE", "none"), ("ComplexRoPE", "llama"))
BITS = [(*rope, *case) for rope in ROPES for case in product(DTYPES, POSITIONS)]


@pytest.mark.parametrize(
    ("device", "kind", "scaling", "dtype", "positions"), devices(BITS, (BITS[6], BITS[11], BITS[21], BITS[24]))
)
def test_bits_of_the_host(
    host: Any, counted: dict[str, int], device: str, kind: str, scaling: str, dtype: str, positions: str
) -> None:
    """Outputs have the host's bits. Gradients, which the host rounds more often, agree to the last place."""
    torch.manual_seed(0)
    q, k = (torch.randn(2, 6, n, 32).to(device, DTYPES[dtype]) for n in (4, 2))
    ids = None if POSITIONS[positions] is None else POSITIONS[positions].to(device)
    theirs, ours = (rope.to(device) for rope in pair(host, kind, **SCALINGS[scaling]))
    want = outputs_and_gradients(theirs, q, k, ids if ids is None else ids.long())
    got = outputs_and_gradients(ours, q, k, ids)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    for a, b in zip(got[2:], want[2:]):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)
    assert counted == {"jitrope": 1}


def test_left_to_the_host(host: Any, counted: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    """Refused calls are counted, and logged once. If the host refuses the call too, its error is raised."""
    theirs, ours = pair(host, "CosSinRoPE")
    q = torch.randn(1, 6, 2, 32)
    for a, b in zip(ours(q.double(), q.double()), theirs(q.double(), q.double())):
        assert torch.equal(a, b)
    ours(q.double(), q.double())
    with pytest.raises(RuntimeError):
        ours(torch.randn(1, 6, 2, 48), q)
    with pytest.raises(RuntimeError):
        ours(torch.randn(1, 65, 2, 32), torch.randn(1, 65, 2, 32))
    assert counted == {"host": 4}
    said = {
        "apply_rope: q is torch.float64; allowed are fp32, fp16 and bf16": 2,
        "the heads and the table have different sizes": 1,
        "apply_rope: q is (B=1, S=65, H=2, D=32) but cos has 64 rows; it needs 65": 1,
    }
    assert torchtitan.reasons == said
    assert [record.getMessage() for record in caplog.records] == [f"jitrope: left to torchtitan: {why}" for why in said]


@pytest.mark.parametrize("shape", [(2, 6), (1, 6), (6,)], ids=["rows", "one-row", "packed"])
@pytest.mark.parametrize("kind", ["CosSinRoPE", "ComplexRoPE"])
def test_positions_out_of_range_raise_as_the_hosts(host: Any, kind: str, shape: tuple[int, ...]) -> None:
    theirs, ours = pair(host, kind)
    q, ids = torch.randn(*((2,) * (len(shape) - 1)), 6, 3, 32), torch.arange(6).expand(shape).clone()
    ids[..., -1] = 63  # the last row
    assert not any(out.isnan().any() for out in ours(q, q, ids))
    ids[..., -1] = 64
    for rope in (theirs, ours):
        with pytest.raises(RuntimeError, match="position_ids exceed max_valid_pos=63"):
            rope(q, q, ids)


def packed(host: Any, rope: Any, query: Tensor, key: Tensor, positions: Tensor | None) -> list[Tensor]:
    """torchtitan's rope since 2026-08-20: query, key (T, H, D), positions (T), the same arithmetic as before."""
    rows = rope.cache[: len(query)] if positions is None else rope.cache[positions.long()]
    return [out[0] for out in rope.apply_rotary_emb(query[None], key[None], rows[None, :, None])]


PACKED = [*product(("CosSinRoPE", "ComplexRoPE"), DTYPES, (None, torch.int64, torch.int32))]


@pytest.mark.parametrize(("device", "kind", "dtype", "positions"), devices(PACKED, (PACKED[1], PACKED[11])))
def test_packed_tokens(host: Any, counted: dict[str, int], device: str, kind: str, dtype: str, positions: Any) -> None:
    """Three documents in one row of tokens, a layout that torchtitan 0.3 does not have yet."""
    torch.manual_seed(0)
    q, k = (torch.randn(12, n, 32).to(device, DTYPES[dtype]) for n in (4, 2))
    ids = None if positions is None else torch.cat([torch.arange(n) for n in (5, 3, 4)]).to(device, positions)
    theirs, ours = (rope.to(device) for rope in pair(host, kind))
    want = outputs_and_gradients(lambda *leaves: packed(host, theirs, *leaves), q, k, ids)
    got = outputs_and_gradients(ours, q, k, ids)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    for a, b in zip(got[2:], want[2:]):
        torch.testing.assert_close(a, b)
    assert counted == {"jitrope": 1}
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, ids)[0], got[0])


def test_packed_and_sharded(host: Any, counted: dict[str, int]) -> None:
    """A rank rotates shards of heads and of tokens; without positions tokens are numbered over all ranks."""
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    theirs, ours = pair(host, "CosSinRoPE")
    with group(2, rank=1):
        mesh = init_device_mesh("cpu", (2,))
        ids, of_rank = torch.arange(5, 11), torch.arange(6, 12)  # 6 tokens a rank
        for placement, given, want in ((Shard(1), None, None), (Shard(0), ids, ids), (Shard(0), None, of_rank)):
            q = torch.randn(6, 2, 32)
            x = DTensor.from_local(q, mesh, (placement,))
            out = ours(x, x, given if given is None else DTensor.from_local(given, mesh, (placement,)))
            assert all(o.placements == (placement,) and o.shape == x.shape for o in out)
            assert torch.equal(out[0].to_local(), packed(host, theirs, q, q, want)[0])
        assert counted == {"jitrope": 3}


def test_the_checker_of_shardings_accepts_it(host: Any) -> None:
    """torchtitan's own checker, with tokens and heads split over the three axes of its mesh, in both layouts."""
    import spmd_types as spmd
    from spmd_types.checker import typecheck
    from torch.distributed.tensor import init_device_mesh

    _, ours = pair(host, "CosSinRoPE")
    with group(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
        every, some = {"dp": spmd.V, "cp": spmd.V, "tp": spmd.V}, {"dp": spmd.V, "cp": spmd.V, "tp": spmd.R}
        for tokens, axes in (((2, 6), ("dp", "cp")), ((12,), (("dp", "cp"),))):
            q, ids = torch.randn(*tokens, 4, 32), torch.arange(tokens[-1]).expand(tokens).clone()
            with spmd.set_current_mesh(mesh), typecheck():
                spmd.assert_type(q, every, spmd.PartitionSpec(*axes, "tp", None))
                spmd.assert_type(ids, some, spmd.PartitionSpec(*axes))
                spmd.assert_type(ours.cache, {"dp": spmd.R, "cp": spmd.R, "tp": spmd.R})
                weight, table = torch.randn(32), {"dp": spmd.R, "cp": spmd.R, "tp": spmd.R}
                spmd.assert_type(weight, table)
                of_axes = ids[..., None].expand(*tokens, 3).clone()
                spmd.assert_type(of_axes, some, spmd.PartitionSpec(*axes, None))
                config, made = SimpleNamespace(mrope_section=(6, 5, 5)), torchtitan._rotation(torchtitan.rotate_cos_sin)
                for out in made(config, q, q, ours.cache, of_axes):
                    assert spmd.get_partition_spec(out) == spmd.get_partition_spec(q)
                made = torchtitan._rotation(torchtitan.rotate_cos_sin, 2, {})
                normed = partial(made, None, q, q, ours.cache, weight, weight)
                for positions in ((), (ids,)):
                    for out in (*ours(q, q, *positions), *normed(*positions)):
                        assert spmd.get_partition_spec(out) == spmd.get_partition_spec(q)


def test_plain_functions(host: Any) -> None:
    q = torch.randn(2, 6, 3, 32)
    for kind, function in (("CosSinRoPE", torchtitan.rotate_cos_sin), ("ComplexRoPE", torchtitan.rotate_complex)):
        rope = getattr(host, kind).Config(dim=32, max_seq_len=64).build()
        for a, b in zip(function(q, q[:, :, :1], rope.cache, POSITIONS["rows"]), rope(q, q[:, :, :1])):
            assert a.shape == b.shape
        assert torch.equal(function(q, q, rope.cache)[0], rope(q, q)[0])
        with pytest.raises(jitrope.InvalidInput, match="it needs"):
            function(q, q, rope.cache[:3])


def test_compiled_whole(host: Any, counted: dict[str, int]) -> None:
    """The module compiles to one graph, and tracing counts once."""
    theirs, ours = pair(host, "ComplexRoPE")
    q, ids = torch.randn(2, 6, 2, 32), POSITIONS["rows"]
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        for a, b in zip(compiled(q, q, ids), theirs(q, q, ids)):
            assert torch.equal(a, b)
    assert counted == {"jitrope": 1}


@pytest.mark.parametrize("device", DEVICES)
def test_sharded(host: Any, counted: dict[str, int], device: str) -> None:
    """A rank rotates its part of DTensors sharded by batch, heads or tokens; positions are sharded like the tokens."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh

    theirs, ours = (rope.to(device) for rope in pair(host, "CosSinRoPE"))
    with group(2, rank=1):
        mesh = init_device_mesh(device, (2,))
        ours.cache = DTensor.from_local(ours.cache, mesh, (Replicate(),))
        ids, of_rank = (torch.arange(n, n + 6, device=device)[None] for n in (5, 6))  # 6 tokens a rank
        sharded = ((Shard(0), None, None), (Shard(2), None, None), (Shard(1), ids, ids), (Shard(1), None, of_rank))
        for placement, given, positions in sharded:
            q = torch.randn(2, 6, 2, 32, device=device, requires_grad=True)
            x = DTensor.from_local(q, mesh, (placement,))
            shared = given if given is None else DTensor.from_local(given, mesh, (placement,))
            want, out = theirs(q, q, positions), ours(x, x, shared)
            assert all(o.placements == (placement,) and o.shape == x.shape for o in out)
            assert torch.equal(out[0].to_local(), want[0])
            grads = [torch.autograd.grad(y.square().sum(), q)[0] for y in (out[0].to_local(), want[0])]
            torch.testing.assert_close(*grads)
        assert counted == {"jitrope": 4}
        with pytest.raises(jitrope.InvalidInput, match=r"positions has shape \(1, 6\)"):
            torchtitan.rotate_cos_sin(x, x, ours.cache.to_local(), ids)
        uneven = DTensor.from_local(q[:1], mesh, (Shard(0),), shape=(1, 6, 2, 32), stride=q.stride())
        for x in (uneven, *(DTensor.from_local(q, mesh, (placement,)) for placement in (Shard(3), Partial()))):
            with pytest.raises(jitrope.InvalidInput):
                torchtitan.rotate_cos_sin(x, x, ours.cache.to_local())


def llama(override: bool, cos_sin: bool) -> tuple[Any, list[str]]:
    """Two layers of torchtitan's debug model; its overrides replace the rope, as in its trainer."""
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE
    from torchtitan.models.llama3 import llama3_configs

    config = llama3_configs["debugmodel"](attn_backend="flex")
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        kind = CosSinRoPE if cos_sin else ComplexRoPE
        layer.attention.rope = kind.Config(dim=16, max_seq_len=64)
    lines = apply_overrides(OverrideConfig(imports=OURS if override else []), config)
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    return model, lines


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cos_sin", [True, False])
def test_model(host: Any, counted: dict[str, int], cos_sin: bool, device: str) -> None:
    """Logits and gradients of a model with overridden rope and packed positions are the host's."""
    results = []
    for override in (False, True):
        model, lines = llama(override, cos_sin)
        assert len(lines) == 2 * override
        logits = model.to(device)(TOKENS.to(device), IDS.to(device))
        logits.square().mean().backward()
        results.append([logits, *(p.grad for p in model.parameters())])
        names = {name for name, _ in model.state_dict().items()}
        results[-1].append(torch.tensor(len(names)))
    assert counted == {"jitrope": 2}
    if device == "cpu":  # on a GPU strides choose the kernels of attention
        assert torch.equal(results[0][0], results[1][0])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


# ---- attention with norms of q and k --------------------------------------------------------------------


NORMED = {
    "qwen3": ("set_qwen3_sharding_config", {"enable_sp": False, "enable_ep": False}),
    "qwen3_5": ("set_qwen35_sharding_config", {"enable_ep": False}),
}
"""Models with norms of q and k, the function that shards them, and its words."""
TABLES = {"deepseek_v3": "deepseekv3", "gpt_oss": "gptoss"}
"""The name of a model in its table of configurations, if it is another than that of its folder."""


def small_config(name: str, override: bool, sharded: bool = False, **changes: Any) -> Any:
    """Two layers with attention of a debug model, with PyTorch's attention."""
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.attention import ScaledDotProductAttention

    module = importlib.import_module(f"torchtitan.models.{name}")
    words = {} if name in NORMED or name == "muse_glimmer" else {"moe_comm_backend": "standard"}
    config = getattr(module, f"{TABLES.get(name, name)}_configs")["debugmodel"](attn_backend="flex", **words)
    config.layers = [layer for layer in config.layers if layer.attention is not None][:2]
    if name in NORMED:
        config.tok_embeddings.num_embeddings = config.lm_head.out_features = 2048
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        for key, value in changes.items():
            setattr(layer.attention, key, value)
    if sharded:
        function, words = NORMED[name]
        getattr(importlib.import_module(f"{module.__name__}.sharding"), function)(config, **words)
    lines = apply_overrides(OverrideConfig(imports=[ATTENTION] if override else []), config)
    assert len(lines) == 2 * override
    return config


def attention_of(layer: Any) -> Any:
    return layer.attn if hasattr(layer, "attn") else layer.attention


def small(*arguments: Any, **changes: Any) -> Any:
    """That model with random weights."""
    config = small_config(*arguments, **changes)
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    for layer in map(attention_of, model.layers.values()):
        for norm in (layer.q_norm, layer.k_norm):
            if norm is not None:
                torch.nn.init.normal_(norm.weight)
    return model


AXES = torch.randint(0, 64, (2, 12, 3), generator=torch.Generator().manual_seed(2))


def logits_and_gradients(model: Any, positions: Tensor = IDS) -> list[Tensor]:
    vision = {"special_tokens": {"image_id": -1, "video_id": -2}} if hasattr(model, "vision_encoder") else {}
    device = next(model.parameters()).device
    logits = model(TOKENS.to(device), positions=positions.to(device), **vision)
    logits.square().mean().backward()
    return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


NAMES = ("qwen3", "qwen3 complex", "qwen3_5", "qwen3_5 axes")
ON_GPU = [("qwen3", "bf16"), ("qwen3 complex", "fp32"), ("qwen3_5", "fp32"), ("qwen3_5 axes", "bf16")]


@pytest.mark.parametrize(("device", "case", "dtype"), devices(product(NAMES, DTYPES), ON_GPU))
def test_norms_and_rope_in_one_launch(host: Any, counted: dict[str, int], device: str, case: str, dtype: str) -> None:
    """q, k and the logits are the host's to the bit, and gradients agree; parameters have the same names.

    On a GPU that holds for Qwen3's q and k. Qwen 3.5's norm adds in another order, and strides choose the kernels of
    attention.
    """
    name, _, more = case.partition(" ")
    changes = {"rope": host.ComplexRoPE.Config(dim=128, max_seq_len=64)} if more == "complex" else {}
    stock, ours = (small(name, override, **changes).to(device, DTYPES[dtype]) for override in (False, True))
    heads: list[Tensor] = []
    for model in (stock, ours):
        for layer in map(attention_of, model.layers.values()):
            layer.rope._init_self_buffers()  # `.to` has converted the table
        first = attention_of(next(iter(model.layers.values()))).inner_attention
        first.register_forward_pre_hook(lambda _, inputs: heads.extend(inputs[:2]))
    assert [key for key, _ in ours.named_parameters()] == [key for key, _ in stock.named_parameters()]
    assert stock.state_dict().keys() == ours.state_dict().keys()
    want, got = (logits_and_gradients(model, AXES if more == "axes" else IDS) for model in (stock, ours))
    assert counted == {"fused": 2}
    same = {"qwen3": 2, "qwen3_5": 0}[name] if device != "cpu" else 3
    assert len(heads) == 4
    for a, b in [*zip(heads[2:], heads[:2]), (got[0], want[0])][:same]:
        assert torch.equal(a, b)
    assert len(got) == len(want) > 20
    unit = 1e-4 if dtype == "fp32" else 0.03
    for a, b in zip((*heads[2:], *got), (*heads[:2], *want)):
        torch.testing.assert_close(a, b, rtol=unit, atol=unit * float(b.abs().max()))


def test_a_rotated_part_is_not_copied(host: Any, counted: dict[str, int]) -> None:
    """Qwen 3.5 cuts heads, rotates a part and joins them; with the override it does not, in both directions."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[set[str]] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen[-1].add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    for override in (False, True):
        layer = attention_of(small("qwen3_5", override).layers["0"])
        x = torch.randn(2, 12, 256)
        seen.append(set())
        with Seen():
            out = layer(x, None, IDS)
            seen.append(set())
            out.sum().backward()
    assert "cat" in seen[0]
    assert "slice_backward" in seen[1]
    assert "cat" not in seen[2]
    assert counted == {"fused": 1}
    assert "slice_backward" not in seen[3]


@pytest.mark.parametrize(
    ("name", "rope"), [("deepseek_v3", "ComplexRoPE"), ("gpt_oss", "CosSinRoPE"), ("muse_glimmer", "ComplexRoPE")]
)
def test_other_attention_gets_the_rope(host: Any, counted: dict[str, int], name: str, rope: str) -> None:
    """A class of attention that jitrope does not know keeps its class and its norms; its rope is one launch."""
    stock, ours = (small_config(name, override).layers[0].attention for override in (False, True))
    assert type(ours) is type(stock)
    assert type(ours.rope) is getattr(torchtitan, rope).Config
    layers = []
    for config in (stock, ours):
        torch.manual_seed(0)
        layers.append(config.build())
        layers[-1].init_states()
    x, heads = torch.randn(2, 12, stock.dim), []
    for layer in layers:
        layer.inner_attention.forward = lambda q, k, v, **_: heads.extend((q, k)) or q
        layer.wo.forward = lambda x: x
        layer(x, None, IDS)
    assert all(map(torch.equal, heads[:2], heads[2:]))
    assert counted == {"jitrope": 1}


class Cut:
    def forward(self, x: Tensor) -> Tensor:
        return x[:1]


class CutAndJoined(Cut):
    """As another version of the host may write its attention."""

    def forward(self, x: Tensor, *, times: int = 2) -> Tensor:
        return torch.cat((super().forward(x), x[2:])) * times


class OwnTorch(Cut):
    def forward(self, x: Tensor) -> Tensor:
        import torch

        return torch.cat((x[:1], x[2:]))


class AttributeTorch(Cut):
    torch = 2

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x[:1], x[2:])) * self.torch


def test_any_forward_is_rewritten_or_kept() -> None:
    """The rewritten one has the host's arguments and class; one without joins, or that is not a function, stays.

    So does one to which `torch` is more than the name of a global.
    """
    ours, layer = torchtitan._without_copies(CutAndJoined.forward), CutAndJoined()
    assert ours is not CutAndJoined.forward
    for words in ({}, {"times": 3}):
        assert torch.equal(ours(layer, torch.ones(4), **words), layer.forward(torch.ones(4), **words))
    for kept in (Cut.forward, partial(Cut.forward), OwnTorch.forward, AttributeTorch.forward):
        assert torchtitan._without_copies(kept) is kept


def test_an_attention_without_norms_keeps_its_forward(host: Any, counted: dict[str, int]) -> None:
    stock, ours = (small("qwen3", override, qk_norm=None) for override in (False, True))
    assert torch.equal(logits_and_gradients(ours)[0], logits_and_gradients(stock)[0])
    assert counted == {"jitrope": 2}


@pytest.mark.parametrize("name", NORMED)
def test_norms_that_stay_with_the_host(host: Any, counted: dict[str, int], name: str) -> None:
    """Modules with a hook, and norms with two eps, are called, and rope is still jitrope's; the reasons are counted."""
    stock, ours = small(name, False), small(name, True)
    first, second = map(attention_of, ours.layers.values())
    hook = first.rope.register_forward_hook(lambda *_: None)
    first(torch.randn(2, 12, 256), None, IDS)
    assert torchtitan.reasons == {"not fused: rope has hooks": 1}
    hook.remove()
    counted.clear()
    torchtitan.reasons.clear()
    first.k_norm.register_forward_hook(lambda *_: None)
    for layer in (second, attention_of(stock.layers[list(stock.layers)[1]])):
        layer.k_norm.eps = 0.1
    assert torch.equal(logits_and_gradients(ours)[0], logits_and_gradients(stock)[0])
    assert counted == {"jitrope": 2, "host": 0}
    said = {"not fused: a norm has hooks": 1, "not fused: the norms of q and k differ, or have a bias": 1}
    assert torchtitan.reasons == said


def test_norms_of_another_kind_stay_with_the_host(host: Any, counted: dict[str, int]) -> None:
    """A norm whose arithmetic jitrope does not have is found when the layer is built, also on the meta device."""
    from torchtitan.models.common.nn_modules import RMSNorm

    class Softer(RMSNorm):
        Config = dataclass(kw_only=True, slots=True)(type("Config", (RMSNorm.Config,), {}))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 0.5

    with torch.device("meta"):
        layer = small_config("qwen3", True).layers[0].attention.build()
        assert layer._norm_form is not None
        assert not torchtitan.reasons
        other = small_config("qwen3", True, qk_norm=Softer.Config(normalized_shape=128)).layers[0].attention.build()
    assert other._norm_form is None
    assert torchtitan.reasons == {"not fused: Softer: jitrope has no norm with its results": 1}


def test_a_copied_layer_has_its_own_norms(host: Any, counted: dict[str, int]) -> None:
    """A pipeline copies the model for each stage."""
    model = small("qwen3", True)
    stage = copy.deepcopy(model)
    for layer in stage.layers.values():
        torch.nn.init.ones_(layer.attention.q_norm.weight)
    assert not torch.equal(model(TOKENS, IDS), stage(TOKENS, IDS))
    logits_and_gradients(stage)
    assert all(layer.attention.q_norm.weight.grad is None for layer in model.layers.values())


@pytest.mark.parametrize("name", NORMED)
def test_a_block_with_norms_compiles_whole(host: Any, counted: dict[str, int], name: str) -> None:
    layer, x = attention_of(small(name, True).layers["0"]), torch.randn(2, 12, 256)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for ids in (IDS, AXES)[: 1 + (name == "qwen3_5")]:
        counted.clear()
        want = layer(x, None, ids)
        assert torch.equal(compiled(x, None, ids), want)
        assert counted == {"fused": 2}
    want.square().mean().backward()
    first = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    compiled(x, None, ids).square().mean().backward()
    for p, grad in zip(layer.parameters(), first):
        torch.testing.assert_close(p.grad, grad)


PARALLEL = [*product(("partial_dtensor", "spmd_types"), ("qwen3", "qwen3_5", "qwen3_5 axes"))]


@pytest.mark.parametrize(("device", "backend", "case"), devices(PARALLEL, PARALLEL[:1]))
def test_norms_of_a_tensor_parallel_layer(
    host: Any, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch, device: str, backend: str, case: str
) -> None:
    """Each rank normalises and rotates its heads; a weight's gradient is the rank's part, as the host's is."""
    from torchtitan.distributed import parallel_dims, utils
    from torchtitan.distributed.spmd_types import set_current_spmd_mesh

    name, _, axes = case.partition(" ")
    monkeypatch.setattr(parallel_dims, "device_type", device)
    monkeypatch.setattr(utils, "_spmd_backend", backend)
    results = []
    with group(2):
        dims = parallel_dims.ParallelDims(1, 1, 1, 2, 1, 1, 2, spmd_backend=backend)
        dims.build_mesh()
        for override in (False, True):
            config = small_config(name, override, sharded=True).layers[0].attention
            whole = config.sharding_config.in_dst_shardings  # the fake backend gathers no tokens
            config.sharding_config = replace(config.sharding_config, in_src_shardings=whole)
            layer = config.build()
            layer.init_states()
            layer.to(device).parallelize(dims)
            torch.manual_seed(0)
            for parameter in layer.parameters():  # the fake backend sends no shards
                torch.nn.init.normal_(local(parameter.data), std=0.1)
            assert "forward" in layer.q_norm.__dict__
            heads: list[Any] = []
            layer.inner_attention.register_forward_pre_hook(lambda _, inputs, heads=heads: heads.extend(inputs[:2]))
            layer.wo.forward = heads.append
            mesh = dims.spmd_dense_mesh() if backend == "spmd_types" else None
            with set_current_spmd_mesh(mesh) if mesh is not None else nullcontext():
                layer(torch.randn(2, 12, 256).to(device), None, (AXES if axes else IDS).to(device))
            sum((n + 1) * x.square().sum() for n, x in enumerate(map(local, heads))).backward()
            weights = layer.q_norm.weight, layer.k_norm.weight
            results.append([*map(local, heads), *(local(w.grad) for w in weights)])
            results[-1] += [getattr(w.grad, "placements", None) for w in weights]
    assert counted == {"fused": 1}
    theirs, ours = results
    assert ours[0].shape == (2, 12, config.n_heads // 2, config.head_dim)
    for a, b in zip(ours[: 3 if device == "cpu" else 2], theirs):  # on a GPU strides choose the kernels of attention
        assert torch.equal(a, b)
    assert ours[5:] == theirs[5:]
    for a, b in zip(ours[3:5], theirs[3:5]):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def local(x: Any) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def test_a_norm_that_is_resharded_is_called(host: Any) -> None:
    """A parallel `forward` that moves tensors, or that is not torchtitan's, is not skipped."""
    norm = small("qwen3", True).layers["0"].attention.q_norm
    form = _layers.form_of(norm)
    query = torch.randn(2, 12, 16, 128)
    weights = partial(torchtitan._weights, (norm,), form, form.words(norm), True, query)
    assert weights()[0] is norm.weight
    norm.forward = norm.forward
    with pytest.raises(jitrope.InvalidInput, match="a norm has its own forward"):
        weights()
    norm._parallelized, norm._sharding_config = True, ShardingConfigs.here
    assert weights()[0] is norm.weight
    norm._sharding_config = ShardingConfigs.moves
    with pytest.raises(jitrope.InvalidInput, match="a norm has its own forward"):
        weights()


class ShardingConfigs:
    """Like torchtitan's `ShardingConfig`, in which only equality matters here."""

    here = SimpleNamespace(
        in_src_shardings={"input": 1}, in_dst_shardings={"input": 1}, out_src_shardings=2, out_dst_shardings=2,
        local_map=None,
    )  # fmt: skip
    moves = SimpleNamespace(**{**vars(here), "out_dst_shardings": 3})


# ---- what users change, before a layer is built or after ------------------------------------------------


class Twice(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def wrapped(norm: Any) -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(norm)


def of_a_subclass(norm: Any) -> Any:
    norm.__class__ = type("Softer", (type(norm),), {"forward": doubled(type(norm).forward)})
    return norm


def without_weight(norm: Any) -> Any:
    norm.weight = None
    return norm


CHANGES: dict[str, Any] = {
    "wrapped": wrapped,
    "parametrised": lambda norm: torch.nn.utils.parametrize.register_parametrization(norm, "weight", Twice()),
    "another class": of_a_subclass,
    "another module": lambda _: Twice(),
    "without a weight": without_weight,
}


@pytest.mark.parametrize(("name", "change"), [("qwen3_5", "wrapped"), *product(["qwen3"], CHANGES)])
def test_a_norm_changed_after_the_layer_was_built(host: Any, counted: dict[str, int], name: str, change: str) -> None:
    """It is called, and rope is still jitrope's; its weight gets the gradient that it gets from the host."""
    x, results = torch.randn(2, 12, 256), []
    for override in (False, True):
        layer = attention_of(small(name, override).layers["0"])
        layer.q_norm, layer.k_norm = CHANGES[change](layer.q_norm), CHANGES[change](layer.k_norm)
        results.append([layer(x, None, None)])
        results[-1][0].square().sum().backward()
        results[-1] += [p.grad for p in layer.parameters()]
    assert torch.equal(results[1][0], results[0][0])
    for a, b in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(a, b)
    assert counted == {"jitrope": 1, "host": 0}
    assert torchtitan.reasons == {f"not fused: {PATCHES['RMSNorm.forward']}": 1}


def test_norms_removed_after_the_layer_was_built(host: Any, counted: dict[str, int]) -> None:
    x, layers = torch.randn(2, 12, 256), [attention_of(small("qwen3", o).layers["0"]) for o in (False, True)]
    for layer in layers:
        layer.q_norm = layer.k_norm = None
    assert torch.equal(layers[1](x, None, IDS), layers[0](x, None, IDS))
    assert counted == {"jitrope": 1}
    for layer in layers:
        layer.q_norm = torch.nn.Identity()
        with pytest.raises(AssertionError):
            layer(x, None, IDS)


PATCHES = {
    "RMSNorm.forward": "a norm was replaced or changed after the layer was built, or one alone has a weight",
    "CosSinRoPE.forward": "a method of CosSinRoPE was replaced",
    "CosSinRoPE.apply_rotary_emb": "a method of CosSinRoPE was replaced",
    "CosSinRoPE._reshape_cache": "a method of CosSinRoPE was replaced",
    "GQAttention.forward": "GQAttention.forward was replaced",
}


@pytest.mark.parametrize("compiled", [False, slow(True)])
@pytest.mark.parametrize("patch", PATCHES)
def test_a_patch_of_a_class(
    host: Any, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch, patch: str, compiled: bool
) -> None:
    """The user's method is called, and the layer is fused again when it is gone."""
    from torchtitan.models.common import attention, nn_modules

    x, layers = torch.randn(2, 12, 256), [attention_of(small("qwen3", o).layers["0"]) for o in (False, True)]
    run = torch.compile(layers[1], backend="aot_eager", fullgraph=True) if compiled else layers[1]
    name, _, method = patch.partition(".")
    cls = next(getattr(module, name) for module in (host, attention, nn_modules) if hasattr(module, name))
    static, function = isinstance(vars(cls).get(method), staticmethod), doubled(getattr(cls, method))
    fused = run(x, None, IDS)
    assert counted["fused"] == 1
    monkeypatch.setattr(cls, method, staticmethod(function) if static else function)
    want = layers[0](x, None, IDS)
    assert not torch.equal(want, fused)
    assert torch.equal(run(x, None, IDS), want)
    assert f"not fused: {PATCHES[patch]}" in torchtitan.reasons
    assert counted["fused"] == 1
    monkeypatch.undo()
    assert torch.equal(run(x, None, IDS), fused)
    assert counted["fused"] == 1 if compiled else 2  # the compiled one needs no new trace


@pytest.fixture
def fresh() -> Iterator[None]:
    """Our classes are made again, as in a process that patches before it applies the overrides."""
    torchtitan._subclass.cache_clear()
    yield
    torchtitan._subclass.cache_clear()


@pytest.mark.parametrize("patch", [patch for patch in PATCHES if patch != "RMSNorm.forward"])
def test_a_patch_before_our_class_is_made(
    host: Any, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch, fresh: None, patch: str
) -> None:
    from torchtitan.models.common import attention

    name, _, method = patch.partition(".")
    cls = getattr(host, name, None) or getattr(attention, name)
    static, function = isinstance(vars(cls).get(method), staticmethod), doubled(getattr(cls, method))
    monkeypatch.setattr(cls, method, staticmethod(function) if static else function)
    x, layers = torch.randn(2, 12, 256), [attention_of(small("qwen3", o).layers["0"]) for o in (False, True)]
    want, got = (layer(x, None, IDS) for layer in layers)
    assert torch.equal(got, want)
    assert f"not fused: {PATCHES[patch]}" in torchtitan.reasons


@pytest.mark.parametrize("name", ["forward", "apply_rotary_emb", "_reshape_cache"])
@pytest.mark.parametrize("of", ["class", "module"])
def test_a_patch_of_a_rope_alone(
    host: Any, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch, of: str, name: str
) -> None:
    ropes, q = pair(host, "CosSinRoPE"), torch.randn(1, 6, 2, 32)
    for place in [host.CosSinRoPE] if of == "class" else ropes:
        function = doubled(getattr(place, name))
        monkeypatch.setattr(place, name, staticmethod(function) if name == "apply_rotary_emb" else function)
    theirs, ours = (rope(q, q) for rope in ropes)
    assert all(map(torch.equal, ours, theirs))


def test_a_rope_of_the_user(host: Any, counted: dict[str, int]) -> None:
    """In place of a layer's own, and as a subclass of ours."""

    def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * query, key

    own = {"apply_rotary_emb": staticmethod(apply_rotary_emb)}
    x, layers = torch.randn(2, 12, 256), [attention_of(small("qwen3", o).layers["0"]) for o in (False, True)]
    for layer in layers:
        layer.rope = type("Own", (host.CosSinRoPE,), own)(layer.rope.config)
    want = layers[0](x, None, IDS)
    assert torch.equal(layers[1](x, None, IDS), want)
    assert torchtitan.reasons == {"not fused: rope was replaced after the layer was built": 1}
    layers[1].rope = type("Own", (torchtitan.CosSinRoPE,), own)(layers[1].rope.config)
    assert torch.equal(layers[1](x, None, IDS), want)
    assert counted == {"host": 1}


def test_overrides_are_exact(host: Any) -> None:
    """Those of ropes take no subclass, because it computes something else; that of attention does. Configs pickle."""
    from torchtitan.config.override import _REGISTRY
    from torchtitan.models.common.attention import BaseAttention

    assert [(_REGISTRY[name].target_cls, _REGISTRY[name].exact) for name in (*OURS, ATTENTION)] == [
        (host.CosSinRoPE.Config, True),
        (host.ComplexRoPE.Config, True),
        (BaseAttention.Config, False),
    ]
    config = torchtitan.CosSinRoPE.Config(dim=32, max_seq_len=64)
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(AttributeError, match="no attribute 'NoRoPE'"):
        torchtitan.NoRoPE  # noqa: B018
