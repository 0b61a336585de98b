"""The hosts, ready for a test, and small layers and models of them that `test_hosts` treats alike (`Live`)."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

from jitrope.integrations import _host

from .. import hosts

PYTORCH = "transformer_engine.pytorch"


# ---- Megatron-core -------------------------------------------------------------------------------------


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch, request: Any) -> Any:
    """Megatron's modules; see `hosts.megatron`."""
    on_cpu = getattr(request.node, "callspec", SimpleNamespace(params={})).params.get("device", "cpu") == "cpu"
    return hosts.megatron(monkeypatch, on_cpu)


@pytest.fixture
def ranks(core: Any, request: Any) -> Iterator[Any]:
    """Megatron's process groups; the parameter is the context parallel (size, rank)."""
    with hosts.group(*getattr(request, "param", (1, 0))) as everyone:
        alone = torch.distributed.new_group([torch.distributed.get_rank()])
        yield core.groups.ProcessGroupCollection(tp=alone, cp=everyone, pp=alone)


# ---- TransformerEngine ---------------------------------------------------------------------------------


class L2Normalization(nn.RMSNorm):
    """The formula of `jit.l2normalization_fused_`: squares are summed."""

    sums = lambda self, x: x.float().pow(2).sum(-1, keepdim=True)  # noqa: E731
    forward = lambda self, x: (x.float() * torch.rsqrt(self.sums(x) + self.eps)).to(x.dtype)  # noqa: E731


