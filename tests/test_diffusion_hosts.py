"""Hosts of diffusion models besides diffusers: jitrope's functions against the hosts' own."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import types
import zipfile
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope.integrations import comfy_kitchen, lightx2v, sglang_diffusion, vllm_omni

from .devices import DEVICES
from .host.backend import DEVICE
from .hosts import HOSTS, missing, stand_in
from .test_serving_fused import COMMANDS, near, normed
from .test_serving_hosts import same, table, turn

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


# ---- files of wheels that cannot be installed ----------------------------------------------------


def files(host: str) -> zipfile.ZipFile:
    wheels = sorted(HOSTS.glob(f"{host}-*.whl"))
    if not wheels:
        missing(COMMANDS[host])
    return zipfile.ZipFile(wheels[-1])


def run_file(wheel: zipfile.ZipFile, patch: pytest.MonkeyPatch, name: str) -> Any:
    """A module of the wheel, in whose package the other modules are stand-ins."""
    module = stand_in(patch, name)
    exec(compile(wheel.read(f"{name.replace('.', '/')}.py"), f"{name}.py", "exec"), vars(module))
    return module


def plain(**names: Any) -> Any:
    return types.SimpleNamespace(**names)


# ---- vLLM-Omni -----------------------------------------------------------------------------------

LAYERS = "vllm_omni.diffusion.layers"


@pytest.fixture
def omni(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM-Omni's own rope.py, fused_qk_rope.py and fused_qk_norm_rope.py, with stand-ins for vLLM, whose CPU build is
    too large for CI. The layers take the path of a GPU, where FlashAttention's function is a stand-in, too."""
    if importlib.util.find_spec("einops") is None:
        missing("pip install einops, which vLLM-Omni's rope.py needs")
    others = {f"is_{name}": lambda: False for name in ("rocm", "npu", "xpu", "musa")}
    platform = plain(**others, is_cuda=lambda: True, device_type="cuda")
    stand_in(monkeypatch, "vllm_omni.platforms").current_omni_platform = platform
    stand_in(monkeypatch, "vllm_omni.diffusion").envs = None
    stand_in(monkeypatch, "vllm.logger").init_logger = lambda name: None
    stand_in(monkeypatch, "vllm.platforms").current_platform = platform
    vars(stand_in(monkeypatch, "vllm.triton_utils")).update(HAS_TRITON=False, tl=None, triton=None)
    stand_in(monkeypatch, "vllm.utils.torch_utils").direct_register_custom_op = lambda **words: None
    flash = stand_in(monkeypatch, "vllm.vllm_flash_attn.layers.rotary")
    with files("vllm_omni") as wheel:
        run_file(wheel, monkeypatch, f"{LAYERS}.custom_op")
        found = {name: run_file(wheel, monkeypatch, f"{LAYERS}.{name}") for name in ("rope", "fused_qk_rope")}
        found["norm"] = run_file(wheel, monkeypatch, f"{LAYERS}.fused_qk_norm_rope")
    flash.apply_rotary_emb = lambda x, cos, sin, **words: found["rope"].apply_rotary_emb_torch(x, cos, sin, **words)
    return plain(**found, flash=flash)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_omni_layer(omni: Any, device: str, neox: bool, wide: bool) -> None:
    """The layer RotaryEmbedding, alone and in `apply_rope_to_qk`, with a batch axis and without, on parts of heads."""
    cos, sin = (t.to(device) for t in table(S, 32).chunk(2, -1))
    if wide:
        cos, sin = (torch.cat((t, t), -1) if neox else t.repeat_interleave(2, -1) for t in (cos, sin))
    for shape in ((B, S, 4, D), (S, 4, D)):
        q, k = (random(*shape, seed=i).to(device) for i in range(2))
        stock = omni.rope.RotaryEmbedding(neox, half_head_dim=not wide)
        want = [stock(x, cos, sin) for x in (q, k)]
        with vllm_omni.enable() as report:
            ours = omni.rope.RotaryEmbedding(neox, half_head_dim=not wide)
            assert all(near(ours(x, cos, sin), y) for x, y in zip((q, k), want))
            for tables in ((cos, sin), (cos[None], sin[None]), (cos.double(), sin.double())):  # FLUX has fp64
                assert all(map(near, omni.rope.apply_rope_to_qk(ours, q, k, tables), want))
            assert omni.rope.apply_rope_to_qk(ours, q, k, None) == (q, k)
        assert report.calls == {"jitrope": 6, "host": 0}
        if not wide:
            x = q.bfloat16()
            got, want = (f(x, cos, sin) for f in (vllm_omni.apply_rotary_emb_torch, omni.rope.apply_rotary_emb_torch))
            assert got.dtype == want.dtype
            assert near(got, want)


