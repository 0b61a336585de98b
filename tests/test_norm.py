"""QK-norm + rope: values, the hosts' bits, gradients, torch's machinery, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import jitrope
from jitrope.base import views
from jitrope.values import constants
from tests.said import KINDS, norm_rope, norm_rope_joint, said

from .cases import HEADS_BACK, NORM_CASES, NormCase, make_norm, norm_call, op_arguments, random_norm_case
from .devices import DEVICE, DEVICES, slow
from .results import near_each
from .test_rope import autograd_reference

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
JOINT = [case for case in NORM_CASES if case.first is not None]
NOT_JOINT = [case for case in NORM_CASES if case.first is None]


def named(*names: str) -> list[NormCase]:
    found = [case for case in NORM_CASES if case.name in names]
    assert len(found) == len(names)
    return found


def tensors(device: str, dtype: torch.dtype, *shapes, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def tables_of(device: str, rows: int, pairs: int, *lead: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(*lead, rows, pairs, generator=torch.Generator().manual_seed(9)).to(device) * 50
    return angles.cos(), angles.sin()


def assert_equal(got, want) -> None:
    for a, b in zip(got, want):
        assert (a is None and b is None) or torch.equal(a, b)


NORM_WORDS = ("norm_rounding", "norm_kind", "of", "zero_centered", "after_rope", "across_heads")

# ---- values against fp64 -----------------------------------------------------------------------------


def normed64(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, case: NormCase) -> torch.Tensor:
    """The norm in fp64, one row after the other."""
    view = views.canonical(x, case.rope.layout).double()
    rows = view.flatten(-2) if case.across_heads else view
    factor = 1 if weight is None else weight.double() + (1 if case.zero_centered else 0)
    if case.kind == "layer_norm":
        rows = rows - rows.sum(-1, keepdim=True) / rows.shape[-1]
    rows = rows / (rows.square().sum(-1, keepdim=True) / rows.shape[-1] + 1e-6).sqrt() * factor + (
        0 if bias is None else bias.double()
    )
    rows = rows.reshape(view.shape)
    order = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}
    return rows[0] if case.rope.layout == "thd" else rows.permute(order[case.rope.layout])


def values64(case: NormCase, call) -> list[torch.Tensor | None]:
    """Normalise each head in fp64, then rotate it pair by pair; or the other way round."""
    options = {name: value for name, value in call.arguments.items()
               if name not in (*NORM_WORDS, "cos", "sin", "q_factor")}  # fmt: skip
    words = {"layout": "bshd", "interleaved": False, **options}
    tables = call.arguments.get("cos"), call.arguments.get("sin")
    q, k = call.streams
    given = [x for x in (q, k) if x is not None]

    def normed(xs):
        named = zip("qk", xs, call.weights, call.biases)
        return [normed64(x, *own, case).float() if name in case.of else x for name, x, *own in named]

    def rotated(xs):
        return autograd_reference(case.rope, *xs, *(xs if len(xs) == 1 else ()), *tables, words)[: len(xs)]

    found = normed(rotated([x.float() for x in given])) if case.after_rope else rotated(normed(given))
    for x in found if case.rope.end is not None else ():
        x[case.rope.end :] = 0
    if "q_factor" in call.arguments:
        factor = call.arguments["q_factor"]
        heads = views.canonical(found[0], case.rope.layout)
        heads *= factor.reshape((1,) * (2 - factor.dim()) + factor.shape)[..., None, None]
    return found + [None] * (2 - len(given))


@pytest.mark.parametrize(
    "case",
    [c for c in (*NOT_JOINT, *map(random_norm_case, range(40))) if c.first is None],
    ids=str,
)
def test_values_are_those_of_fp64(case: NormCase) -> None:
    call = make_norm(case)
    got = norm_call(call)
    near_each(got, values64(case, call))
    for x, out in zip(call.streams, got):
        assert x is None or (out.dtype == x.dtype and out.shape == x.shape)


@pytest.mark.parametrize(
    "case",
    [c for c in (*JOINT, *map(random_norm_case, range(40))) if c.first is not None],
    ids=str,
)
def test_joint_is_both_streams_one_behind_the_other(case: NormCase) -> None:
    """The result equals a separate call of each stream, with its rows of the tables; v is copied."""
    call = make_norm(case)
    q, k, v = norm_call(call)
    streams, first = call.streams, case.first
    parts = []
    for n in range(2):
        own = dict(call.arguments)
        for name in ("cos", "sin", "freqs_cis", "cos_sin_cache"):
            if name in own:
                table = own[name]
                own[name] = table[n] if case.two_tables else table[first:] if n else table[:first]
        if "q_factor" in own and own["q_factor"].dim():
            own["q_factor"] = own["q_factor"][..., first:] if n else own["q_factor"][..., :first]
        if streams[3 * n].shape[1]:
            biases = zip(("q_bias", "k_bias"), call.biases[2 * n : 2 * n + 2])
            own |= {name: x for name, x in biases if x is not None}
            parts.append(norm_rope(*streams[3 * n : 3 * n + 2], *call.weights[2 * n : 2 * n + 2], **own))
    assert_equal((q, k), [torch.cat(pair, 1) for pair in zip(*parts)])
    assert torch.equal(v, torch.cat((streams[2], streams[5]), 1))
    for x in (q, k, v):
        assert x.is_contiguous()
        assert not {x.data_ptr()} & {y.data_ptr() for y in streams}


@pytest.mark.parametrize("device", DEVICES)
def test_a_stream_with_cosines_of_one_is_only_normalised(device: str) -> None:
    """As in FLUX, one call serves both streams, and the text before the image is not rotated."""
    q1, k1, v1, q2, k2, v2 = tensors(device, torch.bfloat16, *[(2, 3, 4, 64)] * 3, *[(2, 5, 4, 64)] * 3)
    weights = tensors(device, torch.bfloat16, *[(64,)] * 4, seed=1)
    cos, sin = tables_of(device, 5, 32)
    both = torch.cat((torch.ones_like(cos[:3]), cos)), torch.cat((torch.zeros_like(sin[:3]), sin))
    q, k, v = norm_rope_joint(
        (q1, k1, v1), (q2, k2, v2), weights[:2], weights[2:], *both, norm_rounding="once", interleaved=True
    )
    assert torch.equal(q[:, :3], F.rms_norm(q1, (64,), weights[0], 1e-6))
    assert torch.equal(k[:, :3], F.rms_norm(k1, (64,), weights[1], 1e-6))
    want = norm_rope(q2, k2, *weights[2:], cos, sin, norm_rounding="once", interleaved=True)
    assert_equal((q[:, 3:], k[:, 3:], v[:, 3:]), (*want, v2))


# ---- the hosts' bits ---------------------------------------------------------------------------------

ON_GPU = (64, 128, 256)  # head sizes whose sums of squares follow torch's there


def sizes(*all_of_them: int):
    """(device, head size); on a GPU only the sizes with promised bits."""
    return [
        *(("cpu", dim) for dim in all_of_them),
        *(pytest.param(DEVICE, dim, marks=pytest.mark.gpu) for dim in ON_GPU),
    ]


WAYS = [{}, {"interleaved": True}, {"interleaved": True, "rounding": "complex64"}, {"rounding": "dtype"}]


@pytest.mark.parametrize("words", WAYS, ids=str)
@pytest.mark.parametrize(("device", "dim"), sizes(64, 72, 80, 96, 128, 192, 256))
@pytest.mark.parametrize("dtype", DTYPES)
def test_once_is_torchs_rms_norm(dtype: torch.dtype, device: str, dim: int, words) -> None:
    for q_shape, k_shape in (((1, 65, 6, dim), (1, 65, 2, dim)), ((2, 3, 4, dim), (2, 3, 4, dim))):
        q, k, q_weight, k_weight = tensors(device, dtype, q_shape, k_shape, (dim,), (dim,))
        tables = tables_of(device, q.shape[1], dim // 2)
        normed = [F.rms_norm(x, (dim,), w, 1e-5) for x, w in ((q, q_weight), (k, k_weight))]
        want = jitrope.apply_rope(*normed, *tables, **said(**words))
        got = norm_rope(q, k, q_weight, k_weight, *tables, eps=1e-5, norm_rounding="once", **words)
        assert_equal(got, want)
        none = jitrope.apply_rope(*(F.rms_norm(x, (dim,), None, 1e-5) for x in (q, k)), *tables, **said(**words))
        assert_equal(norm_rope(q, k, None, None, *tables, eps=1e-5, norm_rounding="once", **words), none)
        rotated = jitrope.apply_rope(q, k, *tables, **said(**words))
        after = norm_rope(q, k, q_weight, k_weight, *tables, eps=1e-5, norm_rounding="once", after_rope=True, **words)
        assert_equal(after, [F.rms_norm(x, (dim,), w, 1e-5) for x, w in zip(rotated, (q_weight, k_weight))])
        in_place = norm_rope(q, k, q_weight, k_weight, *tables, eps=1e-5, norm_rounding="once", **words, inplace=True)
        assert_equal(in_place, want)
        assert in_place[0] is q
        assert in_place[1] is k


PARTS = [(256, 128), (256, 64), (256, 32), (256, 16), (128, 64), (128, 32), (128, 16), (64, 32), (64, 16)]


@pytest.mark.parametrize(("dim", "rotary_dim"), PARTS)
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("device", ["cpu", pytest.param(DEVICE, marks=pytest.mark.gpu)])
def test_partly_rotated_heads_have_the_hosts_bits(device: str, dtype: torch.dtype, dim: int, rotary_dim: int) -> None:
    """Few tokens and many: each launch. Twice, on a GPU, for heads of 128."""
    for tokens, rounding in ((3, "once"), (2048, "once"), (3, "twice"), (2048, "twice")):
        if rounding == "twice" and device != "cpu" and dim != 128:
            continue
        q, k, q_weight, k_weight = tensors(device, dtype, (1, tokens, 6, dim), (1, tokens, 2, dim), (dim,), (dim,))
        tables = tables_of(device, tokens, rotary_dim // 2)
        if rounding == "once":
            normed = [F.rms_norm(x, (dim,), w, 1e-6) for x, w in ((q, q_weight), (k, k_weight))]
        else:
            with torch.no_grad():
                normed = [host_norm("qwen3", dim, w)(x) for x, w in ((q, q_weight), (k, k_weight))]
        for interleaved in (False, True):
            words = {"rotary_dim": rotary_dim, "interleaved": interleaved}
            want = jitrope.apply_rope(*normed, *tables, **words)
            assert_equal(norm_rope(q, k, q_weight, k_weight, *tables, norm_rounding=rounding, **words), want)


def host_norm(name: str, dim: int, weight: torch.Tensor) -> torch.nn.Module:
    """A library's own RMSNorm."""
    if name == "diffusers":
        pytest.importorskip("diffusers", reason="diffusers is not installed: pip install -e '.[diffusers]'")
        from diffusers.models.normalization import RMSNorm

        module = RMSNorm(dim, eps=1e-6)
    else:
        pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[diffusers]'")
        from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
        from transformers.models.llama.modeling_llama import LlamaRMSNorm
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

        module = {"llama": LlamaRMSNorm, "qwen3": Qwen3RMSNorm, "gemma": GemmaRMSNorm}[name](dim, eps=1e-6)
    module.weight.data = weight
    return module


