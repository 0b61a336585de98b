"""torchtitan: jitrope's override against its own rope modules and attention, alone and in small models."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from jitrope.integrations import torchtitan

from ..devices import devices
from ..hosts import close, group, titan_config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOKENS = torch.randint(0, 2048, (2, 12), generator=torch.Generator().manual_seed(1))
IDS = torch.cat((torch.arange(5), torch.arange(7)))[None].expand(2, -1)
X = torch.randn(2, 12, 256, generator=torch.Generator().manual_seed(3))


def pair(titan: Any, kind: str, **words: Any) -> list[Any]:
    """The host's module and ours, of one configuration."""
    return [getattr(module, kind).Config(dim=32, max_seq_len=64, **words).build() for module in (titan, torchtitan)]


POSITIONS = {
    **{"none": None, "one-row": torch.arange(6)[None].flip(1)},
    "rows": torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 63]]),
    "int32": torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]], dtype=torch.int32),
}
SCALINGS: dict[str, dict[str, Any]] = {"none": {}, "yarn": {"rope_factor": 4.0}, "llama": {"theta": 500000.0}}
ROPES = (("CosSinRoPE", "none"), ("CosSinRoPE", "yarn"), ("ComplexRoPE", "none"), ("ComplexRoPE", "llama"))
BITS = [(*rope, *case) for rope in ROPES for case in product(DTYPES, POSITIONS)]
SOME = (BITS[6], BITS[11], BITS[21], BITS[24])


@pytest.mark.parametrize(("device", "kind", "scaling", "dtype", "positions"), devices(BITS, SOME))
def test_bits_of_the_host(titan: Any, device: str, kind: str, scaling: str, dtype: str, positions: str) -> None:
    """Outputs have the host's bits. Gradients, which the host rounds more often, agree to the last place."""
    torch.manual_seed(0)
    heads = [torch.randn(2, 6, n, 32).to(device, DTYPES[dtype]).requires_grad_() for n in (4, 2)]
    ids, results = POSITIONS[positions], []
    for rope, kind_of_ids in zip(pair(titan, kind, scaling=scaling, **SCALINGS[scaling]), (torch.int64, None)):
        out = rope.to(device)(*heads, ids if ids is None else ids.to(device, kind_of_ids))
        loss = sum((x.float() * torch.arange(32, device=device)).sum() for x in out)
        results.append([*out, *torch.autograd.grad(loss, heads)])
    want, got = results
    assert all(map(torch.equal, got[:2], want[:2]))
    torch.testing.assert_close(got[2:], want[2:])
    assert torchtitan.calls == {"jitrope": 1}


@pytest.mark.parametrize("kind", ["CosSinRoPE", "ComplexRoPE"])
def test_positions_out_of_range_raise_as_the_hosts(titan: Any, kind: str) -> None:
    q, ids = torch.randn(2, 6, 3, 32), torch.tensor([[0, 1, 2, 3, 4, 63]])  # the last row
    for rope in pair(titan, kind):
        assert not any(out.isnan().any() for out in rope(q, q, ids))
        with pytest.raises(RuntimeError, match="position_ids exceed max_valid_pos=63"):
            rope(q, q, ids + 1)


def test_a_call_that_both_refuse(titan: Any) -> None:
    """It is counted, with its reason, and the host's error is raised."""
    q, ours = torch.randn(1, 6, 2, 32), pair(titan, "CosSinRoPE")[1]
    for given in (q.repeat(1, 1, 1, 2), q.repeat(1, 11, 1, 1)):  # larger heads; more tokens than rows
        with pytest.raises(RuntimeError):
            ours(given, given)
    assert torchtitan.calls == {"host": 2}
    assert all(map(str.count, torchtitan.reasons, ("different sizes", "cos has 64 rows")))


# ---- models, and attention with norms of q and k --------------------------------------------------------


def layers_of() -> list[Any]:
    """The first attention of the stock Qwen3, and of ours, with the same random weights."""
    made = []
    for override in (False, True):
        torch.manual_seed(0)
        made.append(titan_config("qwen3", override).layers[0].attention.build())
        made[-1].init_states()
        for norm in (made[-1].q_norm, made[-1].k_norm):
            torch.nn.init.normal_(norm.weight)
    return made


