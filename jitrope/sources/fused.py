"""A fused projection that holds q, k and v: the source, and its gradient."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor

from ..base.arguments import refuse_beside
from ..base.fit import Fail
from ..base.views import MEANS, Tensors, bias_like, fused_part, fused_shape, fused_sizes, fused_views, heads_per_group
from ..plan.options import Options
from ..sinks.results import LETTERS
from ..stages import bias, positions
from ..stages.norm import gradients_of_means, normed, sums_heads
from .backward import Backward, named_back, overwrites, turned_back
from .operation import Call, Operation
from .source import Read, tables_of


def split_qkv(t: Tensors, o: Options) -> Tensors:
    """q, k and v, and the gate, (..., heads, D); views, except a q of several groups, or with a bias."""
    parts = {name: FUSED.part(name, t, o) for name in FUSED.letters(t, o)}
    return {**parts, "q": parts["q"].flatten(-3, -2)} if o.order == "grouped" else parts


def join_qkv(parts: Tensors, o: Options) -> Tensor:
    """The inverse of `split_qkv`."""
    q, k, v = (parts[x] for x in "qkv")
    if o.order == "grouped":
        return torch.cat((q.unflatten(-2, (-1, o.q_per_group)), k.unsqueeze(-2), v.unsqueeze(-2)), -2).flatten(-2)
    if o.order == "qkv_gated":
        q = torch.stack((q, parts["gate"]), -2).flatten(-3, -2)
    return torch.cat((q, k, v), -2)


class Fused(Operation):
    """A projection's bias is added first, if it is given; v and the gate are then written too."""

    name = "fused"
    said, function = "fused QKV", "prepare_fused_qkv"
    needed: tuple[str, ...] = ("qkv",)
    heads: tuple[str, ...] = needed
    labels = {"q": "qkv", "k": "qkv"}  # noqa: RUF012
    lacks: tuple[str, ...] = ("shifts",)

    def head_dim(self, t: Tensors, o: Options) -> int:
        width = super().head_dim(t if "qkv" not in t else {"qkv": t["qkv"]}, o)
        return width // heads_per_group(o) if o.q_per_group > 0 and o.order == "grouped" else width

    def reads(self, t: Tensors, o: Options) -> dict[str, Read]:
        """A gate that a kernel writes too is the second head of its head of q."""
        found = dict(zip("qkv", fused_views(t["qkv"], o, self.writes_gate(t, o) and not sums_heads(t, o))))
        if o.per_row and not o.dynamic_v:
            del found["v"]
        return {letter: ("qkv", x) for letter, x in found.items()}

    def shaped(self, t: Tensors, o: Options) -> Tensors:
        k, v = (fused_part(t["qkv"], letter, o) for letter in "kv")
        heads = {"q": k[..., :1, :].expand(*k.shape[:-2], k.shape[-2] * o.q_per_group, -1), "k": k, "v": v}
        if "v_cache" not in t and ("k_cache" in t or not o.copy_v):
            del heads["v"]
        return {**heads, **{name: x for name, x in t.items() if name != "qkv"}}

    def letters(self, given: Container[str], o: Options) -> tuple[str, ...]:
        return LETTERS[: 3 + (o.order == "qkv_gated")]

    def views(self, given: Container[str], o: Options) -> tuple[str, ...]:
        """v without `copy_v`, and a gate without `copy_gate` that has no bias."""
        gate = o.order == "qkv_gated" and not (o.copy_gate or "bias" in given)
        return (*("v",) * (not o.copy_v), *("gate",) * gate)

    def part(self, letter: str, t: Tensors, o: Options) -> Tensor:
        """A view, or with the projection's bias a fresh tensor."""
        return bias.forward(letter, fused_part(t["qkv"], letter, o), t, o)

    def parts(self, t: Tensors, o: Options) -> list[tuple[Tensors, Options]]:
        apart = {name: x.clone(memory_format=torch.contiguous_format) for name, x in split_qkv(t, o).items()}
        return [({**t, **apart}, o)]

    def check(self, t: Tensors, o: Options) -> None:
        fail, qkv, bias = Fail(self.function), t["qkv"], t.get("bias")
        others = {"v_norm": o.v_norm and "v_cache" not in t, "bias": bias is not None, "out's v": "v_out" in t}
        others |= {"v=True of quantize": o.dynamic_v, "Ulysses": o.ulysses_degree > 0, "copy_gate": o.copy_gate}
        if not o.copy_v:
            refuse_beside(self.function, ["copy_v=False"], [x for x in others if others[x]], "leave copy_v out")
        beside = ["inplace"] * o.inplace + [f"order={o.order!r}"] * (o.order != "qkv_gated")
        refuse_beside(self.function, ["copy_gate"] * o.copy_gate, beside, "leave it out")
        apart = "across_heads does not go with v_norm in fused QKV; split it, and pass q, k and v to prepare_qkv"
        fail.when(o.across_heads and o.v_norm, apart)
        if bias is not None:
            shapes = qkv.shape[-2:], (qkv.shape[-2] * qkv.shape[-1],)
            fail.unlike("bias", bias, qkv.device, (qkv.dtype,), *shapes, like="qkv")
            fail.when(o.of == "v", "the norm has of='v', which does not go with bias")
        super().check(t, o)
        q, groups = t.get("q_out"), fused_sizes(qkv, o)[0]
        ranks = o.ulysses_degree or (len(q) if q is not None and q.dim() > qkv.dim() else groups)
        if o.order == "grouped" and o.q_per_group > 1 and ranks != groups:
            fail(f"with order='grouped' and heads for each rank there must be a rank for each of the {groups} groups")

    def put(self, t: Tensors, found: Tensors, o: Options) -> Tensors:
        qkv, own = join_qkv(found, o), t["qkv"]
        biased = own + bias_like(t["bias"], own) if "bias" in t else own
        return {"qkv": own.copy_(positions.spare_stays(biased, qkv, t, o))}

    def empty(self, t: Tensors, o: Options) -> Tensors:
        *lead, groups, head_dim = t["dk"].shape
        return {"qkv": t["dk"].new_empty((*lead, *fused_shape(groups, head_dim, o)))}

    def back(self, call: Call, saved: Tensors, grads: Tensors, o: Options) -> Tensors:
        """The gradients; that of the bias is the sum of qkv's over the tokens."""
        tables, own, plain = tables_of(saved), saved.get("bias"), o._replace(copy_v=True)
        if o.inplace:
            grad = grads["qkv"]
            grad = grad if overwrites(grads, o) else grad.clone(memory_format=torch.contiguous_format)
            found = call(self, {"qkv": grad, **tables}, turned_back(plain, inplace=True))
        else:
            (first, some), n, with_v = next(iter(grads.items())), o.q_per_group, "v" in grads
            *lead, heads, dim = some.shape
            groups = heads // (1 if first in "kv" else n)
            zeros = {x: some.new_zeros((*lead, groups * (n if x == "q" else 1), dim)) for x in "qkv" if x not in grads}
            if grads.keys() == {"v"} and not o.copy_v:  # a view of qkv, with nothing to rotate back
                return {"qkv": join_qkv({"gate": zeros["q"], **zeros, **grads}, o)}
            read = saved if normed(o) else tables
            found = call(FUSED_BACKWARD, {**named_back(grads | zeros), **read}, turned_back(plain, with_v=with_v))
            if MEANS[0] in saved:
                ((xs, _),) = self.parts(saved, o)
                found.update(gradients_of_means(saved, xs, split_qkv({"qkv": found["qkv"]}, o), o))
        if own is not None and own.requires_grad:
            found["bias"] = bias.back(found["qkv"], own)
        return found


FUSED = Fused()
FUSED_BACKWARD = Backward(FUSED)
