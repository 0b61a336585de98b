"""torchtitan: jitrope's override against its own rope modules and attention, alone and in small models."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from jitrope.integrations import torchtitan

from .devices import devices, slow
from .hosts import Twice, doubled, group, missing, triton

OURS = "jitrope.integrations.torchtitan.attention"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOKENS = torch.randint(0, 2048, (2, 12), generator=torch.Generator().manual_seed(1))
IDS = torch.cat((torch.arange(5), torch.arange(7)))[None].expand(2, -1)


@pytest.fixture(scope="module")
def host() -> Any:
    """torchtitan's rope.py."""
    if importlib.util.find_spec("torchtitan") is None:
        missing("pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3 && pip install tyro")
    with triton():
        for name in ("llama3", "qwen3", "deepseek_v3", "gpt_oss", "muse_glimmer"):
            importlib.import_module(f"torchtitan.models.{name}")
        torchtitan.register()
        return importlib.import_module("torchtitan.models.common.rope")


@pytest.fixture(autouse=True)
def counted() -> dict[str, int]:
    torch.compiler.reset()
    torchtitan.calls.clear()
    torchtitan.reasons.clear()
    return torchtitan.calls


@pytest.fixture
def fresh() -> Iterator[None]:
    """Our classes are made again, as in another process."""
    torchtitan._subclass.cache_clear()
    yield
    torchtitan._subclass.cache_clear()


def pair(host: Any, kind: str, **words: Any) -> tuple[Any, Any]:
    """The host's module and ours, of one configuration."""
    words = {"dim": 32, "max_seq_len": 64, **words}
    return getattr(host, kind).Config(**words).build(), getattr(torchtitan, kind).Config(**words).build()


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


SCALINGS: dict[str, dict[str, Any]] = {"none": {}, "yarn": {"rope_factor": 4.0}, "llama": {"theta": 500000.0}}
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
    theirs, ours = (rope.to(device) for rope in pair(host, kind, scaling=scaling, **SCALINGS[scaling]))
    want = outputs_and_gradients(theirs, q, k, ids if ids is None else ids.long())
    got = outputs_and_gradients(ours, q, k, ids)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    torch.testing.assert_close(got[2:], want[2:])
    assert counted == {"jitrope": 1}


