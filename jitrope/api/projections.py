"""The public functions for projections whose outputs hold several of q, k and v."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..base.arguments import flag, flags, refuse, shown, tensor, wholes, word
from ..base.errors import InvalidInput
from ..base.fit import FLOATS
from ..base.layouts import FUSED_AXES, QKV_ORDERS
from ..base.views import fused_part
from ..checks.words import unexpected
from ..plan.options import Options
from ..run.gather import add, gather, result, sent
from ..run.public import repeated
from ..sinks.cache import KVCache
from ..sinks.results import Ulysses  # noqa: F401  in the signature
from ..sources.fused import FUSED
from ..sources.latent import LATENT
from ..sources.projected import PROJECTED, of_linear, projects
from ..sources.source import is_dense
from ..stages.convert import DynamicQuantize, Quantize
from ..stages.norm import Norm
from ..stages.positions import Positions
from .keywords import ROPE_WORDS, LatentWords, RopeWords, with_words

if TYPE_CHECKING:
    from typing_extensions import Unpack


_LATENT_WORDS = frozenset((*LatentWords.__annotations__, "out"))


@repeated
@with_words(RopeWords)
def prepare_fused_qkv(
    qkv: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    heads: Sequence[int],
    order: str = "qkv",
    positions: Tensor | Positions | None = None,
    norm: Norm | None = None,
    copy_v: bool = True,
    copy_gate: bool = False,
    bias: Tensor | None = None,
    cache: KVCache | None = None,
    quantize: Quantize | DynamicQuantize | None = None,
    hadamard: bool = False,
    inplace: bool = False,
    **words: Unpack[RopeWords],
) -> Any:
    """Split a fused projection, normalise q and k if asked, and rotate them, in one launch; so is its gradient.

    >>> qkv, freqs = torch.randn(1, 16, 12 * 64), jitrope.tables.freqs(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> q, k, v = jitrope.prepare_fused_qkv(qkv, freqs=freqs, heads=(8, 2))  # heads: 8 of q, 2 of k, 2 of v
    >>> q.shape, k.shape
    (torch.Size([1, 16, 8, 64]), torch.Size([1, 16, 2, 64]))

    Args:
        qkv: the output of one `Linear` for q, k and v, (B, S, W) in the default layout, or the same with an axis of
            heads, as `order` says; any strides. "sbhd" and "thd" are allowed too: (S, B, W) and (T, W).
        heads: (Hq, Hk), the heads of q, and those of k, which are as many as v's. Hk must divide Hq.
        order: "qkv": all heads of q, then all of k, then all of v (Llama and Qwen in vLLM, Phi-3, GPT-2); with an axis
            of heads (B, S, Hq + 2 Hk, D). "grouped": for each head of k its heads of q, k and v (Megatron, InternLM2,
            Falcon). With Hq = Hk that is q, k and v of each head in turn (GPT-NeoX, BLOOM). With an axis of heads it is
            (B, S, Hk, (Hq / Hk + 2) D). "qkv_gated": as "qkv", with a gate after each head of q: q_0, gate_0, q_1,
            gate_1, ..., then k and v (Qwen3-Next, Qwen3.5); with an axis of heads (B, S, 2 Hq + 2 Hk, D).
        norm: RMSNorm or LayerNorm of q and k, as in `prepare_qkv` (Qwen3-Next, Qwen3.5; the fused qkv_proj of Qwen3 and
            Gemma 3 in vLLM and SGLang; Megatron's qk_layernorm). The gradient of qkv, the weights and the biases is one
            launch, and deterministic; in place there is none. With across_heads but no mean_squares, v and a gate with
            a bias are copied after the launch. With v_norm v is normalised in the same launch, in place too; its
            gradient is in the launch of the others. v_norm goes with neither across_heads nor mean_squares, and no norm
            with inverse.
        copy_v: False: return v as a view of qkv, without a copy; not with v_norm or bias.
        copy_gate: True, with "qkv_gated": return a contiguous gate, from the same launch (behind it with across_heads
            but no mean_squares); not with cache, quantize, out, inplace or copy_v=False.
        bias: the bias of the projection, which you call without it: (W), as `Linear` has it, or qkv's last two axes if
            it has an axis of heads, in qkv's dtype. The results are those of qkv + bias, rounded to the dtype, in the
            same launch; with a norm to the bit only if the bias is contiguous. Then v and the gate are written too,
            and in place all of qkv is. Its gradient is the sum of qkv's over the tokens, by torch.
        cache, quantize: as in `prepare_qkv`, in as many launches, without a gradient. You can combine them with
            hadamard and with a bias, which torch then adds to a gate. inverse is refused with a cache.
        hadamard: as in `prepare_qkv`, also in place. Its gradient takes a second launch.
        inplace: rotate q and k inside qkv and return it, for attention that takes q, k and v as one tensor or as views.
            v stays, unless it is normalised or gets a bias. With a cache k and v stay, but k is rotated with rotate_k.
        out: as in `prepare_qkv`, without a gradient. A call with `Ulysses` alone has one; in "grouped" with Hq > Hk it
            needs a rank for each head of k.
        The other arguments are those of `apply_rope`. `Shifts` and tables for each head are refused. Without a table
            nothing is rotated; in place it then needs a norm, a bias, hadamard or q_scale, or there is nothing to do.

    Returns:
        q (B, S, Hq, D), k and v (B, S, Hk, D), contiguous, unless v is a view. For tokens after the last sequence q and
        k are zero, and v is as elsewhere. With a gate it is the fourth result, a view of qkv with q's shape, not
        rotated, or with a bias or copy_gate a fresh tensor; a second launch copies its gradient into that of qkv. In
        place: qkv. With quantize q, k and v are as in `prepare_qkv`; with a cache v is None, and k too, or with
        rotate_k the rotated view of qkv. With `Ulysses` q, k and v have groups of heads for the ranks, and the gate has
        not.

    Raises:
        InvalidInput, CompileError: as in `apply_rope`.
    """
    tensors: Any = {"qkv": qkv, "cos": cos, "sin": sin, "bias": bias}
    asked = gather(FUSED, tensors, words, ROPE_WORDS, positions, inplace, norm, cache, quantize, hadamard)
    asked.update(flags("prepare_fused_qkv", copy_gate=copy_gate))
    _split(tensors, asked, heads, order, flag("prepare_fused_qkv", "copy_v", copy_v))
    made = sent(FUSED, tensors, asked, quantize)
    if "qkv" in made:
        return qkv
    o = Options(q_per_group=asked["q_per_group"], order=order)
    k = fused_part(tensors["qkv"], "k", o) if "rotate_k" in asked else result(made, "k")
    found = result(made, "q"), k, result(made, "v")
    if order != "qkv_gated":
        return found
    return (*found, made["gate"] if "gate" in made else FUSED.part("gate", tensors, o))


@repeated
@with_words(RopeWords)
def project_qkv(
    x: Tensor,
    weight: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    heads: Sequence[int],
    order: str = "qkv",
    positions: Tensor | Positions | None = None,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    round_projection: bool = False,
    cache: KVCache | None = None,
    quantize: Quantize | DynamicQuantize | None = None,
    hadamard: bool = False,
    **words: Unpack[RopeWords],
) -> Any:
    """Project to q, k and v, normalise q and k if asked, and rotate them, in one kernel on sm_90 (H100, H200).

    Its tensor cores multiply, and the stages take the sums in fp32, in registers, before they are rounded once. So the
    results differ from those of two steps by a rounding, and are more accurate. Elsewhere, and with few tokens, it is
    those two steps, torch's `linear` and `prepare_fused_qkv`.

    >>> x, weight = torch.randn(1, 16, 256), torch.randn(12 * 64, 256)
    >>> cos, sin = jitrope.tables.cos_sin(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> q, k, v = jitrope.project_qkv(x, weight, cos, sin, heads=(8, 2))
    >>> q.shape, k.shape
    (torch.Size([1, 16, 8, 64]), torch.Size([1, 16, 2, 64]))

    Args:
        x: (B, S, K) in the default layout, or (S, B, K), or with "thd" (T, K); fp32, fp16 or bf16.
        weight: (W, K), as the `Linear` of q, k and v has it, in x's dtype. Its rows are in the order of
            `prepare_fused_qkv`'s W.
        bias: (W), in x's dtype. With the kernel it is added to the sums before they are rounded.
        round_projection: True: round the sums to the dtype first, as a tensor of the projection is. The bits are then
            those of two steps where both add in the same order.
        heads, order, positions, norm, cache, quantize, hadamard and the others: as in `prepare_fused_qkv`, without
            inplace, copy_v and copy_gate.

    There is a kernel for fp16 and bf16, heads of 64 and 128 elements that are rotated as a whole, in one pairing, with
    contiguous x and weight at multiples of 16 bytes, on sm_90, where tiles of 128 tokens x 256 rows of the weight fill
    at least 92 % of the multiprocessors' turns: with W = 6144 and 132 of them, 2048 and 4096 tokens do, 3072 do not.
    It goes with neither hadamard, across_heads, per of quantize, rotate_k, `Ulysses` nor
    `configure(batch_invariant=True)`, and not with a norm if x, the weight or the norm needs a gradient: its backward
    would project again. autocast changes nothing.

    Returns:
        As `prepare_fused_qkv`. v is never a view of the projection, and a gate only with a cache, quantize or out.

    Raises:
        InvalidInput, CompileError: as in `apply_rope`.
    """
    name = "project_qkv"
    gate_stays = any(x is not None for x in (cache, quantize, words.get("out")))  # in the projection
    own = flags(name, round_projection=round_projection, copy_gate=order == "qkv_gated" and not gate_stays)
    for other in [x for x in words if x not in ROPE_WORDS]:
        raise unexpected(name, other)
    alike = tensor(name, "x", x).shape[-1:] == tensor(name, "weight", weight).shape[-1:] and x.dtype == weight.dtype
    if x.dim() < 2 or weight.dim() != 2 or x.device != weight.device or x.dtype not in FLOATS or not alike:
        refuse(name, "weight", weight, f"(W, K) in fp32, fp16 or bf16, like x, which is {shown(x)}")
    in_two = (gate_stays and order == "qkv_gated") or "rotate_k" in getattr(cache, "words", ())
    if in_two or not projects(x, weight, norm):
        own.pop("round_projection", None)
        beside: Any = {"positions": positions, "norm": norm, "bias": bias, "cache": cache, **own, **words}
        beside |= {"heads": heads, "order": order, "quantize": quantize, "hadamard": hadamard}
        return prepare_fused_qkv(of_linear(x, weight), cos, sin, **beside)
    tensors: Any = {"x": x, "weight": weight, "cos": cos, "sin": sin, "bias": bias}
    asked = gather(PROJECTED, tensors, words, ROPE_WORDS, positions, False, norm, cache, quantize, hadamard)
    asked.update(own)
    of_one = {"qkv": weight[..., 0].expand(*x.shape[:-1], -1)}
    _split(of_one, asked, heads, order, True, name)
    tensors["weight"] = weight.unflatten(0, of_one["qkv"].shape[-2:])
    made = sent(PROJECTED, tensors, asked, quantize)
    found = tuple([result(made, letter) for letter in "qkv"])
    return (*found, made["gate"]) if order == "qkv_gated" else found


def _split(
    tensors: Any, asked: dict[str, Any], heads: Any, order: Any, copy_v: Any, name: str = "prepare_fused_qkv"
) -> None:
    """Give qkv an axis of heads, and add the words that say where q, k and v are in it."""
    layout = asked.get("layout", "bshd")
    pair = () if isinstance(heads, int) else wholes(name, "heads", heads, 1)
    qkv = tensor(name, "qkv", tensors.get("qkv"))
    if len(pair) != 2 or pair[0] % pair[1]:
        refuse(name, "heads", heads, "(Hq, Hk), the heads of q and of k; Hk must divide Hq")
    axes, grouped = FUSED_AXES[word(name, "layout", layout, FUSED_AXES)], order == "grouped"
    every = pair[0] * QKV_ORDERS[word(name, "order", order, QKV_ORDERS)] + 2 * pair[1]
    asked.update(q_per_group=pair[0] // pair[1], order=order, **({} if copy_v is True else {"copy_v": copy_v}))
    count, rank, width = pair[1] if grouped else every, qkv.dim() - len(axes), qkv.shape[-1] if qkv.dim() else 0
    if rank == 1 and width > 0 and width % every == 0:
        tensors["qkv"] = qkv.unflatten(-1, (count, width // count))
    elif rank != 2 or width <= 0 or qkv.shape[-2] != count or width % (every // count):
        had = f"qkv has shape {tuple(qkv.shape)}, but heads={pair} with order={order!r} are {every} heads of D elements"
        lead, last = ", ".join(axes), f"{count}, {every // count} * D" if grouped else f"{count}, D"
        must = f"it must be ({lead}, {every} * D) or ({lead}, {last}) in layout {layout!r}"
        hints = {0: "; for (T, W) pass layout='thd'", 3: f"; pass qkv.flatten({grouped - 3}, {grouped - 2})"}
        raise InvalidInput(f"{name}: {had}; {must}{hints.get(rank, '')}")


@repeated
@with_words(LatentWords)
def prepare_mla_qkv(
    q: Tensor,
    kv: Tensor,
    k_pe: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    positions: Tensor | Positions | None = None,
    quantize: Quantize | None = None,
    out: Sequence[Tensor | None] | None = None,
    **words: Unpack[LatentWords],
) -> tuple[Tensor, Tensor, Tensor]:
    """Prepare q, k and v of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) in one launch.

    The last R elements of each head of q are rotated. k is the first part of each head of kv and the rotated k_pe,
    which all heads share (equation 17); v is the rest of kv. The gradient is one launch too, with one tensor for kv;
    that of k_pe is the sum over k's heads in fp32, in their order, rotated back. There is no second derivative.

    >>> q, kv, k_pe = torch.randn(1, 16, 8, 128 + 64), torch.randn(1, 16, 8, 128 + 96), torch.randn(1, 16, 1, 64)
    >>> cos, sin = jitrope.tables.cos_sin(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> q, k, v = jitrope.prepare_mla_qkv(q, kv, k_pe, cos, sin, interleaved=True, interleaved_out=False)
    >>> k.shape, v.shape
    (torch.Size([1, 16, 8, 192]), torch.Size([1, 16, 8, 96]))

    Args:
        q: (B, S, Hq, D) in the default layout; D is at most 576; any strides. It may have no heads. To rotate q in
            place use `apply_rope` with rotary_offset = D - R.
        kv: (B, S, Hk, D - R + Dv), the output of the up-projection: the first D - R elements of k, then Dv of v.
        k_pe: (B, S, 1, R); R is even and at most D.
        quantize: return q and k in fp8, with a v_scale v too, by your scales (`Quantize`, without hadamard).
        out: (q_out, k_out, v_out), tensors to write and return, with the shapes of the results and any strides, such as
            heads first for attention; None: a fresh tensor. With quantize or out there is no gradient.
        interleaved, interleaved_out: DeepSeek's checkpoints have interleaved pairs; their reference code, and
            `fused_apply_mla_rope_for_q` and `fused_apply_mla_rope_for_kv` of Megatron-core, rotate them into halves.
        The other arguments are those of `apply_rope`. q_scale multiplies whole heads of q (the softmax's scale, with
            DeepSeek's YaRN). unrotated goes with one pairing. `Shifts` and tables for each head are refused. Without a
            table nothing is rotated (Kimi Linear).

    Returns:
        q like the input, k (B, S, Hk, D) and v (B, S, Hk, Dv), contiguous, and in fp8 if asked. For tokens after the
        last sequence q and k are zero, and v is copied.

    Raises:
        InvalidInput, CompileError: as in `apply_rope`.
    """
    tensors: Any = {"q": q, "kv": kv, "k_pe": k_pe, "cos": cos, "sin": sin}
    asked = gather(LATENT, tensors, {**words, "out": out}, _LATENT_WORDS, positions)
    if is_dense(q) and is_dense(kv) and is_dense(k_pe):  # elsewhere the check refuses them
        asked["rotary_offset"] = first = max(0, int(q.shape[-1] - k_pe.shape[-1]))
        asked["v_dim"] = max(0, int(kv.shape[-1]) - first)
    if quantize is not None:
        add("prepare_mla_qkv", "quantize", quantize, (Quantize,), tensors, asked)
    made = sent(LATENT, tensors, asked)
    return made["q"], made["k"], made["v"]
