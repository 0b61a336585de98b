"""Functions for the tests of the host libraries."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

HOSTS = Path(__file__).parent.parent / "build" / "hosts"
"""Wheels whose sources are only read, because they have no CPU build."""


def missing(command: str) -> None:
    """Skip a test without its host, with the reason. In CI every host must be installed."""
    reason = f"the host library is not installed: {command}"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def doubled(function: Any, named: bool = True) -> Any:
    """A user's function in place of a host's: twice its result, or twice the first. named: it looks like the host's."""

    def patched(*arguments: Any, **words: Any) -> Any:
        out = function(*arguments, **words)
        return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out

    return wraps(function)(patched) if named else patched


class Twice(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def freqs_of(rows: int, dim: int, interleaved: bool = False, batch: int = 1, base: float = 100) -> torch.Tensor:
    """Angles like those of Megatron's and TransformerEngine's embeddings, but different ones for each batch row."""
    angles = torch.outer(torch.arange(rows).float(), base ** (-torch.arange(0, dim, 2) / dim))
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    return torch.stack([angles * (b + 1) for b in range(batch)], 1)[:, :, None]


class Absent(types.ModuleType):
    """A module that has every name, each without effect."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


_XDIT_NEEDS = {"triton": ("triton", "triton.language"), "distvae": ("distvae.vae",)}


def _put_stand_ins(patch: pytest.MonkeyPatch, needed: dict[str, tuple[str, ...]]) -> None:
    """Stand-ins for the modules of packages that are not installed."""
    importlib.import_module("torch._inductor.compile_fx")  # else it would take the stand-in for the real Triton
    for package, names in needed.items():
        if importlib.util.find_spec(package) is None:
            for name in names:
                patch.setitem(sys.modules, name, Absent(name))


@contextmanager
def triton() -> Iterator[None]:
    """Triton, or a stand-in, because torch's CPU build has none: torchtitan imports it for other kernels.

    torch 2.11 has no `DataParallelMeshDims`, which torchtitan 0.3 imports; a single process does not use it.
    """
    fsdp = importlib.import_module("torch.distributed.fsdp")
    with pytest.MonkeyPatch.context() as patch:
        _put_stand_ins(patch, {"triton": _XDIT_NEEDS["triton"]})
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
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(sys, "path", [*sys.path, *map(str, HOSTS.glob("xfuser-*.whl"))])
            patch.setattr(torch.backends.cudnn, "is_available", lambda: False)
            patch.setattr(torch.version, "cuda", None)
            _put_stand_ins(patch, _XDIT_NEEDS)
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


def megatron() -> types.SimpleNamespace:
    """Megatron-core's modules with rope. Without Triton one of 0.19's, which its experts import, has a stand-in."""
    stash = "megatron.core.transformer.moe.ops.paged_stash"
    if importlib.util.find_spec("triton") is None:
        sys.modules.setdefault(stash, Absent(stash))
    modules = {
        "rope_utils": "models.common.embeddings.rope_utils",
        "rotary": "models.common.embeddings.rotary_pos_embedding",
        "attention": "transformer.attention",
        "latent": "transformer.multi_latent_attention",
        "specs": "models.gpt.gpt_layer_specs",
        "transformer": "transformer",
        "norms": "transformer.torch_norm",
        "packed": "packed_seq_params",
        "groups": "process_groups_config",
    }
    try:
        return types.SimpleNamespace(**{k: importlib.import_module(f"megatron.core.{v}") for k, v in modules.items()})
    except ImportError:
        missing("pip install megatron-core")


@contextmanager
def separate(*norms: torch.nn.Module) -> Iterator[None]:
    """Norms with hooks are called, and rope is a launch of its own."""
    hooks = [norm.register_forward_hook(lambda *_: None) for norm in norms]
    yield
    for hook in hooks:
        hook.remove()


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