def test_left_to_the_host(host: Any, counted: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    """Refused calls are counted, and logged once. If the host refuses the call too, its error is raised."""
    theirs, ours = pair(host, "CosSinRoPE")
    q = torch.randn(1, 6, 2, 32)
    for _ in range(2):
        assert all(map(torch.equal, ours(q.double(), q.double()), theirs(q.double(), q.double())))
    for given in (q.repeat(1, 1, 1, 2), q.repeat(1, 11, 1, 1)):  # larger heads; more tokens than rows
        with pytest.raises(RuntimeError):
            ours(given, given)
    assert counted == {"host": 4}
    said = [*torchtitan.reasons]
    assert [torchtitan.reasons[why] for why in said] == [2, 1, 1]
    assert all(map(str.count, said, ("q is float64", "different sizes", "cos has 64 rows")))
    assert [record.getMessage() for record in caplog.records] == [f"jitrope: left to torchtitan: {why}" for why in said]


@pytest.mark.parametrize("kind", ["CosSinRoPE", "ComplexRoPE"])
def test_positions_out_of_range_raise_as_the_hosts(host: Any, kind: str) -> None:
    q, ids = torch.randn(2, 6, 3, 32), torch.tensor([[0, 1, 2, 3, 4, 63]])  # the last row
    for rope in pair(host, kind):
        assert not any(out.isnan().any() for out in rope(q, q, ids))
        with pytest.raises(RuntimeError, match="position_ids exceed max_valid_pos=63"):
            rope(q, q, ids + 1)


# ---- models, and attention with norms of q and k --------------------------------------------------------

TABLES = {"deepseek_v3": "deepseekv3", "gpt_oss": "gptoss"}
"""The name of a model in its table of configurations, if it is another than that of its folder."""
DENSE = {"qwen3", "llama3", "muse_glimmer"}


def small_config(name: str, override: bool, sharded: bool = False, **changes: Any) -> Any:
    """Two layers with attention of a debug model, with PyTorch's attention, and the override as in the trainer."""
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.attention import ScaledDotProductAttention

    module = importlib.import_module(f"torchtitan.models.{name}")
    words = {} if name in DENSE else {"moe_comm_backend": "standard"}
    config = getattr(module, f"{TABLES.get(name, name)}_configs")["debugmodel"](attn_backend="flex", **words)
    config.layers = config.layers[:2]
    if name == "qwen3":
        config.tok_embeddings.num_embeddings = config.lm_head.out_features = 2048
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        for key, value in changes.items():
            setattr(layer.attention, key, value)
    if sharded:
        from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

        set_qwen3_sharding_config(config, enable_sp=False, enable_ep=False)
    assert len(apply_overrides(OverrideConfig(imports=[OURS] if override else []), config)) == 2 * override
    return config


def small(*arguments: Any, **changes: Any) -> Any:
    """That model with random weights."""
    config = small_config(*arguments, **changes)
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    for layer in model.layers.values():
        for norm in (layer.attention.q_norm, layer.attention.k_norm):
            if norm is not None:
                torch.nn.init.normal_(norm.weight)
    return model


def layers_of() -> list[Any]:
    """The first attention of the stock Qwen3, and of ours."""
    return [small("qwen3", override).layers["0"].attention for override in (False, True)]


X = torch.randn(2, 12, 256, generator=torch.Generator().manual_seed(3))


def logits_and_gradients(model: Any) -> list[Tensor]:
    device = next(model.parameters()).device
    logits = model(TOKENS.to(device), positions=IDS.to(device))
    logits.square().mean().backward()
    return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


NAMES = ("llama3", "llama3 halves", "qwen3", "qwen3 complex")
ON_GPU = [("llama3", "bf16"), ("qwen3", "bf16"), ("qwen3 complex", "fp32")]


@pytest.mark.parametrize(("device", "case", "dtype"), devices(product(NAMES, DTYPES), ON_GPU))
def test_model(host: Any, counted: dict[str, int], device: str, case: str, dtype: str) -> None:
    """q, k and the logits are the host's to the bit, and gradients agree; parameters have the same names.

    On a GPU that holds for q and k: strides choose the kernels of attention.
    """
    name, _, more = case.partition(" ")
    ropes = {
        "complex": host.ComplexRoPE.Config(dim=128, max_seq_len=64),
        "halves": host.CosSinRoPE.Config(dim=16, max_seq_len=64),
    }
    changes = {"rope": ropes[more]} if more in ropes else {}
    stock, ours = (small(name, override, **changes).to(device, DTYPES[dtype]) for override in (False, True))
    heads: list[Tensor] = []
    for model in (stock, ours):
        for layer in model.layers.values():
            layer.attention.rope._init_self_buffers()  # `.to` has converted the table
        first = model.layers["0"].attention.inner_attention
        first.register_forward_pre_hook(lambda _, inputs: heads.extend(inputs[:2]))
    assert stock.state_dict().keys() == ours.state_dict().keys()
    want, got = (logits_and_gradients(model) for model in (stock, ours))
    assert counted == {"jitrope" if name == "llama3" else "fused": 2}
    for a, b in [*zip(heads[2:], heads[:2]), (got[0], want[0])][: 3 if device == "cpu" else 2]:
        assert torch.equal(a, b)
    assert len(got) == len(want) > 15
    unit = 1e-4 if dtype == "fp32" else 0.03
    for a, b in zip((*heads[2:], *got), (*heads[:2], *want)):
        torch.testing.assert_close(a, b, rtol=unit, atol=unit * float(b.abs().max()))


@pytest.mark.parametrize(
    ("name", "rope"), [("deepseek_v3", "ComplexRoPE"), ("gpt_oss", "CosSinRoPE"), ("muse_glimmer", "ComplexRoPE")]
)
def test_other_attention_gets_the_rope(host: Any, counted: dict[str, int], name: str, rope: str) -> None:
    """A class of attention that jitrope does not know keeps its class and its norms; its rope is one launch."""
    stock, ours = (small_config(name, override).layers[0].attention for override in (False, True))
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
    assert counted == {"jitrope": 1}


def test_a_layer_compiles_whole(host: Any, counted: dict[str, int]) -> None:
    layer = layers_of()[1]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    want, got = layer(X, None, IDS), compiled(X, None, IDS)
    assert torch.equal(got, want)
    assert counted == {"fused": 2}
    grads = []
    for out in (want, got):
        layer.zero_grad()
        out.square().mean().backward()
        grads.append([p.grad.clone() for p in layer.parameters()])
    torch.testing.assert_close(*grads)


PARALLEL = [("partial_dtensor",), ("spmd_types",)]


@pytest.mark.parametrize(("device", "backend"), devices(PARALLEL, PARALLEL[:1]))
def test_norms_of_a_tensor_parallel_layer(
    host: Any, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch, device: str, backend: str
) -> None:
    """Each rank normalises and rotates its heads; a weight's gradient is the rank's part, as the host's is."""
    from torchtitan.distributed import parallel_dims, utils
    from torchtitan.distributed.spmd_types import set_current_spmd_mesh

    monkeypatch.setattr(parallel_dims, "device_type", device)
    monkeypatch.setattr(utils, "_spmd_backend", backend)
    results = []
    with group(2):
        dims = parallel_dims.ParallelDims(1, 1, 1, 2, 1, 1, 2, spmd_backend=backend)
        dims.build_mesh()
        for override in (False, True):
            config = small_config("qwen3", override, sharded=True).layers[0].attention
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
            weights = layer.q_norm.weight, layer.k_norm.weight
            results.append([*map(local, heads), *(local(w.grad) for w in weights)])
            results[-1] += [getattr(w.grad, "placements", None) for w in weights]
    assert counted == {"fused": 1}
    theirs, ours = results
    assert ours[0].shape == (2, 12, config.n_heads // 2, config.head_dim)
    for a, b in zip(ours[: 3 if device == "cpu" else 2], theirs):  # on a GPU strides choose the kernels of attention
        assert torch.equal(a, b)
    assert ours[5:] == theirs[5:]
    torch.testing.assert_close(ours[3:5], theirs[3:5], rtol=1e-4, atol=1e-3)


def local(x: Any) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


# ---- what users and other versions change ---------------------------------------------------------------


def hooked(norm: Any) -> Any:
    norm.register_forward_hook(lambda *_: None)
    return norm


CHANGES: dict[str, Any] = {
    "hooked": hooked,
    "parametrised": lambda norm: torch.nn.utils.parametrize.register_parametrization(norm, "weight", Twice()),
    "another module": lambda _: Twice(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_norm_is_called(host: Any, counted: dict[str, int], change: str) -> None:
    """Rope is still jitrope's; the norm's weight gets the gradient that it gets from the host."""
    results = []
    for layer in layers_of():
        layer.q_norm, layer.k_norm = CHANGES[change](layer.q_norm), CHANGES[change](layer.k_norm)
        results.append([layer(X, None, None)])
        results[-1][0].square().sum().backward()
        results[-1] += [p.grad for p in layer.parameters()]
    assert torch.equal(results[1][0], results[0][0])
    torch.testing.assert_close(*results)
    assert counted == {"jitrope": 1, "host": 0}
    assert [why.startswith("not fused: a norm ") for why in torchtitan.reasons] == [True]


def test_norms_that_differ_or_are_absent(host: Any, counted: dict[str, int]) -> None:
    """The norms of q and k with two eps are called; a layer without norms has one launch for rope, as copies have."""
    layers = layers_of()
    for layer in layers:
        layer.k_norm.eps = 0.1
    assert torch.equal(layers[1](X, None, IDS), layers[0](X, None, IDS))
    for layer in layers:
        layer.q_norm = layer.k_norm = None
    assert torch.equal(copy.deepcopy(layers[1])(X, None, IDS), layers[0](X, None, IDS))
    assert counted == {"jitrope": 2, "host": 0}


REPLACED = "was replaced, or its file has another text than in 0.3.0"
PATCHES = {
    "F.rms_norm": "a norm is not torchtitan's RMSNorm or has no weight, or q's and k's differ",
    "RMSNorm.forward": "a norm is not torchtitan's RMSNorm or has no weight, or q's and k's differ",
    "CosSinRoPE.forward": f"a method of CosSinRoPE {REPLACED}",
    "CosSinRoPE.apply_rotary_emb": f"a method of CosSinRoPE {REPLACED}",
    "CosSinRoPE._reshape_cache": f"a method of CosSinRoPE {REPLACED}",
    "GQAttention.forward": "GQAttention.forward was replaced, or has another text than in 0.3.0",
}


@pytest.mark.parametrize("when", ["before", "after", slow("compiled")])
@pytest.mark.parametrize("patch", PATCHES)
def test_a_patch_of_a_class(
    host: Any, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch, fresh: None, patch: str, when: str
) -> None:
    """The user's method is called, and the layer is fused again when it is gone."""
    from torchtitan.models.common import attention, nn_modules

    name, _, method = patch.partition(".")
    cls = next(getattr(module, name) for module in (host, attention, nn_modules) if hasattr(module, name))
    static, function = isinstance(vars(cls).get(method), staticmethod), doubled(getattr(cls, method))
    if when == "before":
        monkeypatch.setattr(cls, method, staticmethod(function) if static else function)
    theirs, ours = layers_of()
    run = torch.compile(ours, backend="aot_eager", fullgraph=True) if when == "compiled" else ours
    if when != "before":
        fused = run(X, None, IDS)
        assert counted["fused"] == 1
        monkeypatch.setattr(cls, method, staticmethod(function) if static else function)
    want = theirs(X, None, IDS)
    assert torch.equal(run(X, None, IDS), want)
    assert f"not fused: {PATCHES[patch]}" in torchtitan.reasons
    if when != "before":
        assert not torch.equal(want, fused)
        monkeypatch.undo()
        assert torch.equal(run(X, None, IDS), fused)
        assert counted["fused"] == (1 if when == "compiled" else 2)  # the compiled one needs no new trace


def test_a_keyword_of_another_version(
    host: Any, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    """A rope whose methods take more goes to the host, counted, with its keyword; it is never a TypeError."""
    stock = host.CosSinRoPE.forward

    def forward(self: Any, query: Tensor, key: Tensor, positions: Any = None, *, times: int = 1) -> Any:
        return [times * x for x in stock(self, query, key, positions)]

    theirs, ours = pair(host, "CosSinRoPE")
    monkeypatch.setattr(host.CosSinRoPE, "forward", forward)
    q = torch.randn(1, 6, 2, 32)
    assert all(map(torch.equal, ours(q, q, times=3), theirs(q, q, times=3)))
    assert counted == {"host": 1}
    assert [*torchtitan.reasons] == [PATCHES["CosSinRoPE.forward"]]


@pytest.mark.parametrize("name", ["CosSinRoPE", "GQAttention"])
def test_another_text(
    host: Any, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch, fresh: None, name: str
) -> None:
    """A file that differs from that of 0.3.0 is left to the host."""
    monkeypatch.setitem(torchtitan._PLACES, name, (torchtitan._PLACES[name][0], "another"))
    theirs, ours = layers_of()
    assert torch.equal(ours(X, None, IDS), theirs(X, None, IDS))
    assert counted["fused"] == 0
    assert f"not fused: {PATCHES[f'{name}.forward']}" in torchtitan.reasons


def test_subclasses_and_pickle(host: Any) -> None:
    """A subclass of attention gets the rope, a subclass of a rope stays, and configurations pickle."""
    from torchtitan.config.override import derive
    from torchtitan.models.common.attention import GQAttention

    config = torchtitan.CosSinRoPE.Config(dim=32, max_seq_len=64)
    assert pickle.loads(pickle.dumps(config)) == config
    made = small_config("qwen3", False).layers[0].attention
    own, rope = (type("Config", (base.Config,), {}) for base in (GQAttention, host.CosSinRoPE))
    ours = torchtitan.attention(derive(made, own))
    assert (type(ours), type(ours.rope)) == (own, torchtitan.CosSinRoPE.Config)
    assert type(torchtitan.attention(replace(made, rope=derive(made.rope, rope))).rope) is rope
    with pytest.raises(AttributeError, match="no attribute 'NoRoPE'"):
        torchtitan.NoRoPE  # noqa: B018
