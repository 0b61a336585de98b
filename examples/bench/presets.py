"""`bench presets`: GPU time of the launches between projection and attention of some models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from jitrope import DynamicQuantize, KVCache, Mrope, Norm, Ulysses, prepare_mla_qkv, prepare_qkv

from . import peers as others
from .harness import COPY, DEVICE, Call, Case, bf16, measure
from .harness import rows as rows_of
from .plots import Plot
from .report import AS_JSON, ONLY, PEERS, SMOKE, Rows, app, chosen, show
from .rope import Shape, line_of, name_of, small
from .sections import PLAIN, Row, Section, Table, grouped, of, span

FP8 = torch.float8_e4m3fn
PAGE = 16
RANKS = 4
SECTIONS = (24, 20, 20)


class Inputs(NamedTuple):
    """bf16 activations, weights and biases; fp32 half-width tables (S, rotary_dim / 2)."""

    q: Tensor  # (B, S, Hq, D); k and v (B, S, Hk, D)
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    weights: tuple[Tensor, Tensor]  # of q and k, (D,)
    biases: tuple[Tensor, Tensor]
    ids: Tensor  # (3, S)
    caches: tuple[Tensor, ...]  # k's and v's, (pages, PAGE, Hk, D) in e4m3, and the slots
    out: tuple[Tensor, ...]  # q, k in e4m3 and v, (B, H, S, D)


def inputs(shape: Shape, rotary_dim: int) -> Inputs:
    """Return random inputs."""
    b, s, hq, hk, d = shape
    angles = torch.rand(s, rotary_dim // 2, device=DEVICE) * 2 * torch.pi
    weights, biases = ((bf16(d) / 8 + one, bf16(d) / 8 + one) for one in (1, 0))
    ids, slots = torch.randint(s, (3, s), device=DEVICE), torch.randperm(-(-b * s // PAGE) * PAGE, device=DEVICE)
    caches = [torch.zeros(len(slots) // PAGE, PAGE, hk, d, device=DEVICE).to(FP8) for _ in range(2)]
    out = [torch.empty(b, h, s, d, device=DEVICE, dtype=dtype) for h, dtype in ((hq, FP8), (hk, FP8), (hk, None))]
    out[2] = out[2].bfloat16()
    q, k, v = (bf16(b, s, h, d) for h in (hq, hk, hk))
    return Inputs(q, k, v, angles.cos(), angles.sin(), weights, biases, ids, (*caches, slots[: b * s]), tuple(out))


def latent(shape: Shape, rotary_dim: int) -> Inputs:
    """Return random inputs of latent attention: k is kv, with values of 128, and v is k_pe."""
    b, s, _, hk, d = shape
    own = inputs(shape, rotary_dim)
    return own._replace(k=bf16(b, s, hk, d - rotary_dim + 128), v=bf16(b, s, 1, rotary_dim))


def gated(shape: Shape, rotary_dim: int) -> Inputs:
    """Return random inputs whose q is a view beside its gate."""
    b, s, hq, _, d = shape
    return inputs(shape, rotary_dim)._replace(q=bf16(b, s, hq, 2 * d)[..., :d])


class Preset(NamedTuple):
    """The calls of a model.

    moved: bytes that are read and written for an element of q, of k and of v. trained: fields with gradients.
    """

    shape: Shape
    ours: Call
    plain: Call
    moved: tuple[int, int, int]
    rotary_dim: int = 0  # 0: the whole head
    hot: bool = False
    trained: tuple[str, ...] = ()
    tolerance: tuple[float, float] = (2**-6, 2**-5)
    make: Callable[[Shape, int], Inputs] = inputs
    backward: float = 1.5  # bytes of the backward over those of the forward


# ---- in plain torch ----------------------------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor | None = None) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-6)


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, rotary_dim: int = 0) -> Tensor:
    """x (B, S, H, D), rotated from its first element on."""
    cos, sin = cos[None, :, None], sin[None, :, None]
    n = rotary_dim or x.shape[-1]
    return torch.cat((others.rotate(x[..., :n], cos, sin, interleaved), x[..., n:]), -1)


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3, and the scale of each head."""
    scale = x.float().abs().amax(-1).clamp(min=1e-12) / 448
    return (x * (1 / scale)[..., None]).to(FP8), scale


