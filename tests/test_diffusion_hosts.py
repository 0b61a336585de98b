"""Hosts of diffusion models besides diffusers: jitrope's functions against the hosts' own."""

from __future__ import annotations

import ast
import inspect
import zipfile
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from jitrope.integrations import comfy_kitchen, xfuser
from jitrope.integrations import diffusers as jitrope_diffusers

from .devices import DEVICES
from .host.backend import DEVICE
from .hosts import HOSTS, missing, stand_in

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rotations(*shape: int) -> Tensor:
    """2 x 2 rotations by random angles of this shape."""
    angles = random(*shape, seed=7) * 5
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((cos, -sin, sin, cos), -1).unflatten(-1, (2, 2))


# ---- ComfyUI -------------------------------------------------------------------------------------

B, S, D = 2, 7, 64
LAYOUTS = {  # shapes of q and k, and of the angles
    "bhsd": ((B, 4, S, D), (B, 2, S, D), (1, 1, S, D // 2)),
    "bshd": ((B, S, 4, D), (B, S, 4, D), (B, S, 1, D // 2)),
    "each head": ((B, 4, S, D), (B, 4, S, D), (1, 4, S, D // 2)),
    "one row": ((B, 4, S, D), (B, 2, S, D), (B, 1, 1, D // 2)),
    "one token": ((B, 4, 1, D), (B, 2, 1, D), (1, 1, 1, D // 2)),
    "nhd": ((S, 4, D), (S, 2, D), (S, 1, D // 2)),
}
NAMES = [*comfy_kitchen.FUNCTIONS]
EVERY = [("cpu", *case) for case in product(NAMES, LAYOUTS, DTYPES) if "rms" not in case[0] or case[1] != "nhd"]
EVERY += [
    pytest.param(DEVICE, name, ("bhsd", "bshd")[i % 2], DTYPES[i // 2 % 3], marks=pytest.mark.gpu, id=f"cuda-{name}")
    for i, name in enumerate(NAMES)
]


@pytest.fixture(scope="module")
def ck() -> Any:
    try:
        import comfy_kitchen as ck
    except ImportError:
        missing("pip install --no-deps comfy-kitchen==0.2.40")
    return ck


def arguments(name: str, layout: str, dtype: torch.dtype, device: str = "cpu") -> tuple[list[Tensor], dict[str, Any]]:
    """(q and k, or q alone; further arguments). q and k are views of packed heads where their shapes allow."""
    q_shape, k_shape, angles = LAYOUTS[layout]
    if layout == "bshd":
        xs = [*random(B, S, 2, 4, D, dtype=dtype).to(device).unbind(2)]
    else:
        xs = [random(*shape, dtype=dtype, seed=i).to(device) for i, shape in enumerate((q_shape, k_shape))]
    words: dict[str, Any] = {"freqs_cis": rotations(*angles).to(device)}
    scales = [(random(D, seed=3 + i) + 1).to(device, dtype) for i in range(2)]
    if "1" in name:
        xs, scales = xs[:1], scales[:1]
    if "rms" in name:
        words.update(zip(("scale",) if "1" in name else ("q_scale", "k_scale"), scales))
    return xs, words


def called(function: Any, xs: list[Tensor], words: dict[str, Any]) -> list[Tensor]:
    out = function(*xs, **words)
    return [out] if isinstance(out, Tensor) else [*out]


@pytest.mark.parametrize(("device", "name", "layout", "dtype"), EVERY)
def test_comfy_kitchen(ck: Any, device: str, name: str, layout: str, dtype: torch.dtype) -> None:
    """Each function of the registry gives the results of the eager backend: its bits for halves without a norm, else
    except for the last bits, because the second member of a neighbouring pair adds its products in another order."""
    call = getattr(ck, name)
    xs, words = arguments(name, layout, dtype, device)
    given = [x.clone() for x in xs]
    with ck.use_backend("eager"):
        want = called(call, [x.clone() for x in xs], words)
    with comfy_kitchen.enable() as report:
        got = called(call, xs, words)
    assert report.calls == {"jitrope": 1, "host": 0}
    if name.endswith("_"):
        assert all(a is x for a, x in zip(got, xs))
    else:
        assert all(torch.equal(a, x) for a, x in zip(xs, given))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)
        if "half" in name and "rms" not in name:
            assert torch.equal(a, b)


def test_comfy_kitchen_options(ck: Any) -> None:
    """A part of each head, k's weight from q, and tables longer than x, which neighbouring pairs may have."""
    (q, k), words = arguments("rms_rope", "bhsd", torch.float32)
    words.update(epsilon=1e-3, k_scale=None)
    part = {**words, "freqs_cis": rotations(1, 1, S, 8), "rot_dim": 16}
    longer = rotations(1, 1, S + 3, D // 2)
    calls = [
        (ck.rms_rope_split_half, part),
        (ck.rms_rope_split_half, words),
        (ck.rms_rope, words),
        (ck.apply_rope, {"freqs_cis": longer}),
        (ck.rms_rope, {**words, "freqs_cis": longer}),
    ]
    for call, given in calls:
        with ck.use_backend("eager"):
            want = called(call, [q, k], given)
        with comfy_kitchen.enable() as report:
            got = called(call, [q, k], given)
        assert report.calls["jitrope"] == 1
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b)


def test_comfy_kitchen_enable(ck: Any) -> None:
    """Calls that jitrope refuses, or another backend is asked for, reach the host's; disable leaves no trace."""
    registry = ck.registry
    before = [*registry._priority]
    wide, table = random(1, 2, 3, 1024), rotations(1, 1, 3, 512)
    want = ck.apply_rope1(wide, table)
    xs, words = arguments("apply_rope1_", "bhsd", torch.float32)
    with comfy_kitchen.enable() as report:
        assert registry.get_capable_backend("apply_rope") == "jitrope"
        assert torch.equal(ck.apply_rope1(wide, table), want)
        assert report.calls == {"jitrope": 0, "host": 1}
        with ck.use_backend("jitrope"):
            assert torch.equal(ck.apply_rope1(wide, table), want)
        assert report.calls == {"jitrope": 0, "host": 2}
        with ck.use_backend("eager"):
            ck.apply_rope1(xs[0], **words)
        assert report.calls == {"jitrope": 0, "host": 2}
        with pytest.raises(RuntimeError, match="do not support autograd"):  # the host's own refusal
            ck.apply_rope1_(xs[0].requires_grad_(), **words)
        with pytest.raises((RuntimeError, ValueError)):
            ck.apply_rope_split_half1(xs[0].detach(), rotations(1, 1, S + 3, D // 2))
        assert report.calls == {"jitrope": 0, "host": 4}
        with comfy_kitchen.enable() as again:
            pass
        assert registry.get_capable_backend("apply_rope") == "jitrope"
        assert len(again.replaced) == 16
        assert not again.left
        compiled = torch.compile(lambda x: ck.apply_rope1(x, **words), backend="aot_eager", fullgraph=True)
        compiled(xs[0].detach())
        assert report.calls["jitrope"] == 1
        assert str(report).startswith("16 functions registered; 1 call since, all on the CPU in plain torch; 4 left")
    assert "(disabled)" in str(report)
    assert registry._priority == before
    assert registry.get_capable_backend("apply_rope") == "eager"
    comfy_kitchen.enable()
    assert registry.get_capable_backend("rms_rope_split_half1_") == "jitrope"
    comfy_kitchen.disable()
    assert registry.get_capable_backend("rms_rope_split_half1_") == "eager"


@pytest.mark.parametrize("name", NAMES)
def test_comfy_kitchen_signatures(ck: Any, name: str) -> None:
    """Those of the host, and nothing else but the keywords that select the function, and rot_dim."""
    host = inspect.signature(getattr(ck.backends.eager.rope, name)).parameters.values()
    ours = [p for p in inspect.signature(comfy_kitchen.FUNCTIONS[name]).parameters.values() if p.kind != p.KEYWORD_ONLY]
    words = [(p.name, p.default) for p in ours]
    assert words[: len(host)] == [(p.name, p.default) for p in host]
    assert words[len(host) :] in ([], [("rot_dim", 0)])


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