NAMES = ("llama3", "llama3 halves", "qwen3", "qwen3 complex")
ON_GPU = [("llama3", "bf16"), ("qwen3", "bf16"), ("qwen3 complex", "fp32")]


@pytest.mark.parametrize(("device", "case", "dtype"), devices(product(NAMES, DTYPES), ON_GPU))
def test_model(titan: Any, device: str, case: str, dtype: str) -> None:
    """q, k and the logits are the host's to the bit, and gradients agree; parameters have the same names.

    On a GPU that holds for q and k: strides choose the kernels of attention.
    """
    (name, _, more), results = case.partition(" "), []
    kind, dim = {"complex": (titan.ComplexRoPE, 128), "halves": (titan.CosSinRoPE, 16)}.get(more, (None, 0))
    changes = {"rope": kind.Config(dim=dim, max_seq_len=64)} if kind else {}
    for override in (False, True):
        torch.manual_seed(0)
        model = titan_config(name, override, **changes).build()
        model.init_states()
        model.to(device, DTYPES[dtype])
        for layer in model.layers.values():
            layer.attention.rope._init_self_buffers()  # `.to` has converted the table
        for key, parameter in model.named_parameters():
            if key.endswith(("q_norm.weight", "k_norm.weight")):
                torch.nn.init.normal_(parameter)
        heads: list[Tensor] = []
        first = model.layers["0"].attention.inner_attention
        first.register_forward_pre_hook(lambda _, inputs, heads=heads: heads.extend(inputs[:2]))
        logits = model(TOKENS.to(device), positions=IDS.to(device))
        logits.square().mean().backward()
        grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        results.append(([*heads, logits.detach(), *grads.values()], [*model.state_dict()], [*grads]))
    (want, *keys), (got, *of_ours) = results
    assert of_ours == keys
    assert torchtitan.calls == {"jitrope" if name == "llama3" else "fused": 2}
    assert all(map(torch.equal, got[: 3 if device == "cpu" else 2], want))
    assert len(want) > 17
    close(got, want, 1e-4 if dtype == "fp32" else 0.03)


OTHERS = {"deepseek_v3": "ComplexRoPE", "gpt_oss": "CosSinRoPE", "muse_glimmer": "ComplexRoPE"}


@pytest.mark.parametrize(("name", "rope"), OTHERS.items())
def test_other_attention_gets_the_rope(titan: Any, name: str, rope: str) -> None:
    """A class of attention that jitrope does not know keeps its class and its norms; its rope is one launch."""
    stock, ours = (titan_config(name, override).layers[0].attention for override in (False, True))
    assert type(ours) is type(stock)
    assert type(ours.rope) is getattr(torchtitan, rope).Config
    x, heads = torch.randn(2, 12, stock.dim), []
    for config in (stock, ours):
        torch.manual_seed(0)
        layer = config.build()
        layer.init_states()
        layer.inner_attention.forward = lambda q, k, v, **_: heads.extend((q, k)) or q
        layer.wo.forward = lambda x: x
        layer(x, None, IDS)
    assert all(map(torch.equal, heads[:2], heads[2:]))
    assert torchtitan.calls == {"jitrope": 1}


def test_a_layer_compiles_whole(titan: Any) -> None:
    layer = layers_of()[1]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    want, got = layer(X, None, IDS), compiled(X, None, IDS)
    assert torch.equal(got, want)
    assert torchtitan.calls == {"fused": 2}
    grads = [torch.autograd.grad(out.square().mean(), [*layer.parameters()]) for out in (want, got)]
    torch.testing.assert_close(*grads)


PARALLEL = [("partial_dtensor",), ("spmd_types",)]


