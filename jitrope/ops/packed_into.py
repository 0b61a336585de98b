"""Packed QKV with the stages of `prepare_qkv`: caches, conversions, and tensors of the caller."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from ..plan.options import Options, norm_of
from ..plan.problem import Views
from ..plan.views import FORMATS, Tensors, heads_per_group, packed_sizes, packed_views
from .checks import check_qkv, refuse_gradients
from .fit import failing, require_apart
from .into import Into, is_dense
from .operation import Operation
from .projections import PACKED, contiguous_parts, shaped_parts


class PackedInto(Operation):
    """A form of `Into` that reads q, k and v in a projection's output. The projection's bias is added first, if given.

    Its outputs are always tensors of the call; `fresh_outputs` makes those that the caller does not give.
    """

    function = "prepare_packed_qkv"
    reads = ("qkv", "qkv", "qkv")
    inplace = differentiable = False

    def __init__(self, into: Operation) -> None:
        assert isinstance(into, Into)
        self.into_given, base = into, into.base
        self.name, self.stage = f"{base.name}_packed", f"packed QKV with {base.stage or 'out'}"
        own = [name for name in into.tensors if name.rstrip("?") not in ("q", "k", "v")]
        self.tensors = ("qkv", "bias?", *own)
        self.options = (*[word for word in into.options if word != "rotate_k"], *PACKED)
        self.hidden, self.tables, self.norm = into.hidden, into.tables, into.norm
        self.results, self.writes, self.labels = into.results, into.writes, into.labels
        self.mutated = into.mutated
        super().__init__()

    def written(self, options: Options) -> tuple[str, ...]:
        return self.into_given.written(options)

    def separate(self, tensors: Tensors, options: Options) -> Tensors:
        """Tensors as a call on separate q, k and v has them. Only their shapes, dtypes and devices are right."""
        heads = shaped_parts(tensors["qkv"], options)
        if "v_out" not in tensors and "v_cache" not in tensors:
            del heads["v"]
        return {**heads, **{name: x for name, x in tensors.items() if name not in ("qkv", "bias")}}

    def check(self, name: str, tensors: Tensors, options: Options) -> None:
        fail = failing(name)
        check_qkv(name, tensors, options)
        refuse_gradients(fail, tensors, "qkv", "bias", use="use a call without cache, quantize and out")
        if "bias" in tensors and options.order == "qkv_gated":
            fail("order='qkv_gated' does not go with bias beside cache, quantize and out; add the bias before")
        if "bias" in tensors and norm_of(options).of == "v":
            fail("the norm has of='v', which does not go with bias")
        written = {self.label(x): tensors[x] for x in self.written(options) if x in tensors}
        require_apart(name, written, {"qkv": tensors["qkv"]})
        self.into_given.check(name, self.separate(tensors, options), options)

    def heads(self, tensors: Tensors, options: Options) -> tuple[Views, Views]:
        inputs, outputs = self.into_given.heads(self.separate(tensors, options), options)
        packed = packed_views(tensors["qkv"], options)
        return tuple([None if x is None else own for x, own in zip(inputs, packed)]), outputs  # type: ignore[return-value]

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        return self.into_given.fresh(self.separate(tensors, options), options, blocks)

    def made(self, given: Container[str], options: Options) -> tuple[str, ...]:
        return self.into_given.made(given, options)

    def on_cpu(self, tensors: Tensors, options: Options) -> Tensors:
        parts, alone = contiguous_parts(tensors, options), self.separate(tensors, options)
        alone.update({name: parts[name] for name in "qkv" if name in alone})
        return self.into_given.on_cpu(alone, options)


def fresh_outputs(op: PackedInto, qkv: Any, words: dict[str, Any], given: Container[str], converted: str) -> Tensors:
    """The outputs of a call that the caller does not give, by letters; none of a call that the check refuses.

    given: the letters of the caller's. converted: those of converted ones. Without copy_v v stays in qkv.
    """
    n, order, wanted = words["q_per_group"], words.get("order", "grouped"), "qkv" if "k_out" in op.labels else "q"
    if n < 1 or not is_dense(qkv) or qkv.dim() < 3:
        return {}
    options = Options(q_per_group=n, order=order)
    if qkv.shape[-1 if order == "grouped" else -2] % heads_per_group(options):
        return {}
    groups, head_dim = packed_sizes(qkv, options)
    form = FORMATS[words.get("out_dtype", "fp8")]
    found: Tensors = {}
    for letter in wanted:
        if letter in given or (letter == "v" and words.get("copy_v") is False):
            continue
        own = form if letter in converted else None
        shape = (*qkv.shape[:-2], groups * (n if letter == "q" else 1), head_dim // (own.per_item if own else 1))
        found[letter] = qkv.new_empty(shape, dtype=own.dtype if own else qkv.dtype)
    return found
