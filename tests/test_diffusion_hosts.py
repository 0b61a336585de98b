"""xDiT, whose wheel is only read, and cache-dit: both run models of diffusers."""

from __future__ import annotations

import ast
import zipfile
from typing import Any

import pytest
import torch
from torch import Tensor

from jitrope.integrations import diffusers as jitrope_diffusers
from jitrope.integrations import xfuser

from .devices import DEVICES
from .hosts import HOSTS, missing, stand_in

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


B, S, D = 2, 7, 64


# ---- xDiT ----------------------------------------------------------------------------------------


def test_xdit_calls_what_is_replaced() -> None:
    """Its files hold the two functions under their own names. The wheel is not installed: it needs a GPU."""
    wheels = sorted(HOSTS.glob("xfuser-*.whl"))
    if not wheels:
        missing("pip download --no-deps --only-binary :all: -d build/hosts xfuser==0.7.0")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        held = {
            (alias.name, name.split("/")[-1])
            for name in wheel.namelist()
            if "/transformers/" in name and name.endswith(".py")
            for node in ast.parse(wheel.read(name)).body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if f"{node.module}:{alias.name}" in xfuser._FUNCTIONS and alias.asname is None
        }
    assert ("apply_rotary_emb_qwen", "transformer_qwen.py") in held
    models = {"flux", "flux2", "hunyuan_video", "hunyuan_video15", "krea2", "lumina2"}
    assert {f"transformer_{model}.py" for model in models} <= {file for _, file in held}


@pytest.mark.parametrize("device", DEVICES)
def test_xdit(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """The calls of its processors, with diffusers' own functions, give their bits."""
    embeddings = pytest.importorskip("diffusers.models.embeddings", reason="xDiT runs models of diffusers")
    from diffusers.models.transformers import transformer_qwenimage

    holder = stand_in(monkeypatch, "xfuser.model_executor.models.transformers.transformer_flux")
    holder.apply_rotary_emb = embeddings.apply_rotary_emb
    holder.apply_rotary_emb_qwen = transformer_qwenimage.apply_rotary_emb_qwen
    x = random(B, S, 4, D, dtype=torch.bfloat16).to(device)
    angles = torch.outer(torch.arange(S), 1e4 ** (-torch.arange(0, D, 2) / D)).to(device)
    cos, sin = angles.cos(), angles.sin()
    pairs = [t.repeat_interleave(2, -1) for t in (cos, sin)]
    calls = [
        ("apply_rotary_emb", (x, pairs), {"sequence_dim": 1}),
        ("apply_rotary_emb", (x.transpose(1, 2), pairs), {}),
        ("apply_rotary_emb", (x, torch.complex(cos, sin).expand(B, -1, -1)), {"use_real": False}),
        ("apply_rotary_emb_qwen", (x, torch.complex(cos, sin)), {"use_real": False}),
    ]
    for name, arguments, words in calls:
        want = getattr(holder, name)(*arguments, **words)
        with xfuser.enable() as report:
            assert torch.equal(getattr(holder, name)(*arguments, **words), want)
        assert report.calls == {"jitrope": 1, "host": 0}
    assert holder.apply_rotary_emb is embeddings.apply_rotary_emb


# ---- cache-dit -----------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["cache-dit", "jitrope"])
def test_cache_dit(first: str) -> None:
    """An enabled FLUX under cache-dit, which skips blocks of later steps, has the bits of a stock one under cache-dit,
    whichever comes first."""
    try:
        import cache_dit
    except ImportError:
        missing("pip install --no-deps cache-dit==1.5.3")
    diffusers = pytest.importorskip("diffusers", reason="cache-dit caches models of diffusers")
    sizes = {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8)}
    words = {"in_channels": 4, "num_layers": 4, "num_single_layers": 4, "pooled_projection_dim": 32, **sizes}
    torch.manual_seed(0)
    models = [diffusers.FluxTransformer2DModel(**words).eval() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    cache = cache_dit.DBCacheConfig(
        Fn_compute_blocks=1, Bn_compute_blocks=0, residual_diff_threshold=0.5, max_warmup_steps=1, num_inference_steps=4
    )
    given: Any = {"encoder_hidden_states": random(1, 8, 32), "pooled_projections": random(1, 32)}
    given.update(timestep=torch.ones(1), img_ids=random(16, 3), txt_ids=torch.zeros(8, 3))
    if first == "jitrope":
        report = jitrope_diffusers.enable(models[0])
    for model in models:
        cache_dit.enable_cache(model, cache_config=cache)
    if first == "cache-dit":
        report = jitrope_diffusers.enable(models[0])
    for step in range(4):
        x = random(1, 16, 4) * (1 + step / 1000)
        with torch.no_grad():
            ours, stock = (model(hidden_states=x, **given)[0] for model in models)
        assert torch.equal(ours, stock)
    assert 0 < report.calls["fused"] < 4 * 8
    assert report.calls["host"] == 0
