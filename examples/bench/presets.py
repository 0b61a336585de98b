"""`bench presets`: GPU time of the launches between projection and attention of some models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from jitrope import (
    DynamicQuantize,
    KVCache,
    Mrope,
    Norm,
    Packed,
    Quantize,
    Ulysses,
    apply_rope,
    planning,
    prepare_fused_qkv,
    prepare_mla_qkv,
    prepare_qkv,
)

from . import chains
from . import peers as others
from .chains import NORMED, RANKS, ROTARY, SECTIONS, Inputs, both, centered, layer, rms
from .harness import COPY, Call, Case, measure
from .harness import rows as rows_of
from .plots import Plot
from .report import AS_JSON, ONLY, PEERS, SMOKE, Rows, app, chosen, show
from .rope import Shape, line_of, name_of, small
from .sections import PLAIN, Row, Section, Table, grouped, of, span


class Preset(NamedTuple):
    """The calls of a model.

    plain: the same in plain torch, or None. moved: bytes that are read and written for an element of q, of k and of v.
    trained: fields with gradients.
    """

    shape: Shape
    ours: Call
    plain: Call | None
    moved: tuple[float, float, float]
    rotary_dim: int = 0  # 0: the whole head
    hot: bool = False
    trained: tuple[str, ...] = ()
    tolerance: tuple[float, float] = (2**-6, 2**-5)
    make: Callable[[Shape, int], Any] = chains.inputs
    backward: float = 1.5  # bytes of the backward over those of the forward
    public: Callable[[], dict[str, Call]] = dict  # the kernels of others, as far as they are installed
    in_place: Call | None = None  # another way, with results in q


# ---- with jitrope ------------------------------------------------------------------------------------------


def ours(norm: Callable[[Inputs], Norm], **words: Any) -> Call:
    """q and k, and v where the norm is also v's."""

    def call(x: Inputs) -> Any:
        made = norm(x)
        q, k, v = prepare_qkv(x.q, x.k, x.v, x.cos, x.sin, norm=made, **words)
        return (q, k, v) if "v_norm" in made.words else (q, k)

    return call


def to_ranks(x: Inputs) -> Any:
    norm = Norm(*x.weights, across_heads=True, rounding="once")
    return prepare_qkv(x.q, x.k, x.v, x.cos, x.sin, norm=norm, interleaved=True, out=Ulysses(RANKS))