def hadamard(x: Tensor) -> Tensor:
    """Times the orthogonal Hadamard matrix."""
    y = x.float()
    for bit in range(x.shape[-1].bit_length() - 1):
        a, b = y.unflatten(-1, (-1, 2, 1 << bit)).unbind(-2)
        y = torch.stack((a + b, a - b), -2).flatten(-3)
    return y / torch.tensor(x.shape[-1]).sqrt()


def qwen3_vl(x: Inputs) -> Any:
    """Rows of three axes, alternating; k and v to the pages; a scale for each head of q."""
    pair = torch.arange(x.cos.shape[-1], device=x.q.device)
    axis = pair % 3 * (pair < 3 * SECTIONS[1])  # the second and third section are equally long
    cos, sin = (table[x.ids[axis], pair[:, None]].T for table in (x.cos, x.sin))
    q, k = (others.rotate(rms(y, w), cos[:, None], sin[:, None]) for y, w in zip((x.q, x.k), x.weights))
    *caches, slots = x.caches
    for cache, y, scale in zip(caches, (k, x.v), (0.05, 0.02)):
        units = (y.float() * (1 / scale)).clamp(-448, 448).to(FP8)
        cache.flatten(0, 1).view(torch.uint8)[slots] = units.view(torch.uint8).flatten(0, 1)
    return scaled(q)


def indexer(x: Inputs) -> Any:
    """The queries, and the one key with its LayerNorm."""
    k = layer(x.k, x.weights[1], x.biases[1])
    return [
        *scaled(hadamard(turned(x.q, x.cos, x.sin, False, 64))),
        *scaled(hadamard(turned(k, x.cos, x.sin, False, 64))),
    ]


def operands(x: Inputs) -> Any:
    """q and k in e4m3 and v, heads first."""
    q, k = (scaled(turned(rms(y, w), x.cos, x.sin, True)) for y, w in zip((x.q, x.k), x.weights))
    return [*(y.transpose(1, 2).contiguous() for y in (q[0], k[0], x.v)), q[1], k[1]]


def wan(x: Inputs) -> Any:
    """The mean is over all heads; q, k and v as `RANKS` ranks exchange them."""
    q, k = (
        F.rms_norm(y.flatten(2), (y[0, 0].numel(),), w.repeat(y.shape[2]), 1e-6).view_as(y)
        for y, w in zip((x.q, x.k), x.weights)
    )
    parts = (turned(q, x.cos, x.sin, True), turned(k, x.cos, x.sin, True), x.v)
    return [y.unflatten(2, (RANKS, -1)).permute(2, 0, 1, 3, 4).contiguous() for y in parts]


def mla(x: Inputs) -> Any:
    """q, k and v of latent attention, from interleaved pairs to halves."""
    cos, sin = x.cos[None, :, None], x.sin[None, :, None]
    n, rotary_dim = x.q.shape[-1] - x.v.shape[-1], x.v.shape[-1]
    first, v = x.k.split([n, x.k.shape[-1] - n], -1)
    q_pe, k_pe = (
        others.rotate(y.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin, False)
        for y in (x.q[..., n:], x.v)
    )
    k = torch.cat((first, k_pe.expand(*first.shape[:-1], rotary_dim)), -1)
    return torch.cat((x.q[..., :n], q_pe), -1), k, v.contiguous()


# ---- with jitrope ------------------------------------------------------------------------------------------


def ours(norm: Callable[[Inputs], Norm], **words: Any) -> Call:
    """q and k, and v where the norm is also v's."""

    def call(x: Inputs) -> Any:
        made = norm(x)
        q, k, v = prepare_qkv(x.q, x.k, x.v, x.cos, x.sin, norm=made, **words)
        return (q, k, v) if made.words["norm"].v_norm else (q, k)

    return call


def to_ranks(x: Inputs) -> Any:
    norm = Norm(*[w.repeat(x.q.shape[2]) for w in x.weights], across_heads=True, rounding="once")
    return prepare_qkv(x.q, x.k, x.v, x.cos, x.sin, norm=norm, interleaved=True, out=Ulysses(RANKS))


def to_mla(x: Inputs) -> Any:
    return prepare_mla_qkv(x.q, x.k, x.v, x.cos, x.sin, interleaved=True, interleaved_out=False)


