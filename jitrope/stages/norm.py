"""Norm of q, k and v: y = x / sqrt(mean(x^2) + eps) weight + bias, over each head or all heads of a token.

Sources: RMSNorm, arXiv:1910.07467; with kind="layer_norm" the mean of x is subtracted first, arXiv:1607.06450.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from ..base.arguments import flags, number, refuse, refuse_beside, tensor, word
from ..base.fit import FLOATS, USERS_NAMES, Fail, sizes_of
from ..base.spec import DTYPES, OF_NORM
from ..base.views import DTYPE_NAMES, MEANS, Tensors, canonical, elements_per_access, factor_view
from ..values.asked import Value
from . import positions

ROUNDINGS = ("none", "once", "twice")
KINDS = ("rms_norm", "layer_norm")
OF = ("qk", "q", "k", "v", "k_nope")
WEIGHTS = ("q_weight", "k_weight", "v_weight", "q_bias", "k_bias")
_SECOND = tuple([f"second_{name}" for name in WEIGHTS if name != "v_weight"])
TENSORS = (*WEIGHTS, *MEANS, *_SECOND)
_MEANS, _COUNTERS = " ".join(MEANS), "unsigned int* counters; const T* grad: dq dk"
ARGUMENTS = {
    "given_means": (f"const float* mean_square: {_MEANS}", f"Strides mean_stride: {_MEANS}"),
    "latent_norm": ("const void* v_weight", ""),
    "v_gradient": ("const T* dv", "Strides dv_stride: dv"),
    "weight_dtype": ("const Weight* weight: q_weight k_weight second_q_weight second_k_weight", ""),
    "biased": ("const Weight* bias: q_bias k_bias second_q_bias second_k_bias", ""),
    "gradient": (f"Weight* weight_grads; float* block_sums; {_COUNTERS}", "Strides grad_stride: dq dk"),
}


class Norm(Value):
    """A norm of q and k: x / sqrt(mean(x^2) + eps) times the weight (RMSNorm, arXiv:1910.07467, eq. 4).

    | model | its modules, as q and k | pass |
    | --- | --- | --- |
    | Qwen3 | q_norm, k_norm | `Norm(q.weight, k.weight, eps=q.variance_epsilon, rounding="twice")` |
    | Gemma 3 | q_norm, k_norm | `Norm(q.weight, k.weight, eps=q.eps, zero_centered=True, rounding="once")` |
    | OLMo 2 | q_norm, k_norm | `Norm(q.weight, k.weight, eps=q.variance_epsilon, across_heads=True, rounding="once")` |
    | FLUX | norm_q, norm_k | `Norm(q.weight, k.weight, eps=q.eps, rounding="once")` |
    | Wan, LTX | norm_q, norm_k | `Norm(q.weight, k.weight, eps=q.eps, across_heads=True, rounding="once")` |

    Make one in each forward, because FSDP and `torch.func` replace a module's parameters.

    >>> q, k = torch.randn(2, 1, 16, 8, 64)
    >>> q, k, _ = jitrope.prepare_qkv(q, k, None, norm=jitrope.Norm(torch.ones(64), torch.ones(64)))

    Args:
        q_weight, k_weight: (D), or (H D) with across_heads; contiguous; fp32, fp16 or bf16, and all weights and biases
            in one dtype. None: no weight: the L2 norm of Llama 4. With weights of D ** -0.5, and eps / D as eps, it is
            TransformerEngine's `L2Normalization`.
        q_bias, k_bias: like the weights, added at the end; only with "layer_norm".
        v_weight: (Hv D), only with of="v".
        kind: "rms_norm", or "layer_norm": the mean of x is subtracted first (arXiv:1607.06450; Phi, Persimmon,
            CogVideoX, HunyuanDiT).
        eps: added to the mean of the squares. Pass your model's: Qwen3, FLUX, Qwen-Image and Wan have 1e-6, and LTX
            1e-5. A torch.nn.RMSNorm without one has torch.finfo(torch.float32).eps.
        across_heads: False: a mean for each head (FLUX, Qwen3). True: one mean over all heads of a token, of at most
            512 elements each (Wan, LTX).
        mean_squares: only with across_heads, if each rank has a part of the heads (tensor parallelism of Wan, LTX-2,
            MiniMax-M2): the means of x^2 of each token over the heads of all ranks. They are (q's, k's), in fp32,
            (B, S), with "thd" (T); k's is None without k, and q's without q. Pass this rank's part of the weights. If
            all ranks have equally many heads, in the default layout: `mean = q.float().square().mean((-2, -1))`, then
            `all_reduce(mean, op=ReduceOp.AVG)`. They get a gradient, computed from q's (or k's) in its dtype. To train,
            use an all_reduce that passes it on, such as
            `torch.distributed.nn.functional.all_reduce(mean, op=ReduceOp.AVG)`. across_heads then also goes with a
            cache, `DynamicQuantize` and hadamard. It cannot be combined with "layer_norm", v_norm and
            `prepare_joint_qkv`.
        zero_centered: True: the factor is 1 + weight (Gemma, Qwen3-Next).
        after_rope: False: the norm is before the rotation. True: it follows the rotation (Hunyuan, Llama 4,
            TransformerEngine's default).
        of: "qk", "q", "k", "v" or "k_nope". A q or k that is not normalised is only rotated, with the bits of a call
            without a norm (q of DeepSeek-V3.2's indexer). It has no weights, and mean_squares is refused. "v": with a
            cache, v alone is normalised on its way there, by one mean over all its heads, as the latents of MLA are.
            Then kind is "rms_norm", and across_heads, after_rope and v_norm are refused. "k_nope": the same, but with a
            cache of k the elements of each of its heads before the rotated ones, which must be the last, are
            normalised, with a k_weight of as many elements (MLA's latent before k_pe).
        v_norm: True: normalise v too, without a weight (Gemma 3n and 4), in the same launch. Without a cache v takes a
            launch of its own if it has another shape or dtype than k, with inplace, across_heads, tables for each head
            and DTensors. It also does with Ulysses or quantize, unless out has a tensor for v, and if heads are rotated
            in part and v is not converted. Its gradient then takes a launch too, and if q or k gets no gradient.
        rounding: how often the result is rounded to q's dtype before it is rotated. "none": never, which is the most
            exact. "once": after the weight, as in torch.nn.RMSNorm and LayerNorm. "twice": before and after the weight,
            as in the RMSNorm of Llama and Qwen3 in transformers, and of diffusers. "once" and "twice" give the bits of
            those modules and a rotation, in the order of after_rope. With after_rope and one of them, rotated elements
            are rounded before the norm too. On a CPU the bits are always equal. On a GPU they are with "rms_norm" for
            aligned heads of 64, 128 and 256 that are rotated whole, or in their first 16, 32, 64 or 128 elements
            ("twice": of 128 alone). Across heads they are for heads that are rotated whole, "once", in fp16 and bf16,
            up to 6,144 elements a token. In other cases elements are summed in another order, and a few results differ
            in the last bit.

    Raises:
        InvalidInput: an argument is wrong, or two do not fit together.
    """

    def __init__(
        self,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        *,
        q_bias: Tensor | None = None,
        k_bias: Tensor | None = None,
        v_weight: Tensor | None = None,
        kind: str = "rms_norm",
        eps: float = 1e-6,
        across_heads: bool = False,
        mean_squares: Sequence[Tensor | None] | None = None,
        zero_centered: bool = False,
        after_rope: bool = False,
        of: str = "qk",
        v_norm: bool = False,
        rounding: str = "none",
    ) -> None:
        kind = word("Norm", "kind", kind, KINDS)
        of = word("Norm", "of", of, OF)
        weights = {"q_weight": q_weight, "k_weight": k_weight, "q_bias": q_bias, "k_bias": k_bias, "v_weight": v_weight}
        self.tensors = {label: tensor("Norm", label, x) for label, x in weights.items() if x is not None}
        on = flags("Norm", across_heads=across_heads, zero_centered=zero_centered, after_rope=after_rope, v_norm=v_norm)
        layer = ["kind='layer_norm'"] if kind == "layer_norm" else []
        apart = [label for label in self.tensors if label[0] not in of or (of == "k_nope" and label == "k_bias")]
        if of in OF[3:]:
            apart += [label for label in on if label != "zero_centered"] + layer
        refuse_beside("Norm", apart, [f"of={of!r}"])
        if mean_squares is not None:
            others = [label for label in on if label == "v_norm"] + [f"of={of!r}"] * (of != "qk") + layer
            others += [] if "across_heads" in on else ["across_heads=False"]
            refuse_beside("Norm", ["mean_squares"], others)
            means: Any = mean_squares if isinstance(mean_squares, (list, tuple)) else ()
            given = {name: x for name, x in zip(MEANS, means) if x is not None}
            if len(means) != 2 or not given or not all(isinstance(x, Tensor) for x in given.values()):
                refuse("Norm", "mean_squares", mean_squares, "those of q and k: two tensors, or a tensor and None")
            self.tensors.update(given)
        rounding = word("Norm", "rounding", rounding, ROUNDINGS)
        none = "; torch.nn.RMSNorm(eps=None) has torch.finfo(torch.float32).eps" * (eps is None)
        if type(eps := number("Norm", "eps", eps, or_else=none)) is float and eps < 0:
            refuse("Norm", "eps", eps, "0 or above")
        self.words = {"norm_kind": kind, "norm_rounding": rounding, **on, "of": of, "eps": eps}


NO_NORM = {"norm_kind": "no_norm"}
"""The words of a call without a norm whose other stages need whole heads."""


class Words(positions.Words):
    norm_rounding: str = "none"
    across_heads: bool = False
    zero_centered: bool = False
    after_rope: bool = False
    v_norm: bool = False
    norm_kind: str = ""  # "no_norm" or one of `KINDS`; "": a kernel of rope alone
    of: str = "qk"  # one of `OF`
    eps: float = 1e-6


class Fields:
    """Constants of a kernel. The rounding and the kind are "" in a kernel of rope alone."""

    norm_rounding: str = field(metadata=OF_NORM | {"words": ("", *ROUNDINGS)})
    norm_kind: str = field(metadata=OF_NORM | {"words": ("", "no_norm", *KINDS)})
    across_heads: bool = field(metadata=OF_NORM)  # the mean is over all heads of a token
    row_heads: tuple[int, ...]  # then the numbers of q's (and k's) heads
    given_means: bool = field(metadata=OF_NORM | {"given": "q_mean_square"})  # of squares; across_heads is False
    zero_centered: bool = field(metadata=OF_NORM)  # the factor is 1 + weight
    after_rope: bool = field(metadata=OF_NORM)  # the norm follows the rotation
    norm_q: bool = field(metadata=OF_NORM)  # q is normalised
    norm_k: bool = field(metadata=OF_NORM)
    norm_nope: bool = field(metadata=OF_NORM)  # of k only the elements that are not rotated are normalised
    v_norm: bool = field(metadata=OF_NORM)  # v, which is copied, is normalised too
    latent_norm: bool = field(metadata=OF_NORM)  # v is normalised alone, over all its heads, with weights
    weight_dtype: str | None = field(metadata=OF_NORM | {"words": DTYPES})  # of weights and biases; None without them
    biased: bool = field(metadata=OF_NORM)  # there are biases


def normed(o: Words) -> bool:
    """Whether heads are normalised."""
    return o.norm_kind in KINDS


def takes(letter: str, o: Words) -> bool:
    """Whether q, k or v is normalised."""
    return normed(o) and (letter in o.of or (letter == "v" and o.v_norm))


def sums_heads(t: Container[str], o: Words) -> bool:
    """Whether a kernel takes all heads of a token: a norm across heads without given means, or its gradient."""
    return o.across_heads and ("dq" in t or not any(name in t for name in MEANS))


def fields(t: Tensors, heads: Sequence[Tensor | None], o: Words) -> dict[str, Any]:
    """The constants that its words do not name, and the widest access of its weights. heads: views of q and k."""
    across = sums_heads(t, o)
    weights = {name: x for name, x in t.items() if name.endswith(("_weight", "_bias"))}
    return {
        "norm_rounding": o.norm_rounding if o.norm_kind else "",
        "across_heads": across,
        **{f"norm_{letter}": letter in o.of for letter in "qk"},
        "norm_nope": o.of == "k_nope",
        "latent_norm": o.of == "v",
        "v_norm": o.v_norm or o.of == "v",
        "row_heads": tuple([x.shape[2] * x.shape[3] for x in heads if across and x is not None]),
        "weight_dtype": next((DTYPE_NAMES[x.dtype] for x in weights.values()), None),
        "biased": any(name.endswith("_bias") for name in weights),
        "weight_vec_limit": elements_per_access(weights.values()) if weights else 1,
    }


def check(t: Tensors, o: Words, fail: Fail) -> None:
    """Refuse means, weights and biases that do not fit q, k, v and each other."""
    for name in MEANS[fail.main == "k" :] if any(name in t for name in MEANS) else ():
        letter, label = name[0], USERS_NAMES[name]
        fail.when(letter in t and name not in t, f"{letter} is given, but {label} is not")
        fail.when(name in t and letter not in t, f"{label} is given, but {letter} is not")
        if name in t:
            batch, seqlen, *_ = sizes_of(t[letter], o.layout)
            shape = (seqlen,) if o.layout == "thd" else (batch, seqlen)
            of = fail._replace(owner=letter, heads=t[letter])
            of.unlike(label, t[name], t[letter].device, (torch.float32,), shape)
    dim = t["q"].shape[-1]
    fail.when(o.across_heads and dim > 512, f"{fail.main} has D={dim}; across_heads goes with at most 512")
    missing = "q" if fail.main == "k" else "k" if "k" not in t else ""
    fail.when(o.of == missing, f"the norm has of={missing!r}, but {missing} is not given")
    fail.when(o.v_norm and "k_cache" in t and "v" not in t, "the norm has v_norm, but v is not given")
    if o.of == "v" and "v_cache" not in t:
        fail("the norm has of='v', which goes with a cache of v; without one pass v as q to a call of its own")
    pe = dim - fail.before_last("a norm with of='k_nope'", dim, o) if o.of == "k_nope" else 0
    fail.when(pe and "k_cache" not in t, "the norm has of='k_nope', which goes with a cache")
    dtypes, like = FLOATS, ""
    for label in [label for label in WEIGHTS if label in t]:
        owner, weight = label[0], t[label]
        fail.when(owner not in t, f"{label} is given, but {owner} is not")
        wrong = label.endswith("bias") and o.norm_kind != "layer_norm"
        fail.when(wrong, f"{label} goes with kind='layer_norm'; pass it, or leave {label} out")
        _, _, heads, dim = sizes_of(t[owner], o.layout)
        dim -= pe
        size, other = (heads * dim, dim) if o.across_heads or owner == "v" else (dim, heads * dim)
        of = fail._replace(owner=f"{like}{owner}{' of qkv' * (o.q_per_group > 0)}", heads=t[owner])
        across = owner != "v" and not pe and weight.shape == (other,) != (size,)
        hint = f"; pass across_heads={not o.across_heads}" * across
        of.unlike(label, weight, t[owner].device, dtypes, (size,), contiguous=True, hint=hint)
        dtypes, like = (weight.dtype,), like or f"{label} and "  # all have one


def forward(letter: str, x: Tensor, t: Tensors, o: Words) -> Tensor:
    """Heads, normalised with the mean in fp32.

    The result is in fp32 with the rounding "none", else in the dtype of the call's heads: "once" has the bits of
    torch.nn.RMSNorm and LayerNorm, "twice" those of the RMSNorm of transformers and diffusers.
    """
    if not takes(letter, o):
        return x
    if o.of == "k_nope":
        first, rest = x.tensor_split([o.rotary_offset], -1)  # type: ignore[attr-defined]
        return torch.cat((forward(letter, first, t, o._replace(of="k")), rest), -1)
    across, one, weight, bias, mean_square = _parameters(letter, t, o)
    rows = x if o.norm_rounding == "none" else x.to(t[letter].dtype)
    rows = rows.flatten(-2) if across else rows
    plain = {p.dtype for p in (weight, bias) if p is not None} <= {rows.dtype} and mean_square is None and not one
    if o.norm_rounding == "once" and plain and o.norm_kind == "layer_norm":
        y = torch.nn.functional.layer_norm(rows, rows.shape[-1:], weight, bias, o.eps)
    elif o.norm_rounding == "once" and plain:
        y = torch.nn.functional.rms_norm(rows, rows.shape[-1:], weight, o.eps)
    else:
        y, scale = _centred(rows.float(), o, mean_square)
        y = y * scale
        if o.norm_rounding == "twice":
            y = y.to(rows.dtype)
        if weight is not None:
            y = y * (weight.float() + one)
        if bias is not None:
            y = y + bias.float()
        if o.norm_rounding != "none":
            y = y.to(rows.dtype)
    return torch.empty_like(x, dtype=y.dtype).copy_(y.view(x.shape)) if across else y


def back(letter: str, x: Tensor, grad: Tensor, t: Tensors, o: Words, found: Tensors) -> Tensor:
    """The gradient of x, in fp32, and those of its weight and bias. Roundings do not change them."""
    across, one, weight, bias, mean_square = _parameters(letter, t, o)
    if not takes(letter, o):
        return grad
    rows, g = (y.float().flatten(-2) if across else y.float() for y in (x, grad))
    rows, scale = _centred(rows, o, mean_square)
    y, g = (positions.cleared(letter, part, t, o) for part in (rows * scale, g))
    tokens = tuple(range(g.dim() - 1))
    if bias is not None:
        found[f"{letter}_bias"] = g.sum(tokens)
    if weight is not None:
        found[f"{letter}_weight"] = (g * y).sum(tokens)
        g = g * (weight.float() + one)
    if mean_square is not None:
        return (scale * g).view(x.shape)
    centre = g.mean(-1, keepdim=True) if o.norm_kind == "layer_norm" else 0
    return (scale * (g - y * (g * y).mean(-1, keepdim=True) - centre)).view(x.shape)


def after_rope(letter: str, o: Words) -> bool:
    """Whether heads are rotated before they are normalised."""
    return o.after_rope and takes(letter, o)


def _parameters(letter: str, t: Tensors, o: Words) -> tuple[Any, ...]:
    """Whether all heads of a token share a mean; whether one is added to the weight; the weight, bias and given mean.

    A v beside q and k has neither.
    """
    own = letter != "v" or o.of == "v"
    given = [t.get(f"{letter}_{kind}") for kind in ("weight", "bias", "mean_square")]
    return (o.across_heads or o.of == "v") and own, o.zero_centered and own, *given


def _centred(rows: Tensor, o: Words, mean_square: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows in fp32, less their mean with "layer_norm", and 1 / sqrt(mean of their squares + eps)."""
    rows = rows - rows.mean(-1, keepdim=True) if o.norm_kind == "layer_norm" else rows
    mean = rows.pow(2).mean(-1, keepdim=True) if mean_square is None else factor_view(mean_square)[..., 0, 0]
    return rows, torch.rsqrt(mean + o.eps)


def gradients_of_means(t: Tensors, xs: Tensors, grads: Tensors, o: Words) -> Tensors:
    """The gradients of a call's given means that require one. xs, grads: q and k, and their other gradients.

    1 / sqrt(mean + eps) is a factor of x, so it is the sum of dx x over a token's heads, times -1/2 / (mean + eps).
    Elements without a gradient may be anything.
    """
    found = {}
    for name in [name for name in MEANS if name in t and t[name].requires_grad and name[0] in grads]:
        mean, x, dx = t[name], xs[name[0]], grads[name[0]]
        total = canonical(torch.where(dx == 0, 0, dx.float() * x.float()), o.layout).sum((-2, -1)).view(mean.shape)
        found[name] = torch.where(total == 0, 0, total * (-0.5 / (mean + o.eps)))
    return found