def to_gated(x: Inputs) -> Any:
    words: Any = {"norm": Norm(*x.weights, zero_centered=True, rounding="once"), "rotary_dim": 64}
    k_heads = x.k.shape[2]
    heads = (x.q.shape[2] // 2 - k_heads, k_heads)
    return prepare_fused_qkv(x.q, x.cos, x.sin, heads=heads, order="qkv_gated", copy_gate=True, **words)


def to_te_mha(x: Inputs) -> Any:
    norm = Norm(*x.weights, after_rope=True, rounding="once")
    return prepare_qkv(x.q, x.k, None, freqs=x.freqs, norm=norm, layout="sbhd")[:2]


def to_cogview4(x: Inputs) -> Any:
    norm = Norm(kind="layer_norm", eps=1e-5, rounding="once")
    return prepare_qkv(x.q, x.k, None, x.cos, x.sin, norm=norm, unrotated=chains.text_tokens(x))[:2]


def to_mla(x: Inputs, cp_size: int = 0) -> Any:
    """cp_size: the sequences are packed, and the tensors are those of the first of so many ranks."""
    words: Any = {"positions": Packed(x.cu_seqlens, cp_size=cp_size)} if cp_size else {}
    return prepare_mla_qkv(x.q, x.k, x.v, x.cos, x.sin, interleaved=True, interleaved_out=False, **words)


class Activation(torch.autograd.Function):
    """A leaf as a tensor that may be overwritten, without a copy."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.data

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def to_mla_in_place(x: Inputs, cp_size: int = 0) -> Any:
    """The same in two calls; the first overwrites the rotated elements of q and of its gradient, and no others."""
    words: Any = {"positions": Packed(x.cu_seqlens, cp_size=cp_size)} if cp_size else {}
    words.update(interleaved=True, interleaved_out=False)
    own: Any = {"rotary_dim": ROTARY, "rotary_offset": x.q.shape[-1] - ROTARY, "inplace": True, "inplace_grad": True}
    q, _ = apply_rope(Activation.apply(x.q), None, x.cos, x.sin, **own, **words)
    return q, *prepare_mla_qkv(x.q[..., :0, :], x.k, x.v, x.cos, x.sin, **words)[1:]


def to_mla_decode(x: Inputs) -> Any:
    cache, slots = x.caches
    c_kv, k_pe = cache.split([cache.shape[-1] - ROTARY, ROTARY], -1)
    into = KVCache(k_pe.unsqueeze(-2), c_kv.unflatten(-1, (-1, ROTARY)), slots)
    words: Any = {"positions": x.ids[0], "interleaved": True, "cache": into, "inplace": True}
    return prepare_qkv(x.q[..., -ROTARY:], x.k, x.v, x.cos, x.sin, **words)[0]


def to_mla_fp8(x: Inputs) -> Any:
    """The absorbed q, [latent | rotated], and the cache in fp8."""
    k_cache, _, slots = x.caches
    words: Any = {"rotary_dim": ROTARY, "rotary_offset": x.q.shape[-1] - ROTARY, "interleaved": True}
    words.update(positions=x.ids[0], cache=KVCache(k_cache, None, slots, k_scale=0.05), quantize=Quantize(0.05))
    return prepare_qkv(x.q, x.k, None, x.cos, x.sin, **words)[0]


def to_record(x: Inputs, **words: Any) -> Any:
    """k, [latent | rotated], alone."""
    latents, scales, k_pe, slots = x.caches
    n = x.k.shape[-1] - ROTARY
    norm = Norm(k_weight=x.weights[1][:NORMED], of="k_nope" if n == NORMED else "k", rounding="once")
    cache = KVCache(latents, None, slots, k_block_scale=scales, k_pe_cache=k_pe, **words)
    words = {"positions": x.ids[0], "interleaved": True, "rotary_dim": ROTARY, "rotary_offset": n}
    prepare_qkv(None, x.k, None, x.cos, x.sin, norm=norm, cache=cache, **words)
    return x.caches


def to_cache(x: Inputs) -> Any:
    k_cache, v_cache, slots = x.caches
    cache = KVCache(k_cache, v_cache, slots, k_scale=0.05, v_scale=0.02)
    words: Any = {"norm": Norm(*x.weights, rounding="once"), "positions": Mrope(x.ids, SECTIONS, True)}
    return tuple(prepare_qkv(x.q, x.k, x.v, x.cos, x.sin, cache=cache, quantize=DynamicQuantize(), **words)[0])


def to_indexer(x: Inputs, hadamard: bool = False) -> Any:
    """Two calls. One with `Norm(of="k")` has registers for fewer threads: 44 us in place of 32 on an H200."""
    norm = Norm(x.weights[1], q_bias=x.biases[1], kind="layer_norm", rounding="once")
    words: Any = {"rotary_dim": 64, "quantize": DynamicQuantize(hadamard=hadamard)}
    of_q: Any = {**words, "quantize": DynamicQuantize(hadamard=hadamard, q_weights=x.head_weights)}
    q, _, _ = prepare_qkv(x.q, None, None, x.cos, x.sin, **of_q)
    k, _, _ = prepare_qkv(x.k, None, None, x.cos, x.sin, norm=norm, **words)
    return [*q, *k]


def to_indexer_decode(x: Inputs) -> Any:
    """A step is one call."""
    norm = Norm(None, x.weights[1], k_bias=x.biases[1], kind="layer_norm", rounding="once", of="k")
    words: Any = {"rotary_dim": 64, "quantize": DynamicQuantize(q_weights=x.head_weights)}
    q, k, _ = prepare_qkv(x.q, x.k, None, x.cos, x.sin, norm=norm, **words)
    return [*q, *k]


def to_operands(x: Inputs, per: str = "token", hadamard: bool = False) -> Any:
    """Scales of heads are those of FlashAttention-3, which has v's too."""
    of_v = per == "head"
    out = [*x.out[:2], x.out[0].new_empty(x.out[2].shape) if of_v else x.out[2]]
    words: Any = {"norm": Norm(*x.weights, rounding="once"), "interleaved": True}
    words["out"] = [y.transpose(1, 2) for y in out]
    quantize = DynamicQuantize(per=per, v=of_v, hadamard=hadamard)
    found: Any = prepare_qkv(x.q, x.k, x.v, x.cos, x.sin, quantize=quantize, **words)
    return [*out, *[y.scale for y in found[: 2 + of_v]]]


def latent(cp_size: int = 0) -> Preset:
    """Latent attention of DeepSeek-V3. cp_size: as in `to_mla`."""
    rows: Any = {"rows": partial(chains.positions, cp_size=cp_size)} if cp_size else {}
    return Preset(
        (1, 4096, 128, 128, 192), partial(to_mla, cp_size=cp_size), partial(chains.mla, **rows), (4, 6, 0), ROTARY,
        trained=("q", "k", "v"), make=partial(chains.latent_packed, cp_size=cp_size) if cp_size else chains.latent,
        backward=1, public=partial(others.latent, cp_size), in_place=partial(to_mla_in_place, cp_size=cp_size),
    )  # fmt: skip


IN_AND_OUT = (4, 4, 0)
LAYER_NORM = ours(
    lambda x: Norm(*x.weights, q_bias=x.biases[0], k_bias=x.biases[1], kind="layer_norm", rounding="once"),
    interleaved=True,
)
FP8_WORDS: Any = {"tolerance": (2**-3, 2**-4)}
INDEXER: Any = {"rotary_dim": 64, "tolerance": (2**-2, 2.0)}
RECORD: Any = {"ours": to_record, "plain": chains.record, "rotary_dim": ROTARY, "tolerance": (2**-3, 2**-4)}
V3_RECORD: Any = {"moved": (0, 2 + 656 / 576, 0), "make": chains.records, **RECORD}
PRESETS = {
    "qwen3": Preset(
        (1, 4096, 32, 8, 128), ours(lambda x: Norm(*x.weights, rounding="once")), both(lambda y, w, b: rms(y, w)),
        IN_AND_OUT, trained=("q", "k"), public=partial(others.normed_pairs, lambda x: x.weights, 1e-6),
    ),
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
    "te-mha": Preset(
        (2, 4096, 32, 8, 128), to_te_mha, chains.te_mha, IN_AND_OUT, trained=("q", "k"), make=chains.sequence_first,
    ),
    "cogvideox": Preset(
        (1, 17776, 48, 48, 64), LAYER_NORM, both(layer, interleaved=True), IN_AND_OUT, trained=("q", "k"),
    ),
    "cogview4": Preset((1, 4352, 32, 32, 128), to_cogview4, chains.cogview4, IN_AND_OUT, trained=("q", "k")),
    "hunyuandit": Preset((2, 4096, 16, 16, 88), LAYER_NORM, both(layer, interleaved=True), IN_AND_OUT),
    "qwen3-vl-decode": Preset(
        (1, 64, 32, 8, 128), to_cache, chains.qwen3_vl, (3, 3, 3), hot=True, tolerance=(2**-3, 2**-5),
    ),
    "qwen3-vl-prefill": Preset((1, 4096, 32, 8, 128), to_cache, chains.qwen3_vl, (3, 3, 3), tolerance=(2**-3, 2**-5)),
    "deepseek-indexer": Preset((1, 4096, 64, 1, 128), to_indexer, chains.indexer, (3, 3, 0), **INDEXER),
    "deepseek-indexer-decode": Preset(
        (1, 64, 64, 1, 128), to_indexer_decode, chains.indexer, (3, 3, 0), hot=True, **INDEXER,
    ),
    "deepseek-indexer-hadamard": Preset(
        (1, 4096, 64, 1, 128), partial(to_indexer, hadamard=True), partial(chains.indexer, transform=chains.hadamard),
        (3, 3, 0), **INDEXER,
    ),
    "deepseek-mla": latent(),
    "deepseek-mla-thd": latent(cp_size=1),
    "deepseek-mla-cp": latent(cp_size=2),
    "deepseek-mla-decode": Preset(
        (1, 64, 128, 1, 576), to_mla_decode, chains.mla_decode, (4 * ROTARY / 576, 4, 0), rotary_dim=ROTARY, hot=True,
        make=chains.absorbed,
    ),
    "deepseek-mla-decode-fp8": Preset(
        (1, 64, 128, 1, 576), to_mla_fp8, chains.mla_fp8, (3, 3, 0), rotary_dim=ROTARY, hot=True, **FP8_WORDS,
    ),
    "deepseek-record": Preset((1, 4096, 1, 1, 576), **V3_RECORD),
    "deepseek-record-decode": Preset((1, 64, 1, 1, 576), hot=True, **V3_RECORD),
    "deepseek-v4-record": Preset(
        (1, 4096, 1, 1, 512), moved=(0, 2 + 583 / 512, 0), make=chains.newer_records, **RECORD,
    ),
    "nvfp4-record": Preset(
        (1, 4096, 1, 1, 576), partial(to_record, k_scale=0.05), None, (0, 2 + 352 / 576, 0), rotary_dim=ROTARY,
        make=partial(chains.records, fp4=True),
    ),
    "qwen3.5": Preset(
        (1, 4096, 16, 2, 256), ours(lambda x: Norm(*x.weights, zero_centered=True, rounding="once"), rotary_dim=64),
        both(lambda y, w, b: centered(y, w), rotary_dim=64), IN_AND_OUT, rotary_dim=64, trained=("q", "k"),
        make=chains.gated,
    ),
    "qwen3.5-fused": Preset(
        (1, 4096, 16, 2, 256), to_gated, chains.qwen3_next, (8, 4, 4), rotary_dim=64, trained=("q",), make=chains.fused,
        backward=1.25,
    ),
    "wan-ulysses": Preset((1, 8192, 40, 40, 128), to_ranks, chains.wan, (4, 4, 4), make=chains.across),
    "flux-fp8": Preset((1, 4608, 24, 24, 128), to_operands, chains.operands, (3, 3, 4), **FP8_WORDS),
    "flux-fp8-heads": Preset(
        (1, 4608, 24, 24, 128), partial(to_operands, per="head"), lambda x: chains.operands(x, 1), (3, 3, 3),
        **FP8_WORDS,
    ),
    "flux-fp8-heads-hadamard": Preset(
        (1, 4608, 24, 24, 128), partial(to_operands, per="head", hadamard=True),
        lambda x: chains.operands(x, 1, transform=chains.hadamard), (3, 3, 3), tolerance=(2**-3, 1.0),
    ),
}  # fmt: skip
"""Tokens, heads and head sizes are the models'. A rounding of "once" is that of the norms of plain torch."""


def case(preset: Preset, with_peers: bool = True, smoke: bool = False, training: bool = False) -> Case:
    """Cold, except for a decode step. For a backward, COPY covers x and dy, which are read, and dx."""
    shape = small(preset.shape) if smoke else preset.shape
    b, s, hq, hk, d = shape
    moved = b * s * d * sum(heads * size for heads, size in zip((hq, hk, hk), preset.moved))
    moved = int(moved * (preset.backward if training else 1))
    made = partial(preset.make, shape, preset.rotary_dim or d)
    calls = {
        "jitrope": preset.ours,
        **({"jitrope in place": preset.in_place} if preset.in_place else {}),
    }
    plain = dict.fromkeys(calls, preset.plain) if preset.plain else {}
    peers = {**preset.public(), **(others.with_compiled(preset.plain) if preset.plain else {})} if with_peers else {}
    return Case(made, calls, {COPY: moved}, peers, {}, preset.hot, plain, ("caches",), preset.tolerance)


def timed(preset: Preset, with_peers: bool, training: bool, smoke: bool) -> tuple[Case, dict[str, float]]:
    """A case, and the times of one of its passes by their labels."""
    made = case(preset, with_peers, smoke, training)
    times = measure(made, preset.trained if training else ())
    return made, {by: each.backward if training else each.forward for by, each in times.items()}


def texts(preset: Preset) -> list[str]:
    """The texts of a preset's calls, which `jitrope prewarm` reads."""
    inputs = preset.make(small(preset.shape), preset.rotary_dim or preset.shape[-1])
    with planning(["auto"]) as specs:
        preset.ours(tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, inputs))
    return [*dict.fromkeys(spec.call for spec in specs)]