def to_cache(x: Inputs) -> Any:
    k_cache, v_cache, slots = x.caches
    cache = KVCache(k_cache, v_cache, slots, k_scale=0.05, v_scale=0.02)
    words: Any = {"norm": Norm(*x.weights, rounding="once"), "positions": Mrope(x.ids, SECTIONS, True)}
    return tuple(prepare_qkv(x.q, x.k, x.v, x.cos, x.sin, cache=cache, quantize=DynamicQuantize(), **words)[0])


def to_indexer(x: Inputs) -> Any:
    quantize = DynamicQuantize(hadamard=True)
    norm = Norm(x.weights[1], q_bias=x.biases[1], kind="layer_norm", rounding="once")
    q, _, _ = prepare_qkv(x.q, None, None, x.cos, x.sin, quantize=quantize, rotary_dim=64)
    k, _, _ = prepare_qkv(x.k, None, None, x.cos, x.sin, norm=norm, quantize=quantize, rotary_dim=64)
    return [*q, *k]


def to_operands(x: Inputs) -> Any:
    out = [y.transpose(1, 2) for y in x.out]
    words: Any = {"norm": Norm(*x.weights, rounding="once"), "interleaved": True, "out": out}
    q, k, _ = prepare_qkv(x.q, x.k, x.v, x.cos, x.sin, quantize=DynamicQuantize(), **words)
    return [*x.out, q.scale, k.scale]


def both(
    norm: Callable[[Tensor, Tensor, Tensor], Tensor],
    after: bool = False,
    interleaved: bool = False,
    v: bool = False,
    rotary_dim: int = 0,
) -> Call:
    """Plain torch: norm(x, weight, bias) before or after the rotation, and v's norm."""

    def call(x: Inputs) -> Any:
        parts = zip((x.q, x.k), x.weights, x.biases)
        turn = partial(turned, cos=x.cos, sin=x.sin, interleaved=interleaved, rotary_dim=rotary_dim)
        made = [norm(turn(y), *own) if after else turn(norm(y, *own)) for y, *own in parts]
        return (*made, rms(x.v)) if v else tuple(made)

    return call


IN_AND_OUT = (4, 4, 0)
PRESETS = {
    "gemma4": Preset(
        (1, 4096, 16, 8, 256), ours(lambda x: Norm(*x.weights, v_norm=True, rounding="once")),
        both(lambda y, w, b: rms(y, w), v=True), (4, 4, 4), trained=("q", "k", "v"),
    ),
    "llama4": Preset(
        (1, 4096, 40, 8, 128), ours(lambda x: Norm(after_rope=True, rounding="once"), interleaved=True),
        both(lambda y, w, b: rms(y), after=True, interleaved=True), IN_AND_OUT, trained=("q", "k"),
    ),
    "hunyuan": Preset(
        (1, 4096, 32, 8, 128), ours(lambda x: Norm(*x.weights, after_rope=True, rounding="once")),
        both(lambda y, w, b: rms(y, w), after=True), IN_AND_OUT, trained=("q", "k"),
    ),
    "cogvideox": Preset(
        (1, 17776, 48, 48, 64),
        ours(lambda x: Norm(*x.weights, q_bias=x.biases[0], k_bias=x.biases[1], kind="layer_norm", rounding="once"),
             interleaved=True),
        both(layer, interleaved=True), IN_AND_OUT, trained=("q", "k"),
    ),
    "hunyuandit": Preset(
        (2, 4096, 16, 16, 88),
        ours(lambda x: Norm(*x.weights, q_bias=x.biases[0], k_bias=x.biases[1], kind="layer_norm", rounding="once"),
             interleaved=True),
        both(layer, interleaved=True), IN_AND_OUT,
    ),
    "qwen3-vl-decode": Preset((1, 64, 32, 8, 128), to_cache, qwen3_vl, (3, 3, 3), hot=True, tolerance=(2**-3, 2**-5)),
    "qwen3-vl-prefill": Preset((1, 4096, 32, 8, 128), to_cache, qwen3_vl, (3, 3, 3), tolerance=(2**-3, 2**-5)),
    "deepseek-indexer": Preset(
        (1, 4096, 64, 1, 128), to_indexer, indexer, (3, 3, 0), rotary_dim=64, tolerance=(2**-2, 2.0)
    ),
    "deepseek-mla": Preset(
        (1, 4096, 128, 128, 192), to_mla, mla, (4, 6, 0), rotary_dim=64, trained=("q", "k", "v"), make=latent,
        backward=1,
    ),
    "qwen3.5": Preset(
        (1, 4096, 16, 2, 256),
        ours(lambda x: Norm(*x.weights, zero_centered=True, rounding="once"), rotary_dim=64),
        both(lambda y, w, b: (rms(y.float()) * (1 + w.float())).to(y.dtype), rotary_dim=64),
        IN_AND_OUT, rotary_dim=64, trained=("q", "k"), make=gated,
    ),
    "wan-ulysses": Preset((1, 8192, 40, 40, 128), to_ranks, wan, (4, 4, 4)),
    "flux-fp8": Preset((1, 4608, 24, 24, 128), to_operands, operands, (3, 3, 4), tolerance=(2**-3, 2**-4)),
}  # fmt: skip
"""Tokens, heads and head sizes are the models'. A rounding of "once" is that of the norms of plain torch."""


