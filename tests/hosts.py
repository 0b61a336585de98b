"""Functions for the tests of the host libraries."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

HOSTS = Path(__file__).parent.parent / "build" / "hosts"
"""Wheels whose sources are only read, because they have no CPU build."""

TE_ROPE, TE_ATTENTION = (f"transformer_engine.pytorch.attention.{name}" for name in ("rope", "multi_head_attention"))


def missing(command: str) -> None:
    """Skip a test without its host, with the reason. In CI every host must be installed."""
    reason = f"the host library is not installed: {command}"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


INSTALL = {
    "diffusers": "pip install -e '.[diffusers]'",
    "deepspeed": "pip install deepspeed",
    "comfy_kitchen": "pip install --no-deps comfy-kitchen==0.2.40",
    "cache_dit": "pip install --no-deps cache-dit==1.5.3",
    "transformer_engine": "pip install --no-build-isolation 'transformer-engine[pytorch]'",
    "kernels": "pip install 'kernels>=0.17.2'",
}


def installed(name: str) -> Any:
    """A module of a host."""
    try:
        return importlib.import_module(name)
    except (ImportError, FileNotFoundError):  # the second is TransformerEngine's without its compiled part
        missing(INSTALL[name.partition(".")[0]])


def doubled(function: Any, named: bool = True) -> Any:
    """A user's function in place of a host's: twice its result, or twice the first. named: it looks like the host's."""
    twice = lambda out: (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out  # noqa: E731
    patched = lambda *arguments, **words: twice(function(*arguments, **words))  # noqa: E731
    return wraps(function)(patched) if named else patched


def freqs_of(rows: int, dim: int, interleaved: bool = False, batch: int = 1, base: float = 100) -> Tensor:
    """Angles like those of Megatron's and TransformerEngine's embeddings, but different ones for each batch row."""
    angles = torch.outer(torch.arange(rows).float(), base ** (-torch.arange(0, dim, 2) / dim))
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    return torch.stack([angles * (b + 1) for b in range(batch)], 1)[:, :, None]


@contextmanager
def triton(*more: str) -> Iterator[None]:
    """Triton, or a stand-in, because torch's CPU build has none: torchtitan imports it for other kernels.

    torch 2.11 has no `DataParallelMeshDims`, which torchtitan 0.3 imports; a single process does not use it.
    more: other modules, of packages that may be absent.
    """
    fsdp = importlib.import_module("torch.distributed.fsdp")
    importlib.import_module("torch._inductor.compile_fx")  # else it would take the stand-in for the real Triton
    names = ("triton", "triton.language", *more)
    absent = [name for name in names if importlib.util.find_spec(name.partition(".")[0]) is None]
    with pytest.MonkeyPatch.context() as patch:
        for name in absent:
            patch.setitem(sys.modules, name, MagicMock())
        if not hasattr(fsdp, "DataParallelMeshDims"):
            patch.setattr(fsdp, "DataParallelMeshDims", object, raising=False)
        yield


@contextmanager
def xdit() -> Iterator[None]:
    """xDiT, installed or, without a GPU, its wheel.

    Without a GPU its import asks for Triton, DistVAE and a version of CUDA, and FLUX.1 needs none of them.
    """
    diffusers = pytest.importorskip("diffusers", reason="xDiT runs models of diffusers")
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        if not torch.cuda.is_available():
            patch.setattr(sys, "path", [*sys.path, *map(str, HOSTS.glob("xfuser-*.whl"))])
            patch.setattr(torch.backends.cudnn, "is_available", lambda: False)
            patch.setattr(torch.version, "cuda", None)
            stack.enter_context(triton("distvae.vae"))
        if importlib.util.find_spec("xfuser") is None:
            missing("pip install xfuser, or without a GPU: pip download --no-deps -d build/hosts xfuser==0.7.0")
        assert diffusers.FluxTransformer2DModel  # imported before there is a version of CUDA
        with pytest.MonkeyPatch.context() as importing:
            importing.setattr(torch.version, "cuda", torch.version.cuda or "13.0")
            importlib.import_module("xfuser.model_executor.models.transformers.transformer_flux")
        yield
    for name in set(sys.modules) - before:
        if name.startswith("xfuser"):
            del sys.modules[name]


class Core(torch.nn.Identity):
    """Causal attention in plain torch, of [s, b, h, d] or one sequence [t, h, d]; Megatron's local one is fp32 only."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **words: Any) -> Tensor:
        packed = q.dim() == 3
        q, k, v = (x.reshape(len(x), -1, *x.shape[-2:]).permute(1, 2, 0, 3) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(1 if packed else 2)


MEGATRON = {
    **{"rope_utils": "models.common.embeddings.rope_utils", "specs": "models.gpt.gpt_layer_specs"},
    **{"attention": "transformer.attention", "latent": "transformer.multi_latent_attention"},
    **{"transformer": "transformer", "norms": "transformer.torch_norm"},
    **{"packed": "packed_seq_params", "groups": "process_groups_config", "build": "transformer.spec_utils"},
}


def megatron(patch: pytest.MonkeyPatch, on_cpu: bool = True) -> Any:
    """Megatron's modules, without what compiles for seconds.

    Without Triton one of 0.19's modules, which its experts import, has a stand-in.
    """
    if importlib.util.find_spec("triton") is None:
        sys.modules.setdefault("megatron.core.transformer.moe.ops.paged_stash", MagicMock())
    try:
        made = SimpleNamespace(**{key: importlib.import_module(f"megatron.core.{x}") for key, x in MEGATRON.items()})
    except ImportError:
        missing("pip install megatron-core")
    patch.setattr(made.latent, "HAVE_TE", False)  # 0.16.1 sets it to True without TransformerEngine
    if on_cpu:
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
    for cls, name in ((made.norms.L2Norm, "_norm"), (made.attention.Attention, "_apply_output_gate")):
        method = getattr(cls, name)
        patch.setattr(cls, name, getattr(method, "_torchdynamo_orig_callable", method))
    return made


def megatron_config(core: Any, heads: int = 2, fusion: bool = True, mla: bool = False, **words: Any) -> Any:
    """Megatron's own configuration of a small model."""
    kind = core.transformer.MLATransformerConfig if mla else core.transformer.TransformerConfig
    words |= {"multi_latent_attention": True} if mla else {}
    made = kind(num_layers=1, hidden_size=64, num_attention_heads=heads, **words, apply_rope_fusion=False)
    made.apply_rope_fusion = fusion  # set late: the constructor requires TransformerEngine or Triton
    return made


def megatron_attention(core: Any, ranks: Any, norm: str, dtype: Any = torch.float32, **words: Any) -> Any:
    """Megatron's attention with our core and random weights. norm: of q and k of `SelfAttention`, or "latent"."""
    latent, kind = norm == "latent", {"normalization": {"LayerNorm": "LayerNorm"}.get(norm, "RMSNorm")}
    spec = {"multi_latent_attention": True} if latent else {"qk_layernorm": True, "qk_l2_norm": norm == "L2Norm"}
    if not latent:  # 4 heads of q and 2 of k
        words = {"num_query_groups": 2, "kv_channels": 32, "qk_layernorm": True, **words}
    config = megatron_config(
        core, 2 if latent else 4, True, latent, **kind, params_dtype=dtype, **words, use_cpu_initialization=True
    )
    torch.manual_seed(0)
    attention = core.specs.get_gpt_layer_local_spec(**spec, **kind).submodules.self_attention
    attention.submodules.core_attention = Core
    layer = core.build.build_module(attention, config=config, layer_number=1, pg_collection=ranks)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def te_attention(te: Any, norm: Any, before: bool, dtype: torch.dtype = torch.float32, **words: Any) -> Any:
    """TransformerEngine's attention. before: its norms are before rope."""
    torch.manual_seed(0)
    words = {"num_gqa_groups": 2, "fuse_qkv_params": True, "qk_norm_eps": 1e-3, "device": "cpu", **words}
    layer = te.MultiheadAttention(64, 4, 32, qk_norm_type=norm, qk_norm_before_rope=before, params_dtype=dtype, **words)
    for weight in (weight for each in (layer.q_norm, layer.k_norm) if each is not None for weight in each.parameters()):
        torch.nn.init.uniform_(weight)
    return layer


def titan_config(name: str, override: bool, sharded: bool = False, **changes: Any) -> Any:
    """Two layers with attention of a debug model, with PyTorch's attention, and the override as in the trainer."""
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.attention import ScaledDotProductAttention

    module = importlib.import_module(f"torchtitan.models.{name}")
    table = {"deepseek_v3": "deepseekv3", "gpt_oss": "gptoss"}
    words = {} if name in ("qwen3", "llama3", "muse_glimmer") else {"moe_comm_backend": "standard"}
    config = getattr(module, f"{table.get(name, name)}_configs")["debugmodel"](attn_backend="flex", **words)
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
    imports = ["jitrope.integrations.torchtitan.attention"] if override else []
    assert len(apply_overrides(OverrideConfig(imports=imports), config)) == 2 * override
    return config


def step(layer: Any, x: Tensor, *given: Any, **words: Any) -> list[Tensor]:
    """q, k and v as attention gets them, a layer's output, and the gradients of the input and of all its weights."""
    seen, leaf = [], x.clone().requires_grad_()
    core = getattr(layer, "self_attention", layer).core_attention
    hook = core.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs[:3]))
    out = layer(leaf, *given, **words)
    out = out[0] if isinstance(out, tuple) else out
    hook.remove()
    grads = torch.autograd.grad(out.float().sin().sum(), (leaf, *layer.parameters()), allow_unused=True)
    return [*seen, out, *(g for g in grads if g is not None)]


def close(got: Sequence[Tensor], want: Sequence[Tensor], unit: float) -> None:
    """Within some units of the largest value."""
    assert len(got) == len(want) > 0
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=unit, atol=unit * float(b.detach().abs().max()))


@contextmanager
def group(size: int, rank: int = 0) -> Iterator[Any]:
    """A rank's process group on torch's fake backend, which sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield torch.distributed.group.WORLD
    finally:
        torch.distributed.destroy_process_group()


_declared: list[torch.library.Library] = []


def timm() -> Any:
    """timm, installed or from build/hosts/timm, where the other hosts do not find torchvision.

    Beside torch's CPU build torchvision cannot load its C++ part, and its import asks for two operators of it. They are
    declared, without code, because timm does not call them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(HOSTS / "timm")])
        try:
            found = importlib.import_module("timm")
            if tuple(map(int, found.__version__.split(".")[:3])) < (1, 0, 31):
                missing(f"pip install timm==1.0.31; {found.__version__} lacks some of the models")
            return found
        except ImportError:
            missing("pip install --no-deps --target build/hosts/timm timm torchvision, of the version for this torch")
        except RuntimeError as error:
            if _declared or "operator torchvision::" not in str(error):
                raise
        _declared.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            _declared[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return timm()
