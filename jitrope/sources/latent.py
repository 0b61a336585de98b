"""Multi-head latent attention: the source, and its gradient."""

from __future__ import annotations

import torch

from .. import chain
from ..base.errors import JitropeError
from ..base.fit import Fail, named
from ..base.layouts import LAYOUT_AXES
from ..base.views import Tensors, canonical
from ..checks.checks import check_heads
from ..plan.options import Options
from ..sinks import results
from ..stages import BEHIND, WHOLE
from .backward import Backward, named_back, turned_back
from .operation import Call, Operation


class Latent(Operation):
    name = "latent"
    said, function = "latent attention", "prepare_mla_qkv"
    needed = heads = ("q", "kv", "k_pe")
    lacks = ("inplace", "shifts", "inverse", *[label for label in BEHIND if label in WHOLE])

    def shaped(self, t: Tensors, o: Options) -> Tensors:
        kv, dim = t["kv"], t["q"].shape[-1]
        return {**t, "k": kv[..., :1].expand(*kv.shape[:-1], dim), "v": kv[..., o.rotary_offset :]}

    def parts(self, t: Tensors, o: Options) -> list[tuple[Tensors, Options]]:
        """k is the first part of kv and the one head k_pe for every head; v is the rest of kv."""
        first, v = t["kv"].split([o.rotary_offset, o.v_dim], -1)
        return [({**t, "k": torch.cat((first, t["k_pe"].expand(*first.shape[:-1], -1)), -1), "v": v}, o)]

    def check(self, t: Tensors, o: Options) -> None:
        q, kv, k_pe = (t[label] for label in self.needed)
        fail, layout = Fail(self.function, "q", q, o.layout), o.layout
        check_heads({"q": q}, o, fail)
        for label, x, heads, width in (("kv", kv, "H", "D"), ("k_pe", k_pe, 1, o.rotary_dim)):
            shape = [heads if axis == "h" else size for axis, size in zip(layout, q.shape)]
            use = "kv.unflatten(-1, (H, D))" if label == "kv" else f"k_pe.unsqueeze({LAYOUT_AXES[layout][2]})"
            hint = f"; pass {use}" * (x.dim() < q.dim())
            fail.unlike(label, x, q.device, (q.dtype,), (*shape[:-1], width), hint=hint)
        if o.v_dim < 1 or kv.shape[-1] != o.rotary_offset + o.v_dim:
            had = f"q is {named(q, layout)}, k_pe {named(k_pe, layout)} and kv {named(kv, layout)}"
            fail(f"{had}; kv must be wider than q less k_pe, {o.rotary_offset}, by the elements of a head of v")
        super().check(t, o)

    def empty(self, t: Tensors, o: Options) -> Tensors:
        dk, shape = t["dk"], [*t["dk"].shape[:-1], o.rotary_dim]
        shape[LAYOUT_AXES[o.layout][2]] = 1
        kv = dk.new_empty((*dk.shape[:-1], o.rotary_offset + o.v_dim))
        return {"q": torch.empty_like(t["dq"]), "kv": kv, "k_pe": dk.new_empty(shape)}

    def back(self, call: Call, saved: Tensors, grads: Tensors, o: Options) -> Tensors:
        """A missing gradient has no heads, or, of k or v alone, is zero."""
        some, axis, dim = next(iter(grads.values())), LAYOUT_AXES[o.layout][2], o.rotary_offset + o.rotary_dim
        heads = {x: grad.shape[axis] for x, grad in grads.items()}
        pair = heads.get("k", heads.get("v", 0))
        for x, n, width in (("q", 0, dim), ("k", pair, dim), ("v", pair, o.v_dim)):
            if x not in grads:
                grads[x] = some.new_zeros((*some.shape[:axis], n, *some.shape[axis + 1 : -1], width))
        found = call(LATENT_BACKWARD, {**named_back({x: grads[x] for x in "qkv"}), **saved}, turned_back(o))
        return {name: x for name, x in found.items() if (name == "q" and "q" in heads) or (name != "q" and pair)}


class LatentBackward(Backward):
    """The gradients of q, kv and k_pe, whose heads are summed in fp32; the options rotate back."""

    def compute(self, made: Tensors, t: Tensors, o: Options) -> None:
        dk, dv, offset, layout = t["dk"], t["dv"], o.rotary_offset, o.layout
        t = {**t, "q": t["dq"], "k": dk}
        chain.run([(t, o)], results.places({"q": made["q"]}, o), o)
        summed = dk[..., offset:].float().sum(LAYOUT_AXES[layout][2], keepdim=True)
        alone = o._replace(rotary_offset=0)
        canonical(made["k_pe"], layout).copy_(chain.forward("k", canonical(summed, layout), t, alone))
        first, rest = canonical(made["kv"], layout).tensor_split([offset], -1)
        first.copy_(chain.forward("k", chain.load("k", t, o), t, o)[..., :offset])
        rest.copy_(canonical(dv, layout))

    def back(self, call: Call, saved: Tensors, grads: Tensors, o: Options) -> Tensors:
        raise JitropeError(f"{LATENT.function} has no second derivative")


LATENT = Latent()
LATENT_BACKWARD = LatentBackward(LATENT)