@pytest.mark.parametrize(("device", "backend"), devices(PARALLEL, PARALLEL[:1]))
def test_norms_of_a_tensor_parallel_layer(titan: Any, monkeypatch: Any, device: str, backend: str) -> None:
    """Each rank normalises and rotates its heads; a weight's gradient is the rank's part, as the host's is."""
    from torchtitan.distributed import parallel_dims, utils
    from torchtitan.distributed.spmd_types import set_current_spmd_mesh

    local = lambda x: x.to_local() if hasattr(x, "to_local") else x  # noqa: E731
    monkeypatch.setattr(parallel_dims, "device_type", device)
    monkeypatch.setattr(utils, "_spmd_backend", backend)
    results = []
    with group(2):
        dims = parallel_dims.ParallelDims(1, 1, 1, 2, 1, 1, 2, spmd_backend=backend)
        dims.build_mesh()
        for override in (False, True):
            config = titan_config("qwen3", override, sharded=True).layers[0].attention
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
                layer(X.to(device), None, IDS.to(device))
            sum((n + 1) * x.square().sum() for n, x in enumerate(map(local, heads))).backward()
            grads = layer.q_norm.weight.grad, layer.k_norm.weight.grad
            results.append([*map(local, [*heads, *grads]), *(getattr(grad, "placements", None) for grad in grads)])
    assert torchtitan.calls == {"fused": 1}
    theirs, ours = results
    assert ours[0].shape == (2, 12, config.n_heads // 2, config.head_dim)
    assert all(map(torch.equal, ours[: 3 if device == "cpu" else 2], theirs))  # on a GPU as in `test_model`
    assert ours[5:] == theirs[5:]
    torch.testing.assert_close(ours[3:5], theirs[3:5], rtol=1e-4, atol=1e-3)


# ---- what users and other versions change ---------------------------------------------------------------


@pytest.mark.parametrize("norm", [torch.nn.Tanh(), None])
def test_norms_of_another_or_none(titan: Any, norm: Any) -> None:
    """Norms of another are called, and without norms rope is one launch; in copies too."""
    layers = layers_of()
    for layer in layers:
        layer.q_norm = layer.k_norm = norm
    assert torch.equal(copy.deepcopy(layers[1])(X, None, IDS), layers[0](X, None, IDS))
    assert (torchtitan.calls["jitrope"], torchtitan.calls["host"]) == (1, 0)


def test_a_keyword_of_another_version(titan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rope whose methods take more goes to the host, counted, with its keyword; it is never a TypeError."""
    stock, (theirs, ours) = titan.CosSinRoPE.forward, pair(titan, "CosSinRoPE")
    newer = lambda *given, times=1: [times * x for x in stock(*given)]  # noqa: E731
    monkeypatch.setattr(titan.CosSinRoPE, "forward", newer)
    q = torch.randn(1, 6, 2, 32)
    assert all(map(torch.equal, ours(q, q, times=3), theirs(q, q, times=3)))
    assert torchtitan.calls == {"host": 1}
    assert [*torchtitan.reasons] == ["a method of CosSinRoPE was replaced, or its file has another text than in 0.3.0"]


@pytest.mark.parametrize("name", ["CosSinRoPE", "GQAttention"])
def test_another_text(titan: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(torchtitan._PLACES, name, (torchtitan._PLACES[name][0], "another"))
    theirs, ours = layers_of()
    assert torch.equal(ours(X, None, IDS), theirs(X, None, IDS))
    assert torchtitan.calls["fused"] == 0
    assert all("another text than in 0.3.0" in why for why in torchtitan.reasons)
    assert any(why.startswith("not fused: ") and name in why for why in torchtitan.reasons)


def test_subclasses_and_pickle(titan: Any) -> None:
    """A subclass of attention gets the rope, a subclass of a rope stays, and configurations pickle."""
    from torchtitan.config.override import derive
    from torchtitan.models.common.attention import GQAttention

    config = torchtitan.CosSinRoPE.Config(dim=32, max_seq_len=64)
    assert pickle.loads(pickle.dumps(config)) == config
    made = titan_config("qwen3", False).layers[0].attention
    own, rope = (type("Config", (base.Config,), {}) for base in (GQAttention, titan.CosSinRoPE))
    ours = torchtitan.attention(derive(made, own))
    assert (type(ours), type(ours.rope)) == (own, torchtitan.CosSinRoPE.Config)
    assert type(torchtitan.attention(replace(made, rope=derive(made.rope, rope))).rope) is rope
    with pytest.raises(AttributeError, match="no attribute 'NoRoPE'"):
        torchtitan.NoRoPE  # noqa: B018
