"""The gradients of learned tables.

On a GPU one launch computes the gradients of each token's cosines and sines, and torch adds up those that come from one
row of a table. Behind a norm another launch first computes the normalised heads, in their dtype. Calls with v_norm, a
norm behind the rotation, another stage, q_scale or fp64, and second derivatives run torch's autograd through the
reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from ..jit.registry import KINDS
from ..plan.options import Options, changed, norm_of, rotated
from ..plan.problem import DTYPE_NAMES, elements_per_access, strides_of
from ..plan.table_gradient import KIND, TableGradientSpec, spec_of
from ..plan.views import Tensors, canonical, table_view
from . import planning, reference, watch
from .enqueue import Call, enqueue
from .operation import Call as CallOf
from .operation import Operation
from .rows import POSITIONS
from .words import resolved

KINDS[KIND] = TableGradientSpec


def gradients(
    call: CallOf, op: Operation, t: Tensors, names: Sequence[str], grads: Tensors, o: Options
) -> dict[str, Tensor | None]:
    """The gradients of the tables `names`. grads: of the results."""
    again = torch.is_grad_enabled()  # the gradient of this gradient is wanted too
    launched = not again and _has_kernel(op, t, grads, o)
    if launched and o.table == "cos_sin" and not o.inverse and _in_order(t, o):
        turned = {**t, **_normed(call, op, t, grads, o)} if op.norm else t
        return {name: grad for name, grad in _of_rows(turned, grads, o).items() if name in names}
    with torch.enable_grad():
        # Views: there is no way from a result to a table through q or through another table.
        inputs = {name: x.view_as(x) if again else x.detach().requires_grad_(name in names) for name, x in t.items()}
        if launched:
            turned = {**inputs, **_normed(call, op, inputs, grads, o)} if op.norm else inputs
            results, grads = _through_turns(turned, grads, changed(o, rounding="fp32"))
        else:
            with watch.without_autocast(t[names[0]]):  # the words alone say what is rounded
                results = op.reference(inputs, o)
        wanted = [inputs[name] for name in names]
        given = {name: grad for name, grad in grads.items() if results[name].requires_grad}  # k has no scale
        outputs, sent = [results[name] for name in given], [*given.values()]
        found = torch.autograd.grad(outputs, wanted, sent, create_graph=again, allow_unused=True)
    return dict(zip(names, found))


def _has_kernel(op: Operation, t: Tensors, grads: Tensors, o: Options) -> bool:
    apart = op.name == "rope" or (op.name == "qk_norm_rope" and not norm_of(o).after_rope)
    if not apart or "q_factor" in t or o.rounding == "complex128":
        return False
    planned = t["q"].is_meta and type(t["q"]) in (Tensor, torch.nn.Parameter) and not watch.watched()
    return planned or watch.plain({**t, **{f"d{name}": x for name, x in grads.items()}})


def _normed(call: CallOf, op: Operation, t: Tensors, grads: Tensors, o: Options) -> Tensors:
    """q, and k if its result has a gradient, normalised and not rotated."""
    own = {name: t[name] for name in op.names if name in t and (name[0] == "q" or name[0] in grads)}
    words = {word: getattr(o, word) for word in ("layout", "interleaved", "rotary_dim", "rotary_offset", "norm")}
    alone, tensors = resolved(op, own, words)
    return call(op, tensors, alone)


def _through_turns(t: Tensors, grads: Tensors, o: Options) -> tuple[Tensors, Tensors]:
    """The cosines and sines of each token, from the tables; and their gradients, given those of q and k."""
    pairs = _pairs(t, grads, o)
    if _in_order(t, o):
        o = changed(o, unrotated=0)
    found = reference.turns(pairs[0][0].shape[1], t, o)
    made = of_turns(pairs, found.cos, o)
    for unused in (found.still, None if found.spare is None else found.spare[:, None, None]):
        made = made if unused is None else [x.masked_fill_(unused, 0) for x in made]
    return {"cos": found.cos, "sin": found.sin}, dict(zip(("cos", "sin"), made))


def _in_order(t: Tensors, o: Options) -> bool:
    """Whether the rotated tokens have the rows of a table in turn."""
    return o.cp_size == 1 and POSITIONS.isdisjoint(t)


def _pairs(t: Tensors, grads: Tensors, o: Options) -> list[tuple[Tensor, Tensor]]:
    """q, and k, each with the gradient of its result; in order, without the tokens that are not rotated."""
    pairs = [(canonical(t[name], o.layout), canonical(grad, o.layout)) for name, grad in grads.items()]
    if o.unrotated and _in_order(t, o):
        pairs = [(x[:, o.unrotated :], grad[:, o.unrotated :]) for x, grad in pairs]
    return pairs


def _of_rows(t: Tensors, grads: Tensors, o: Options) -> Tensors:
    """The gradients of cos and sin whose rows the tokens have in turn."""
    pairs, made = _pairs(t, grads, o), {}
    tokens = pairs[0][0].shape[1]
    for name, grad in zip(("cos", "sin"), of_turns(pairs, table_view(t["cos"])[:, :tokens], o)):
        longer = table_view(t[name]).shape[1] > tokens
        made[name] = torch.zeros_like(t[name]) if longer else torch.empty_like(t[name])
        table_view(made[name])[:, :tokens].copy_(grad)
    return made


def of_turns(pairs: Sequence[tuple[Tensor, Tensor]], like: Tensor, o: Options) -> list[Tensor]:
    """The gradients of the cosines and of the sines of each token.

    pairs: q, and k, before their rotation, each with the gradient of its result, (batch, seq, head, dim). like: the
    cosines, (batch or 1, seq, head or 1, width).
    """
    (rows, tokens, table_heads, width), batch = like.shape, pairs[0][0].shape[0]
    made = [torch.empty(like.shape, dtype=torch.float32, device=like.device) for _ in "cs"]
    if made[0].numel() == 0 or batch == 0:
        return [x.zero_() for x in made]
    xs, grads = ([pair[n] for pair in pairs] for n in (0, 1))
    strides, none = [strides_of(x) for x in (*xs, *grads)], [None] * (2 - len(pairs))
    heads, shared_rows = [x.shape[2] for x in xs], batch // rows
    head = o.interleaved, o.interleaved_out, width == o.rotary_dim, o.rotary_dim, rotated(o)[0]
    limit, addends = elements_per_access((*xs, *grads), strides), len(pairs) if table_heads > 1 else sum(heads)
    spec = spec_of(DTYPE_NAMES[xs[0].dtype], *head, limit, table_heads, shared_rows * addends)
    if like.is_meta:
        planning.add(spec)
        return made
    of_xs, of_grads = ([*each, *[[0] * 4] * len(none)] for each in (strides[: len(xs)], strides[len(xs) :]))
    words = [*chain(*of_xs, *of_grads), tokens, table_heads, *heads, *[0] * len(none), shared_rows]
    grid = rows * tokens, -(-table_heads // spec.heads)
    enqueue(Call(spec, grid, [*xs, *none, *grads, *none, *made], words, like.device))
    return made
