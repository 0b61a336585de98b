"""The operations of multi-head latent attention: its check, its heads in plain torch, and its gradient."""

from __future__ import annotations

import torch

from .. import chain
from ..plan.options import LAYOUT_AXES, Options, changed
from ..plan.views import FORMATS, TABLE_NAMES, Tensors, canonical
from .checks import check, check_outs
from .fit import check_heads, check_scale, failing, named, refuse_per_head
from .operation import ROTATION, Call, Operation, empty_like, turned_back

_OPTIONS = (*ROTATION, "v_dim")


def check_latent(name: str, tensors: Tensors, options: Options) -> None:
    """The check of a call with latent attention."""
    fail, layout = failing(name), options.layout
    q, kv, k_pe, cos = (tensors[label] for label in ("q", "kv", "k_pe", "cos"))
    if q.dim() == k_pe.dim() == len(layout) and q.shape[-1] < k_pe.shape[-1]:
        fail(f"q is {named(q, layout)} but k_pe {named(k_pe, layout)}; q's heads end in as many rotated elements")
    for label, x in (("kv", kv), ("k_pe", k_pe)):
        as_wide = x.dim() == len(layout) == q.dim() and x.shape[-1] > 0  # its own width is checked below
        like = x[..., :1].expand(*x.shape[:-1], q.shape[-1]) if as_wide else x
        check_heads(q, like, options, fail, "q", label)
    check(name, {"q": q, **{label: tensors[label] for label in TABLE_NAMES if label in tensors}}, options)
    if k_pe.shape[LAYOUT_AXES[layout][2]] != 1 or k_pe.shape[-1] != options.rotary_dim:
        fail(f"k_pe is {named(k_pe, layout)}; it must have H=1, and D=rotary_dim={options.rotary_dim}")
    if options.v_dim < 1 or kv.shape[-1] != options.rotary_offset + options.v_dim:
        had = f"q is {named(q, layout)}, k_pe {named(k_pe, layout)} and kv {named(kv, layout)}"
        fail(f"{had}; kv must be wider than q less k_pe, {options.rotary_offset}, by the elements of a head of v")
    refuse_per_head(cos, options, "latent attention", fail)


class _Latent(Operation):
    name, function, stage = "rope_latent", "prepare_mla_qkv", "latent attention"
    tensors: tuple[str, ...] = ("q", "kv", "k_pe")
    options = _OPTIONS
    hidden = ("inverse",)
    results: tuple[str, ...] = ("q", "k", "v")
    reads = ("q", "kv", "k_pe")
    inplace = False
    rules = (check_latent,)

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        q, kv = tensors["q"], tensors["kv"]
        k, v = (kv.new_empty((*kv.shape[:-1], size)) for size in (q.shape[-1], options.v_dim))
        return {"q": empty_like(q), "k": k, "v": v}

    def parts(self, tensors: Tensors, options: Options) -> list[tuple[Tensors, Options]]:
        """k is the first part of kv and the one head k_pe for every head; v is the rest of kv."""
        first, v = tensors["kv"].split([options.rotary_offset, options.v_dim], -1)
        k = torch.cat((first, tensors["k_pe"].expand(*first.shape[:-1], -1)), -1)
        return [({**tensors, "k": k, "v": v}, options)]

    def gradient(self, call: Call, saved: Tensors, grads: Tensors, options: Options) -> Tensors:
        """A missing gradient has no heads, or, of k or v alone, is zero."""
        axis, sizes = LAYOUT_AXES[options.layout][2], {"v": options.v_dim}
        heads = {name: x.shape[axis] for name, x in grads.items()}
        pair = heads.get("k", heads.get("v", 0))
        some = next(iter(grads.values()))
        for name, count in (("q", 0), ("k", pair), ("v", pair)):
            if name not in grads:
                shape = [*some.shape[:-1], sizes.get(name, options.rotary_offset + options.rotary_dim)]
                shape[axis] = count
                grads[name] = some.new_zeros(shape)
        ordered = {"d" + name: grads[name] for name in "qkv"}
        found = call(ROPE_LATENT_BACKWARD, {**ordered, **saved}, turned_back(options))
        return {name: x for name, x in found.items() if (name == "q" and "q" in heads) or (name != "q" and pair)}


class _LatentInto(_Latent):
    """The same to tensors of the caller, with any strides; in fp8 those that have a scale."""

    name, stage = "rope_latent_into", "latent attention with quantize or out"
    mutated = ("q_out", "k_out", "v_out")
    tensors = (*_Latent.tensors, "q_scale?", "k_scale?", "v_scale?", *[f"{name}?" for name in mutated])
    options = (*_OPTIONS, "out_dtype")
    labels = {name: f"out's {name[0]}" for name in mutated}  # noqa: RUF012
    results = ()
    differentiable = False

    def check(self, name: str, tensors: Tensors, options: Options) -> None:
        super().check(name, tensors, options)
        q, kv, fp8 = tensors["q"], tensors["kv"], FORMATS[options.out_dtype].dtype
        wanted, widths = {}, {"q": q.shape[-1], "k": q.shape[-1], "v": options.v_dim}
        for letter, x in (("q", q), ("k", kv), ("v", kv)):
            scale, needed = tensors.get(f"{letter}_scale"), letter == "k" and "q_scale" in tensors
            check_scale(f"{letter}_scale", {**tensors, letter: x}, letter, True, options, failing(name), needed)
            wanted[f"{letter}_out"] = (*x.shape[:-1], widths[letter]), q.dtype if scale is None else fp8
        check_outs(name, tensors, self.labels, wanted, "use a call without quantize and out")

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        return {}


class _LatentBackward(Operation):
    name = "rope_latent_backward"
    tensors = ("dq", "dk", "dv")
    options = _OPTIONS
    results = ("q", "kv", "k_pe")
    reads = ("dq", "dk", "dv")
    writes = ("q_out", "kv_out", "k_pe_out")
    inplace = False

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        dk, shape = tensors["dk"], [*tensors["dk"].shape[:-1], options.rotary_dim]
        shape[LAYOUT_AXES[options.layout][2]] = 1
        kv = dk.new_empty((*dk.shape[:-1], options.rotary_offset + options.v_dim))
        return {"q": empty_like(tensors["dq"]), "kv": kv, "k_pe": dk.new_empty(shape)}

    def compute(self, places: Tensors, tensors: Tensors, options: Options) -> None:
        """The gradients of q, kv and k_pe, whose heads are summed in fp32; `options` rotate back."""
        dk, dv, offset, layout = tensors["dk"], tensors["dv"], options.rotary_offset, options.layout
        t = {**tensors, "q": tensors["dq"], "k": dk}
        chain.run([(t, options)], {"q": places["q"]}, options)
        summed = dk[..., offset:].float().sum(LAYOUT_AXES[layout][2], keepdim=True)
        alone = changed(options, rotary_offset=0)
        canonical(places["k_pe"], layout).copy_(chain.forward("k", canonical(summed, layout), t, alone))
        first, rest = canonical(places["kv"], layout).tensor_split([offset], -1)
        first.copy_(chain.forward("k", chain.load("k", t, options), t, options)[..., :offset])
        rest.copy_(canonical(dv, layout))


ROPE_LATENT, ROPE_LATENT_BACKWARD, ROPE_LATENT_INTO = _Latent(), _LatentBackward(), _LatentInto()