# Classes of torch under the names of TransformerEngine's, without the words for fp8 and parallelism. Attention is a
# product of q, k and v.
TE_CLASSES = {
    name: type(name, (base,), {"__module__": f"{PYTORCH}.{at}", "name": None, **own})
    for name, base, at, own in (
        ("Linear", nn.Linear, "", {
            "__init__": lambda self, size, out, bias=True, params_dtype=None, **_:
                nn.Linear.__init__(self, size, out, bias, dtype=params_dtype),
            "forward": lambda self, x, **_: nn.Linear.forward(self, x)}),
        ("DotProductAttention", nn.Identity, "", {
            "forward": lambda self, q, k, v, **_: (q * k.flip(0).repeat_interleave(q.shape[-2] // k.shape[-2], -2)
                + v.repeat_interleave(q.shape[-2] // v.shape[-2], -2)).flatten(-2)}),
        ("L2Normalization", L2Normalization, "ops.basic.l2normalization", {
            "__init__": lambda self, eps, **_: nn.RMSNorm.__init__(self, 32, eps, elementwise_affine=False)}),
        *((cls.__name__, cls, f"module.{cls.__name__.lower()}", {
            "__init__": lambda self, normalized_shape, eps, params_dtype, cls=cls, **_:
                cls.__init__(self, normalized_shape, eps, dtype=params_dtype),
            "zero_centered_gamma": False}) for cls in (nn.RMSNorm, nn.LayerNorm)),
    )
}  # fmt: skip
TE_MODULES = """attention attention.dot_product_attention attention.dot_product_attention.utils attention.inference
cpp_extensions cpp_extensions.fused_attn cpu_offload distributed module module.base ops ops.basic
ops.basic.l2normalization quantized_tensor tensor tensor.float8_tensor quantization utils constants"""


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The wheel's rope.py and multi_head_attention.py, whose own code decides what is called, and in which order.

    The wheel has no CPU build. So its files are executed with stand-ins for everything that they import. Only the
    names below have an effect. In place of the compiled rope is the one in plain torch beside it.
    """
    files = {name: hosts.HOSTS / f"{name.replace('.', '/')}.py" for name in (hosts.TE_ROPE, hosts.TE_ATTENTION)}
    if not all(path.exists() for path in files.values()):
        hosts.missing("pip install --no-deps --target build/hosts transformer-engine")
    no = dict.fromkeys(("custom", "float8_current_scaling", "mxfp8"), lambda: False)
    recipe = SimpleNamespace(fp8_dpa=False, fp8_mha=False, **no)
    held: dict[str, Any] = {
        "FP8GlobalStateManager": SimpleNamespace(is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: recipe),
        "Float8Tensor": type("Float8Tensor", (), {}),
        "SplitAlongDim": SimpleNamespace(apply=lambda x, dim, sizes: x.split(sizes, dim)),
        **{"divide": lambda a, b: a // b, "AttnTypes": ("self", "cross"), "AttnBiasTypes": ("no_bias",)},
        **{"LayerNormLinear": TE_CLASSES["Linear"], **TE_CLASSES},
    }
    names = [f"{PYTORCH}.{name}" for name in TE_MODULES.split()]
    for name in ("transformer_engine", "transformer_engine_torch", PYTORCH, *names):
        monkeypatch.setitem(sys.modules, name, module := MagicMock())
        vars(module).update(held, __path__=[], __spec__=None)
    for name, path in files.items():
        spec = importlib.util.spec_from_file_location(name, path)
        monkeypatch.setitem(sys.modules, name, module := importlib.util.module_from_spec(spec))
        package, _, last = name.rpartition(".")
        setattr(sys.modules[package], last, module)
        spec.loader.exec_module(module)
    rope = sys.modules[hosts.TE_ROPE]
    plain, compiled = rope.apply_rotary_pos_emb, SimpleNamespace()
    compiled.apply = lambda t, freqs, starts, form, pairs, *of: plain(t, freqs, form, starts, pairs, False, *of)
    rope.FusedRoPEFunc = compiled
    yield sys.modules[hosts.TE_ATTENTION]
    assert not _host.placed


# ---- torchtitan ----------------------------------------------------------------------------------------


@pytest.fixture
def titan() -> Iterator[Any]:
    """torchtitan's rope.py, and our classes as another process makes them, with no calls counted."""
    if importlib.util.find_spec("torchtitan") is None:
        hosts.missing("pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3 && pip install tyro")
    with hosts.triton():
        for name in ("llama3", "qwen3", "deepseek_v3", "gpt_oss", "muse_glimmer"):
            importlib.import_module(f"torchtitan.models.{name}")
        from jitrope.integrations import torchtitan

        torchtitan.register()
        torch.compiler.reset()
        for counted in (torchtitan.calls, torchtitan.reasons):
            counted.clear()
        torchtitan._subclass.cache_clear()
        yield importlib.import_module("torchtitan.models.common.rope")
        torchtitan._subclass.cache_clear()


# ---- what hosts share ----------------------------------------------------------------------------------


class Live(NamedTuple):
    """A small layer or model of a host, on the CPU, with norms of q and k if jitrope fuses those of this host."""

    run: Callable[[], Tensor]  # a forward
    enable: Callable[..., Any]  # a context manager
    calls: dict[str, int]  # what one enabled forward counts
    rope: dict[str, int]  # what it counts if no norm is fused
    norms: Sequence[nn.Module] = ()  # of q, one in each of its attention layers


def live(request: Any, name: str, dtype: torch.dtype = torch.float32) -> Live:
    """A `Live` by the name of its host, and perhaps of a kind."""
    torch.manual_seed(0)
    (host, _, kind), get = name.partition(" "), request.getfixturevalue
    ours = importlib.import_module(f"jitrope.integrations.{host}")
    match host:
        case "diffusers":
            hosts.installed(host)
            zoo = importlib.import_module(f"{__package__}.diffusion_zoo")
            model, inputs = zoo.prepared("FluxTransformer2DModel", dtype=dtype)
            inputs = {key: x.to(dtype) for key, x in inputs.items()}  # the ids too
            norms = [x.attn.norm_q for x in (*model.transformer_blocks, *model.single_transformer_blocks)]
            enable = partial(ours.enable, model, fuse_norm=kind != "rope")
            calls, run = {"jitrope": 6} if kind == "rope" else {"fused": 3}, partial(zoo.forward, model, inputs)
            return Live(run, enable, calls, {"jitrope": 6}, norms)
        case "transformers":
            zoo = importlib.import_module(f"{__package__}.transformers_zoo")
            model = zoo.language_model(kind or "qwen3", dtype)
            run, norms = lambda: model(input_ids=zoo.IDS)[0], [x.self_attn.q_norm for x in model.model.layers]
            return Live(run, partial(ours.enable, model), {"fused": 2}, {"jitrope": 2}, norms)
        case "megatron":
            layer = hosts.megatron_attention(get("core"), get("ranks"), kind or "RMSNorm", dtype)
            x, freqs = torch.randn(6, 2, 64).to(dtype), hosts.freqs_of(6, 32)
            # Without jitrope Megatron has no fused rope, which the configuration asks for.
            fusion = lambda *_: setattr(layer.config, "apply_rope_fusion", bool(_host.placed))  # noqa: E731
            layer.register_forward_pre_hook(fusion)
            run = lambda: layer(x, None, rotary_pos_emb=freqs)[0]  # noqa: E731
            return Live(run, ours.enable, {"fused": 1}, {"jitrope": 2}, [layer.q_layernorm])
        case "transformer_engine":
            layer = hosts.te_attention(get("te"), "RMSNorm", True, dtype)
            run = partial(layer, torch.randn(12, 2, 64).to(dtype), rotary_pos_emb=hosts.freqs_of(24, 32))
            return Live(run, ours.enable, {"fused": 1}, {"jitrope": 2}, [layer.q_norm])
        case "timm":
            hosts.timm()
            attention = importlib.import_module("timm.models.eva").EvaAttention
            layer = attention(32, 4, qk_norm=True, norm_layer=nn.LayerNorm).to(dtype)
            x, emb = torch.randn(2, 10, 32).to(dtype), torch.randn(9, 16).to(dtype)
            return Live(lambda: layer(x, emb), ours.enable, {"jitrope": 1}, {"jitrope": 1})
        case "torchtitan":
            get("titan")
            layers = [hosts.titan_config("qwen3", False).layers[0].attention.build().to(dtype)]
            layers[0].init_states()
            x = torch.randn(2, 12, 256).to(dtype)

            @contextmanager
            def enabled() -> Iterator[Any]:
                """A layer with our override, and with the norms of the host's."""
                layers.append(hosts.titan_config("qwen3", True).layers[0].attention.build().to(dtype))
                layers[1].q_norm, layers[1].k_norm = layers[0].q_norm, layers[0].k_norm
                layers[1].load_state_dict(layers[0].state_dict())
                layers[1].rope._init_self_buffers()
                yield _host.Report("torchtitan")
                layers.pop()

            run = lambda: layers[-1](x, None, None)  # noqa: E731
            return Live(run, enabled, {"fused": 1}, {"jitrope": 1}, [layers[0].q_norm])
        case "deepspeed":
            layer = hosts.installed("deepspeed.sequence.layer")
            t, angles = torch.randn(2, 6, 3, 16).to(dtype), torch.rand(1, 6, 1, 16).to(dtype)
            run = lambda: layer.apply_rotary_pos_emb(t, angles.cos(), angles.sin())  # noqa: E731
        case "comfy_kitchen":
            ck, x, angles = hosts.installed(host), torch.randn(2, 4, 7, 64).to(dtype), torch.randn(1, 1, 7, 32)
            table = torch.stack((angles.cos(), -angles.sin(), angles.sin(), angles.cos()), -1)
            run = lambda: ck.apply_rope1(x, table.unflatten(-1, (2, 2)))  # noqa: E731
    return Live(run, ours.enable, {"jitrope": 1}, {"jitrope": 1})