HOST_NORMS = [
    *(("cpu", dim, dtype) for dim in (64, 72, 96, 128, 256) for dtype in DTYPES),
    *(pytest.param(DEVICE, dim, dtype, marks=pytest.mark.gpu) for dim in ON_GPU for dtype in DTYPES[:2]),
]


@pytest.mark.parametrize(("device", "dim", "dtype"), HOST_NORMS)
@pytest.mark.parametrize("name", ["diffusers", "llama", "qwen3"])
def test_twice_is_the_hosts_rms_norm(name: str, device: str, dim: int, dtype: torch.dtype) -> None:
    q, k, q_weight, k_weight = tensors(device, dtype, (2, 33, 6, dim), (2, 33, 2, dim), (dim,), (dim,))
    tables = tables_of(device, 33, dim // 2)
    with torch.no_grad():
        normed = [host_norm(name, dim, w)(x) for x, w in ((q, q_weight), (k, k_weight))]
    for words in ({}, {"interleaved": True}, {"rounding": "dtype"}):
        want = jitrope.apply_rope(*normed, *tables, **said(**words))
        got = norm_rope(q, k, q_weight, k_weight, *tables, norm_rounding="twice", **words)
        assert_equal(got, want)
        rotated = jitrope.apply_rope(q, k, *tables, **said(**words))
        with torch.no_grad():
            want = [host_norm(name, dim, w)(x) for x, w in zip(rotated, (q_weight, k_weight))]
        assert_equal(
            norm_rope(q, k, q_weight, k_weight, *tables, norm_rounding="twice", after_rope=True, **words), want
        )


@pytest.mark.parametrize(("device", "dim", "dtype"), HOST_NORMS)
def test_after_rope_is_llama_4s_norm(device: str, dim: int, dtype: torch.dtype) -> None:
    """Complex rotation, then its norm, which has no weight."""
    llama4 = pytest.importorskip("transformers.models.llama4.modeling_llama4", reason="transformers is not installed")
    q, k = tensors(device, dtype, (2, 33, 6, dim), (2, 33, 2, dim))
    cos, sin = tables_of(device, 33, dim // 2)
    cis = torch.complex(cos, sin).expand(2, -1, -1)
    want = [llama4.Llama4TextL2Norm(1e-6)(x) for x in llama4.apply_rotary_emb(q, k, cis)]
    words = {"interleaved": True, "rounding": "complex64", "norm_rounding": "twice", "after_rope": True}
    assert_equal(norm_rope(q, k, None, None, cos, sin, **words), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_centered_is_gemmas(dtype: torch.dtype) -> None:
    """Gemma's norm, also with fp32 weights beside q in bf16. zero_centered is the same as weights plus one."""
    q, k = tensors("cpu", dtype, (2, 5, 4, 96), (2, 5, 2, 96))
    weights = tensors("cpu", torch.float32, (96,), (96,), seed=1)
    tables = tables_of("cpu", 5, 48)
    words = {"zero_centered": True, "norm_rounding": "once"}
    for own in (weights, [w.to(dtype) for w in weights]):
        with torch.no_grad():
            normed = [host_norm("gemma", 96, w)(x) for x, w in zip((q, k), own)]
        assert_equal(norm_rope(q, k, *own, *tables, **words), jitrope.apply_rope(*normed, *tables))
    shifted = [w + 1 for w in weights]
    assert_equal(
        norm_rope(q, k, *weights, *tables, zero_centered=True),
        norm_rope(q, k, *shifted, *tables),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_is_torchs(dtype: torch.dtype, device: str) -> None:
    """`torch.nn.LayerNorm` with weights and biases (CogVideoX, HunyuanDiT), before and after the rotation."""
    q, k, *weights = tensors(device, dtype, (2, 33, 6, 64), (2, 33, 2, 64), *[(64,)] * 4)
    biases, tables = dict(zip(("q_bias", "k_bias"), weights[2:])), tables_of(device, 33, 32)
    words = {"norm_kind": "layer_norm", "norm_rounding": "once", "eps": 1e-5}

    def plain(*xs):
        return [F.layer_norm(x, (64,), *own, eps=1e-5) for x, *own in zip(xs, weights, weights[2:])]

    before = norm_rope(q, k, *weights[:2], *tables, **words, **biases), jitrope.apply_rope(*plain(q, k), *tables)
    rotated = jitrope.apply_rope(q, k, *tables)
    after = norm_rope(q, k, *weights[:2], *tables, **words, **biases, after_rope=True), plain(*rotated)
    for got, want in (before, after):
        if device == "cpu":
            assert_equal(got, want)
        else:
            near_each(got, want)


@pytest.mark.parametrize("device", DEVICES)
def test_layer_norm_keeps_the_variance_of_large_elements(device: str) -> None:
    """Elements far from zero: squares less the squared mean would lose all digits."""
    x = 1e4 + tensors("cpu", torch.float32, (1, 5, 3, 64))[0]
    got = norm_rope(x.to(device), None, norm_kind="layer_norm")[0].cpu()
    torch.testing.assert_close(got, F.layer_norm(x.double(), (64,), eps=1e-6).float(), rtol=1e-3, atol=1e-3)


ACROSS = [("wan", 12, 128, True), ("wan-14b", 40, 128, True), ("ltx", 32, 64, False)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rounding", ["none", "twice"])
def test_v_norm_is_gemma_4s_norm(rounding: str, device: str) -> None:
    """Close, as Gemma 4 takes a power in place of a reciprocal root; with its gradient."""
    gemma4 = pytest.importorskip(
        "transformers.models.gemma4.modeling_gemma4", reason="this transformers has no Gemma 4"
    )
    q, k, v = tensors(device, torch.float32, (2, 5, 4, 64), (2, 5, 2, 64), (2, 5, 2, 64))
    norm = jitrope.Norm(v_norm=True, rounding=rounding)
    results = []
    for function in (
        lambda v: jitrope.prepare_qkv(q, k, v, norm=norm)[2],
        gemma4.Gemma4RMSNorm(64, with_scale=False),
    ):
        leaf = v.clone().requires_grad_()
        y = function(leaf)
        results.append((y, *torch.autograd.grad(y.sin().sum(), leaf)))
    for got, want in zip(*results):
        torch.testing.assert_close(got, want)
    compiled = torch.compile(lambda v: jitrope.prepare_qkv(q, k, v, norm=norm)[2], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(v), results[0][0])
    with pytest.raises(jitrope.InvalidInput, match="v is None; it must be a tensor, because the norm has v_norm"):
        jitrope.prepare_qkv(q, k, None, norm=norm)
    for wrong, text in (
        (v.double(), "v is float64; it must be"),
        (v[0], r"v is a tensor of shape \(5, 2, 64\).*; it must be \(B, S, H, D\)"),
    ):
        with pytest.raises(jitrope.InvalidInput, match=f"prepare_qkv: {text}"):
            jitrope.prepare_qkv(q, k, wrong, norm=norm)
    for word in ("rotary_dim", "rotary_offset"):
        with pytest.raises(jitrope.InvalidInput, match=f"{word} is a numpy array .*; it must be a whole number"):
            jitrope.prepare_qkv(q, k, v, *torch.ones(2, 5, 32), norm=norm, **{word: np.ones(2)})


V_NORMS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {  # launches, words of the norm, words of the call
    "once": (1, {"rounding": "once"}, {}),
    "twice, zero centered": (1, {"rounding": "twice", "zero_centered": True}, {}),
    "after rope": (1, {"after_rope": True, "rounding": "once"}, {"interleaved": True}),
    "layer norm": (1, {"kind": "layer_norm", "eps": 1e-3}, {"rounding": "dtype"}),
    "ids": (1, {}, {"positions": torch.tensor([3, 0, 8, 1, 1, 7])}),
    "no table": (1, {}, {"cos": None, "sin": None}),
    "cos_sin_cache": (1, {}, {"cos": None, "sin": None, "cos_sin_cache": torch.rand(9, 64)}),
    "freqs_cis": (1, {}, {"cos": None, "sin": None, "freqs_cis": torch.rand(9, 32).to(torch.complex64)}),
    "scaled q": (1, {}, {"q_scale": 0.25}),
    "k as v": (1, {}, {"v": "k"}),
    "odd heads": (1, {"rounding": "once"}, {"heads": (3, 1, 1)}),
    "layout": (1, {}, {"layout": "bhsd"}),
    "across heads": (2, {"across_heads": True}, {}),
    "in place": (2, {}, {"inplace": True}),
    "part of a head": (2, {}, {"cos": None, "sin": None, "cos_sin_cache": torch.rand(9, 32)}),
    "slice of a head": (2, {}, {"rotary_dim": 32, "rotary_offset": 8, "tables": (16,)}),
    "tables for each head": (2, {}, {"heads": (2, 2, 2), "tables": (32, 1, 2)}),
    "wider v": (2, {}, {"heads": (4, 2, 4)}),
    "no k": (2, {}, {"k": None}),
    "quantize": (2, {}, {"quantize": jitrope.Quantize(0.5, 0.25)}),
    "Ulysses": (2, {}, {"out": jitrope.Ulysses(2)}),
}


def v_norm_call(kind: str, device: str) -> tuple[list[Any], dict[str, Any], jitrope.Norm]:
    """(q, k, v, cos, sin), the words and the norm of a call whose norm is v's too."""
    _, of_norm, words = V_NORMS[kind]
    words = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in words.items()}
    layout = words.get("layout", "bshd")
    shapes = [(2, 6, n, 64) if layout == "bshd" else (2, n, 6, 64) for n in words.pop("heads", (4, 2, 2))]
    q, k, v = tensors(device, torch.float32 if kind == "ids" else torch.bfloat16, *shapes)
    pairs, *lead = words.pop("tables", (32,))
    cos, sin = tables_of(device, 6 if lead else 9, pairs, *lead)
    if lead:
        cos, sin = cos.transpose(1, 2), sin.transpose(1, 2)
    given = {"q": q, "k": k, "v": v, "cos": cos, "sin": sin}
    given.update({name: words.pop(name) for name in [*words] if name in given})
    given["v"] = given["k"] if given["v"] is k or isinstance(given["v"], str) else given["v"]
    weights = [torch.linspace(0.5, 1.5, 64, device=device).roll(n) for n in (0, 7)][: 1 + (given["k"] is not None)]
    return [*given.values()], words, jitrope.Norm(*(() if "across" in kind else weights), v_norm=True, **of_norm)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", V_NORMS)
def test_v_norm_has_the_bits_of_a_norm_of_v_alone(kind: str, device: str) -> None:
    """And q and k those of a call without v, also in a second call and in the gradients."""
    (q, k, v, *tables), words, norm = v_norm_call(kind, device)
    shared = v is k
    plain = jitrope.Norm(norm.tensors.get("q_weight"), norm.tensors.get("k_weight"), **V_NORMS[kind][1])
    of_norm = {name: x for name, x in V_NORMS[kind][1].items() if name in ("rounding", "kind", "eps", "across_heads")}
    layout = {"layout": words["layout"]} if "layout" in words else {}

    def apart(q: Any, k: Any, v: Any) -> Any:
        y = jitrope.prepare_qkv(v, None, None, norm=jitrope.Norm(**of_norm), **layout)[0]
        return jitrope.prepare_qkv(q, k, y, *tables, norm=plain, **words)

    def leaves() -> list[Any]:
        trained = kind not in ("in place", "quantize")
        made = [None if x is None else x.clone().requires_grad_(trained) for x in (q, k, v)]
        return [*made[:2], made[1]] if shared else made

    for _ in range(2):
        ours, theirs = leaves(), leaves()
        got = jitrope.prepare_qkv(*ours, *tables, norm=norm, **words)
        want = apart(*theirs)
        assert_equal([None if x is None else x.float() for x in got], [None if x is None else x.float() for x in want])
        for picked in ((0, 1, 2), (2,), (0,)) if ours[0].requires_grad else ():
            pairs = [(x, y) for x, y in [(got[n], want[n]) for n in picked] if x is not None]
            douts = [torch.sin(x.detach().float() * 3).to(x) for x, _ in pairs]
            of = [[x for x in xs if x is not None] for xs in (ours, theirs)]
            grads = [
                torch.autograd.grad(ys, xs, douts, retain_graph=True, allow_unused=True)
                for ys, xs in zip(zip(*pairs), of)
            ]
            assert_equal(*grads)


@pytest.mark.parametrize("kind", V_NORMS)
def test_v_norm_is_one_launch_where_a_kernel_can_do_it(kind: str) -> None:
    """Forward and, if there is one, backward."""
    args, words, norm = v_norm_call(kind, "meta")
    with jitrope.planning(["auto"]) as specs:
        jitrope.prepare_qkv(*args, norm=norm, **words)
    assert len(specs) == V_NORMS[kind][0]
    assert specs[-1].v_norm == specs[-1].copy_v == (len(specs) == 1) or kind == "Ulysses"
    if len(specs) == 1:
        leaves = [x.requires_grad_() for x in args[:2]]
        leaves.append(leaves[1] if args[2] is args[1] else args[2].requires_grad_())
        with jitrope.planning(["auto"]) as specs:
            out = jitrope.prepare_qkv(*leaves, *args[3:], norm=norm, **words)
            torch.autograd.backward(out, [torch.empty_like(x) for x in out])
        assert [(spec.gradient, spec.v_norm) for spec in specs] == [(False, True), (True, True)]


def test_v_norm_refuses_a_tangent_of_v() -> None:
    (q, k, v, *tables), _, norm = v_norm_call("once", "cpu")
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(v, torch.ones_like(v))
        with pytest.raises(jitrope.InvalidInput, match="forward-mode derivatives"):
            jitrope.prepare_qkv(q, k, dual, *tables, norm=norm)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize(("name", "heads", "dim", "interleaved"), ACROSS)
def test_once_across_heads_is_torchs(name, heads, dim, interleaved, dtype, device) -> None:
    """Interleaved pairs with shared tables as in Wan; halves with angles for each head as in LTX-2."""
    q, k = tensors(device, dtype, *[(2, 17, heads, dim)] * 2)
    weights = tensors(device, dtype, *[(heads * dim,)] * 2, seed=1)
    tables = tables_of(device, 17, dim // 2)
    words = {"interleaved": interleaved}
    if name == "ltx":
        tables = [t.transpose(1, 2) for t in tables_of(device, 17, dim // 2, 2, heads)]
        words["rounding"] = "addcmul"
    normed = [F.rms_norm(x.flatten(-2), (heads * dim,), w, 1e-6).view_as(x) for x, w in zip((q, k), weights)]
    want = jitrope.apply_rope(*normed, *tables, **said(**words))
    assert_equal(norm_rope(q, k, *weights, *tables, across_heads=True, norm_rounding="once", **words), want)


# ---- kinds of tensors and tables ---------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [7, 45])
def test_a_norm_alone_of_odd_heads(dim: int, device: str) -> None:
    q, weight = tensors(device, torch.float32, (1, 3, 2, dim), (dim,))
    out, _ = norm_rope(q, None, weight)
    torch.testing.assert_close(out, F.rms_norm(q, (dim,), weight, 1e-6))


@pytest.mark.parametrize("device", DEVICES)
def test_fake_tensors_leave_nothing_behind(device: str) -> None:
    """The table of no rotation is kept, but never a fake one, which a later real call would use."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    constants.one_row.cache_clear()
    with FakeTensorMode():
        norm_rope(torch.ones(1, 2, 1, 10, device=device), None)
    with torch.inference_mode():
        norm_rope(torch.ones(1, 2, 1, 12, device=device), None)
    for dim in (10, 12):
        q = torch.ones(1, 2, 1, dim, device=device, requires_grad=True)
        out, _ = norm_rope(q, None)
        torch.testing.assert_close(out, torch.ones_like(q))
        out.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_views_of_a_wide_projection(device: str) -> None:
    """FLUX.2: q, k, v and the MLP's input are one row of 55,296 elements."""
    heads, dim = 48, 128
    projected, q_weight, k_weight = tensors(device, torch.bfloat16, (1, 9, 55_296), (dim,), (dim,))
    q, k, v = (part.unflatten(-1, (heads, dim)) for part in projected[..., : 3 * heads * dim].chunk(3, -1))
    assert q.stride(1) == 55_296
    tables = tables_of(device, 9, dim // 2)
    words = {"norm_rounding": "once", "interleaved": True}
    want = norm_rope(q.contiguous(), k.contiguous(), q_weight, k_weight, *tables, **words)
    assert_equal(norm_rope(q, k, q_weight, k_weight, *tables, **words), want)
    both = [(x[:, :4], x[:, 4:]) for x in (q, k, v)]
    weights = (q_weight, k_weight)
    streams = [tuple(part[n] for part in both) for n in range(2)]
    joint = norm_rope_joint(*streams, weights, weights, *tables, **words)
    assert_equal(joint, (*want, v))
    rest = projected.clone()
    norm_rope(q, k, q_weight, k_weight, *tables, **words, inplace=True)
    assert_equal((q, k), want)
    assert torch.equal(projected[..., 2 * heads * dim :], rest[..., 2 * heads * dim :])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 4, 2, 8), (2, 0, 2, 8), (2, 4, 0, 8)])
def test_nothing_to_normalise(shape: tuple[int, ...], device: str) -> None:
    q = torch.empty(shape, device=device, requires_grad=True)
    weight = torch.ones(8, device=device, requires_grad=True)
    for tables in ((None, None), tables_of(device, 4, 4)):
        out, k = norm_rope(q, q.clone(), weight, weight, *tables)
        assert out.shape == k.shape == shape
        q_grad, weight_grad = torch.autograd.grad(out.sum() + k.sum(), (q, weight))
        assert q_grad.shape == shape
        assert torch.equal(weight_grad, torch.zeros_like(weight))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [(0, 3), (3, 0), (0, 0)])
def test_a_stream_may_be_empty(tokens: tuple[int, int], device: str) -> None:
    streams = [tensors(device, torch.float32, *[(2, n, 2, 8)] * 3, seed=n) for n in tokens]
    for x in (*streams[0], *streams[1]):
        x.requires_grad_()
    tables = tables_of(device, 3, 4)
    q, k, v = norm_rope_joint(*streams, None, None, *tables)
    assert q.shape == k.shape == v.shape == (2, sum(tokens), 2, 8)
    if sum(tokens):
        full = streams[0] if tokens[0] else streams[1]
        assert_equal((q, k), norm_rope(*full[:2], None, None, *tables))
        assert torch.equal(v, full[2])
    (q.sum() + v.sum()).backward()
    assert streams[0][0].grad.shape == streams[0][0].shape


@pytest.mark.parametrize("case", [c for c in NOT_JOINT if c.rope.strides != "reversed"], ids=str)
def test_outputs_keep_dense_strides(case: NormCase) -> None:
    call = make_norm(case)
    for x, out in zip(call.streams, norm_call(call)):
        assert x is None or out.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", ["q", "weight"])
def test_in_place_has_no_gradient(which: str, device: str) -> None:
    q, weight = tensors(device, torch.float32, (1, 3, 2, 8), (8,))
    before = q.clone()
    {"q": q, "weight": weight}[which].requires_grad_()
    with pytest.raises(
        jitrope.JitropeError,
        match=f"{which}.* requires a gradient, but this call has none; leave inplace=True out",
    ):
        norm_rope(q, None, weight, inplace=True)
    assert torch.equal(q, before)
    with torch.no_grad():
        norm_rope(q, None, weight, inplace=True)
    assert not torch.equal(q, before)


# ---- gradients ---------------------------------------------------------------------------------------


def oracle(q, k, q_weight, k_weight, cos, sin, *, across_heads=False, zero_centered=False, after_rope=False,
           interleaved=False, rotary_dim=None, rotary_offset=0, eps=1e-6, norm_kind="rms_norm", q_bias=None,
           k_bias=None):  # fmt: skip
    """Norm and rope in differentiable fp64, for (B, S, H, D) and tables that broadcast to (B, S, H, rotary_dim / 2)."""

    def normed(x, weight, bias):
        rows = x.flatten(-2) if across_heads else x
        rows = rows - rows.mean(-1, keepdim=True) if norm_kind == "layer_norm" else rows
        rows = rows / (rows.square().mean(-1, keepdim=True) + eps).sqrt()
        rows = rows if weight is None else rows * (weight + (1 if zero_centered else 0))
        rows = rows if bias is None else rows + bias
        return rows.reshape(x.shape)

    def rotated(y):
        n = rotary_dim or y.shape[-1]
        index = torch.arange(n).view(-1, 2) if interleaved else torch.arange(n).view(2, -1).T
        c, s = (t.double() if t.dim() == 4 else t.double()[:, None] for t in (cos, sin))
        out = list(y.unbind(-1))
        for pair, (a, b) in enumerate((index + rotary_offset).tolist()):
            out[a] = y[..., a] * c[..., pair] - y[..., b] * s[..., pair]
            out[b] = y[..., b] * c[..., pair] + y[..., a] * s[..., pair]
        return torch.stack(out, -1)

    parts = ((q, q_weight, q_bias), (k, k_weight, k_bias))
    if after_rope:
        return [None if x is None else normed(rotated(x), *own) for x, *own in parts]
    return [None if x is None else rotated(normed(x, *own)) for x, *own in parts]


GRADIENTS = {
    "halves": {},
    "interleaved": {"interleaved": True},
    "partial": {"rotary_dim": 8, "rotary_offset": 4},
    "zero-centered": {"zero_centered": True},
    "across": {"across_heads": True},
    "after": {"after_rope": True, "zero_centered": True},
    "after-partial": {"after_rope": True, "rotary_dim": 8, "interleaved": True},
    "after-across": {"after_rope": True, "across_heads": True},
    "across-interleaved": {"across_heads": True, "interleaved": True, "zero_centered": True},
    "layer": {"norm_kind": "layer_norm"},
    "layer-partial": {"norm_kind": "layer_norm", "rotary_dim": 8, "interleaved": True, "zero_centered": True},
    "layer-after": {"norm_kind": "layer_norm", "after_rope": True},
    "layer-across": {"norm_kind": "layer_norm", "across_heads": True},
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-6}


def assert_gradients(got, want, dtype: torch.dtype) -> None:
    for a, b in zip(got, want):
        size = max(1e-3, float(b.abs().max()))
        torch.testing.assert_close(a.double(), b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] / 4 * size)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("words", GRADIENTS.values(), ids=GRADIENTS)
def test_gradient_against_fp64(words, per_head: bool, dtype: torch.dtype, device: str) -> None:
    """The gradients of q, k, weights and biases, also for bf16 q and fp32 weights; two runs give the same bits."""
    heads, dim = (3, 3) if per_head else (4, 2), 16
    q, k = tensors("cpu", dtype, *((2, 11, h, dim) for h in heads))
    sizes = [(dim * (h if "across_heads" in words else 1),) for h in heads]
    biases = ["q_bias", "k_bias"] if "norm_kind" in words else []
    weights = tensors("cpu", torch.float32, *sizes, *(sizes if biases else []), seed=1)

    def call(function, leaves, tables):
        return function(*leaves[:4], *tables, **words, **dict(zip(biases, leaves[4:])))

    tables = tables_of("cpu", 11, words.get("rotary_dim", dim) // 2)
    if per_head:
        tables = [t.transpose(1, 2) for t in tables_of("cpu", 11, words.get("rotary_dim", dim) // 2, 2, 3)]
    grads = tensors("cpu", dtype, q.shape, k.shape, seed=2)
    leaves = [x.double().requires_grad_() for x in (q, k, *weights)]
    want = torch.autograd.grad(call(oracle, leaves, tables), leaves, [g.double() for g in grads])
    leaves = [x.to(device).requires_grad_() for x in (q, k, *weights)]
    results = []
    for _ in range(2):
        outputs = call(norm_rope, leaves, [t.to(device) for t in tables])
        results.append(torch.autograd.grad(outputs, leaves, [g.to(device) for g in grads]))
    assert [g.dtype for g in results[0]] == [x.dtype for x in leaves]
    assert_gradients([g.cpu() for g in results[0]], want, dtype)
    assert_equal(*results)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("of", ["q", "k"])
@pytest.mark.parametrize("kind", ["partial", "after", "across-interleaved", "layer-after", "layer-across"])
def test_a_norm_of_one_beside_a_rotation_of_the_other(kind: str, of: str, device: str) -> None:
    """The bits are those of a norm of both and of `apply_rope`, and so are the gradients, also those of one alone."""
    words, across = GRADIENTS[kind], "across" in kind
    q, k, *grads = [x.to(device) for x in tensors("cpu", torch.float32, *[(2, 11, h, 16) for h in (4, 2)] * 2)]
    names = ("q_weight", "k_weight", *(("q_bias", "k_bias") if "layer" in kind else ()))
    sizes = [(16 * (4, 2)[name[0] == "k"] if across else 16,) for name in names]
    weights = dict(zip(names, tensors(device, torch.float32, *sizes, seed=1)))
    own = {name: x.requires_grad_() for name, x in weights.items() if name[0] == of}
    rest = {"cos": tables_of(device, 11, words.get("rotary_dim", 16) // 2)[0], "sin": torch.ones(11, 8, device=device)}
    rest["sin"] = rest["sin"][:, : rest["cos"].shape[-1]]
    for wanted in ((q, k), (q,), (k,)):
        for x in (q, k):
            x.requires_grad_(any(x is y for y in wanted))
        given = [x.clone() for x in (q, k)]
        got = norm_rope(*given, **own, **rest, **words, of=of, q_factor=0.5)
        rotation = {name: x for name, x in words.items() if name in ("interleaved", "rotary_dim", "rotary_offset")}
        plain = jitrope.apply_rope(*given, **rest, **rotation, q_scale=0.5)
        both = norm_rope(*given, **weights, **rest, **words, q_factor=0.5)
        want = [both[0], plain[1]] if of == "q" else [plain[0], both[1]]
        assert_equal(got, want)
        leaves = [*wanted, *(own.values() if any(x is (q, k)["qk".index(of)] for x in wanted) else ())]
        some = [n for n, x in enumerate((q, k)) if any(x is y for y in wanted)]
        found = [torch.autograd.grad([xs[n] for n in some], leaves, [grads[n] for n in some], retain_graph=True)
                 for xs in (got, want)]  # fmt: skip
        assert_gradients(found[0], [x.double() for x in found[1]], torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("across_heads", [False, True])
@pytest.mark.parametrize("which", ["q", "k", "both", "weights"])
def test_gradient_of_some_through_an_expanded_one(which: str, across_heads: bool, device: str) -> None:
    """Gradients with strides of 0, as in `out.sum().backward()`; of q or k only; of the weights only."""
    dim, words = 16, {"across_heads": across_heads, "interleaved": True}
    size = [dim * (h if across_heads else 1) for h in (24, 2)]
    given = tensors("cpu", torch.float32, (2, 5, 24, dim), (2, 5, 2, dim), *((n,) for n in size))
    tables = tables_of("cpu", 5, dim // 2)
    wanted = {"q": (0, 2), "k": (1, 3), "both": (0, 1, 2, 3), "weights": (2, 3)}[which]

    def total(outputs):
        parts = [out for n, out in zip("qk", outputs) if which in (n, "both", "weights")]
        return sum(part.sum() for part in parts)

    leaves = [x.double().requires_grad_() for x in given]
    want = torch.autograd.grad(total(oracle(*leaves, *tables, **words)), [leaves[i] for i in wanted])
    leaves = [x.to(device).requires_grad_(i in wanted) for i, x in enumerate(given)]
    outputs = norm_rope(*leaves, *(t.to(device) for t in tables), **words)
    total(outputs).backward()
    assert_gradients([leaves[i].grad.cpu() for i in wanted], want, torch.float32)
    for i in set(range(4)) - set(wanted):
        assert leaves[i].grad is None


@pytest.mark.parametrize("device", DEVICES)
def test_gradient_beside_k_without_heads(device: str) -> None:
    """The weights of k get zeros, and q's get what they get alone."""
    q, k, *weights = tensors(device, torch.float32, (1, 4, 2, 64), (1, 4, 0, 64), *[(64,)] * 4)
    leaves = [x.requires_grad_() for x in (q, *weights)]
    words = {
        "norm_kind": "layer_norm",
        "cos": torch.ones(4, 32, device=device),
        "sin": torch.zeros(4, 32, device=device),
    }
    found = []
    for keys, own in (((k,), weights), ((None,), (weights[0], None, weights[2], None))):
        out = norm_rope(q, *keys, *own[:2], q_bias=own[2], k_bias=own[3], **words)
        used = [x for x in (q, *own) if x is not None]
        outputs = [x for x in out if x is not None]
        found.append(
            dict(
                zip(
                    map(id, used),
                    torch.autograd.grad([x.square() for x in outputs], used, [torch.ones_like(x) for x in outputs]),
                )
            )
        )
    both, alone = found
    for x in leaves:
        assert torch.equal(both[id(x)], alone[id(x)] if id(x) in alone else torch.zeros_like(x))


@pytest.mark.parametrize("device", DEVICES)
def test_gradient_of_a_transposed_layout_and_one_weight(device: str) -> None:
    """(B, H, S, D) views of (B, S, H, D), a gradient that is not contiguous, no weight for k, no k."""
    q, k, weight = tensors("cpu", torch.float32, (2, 5, 3, 16), (2, 5, 3, 16), (16,))
    grads = tensors("cpu", torch.float32, (2, 3, 16, 5), (2, 3, 16, 5), seed=2)
    grads = [g.transpose(-1, -2) for g in grads]
    tables = tables_of("cpu", 5, 8)
    leaves = [x.double().requires_grad_() for x in (q, k, weight)]
    outputs = oracle(leaves[0], leaves[1], leaves[2], None, *tables)
    want = torch.autograd.grad([y.transpose(1, 2) for y in outputs], leaves, [g.double() for g in grads])
    leaves = [x.to(device).requires_grad_() for x in (q, k, weight)]
    q, k = (x.transpose(1, 2) for x in leaves[:2])
    on_device = [t.to(device) for t in tables]
    outputs = norm_rope(q, k, leaves[2], None, *on_device, layout="bhsd")
    got = torch.autograd.grad(outputs, leaves, [g.to(device) for g in grads])
    assert_gradients([g.cpu() for g in got], want, torch.float32)
    alone, _ = norm_rope(q, None, leaves[2], None, *on_device, layout="bhsd")
    got = torch.autograd.grad(alone, (leaves[0], leaves[2]), grads[0].to(device))
    assert_gradients([g.cpu() for g in got], (want[0], want[2]), torch.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_a_second_derivative_is_refused(device: str) -> None:
    q, weight = tensors(device, torch.float32, (1, 3, 2, 8), (8,))
    q.requires_grad_(), weight.requires_grad_()
    out, _ = norm_rope(q, None, weight, None, *tables_of(device, 3, 4))
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(jitrope.JitropeError, match="no second derivative"):
        first.sum().backward()


# ---- torch's machinery -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", named(
    "once", "twice", "d192", "partial", "only-q-weight", "across-per-head", "unweighted", "layer-biased",
), ids=str)  # fmt: skip
def test_opcheck_of_the_gradient(case: NormCase) -> None:
    """opcheck without its test of the gradient, because the op has none."""
    call = make_norm(case)
    grads = [None if x is None else torch.randn_like(x) for x in call.streams]
    options = call.options._replace(inverse=True, rounding="fp32")
    tensors = (*grads, *call.streams, *call.weights, *call.biases)
    arguments = op_arguments(HEADS_BACK, tensors, call.tables, options)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.jitrope.prepare.default, arguments, test_utils=tests)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("grad", [slow(False), True])
@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "alone",
        "joint",
        *(slow(kind) for kind in ("across", "joint, two tables")),
    ],
)
def test_compile_fullgraph_once_for_all_lengths(kind: str, grad: bool, device: str) -> None:
    heads, dim = 3, 16
    size = dim * (heads if kind == "across" else 1)
    weights = [w.requires_grad_(grad) for w in tensors(device, torch.float32, (size,), (size,), seed=1)]

    def model(q, k, v, cos, sin):
        if kind.startswith("joint"):
            if kind == "joint, two tables":
                cos, sin = (cos, cos), (sin, sin)
            streams = [tuple(part * 2 for part in (q, k, v)), tuple(x[:, 1:] for x in (q, k, v))]
            return norm_rope_joint(*streams, weights, weights, cos, sin)
        if kind == "alone":
            return (norm_rope(q * 2, None, weights[0])[0],)
        return norm_rope(q * 2, k, *weights, cos, sin, across_heads=kind == "across", norm_rounding="once")

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    frames = 0  # that the first length is compiled to
    for tokens in (5, 7, 12, 33):
        q, k, v = tensors(device, torch.float32, *[(2, tokens, heads, dim)] * 3, seed=tokens)
        tables = tables_of(device, 2 * tokens, dim // 2)
        results = []
        for function in (compiled, model):
            leaves = [x.clone().requires_grad_(grad) for x in (q, k, v)]
            outputs = function(*leaves, *tables)
            wanted = [x for x in (*leaves, *weights) if grad]
            loss = sum(y.sin().sum() for y in outputs)
            grads = torch.autograd.grad(loss, wanted, allow_unused=True) if grad else ()
            results.append((*outputs, *(g for g in grads if g is not None)))
        assert len(results[0]) == len(results[1])
        for got, want in zip(*results):
            torch.testing.assert_close(got, want)
        frames = frames or counter.frame_count
    assert counter.frame_count == frames


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_in_place(device: str) -> None:
    q, k, weight = tensors(device, torch.float32, (2, 5, 3, 16), (2, 5, 1, 16), (16,))
    tables = tables_of(device, 5, 8)

    def model(q, k):
        q, k = q * 2, k + 1
        norm_rope(q, k, weight, weight, *tables, inplace=True)
        return q, k * 3

    for got, want in zip(torch.compile(model, fullgraph=True, backend="aot_eager")(q, k), model(q, k)):
        torch.testing.assert_close(got, want)


@pytest.mark.slow
def test_compile_with_inductor() -> None:
    """The strides are those of the fake tensors; Inductor's code asserts them."""
    for case in named("across-per-head", "cis-starts", "fused-qkv", "joint"):
        call = make_norm(case)

        def model(*streams, call=call):
            call.streams = [x * 1 for x in streams]
            return [None if y is None else y * 2 for y in norm_call(call)]

        streams = call.streams
        want = model(*streams)
        for got, expected in zip(torch.compile(model, fullgraph=True)(*streams), want):
            torch.testing.assert_close(got, expected, rtol=2**-7, atol=2**-7, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool, device: str) -> None:
    given = tensors(device, torch.float32, (2, 5, 3, 16), (2, 5, 1, 16), (16,), (16,))
    tables = tables_of(device, 5, 8)

    def block(q, k, *weights):
        q, k = norm_rope(q * 2, k, *weights, *tables)
        return (q.sin().sum() + k.cos().sum()).square()

    grads = []
    for run in (block, lambda *leaves: checkpoint(block, *leaves, use_reentrant=reentrant)):
        leaves = [x.clone().requires_grad_() for x in given]
        run(*leaves).backward()
        grads.append([x.grad for x in leaves])
    assert_equal(*grads)


def test_forward_mode_is_refused() -> None:
    q, weight = torch.randn(1, 3, 2, 8), torch.ones(8)
    for run, x in ((lambda x: norm_rope(x, None), q), (lambda x: norm_rope(q, None, x), weight)):
        with pytest.raises(jitrope.InvalidInput, match="forward-mode"):
            torch.func.jvp(lambda x, run=run: run(x)[0], (x,), (x,))


# ---- refusals ----------------------------------------------------------------------------------------


ONES = torch.ones(8)


def arguments(**changes):
    words = {
        "q": torch.ones(2, 6, 4, 8), "k": torch.ones(2, 6, 2, 8), "q_weight": torch.ones(8), "k_weight": torch.ones(8),
        "cos": torch.zeros(6, 4), "sin": torch.zeros(6, 4),
    }  # fmt: skip
    return {**words, **changes}


REFUSALS = {
    "weight-shape": (
        arguments(q_weight=torch.ones(9)),
        r"q_weight is .*\(9,\).*; it must be \(8,\), .* like q \(B=2, S=6, H=4, D=8\)$",
    ),
    "weight-rank": (arguments(k_weight=torch.ones(1, 8)), r"k_weight is .*\(1, 8\).*; it must be \(8,\)"),
    "weight-across": (arguments(across_heads=True), r"q_weight is .*\(8,\).*; it must be \(32,\)"),
    "weight-per-head": (arguments(q_weight=torch.ones(32)), r"q_weight is .*\(32,\).*; it must be \(8,\)"),
    "weight-dtype": (
        arguments(q_weight=torch.ones(8).double()),
        r"q_weight is float64; it must be \(8,\), float32 or float16 or bfloat16, contiguous",
    ),
    "weights-dtypes": (
        arguments(k_weight=torch.ones(8).half()),
        r"k_weight is float16; it must be \(8,\), float32, contiguous, on cpu like q_weight and k$",
    ),
    "weight-device": (
        arguments(k_weight=torch.ones(8, device="meta")),
        "k_weight is .* on meta; it must be .*, float32, contiguous, on cpu",
    ),
    "weight-strided": (
        arguments(q_weight=torch.ones(16)[::2]),
        r"q_weight is .*, with strides \(2,\); it must be .*, contiguous",
    ),
    "weight-expanded": (
        arguments(k_weight=torch.ones(1).expand(8)),
        r"k_weight is .*, with strides \(0,\); it must be .*, contiguous",
    ),
    "weight-without-k": (arguments(k=None), "k_weight is given, but k is not"),
    "bias": (arguments(q_bias=ONES), "q_bias goes with kind='layer_norm'"),
    "bias-shape": (arguments(k_bias=torch.ones(9), norm_kind="layer_norm"), r"k_bias is .*\(9,\).*; it must be \(8,\)"),
    "bias-dtype": (
        arguments(q_bias=ONES.half(), norm_kind="layer_norm"),
        "q_bias is float16; it must be .*, float32, contiguous",
    ),
    "of": (arguments(of="kq"), "of is 'kq'; it must be one of 'qk', 'q', 'k'"),
    "of-weight": (arguments(of="k", q_weight=ONES), "q_weight does not go with of='k'"),
    "of-means": (
        arguments(of="q", k_weight=None, across_heads=True, q_mean_square=ONES),
        "mean_squares does not go with of='q'",
    ),
    "of-without-k": (arguments(of="k", k=None, q_weight=None, k_weight=None), "the norm has of='k', but k is not"),
    "kind": (arguments(norm_kind="batch_norm"), "kind is 'batch_norm'; it must be one of 'rms_norm', 'layer_norm'"),
    "norm-rounding": (
        arguments(norm_rounding="thrice"),
        "rounding is 'thrice'; it must be one of 'none', 'once', 'twice'",
    ),
    "rounding": (arguments(rounding="bf16"), "rounding is 'bf16'"),
    "layout": (arguments(layout="hsbd"), "layout is 'hsbd'"),
    "layout-no-table": (arguments(cos=None, sin=None, layout="hsbd"), "layout is 'hsbd'"),
    "k-shape": (arguments(k=torch.ones(2, 5, 2, 8)), "only H may differ"),
    "k-dtype": (
        arguments(k=torch.ones(2, 6, 2, 8).half()),
        r"k is float16; it must be \(2, 6, H, 8\), float32, on cpu like q; pass k.to\(q\)",
    ),
    "rank": (arguments(q=torch.ones(6, 4, 8)), r"it must be \(B, S, H, D\), .*pass layout=\"thd\""),
    "table-rows": (arguments(cos=torch.zeros(5, 4), sin=torch.zeros(5, 4)), "cos has 5 rows"),
    "table-width": (
        arguments(cos=torch.zeros(6, 3), sin=torch.zeros(6, 3)),
        r"cos is .*\(6, 3\).* must be \(P, 4\|8\)",
    ),
    "half-a-table": (arguments(sin=None), "pass cos and sin, or one of"),
    "check": (arguments(position_ids=torch.tensor([0, 1, 2, 3, 4, 6]), check=True), "positions go from 0 to 6"),
}


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize("function", [KINDS["norm_rope"], KINDS["norm_rope_"]])
def test_refusals_name_the_argument_and_write_nothing(name: str, function) -> None:
    words, message = REFUSALS[name]
    before = words["q"].clone()
    with pytest.raises(jitrope.InvalidInput, match=message) as error:
        function(**words)
    assert str(error.value).startswith(("prepare_qkv: ", "Norm: "))
    assert torch.equal(words["q"], before)


def stream(tokens: int = 3, **changes):
    words = {"heads": 4, "k_heads": 2, "dim": 8, "batch": 2, "dtype": torch.float32, **changes}
    shape = words["batch"], tokens
    q = torch.ones(*shape, words["heads"], words["dim"], dtype=words["dtype"])
    return q, *(torch.ones(*shape, words["k_heads"], words["dim"], dtype=words["dtype"]) for _ in range(2))


JOINT_REFUSALS = {
    "heads": ((stream(), stream(5, heads=6)), {}, r"second's q is .*\(2, 5, 6, 8\).*; it must be \(2, 5, 4, 8\)"),
    "k-heads": ((stream(), stream(5, k_heads=1)), {}, "second's k is .*it must be"),
    "dim": ((stream(), stream(5, dim=16)), {}, "second's q is .*16.*; it must be"),
    "batch": ((stream(), stream(5, batch=1)), {}, r"second's q is .*\(1, 5, .*; it must be \(2, 5, "),
    "dtype": ((stream(), stream(5, dtype=torch.bfloat16)), {}, "second's q is bfloat16; it must be .* float32"),
    "v": (((*stream()[:2], stream()[0]), (*stream(5)[:2], stream(5)[0])), {}, "first's v is .*; it must be"),
    "rank": (((*stream()[:2], torch.ones(3)), stream(5)), {}, r"first's v is a tensor of shape \(3,\)"),
    "rows": ((stream(), stream(6)), {}, "S=9.* but cos has 8 rows; it needs 9"),
    "weights": ((stream(), stream(5)), {"second": (ONES.half(), ONES.half())}, "the weights are"),
    "weight-shape": (
        (stream(), stream(5)),
        {"second": (ONES, torch.ones(4))},
        r"k_weight is .*\(4,\).*; it must be \(8,\)",
    ),
    "per-head": (
        (stream(k_heads=4), stream(5, k_heads=4)),
        {"cos": torch.zeros(1, 8, 4, 4), "sin": torch.zeros(1, 8, 4, 4)},
        "with two streams the heads must share it",
    ),
    "two-tables-rows": (
        (stream(), stream(5)),
        {"cos": (torch.zeros(3, 4), torch.zeros(4, 4)), "sin": (torch.zeros(3, 4), torch.zeros(4, 4))},
        "cos has 4 rows",
    ),
    "norm-rounding": ((stream(), stream(5)), {"norm_rounding": "thrice"}, "rounding is 'thrice'"),
}


@pytest.mark.parametrize("name", JOINT_REFUSALS)
def test_joint_refusals(name: str) -> None:
    streams, words, message = JOINT_REFUSALS[name]
    words = {"cos": torch.zeros(8, 4), "sin": torch.zeros(8, 4), "second": (ONES, ONES), **words}
    second = words.pop("second")
    with pytest.raises(jitrope.InvalidInput, match=message) as error:
        norm_rope_joint(*streams, (ONES, ONES), second, **words)
    assert str(error.value).startswith(("prepare_joint_qkv: ", "Norm: "))