def rows(name: str, with_peers: bool, training: bool = False, smoke: bool = False) -> Rows:
    """A row an implementation, of one pass."""
    made, us = timed(PRESETS[name], with_peers, training, smoke)
    head = {"case": name, "call": "; ".join(texts(PRESETS[name])), "pass": "backward" if training else "forward"}
    return rows_of(us, made.moved[COPY], **head)


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


PUBLIC = {"jitrope in place": "q in place", "Liger": "Liger", "Megatron-core": "Megatron-core"}
PLOTTED = "qwen3 gemma4 llama4 cogvideox qwen3-vl-prefill deepseek-indexer deepseek-mla qwen3.5 wan-ulysses flux-fp8"


def plot(rows: Rows) -> Plot:
    """The forwards of a model of each kind."""
    shown = [row for row in rows if row["pass"] == "forward" and row["case"] in PLOTTED.split()]
    groups = grouped(shown, name_of, {"jitrope": "jitrope", "torch.compile": "torch.compile"})
    compiled = [group["torch.compile"] / group["jitrope"] for group in groups.values() if "torch.compile" in group]
    faster = span(compiled or [1.0], 1)
    title = f"Projection to attention: {faster} times as fast as torch.compile"
    return Plot(title, "time over COPY", groups, "COPY")


SECTION = Section(
    "From projection to attention",
    """
    GPU time of all that some models do between the projection and attention, over COPY of the bytes that it must read
    and write. Each is one launch; a second one makes the key of DeepSeek's indexer, the scales of flux-fp8-heads, a
    copy of Wan's v, and, backward, a copy of the gate of Qwen3.5. A decode step is hot. Liger normalises in two
    launches and rotates in a third. Megatron-core's kernels for latent attention are two, and rotate q in place; so
    does jitrope in the column beside them, where COPY is still of all of q. Its gradient rotates dq in place too.
    `--json` prints the calls. Plain torch has no NVFP4. Rows of deepseek-indexer are of calls with Hadamard and without
    weights, and qwen3.5-fused returned a gate's view.
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
                    **{
                        shown + label: of("x COPY", by=by, **{"pass": name})
                        for by, shown in {**PUBLIC, **PLAIN}.items()
                    },
                }.items()
            },
        ),
    ),
    plot,
)