def test_omni_layers_of_users(omni: Any) -> None:
    """A subclass of RotaryEmbedding, and a layer with a hook, are called."""

    class Own(omni.rope.RotaryEmbedding):  # type: ignore[misc]
        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            return x + 1

    hooked = omni.rope.RotaryEmbedding(False)
    hooked.register_forward_hook(lambda module, given, result: given[0] + 1)
    q, k = random(B, S, 4, D), random(B, S, 2, D)
    with vllm_omni.enable() as report:
        for rope in (Own(False), hooked):
            got = omni.rope.apply_rope_to_qk(rope, q, k, table(S, D).chunk(2, -1))
            assert all(torch.equal(x, y + 1) for x, y in zip(got, (q, k)))
    assert set(report.reasons) == {"rope is a Own, which is not the host's", "rope has hooks"}


def test_omni_of_earlier_versions(omni: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.24.0 has no fused functions, and its layer no half_head_dim: its tables have a column for each pair."""
    for name in ("fused_qk_rope", "fused_qk_norm_rope"):
        monkeypatch.setitem(sys.modules, f"{LAYERS}.{name}", None)
    (q, k), tables = random(2, B, S, 4, D), table(S, D).chunk(2, -1)
    rope = omni.rope.RotaryEmbedding(False)
    want = [rope(x, *tables) for x in (q, k)]
    del rope.half_head_dim
    with vllm_omni.enable() as report:
        assert all(map(near, omni.rope.apply_rope_to_qk(rope, q, k, tables), want))
    assert report.calls == {"jitrope": 1, "host": 0}
    assert {name.rpartition(".")[2] for name in report.replaced} == {
        "apply_rotary_emb", "apply_rotary_emb_torch", "apply_rope_to_qk"
    }  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_omni_fused(omni: Any, device: str) -> None:
    """Wan's layer, norm and rope against the host's eager functions, and q and k by the formula of its kernel."""
    q, k = (random(S, heads, D, seed=heads).bfloat16().to(device) for heads in (4, 2))
    weights = [(random(D, seed=i) + 1).bfloat16().to(device) for i in range(2)]
    wan, cache = omni.rope.RotaryEmbeddingWan(half_head_dim=True), table(S, D).to(device)
    cos, sin = cache.chunk(2, -1)
    wanted = wan.forward_native(q[None], cos[:, None], sin[:, None])
    norms = {
        (rotary, interleaved): omni.norm.fused_qk_norm_rope(
            q, k, *weights, table(S, rotary).to(device), 1e-6, interleaved=interleaved
        )
        for rotary, interleaved in ((D, True), (32, True))
    }
    with vllm_omni.enable() as report:
        got = omni.rope.RotaryEmbeddingWan(half_head_dim=True)(q[None], cos, sin)
        assert same(got, wanted)
        for (rotary, interleaved), want in norms.items():
            given = *weights, table(S, rotary).to(device), 1e-6
            got = omni.norm.fused_qk_norm_rope(q, k, *given, rotary_dim=rotary, interleaved=interleaved)
            assert all(near(a, b, 1e-2) for a, b in zip(got, want))
        wide = [t.repeat_interleave(2, -1) for t in (cos, sin)]
        got = omni.fused_qk_rope.fused_qk_rope(q[None], k[None], *wide)
        assert all(same(a, turn(x[None].cpu(), table(S, D), False).bfloat16()) for a, x in zip(got, (q, k)))
        assert report.calls == {"jitrope": 4, "host": 0}
        with pytest.raises(ValueError, match="Expected rope_table"):  # the host's own refusal
            omni.norm.fused_qk_norm_rope(q, k, *weights, table(S + 1, D).to(device), 1e-6)
        assert report.calls == {"jitrope": 4, "host": 1}


def test_flash_attention_words() -> None:
    """In place, as FlashAttention's function takes it. Its offsets and packed sequences are refused."""
    x, cache = random(B, S, 4, D), table(S, 32)
    tables = cache.chunk(2, -1)
    want = turn(x, cache.expand(B, -1, -1), True)
    for words in ({"seqlen_offsets": 3}, {"seqlen_offsets": torch.tensor([3, 3])}, {"cu_seqlens": torch.arange(2)}):
        with pytest.raises(jitrope.InvalidInput, match="is given"):
            vllm_omni.apply_rotary_emb(x, *tables, **words)
    assert vllm_omni.apply_rotary_emb(x, *tables, inplace=True, max_seqlen=S) is x
    assert near(x, want)


# ---- SGLang's diffusion models -------------------------------------------------------------------


@pytest.fixture
def sgl(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's own rotary_embedding/utils.py, with stand-ins for its kernels and its other modules."""
    layers, kernels = sglang_diffusion._LAYERS, sglang_diffusion._ROPE
    for name in (f"{kernels}.rotary_triton", f"{kernels}.qknorm_rope_jit", f"{layers}.layernorm"):
        module = stand_in(monkeypatch, name)
        for at in sglang_diffusion._FUNCTIONS:
            if at.startswith(f"{name}:"):
                setattr(module, at.split(":")[1], lambda *a, **words: "host")
    stand_in(monkeypatch, "sglang.kernels.kernel_api_logging").debug_kernel_api = lambda f: f
    stand_in(monkeypatch, "sglang.kernels.ops.diffusion").apply_rotary_embedding = None
    platform = plain(is_cuda=lambda: False, is_npu=lambda: False)
    stand_in(monkeypatch, "sglang.multimodal_gen.runtime.platforms").current_platform = platform
    logger = plain(warning_once=lambda *a: None)
    stand_in(monkeypatch, "sglang.multimodal_gen.runtime.utils.logging_utils").init_logger = lambda name: logger
    stand_in(monkeypatch, "sglang.srt.utils.custom_op").register_custom_op_from_extern = None
    with files("sglang") as wheel:
        return run_file(wheel, monkeypatch, f"{layers}.rotary_embedding.utils")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("neox", [False, True])
def test_sglang_rope(sgl: Any, device: str, neox: bool) -> None:
    """q and k, of grouped heads and of packed QKV, by the host's own torch code; in place if contiguous."""
    cache, ids = table(20, 32).to(device), torch.randint(20, (B * S,), generator=torch.Generator().manual_seed(3))
    buffer = random(B, S, 6, D).to(device)
    for q, k in ((buffer[:, :, :4], buffer[:, :, 4:]), (random(B, S, 4, D).to(device), random(B, S, 2, D).to(device))):
        for positions in (None, ids.to(device)):
            given = [q.clone(), k.clone()]
            want = sgl.apply_flashinfer_rope_qk_inplace(*given, cache, is_neox=neox, positions=positions)
            inputs = [x.clone() if x.is_contiguous() else x for x in (q, k)]
            with sglang_diffusion.enable() as report:
                got = sgl.apply_flashinfer_rope_qk_inplace(
                    *inputs, cache, is_neox=neox, positions=positions, head_size=D
                )
            assert report.calls == {"jitrope": 1, "host": 0}
            assert all(map(near, got, want))
            assert all((a.data_ptr() == x.data_ptr()) == x.is_contiguous() for a, x in zip(got, inputs))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exact", [False, True])
def test_sglang_norm_rope(device: str, dtype: torch.dtype, exact: bool) -> None:
    """All three functions with norms; exact: the normalised elements are rounded first, as by torch.nn.RMSNorm."""
    cache, ids = table(20, 32), torch.randint(20, (B * S,), generator=torch.Generator().manual_seed(3))
    qk = [random(B, S, heads, D, seed=heads).to(dtype) for heads in (4, 2)]
    weights = [(random(D, seed=i) + 1).to(dtype) for i in range(2)]
    rows = cache[ids].unflatten(0, (B, S))
    heads = [normed(x.float(), w.float()) for x, w in zip(qk, weights)]
    want = [turn(x.to(dtype) if exact else x, rows, True).to(dtype) for x in heads]
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    norms = [plain(weight=w.to(device), variance_epsilon=1e-6) for w in weights]
    words: dict[str, Any] = {"is_neox": True, "round_norm_before_rope": exact}
    cache, ids = cache.to(device), ids.to(device)
    for table_, full in ((cache, False), (torch.cat([t.repeat(1, 2) for t in cache.chunk(2, -1)], -1), True)):
        given = [x.to(device, copy=True) for x in qk]
        words["cache_has_full_width"] = full
        got = sglang_diffusion.apply_qk_norm_rope(*given, *norms, D, table_, positions=ids, **words)
        assert all(near(a, b, tolerance) for a, b in zip(got, want))
        assert all(a.data_ptr() == x.data_ptr() for a, x in zip(got, given))
        given = [x.flatten(0, 1).to(device, copy=True) for x in qk]
        ends = norms[0].weight, norms[1].weight, table_, ids
        fresh = [torch.empty_like(x) for x in given]
        sglang_diffusion.fused_qknorm_rope_out_of_place(*given, *fresh, *ends, rope_dim=32, head_dim=D, **words)
        sglang_diffusion.fused_inplace_qknorm_rope(*given, *ends, rope_dim=32, head_dim=D, **words)
        for got in (fresh, given):
            assert all(near(a, b.flatten(0, 1), tolerance) for a, b in zip(got, want))
    shifted = sglang_diffusion.apply_qk_norm_rope(
        *(x.to(device) for x in qk), *norms, D, cache, position_offset=5, allow_inplace=False, is_neox=True
    )
    want = [turn(x, cache.cpu()[5 : S + 5].expand(B, -1, -1), True) for x in heads]
    assert all(near(a, b, tolerance) for a, b in zip(shifted, want))


@pytest.mark.parametrize("device", DEVICES)
def test_sglang_rotary_embedding(device: str) -> None:
    """Neighbours, by tables of half a head and, with `interleaved`, of a whole one, where neighbours are equal."""
    cos, sin = table(S, D).to(device).chunk(2, -1)
    wide = [t.repeat_interleave(2, -1) for t in (cos, sin)]
    for x in (random(B, S, 4, D).to(device), random(S, 4, D).to(device)):
        want = turn(x.cpu(), table(S, D).expand(*x.shape[:-2], -1), False)
        assert near(sglang_diffusion.apply_rotary_embedding(x, cos, sin), want)
        assert near(sglang_diffusion.apply_rotary_embedding(x, *wide, interleaved=True), want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_norm": plain(weight=torch.ones(D), variance_epsilon=1e-5)}, "one epsilon"),
        ({"k_norm": plain(weight=torch.ones(D), variance_epsilon=1e-6, variance_size_override=8)}, "a part of a head"),
        ({"positions": torch.arange(S)}, r"positions have shape \(7,\); q has 2 x 7 tokens"),
        ({"head_dim": 32}, "head_dim"),
    ],
)
def test_sglang_refusals(change: dict[str, Any], message: str) -> None:
    norm = plain(weight=torch.ones(D), variance_epsilon=1e-6)
    q = random(B, S, 4, D)
    words = {"q": q, "k": q, "q_norm": norm, "k_norm": norm, "head_dim": D, "cos_sin_cache": table(S, D), **change}
    with pytest.raises(jitrope.InvalidInput, match=message):
        sglang_diffusion.apply_qk_norm_rope(**words)


# ---- LightX2V ------------------------------------------------------------------------------------


class Template:
    """The published attributes of its RopeTemplate; the library is not on the package index."""

    def __init__(self, layout: str = "interleaved", compute_dtype: torch.dtype = torch.float32) -> None:
        self.layout, self.compute_dtype = layout, compute_dtype


class Theirs(Template):
    """The published formula of its class in torch for real tables, which takes complex ones too, but no positions."""

    def apply_single(self, x: Tensor, freqs: Any, rotary_dim: int | None = None, unsqueeze_dim: int = -2) -> Tensor:
        pair = (freqs.real, freqs.imag) if isinstance(freqs, Tensor) and freqs.is_complex() else freqs
        return turn(x, torch.cat([*pair], -1), self.layout == "split_half")


class TheirsOfComplex(Theirs):
    """Its class for complex tables, which knows neighbours alone."""

    def apply_single(self, x: Tensor, freqs: Any, **words: Any) -> Tensor:
        assert freqs.is_complex()
        assert self.layout == "interleaved"
        return super().apply_single(x, freqs, **words)


def cpu(freqs: Any) -> Any:
    return freqs.cpu() if isinstance(freqs, Tensor) else tuple(x.cpu() for x in freqs)


@pytest.fixture
def ropes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Its register, as a dict."""
    stand_in(monkeypatch, "lightx2v.common.ops.rope.template").RopeTemplate = Template
    found: dict[str, Any] = {"torch_complex_rope": TheirsOfComplex, "torch_real_rope": Theirs}
    stand_in(monkeypatch, "lightx2v.utils.registry_factory").ROPE_REGISTER = found
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["interleaved", "split_half"])
def test_lightx2v(ropes: dict[str, Any], device: str, layout: str) -> None:
    """Every form of a table, whole and partial heads, and rows by positions; others are left to the host."""
    cache, halves = table(S, 32), layout == "split_half"
    q, k = (random(S, heads, D, seed=heads) for heads in (4, 2))
    want = [turn(x, cache, halves) for x in (q, k)]
    q, k, cache = q.to(device), k.to(device), cache.to(device)
    cos, sin = cache.chunk(2, -1)
    wide = tuple(t.repeat(1, 2) if halves else t.repeat_interleave(2, -1) for t in (cos, sin))
    forms = [torch.complex(cos, sin), torch.complex(cos, sin)[:, None], (cos, sin), wide, cache]
    with lightx2v.enable() as report:
        rope = ropes["jitrope_rope"](layout=layout)
        for freqs in forms:
            assert all(map(near, rope.apply(q, k, freqs, rotary_dim=32), want))
        assert near(rope.apply_single(q, (cos, sin), rotary_dim=32, unsqueeze_dim=-2), want[0])
        ids = torch.arange(S - 1, -1, -1)
        got = rope.apply(q, k, cache, positions=ids.to(device), rotary_dim=32)
        assert all(near(a, turn(x.cpu(), cache.cpu()[ids], halves)) for a, x in zip(got, (q, k)))
        assert report.calls == {"jitrope": 7, "host": 0}
        wider = ropes["jitrope_rope"](layout=layout, compute_dtype=torch.float64)
        for freqs in (torch.complex(cos, sin), (cos, sin)):
            assert all(map(near, wider.apply(q.cpu(), k.cpu(), cpu(freqs)), want))
            got = wider.apply(q.cpu(), k.cpu(), cpu(freqs), positions=ids)
            assert all(near(a, turn(x.cpu(), cache.cpu()[ids], halves)) for a, x in zip(got, (q, k)))
        assert report.calls == {"jitrope": 7, "host": 4}
    assert set(ropes) == {"torch_complex_rope", "torch_real_rope"}
    assert "(disabled)" in str(report)