def case(name: str, with_peers: bool = True, smoke: bool = False, training: bool = False) -> Case:
    """Cold, except for a decode step. For a backward, COPY covers x and dy, which are read, and dx."""
    preset = PRESETS[name]
    shape = small(preset.shape) if smoke else preset.shape
    b, s, hq, hk, d = shape
    moved = b * s * d * sum(heads * size for heads, size in zip((hq, hk, hk), preset.moved))
    moved = int(moved * (preset.backward if training else 1))
    made = partial(preset.make, shape, preset.rotary_dim or d)
    calls, plain = {"jitrope": preset.ours}, {"jitrope": preset.plain}
    peers = others.with_compiled(preset.plain) if with_peers else {}
    return Case(made, calls, {COPY: moved}, peers, {}, preset.hot, plain, ("caches",), preset.tolerance)


def rows(name: str, with_peers: bool, training: bool = False, smoke: bool = False) -> Rows:
    """A row an implementation, of one pass."""
    made = case(name, with_peers, smoke, training)
    us = {
        by: each.backward if training else each.forward
        for by, each in measure(made, PRESETS[name].trained if training else ()).items()
    }
    return rows_of(us, made.moved[COPY], case=name, **{"pass": "backward" if training else "forward"})


@app.command("presets")
def command(only: ONLY = "", peers: PEERS = True, smoke: SMOKE = False, as_json: AS_JSON = False) -> None:
    """GPU time of the launches between projection and attention of some models, beside a copy of the same bytes."""
    steps = {}
    for name in chosen(only, PRESETS):
        steps[name] = partial(rows, name, peers, False, smoke)
        if PRESETS[name].trained:
            steps[f"{name} backward"] = partial(rows, name, peers, True, smoke)
    show(steps, smoke, as_json)


# ---- in examples/results/README.md -----------------------------------------------------------------------


def line(row: Row) -> str:
    """The case with its shape."""
    preset = PRESETS[row["case"]]
    return line_of(row, preset.shape, hot=preset.hot)


def plot(rows: Rows) -> Plot:
    """The forwards."""
    shown = [row for row in rows if row["pass"] == "forward"]
    groups = grouped(shown, name_of, {"jitrope": "jitrope", "torch.compile": "torch.compile"})
    compiled = [group["torch.compile"] / group["jitrope"] for group in groups.values() if "torch.compile" in group]
    faster = span(compiled or [1.0], 1)
    title = f"Projection to attention: {faster} times as fast as torch.compile"
    return Plot(title, "time over COPY", groups, "COPY")


SECTION = Section(
    "From projection to attention",
    """
    GPU time of all that some models do between the projection and attention, over COPY of the bytes that it must read
    and write. Each is one launch; a second one makes the key of DeepSeek's indexer, copies Wan's v, and, backward,
    normalises v of Gemma 4. A decode step is hot.
    """,
    "jitrope bench presets",
    (
        Table(
            "model (B, S, Hq, Hk, D)",
            line,
            {
                head: column
                for name, label in (("forward", ""), ("backward", ", backward"))
                for head, column in {
                    f"COPY, us{label}": of("us", by=COPY, **{"pass": name}),
                    f"jitrope{label}": of("x COPY", by="jitrope", **{"pass": name}),
                    **{shown + label: of("x COPY", by=by, **{"pass": name}) for by, shown in PLAIN.items()},
                }.items()
            },
        ),
    ),
    plot,
)
