"""torch.compile, export, checkpoints and autocast of a call, beside the situations of the matrix."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy
import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import jitrope
from jitrope import InvalidInput, KVCache, Norm, Packed, Pages, Starts

from ..devices import slow

FREQS = torch.rand(64, 32)
OWN = type("OwnNorm", (Norm,), {})(torch.ones(64))
COMPILED = {  # what Dynamo meets in a function, and what only the function itself knows to refuse
    "a flag by a size": lambda x, f: jitrope.apply_rope(x, None, freqs=f, interleaved=x.shape[1] > 3)[0],
    "a number of numpy": lambda x, f: jitrope.apply_rope(x, None, freqs=f, q_scale=numpy.float32(0.5))[0],
    "vmap": lambda x, f: torch.vmap(lambda y: jitrope.apply_rope(y[None], None, freqs=f)[0])(x),
    "a class of the user's": lambda x, f: jitrope.prepare_qkv(x, None, None, freqs=f, norm=OWN)[0],
    "another keyword": lambda x, f: jitrope.apply_rope(x, None, freqs=f, interleave=True),
    "another norm": lambda x, f: jitrope.prepare_qkv(x, None, None, freqs=f, norm=torch.nn.RMSNorm(64)),
    "infinite": lambda x, f: jitrope.apply_rope(x, None, freqs=f, q_scale=math.inf),
}


LONG = ("a number of numpy", "a class of the user's")  # torch compiles each function of jitrope by itself


@pytest.mark.parametrize("name", [slow(x) if x in LONG else x for x in COMPILED])
def test_a_compiled_function_does_as_the_function(name: str) -> None:
    x, freqs = torch.randn(2, 6, 4, 64), torch.rand(6, 64)
    backend = "eager" if "class" in name else "aot_eager"  # each function of jitrope is compiled by itself there
    compiled = torch.compile(COMPILED[name], backend=backend, dynamic=True)
    try:
        want = COMPILED[name](x, freqs)
    except (InvalidInput, TypeError) as error:
        with pytest.raises(type(error), match=f"^{re.escape(str(error))}$"):
            compiled(x, freqs)
    else:
        torch.testing.assert_close(compiled(x, freqs), want)


def test_compiled_with_numbers_that_change() -> None:
    """Results and gradients are right with a symbolic max_seqlen, cp_rank and number of tokens."""
    ends, rope = torch.tensor([0, 8, 16]), partial(jitrope.apply_rope, k=None, freqs=FREQS)
    call = lambda x, n, rank: rope(x * 1, positions=Packed(ends, n, cp_size=8, cp_rank=rank))[0].sin()  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for i in range(4):
        x = torch.randn(16 + i, 2, 64, requires_grad=True)
        got, want = compiled(x, 8 + i, i), call(x, 8 + i, i)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), x) for out in (got, want)))


def test_compiled_with_head_sizes_that_change() -> None:
    """One compiled function serves the heads of a text model and of a vision tower, with symbolic sizes."""
    call = lambda q, cos: jitrope.apply_rope(q * 1, None, cos, cos)[0]  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for batch, dim in ((1, 64), (2, 192), (3, 32), (2, 80)):
        q, cos = torch.randn(batch, 6, 2, dim), torch.rand(batch, 6, dim // 2)
        torch.testing.assert_close(compiled(q, cos), call(q, cos))


def test_serving_compiles_once_for_all_lengths() -> None:
    counter, caches = CompileCounter(), torch.zeros(2, 64, 2, 64)
    step = lambda q, k, v, slots, **words: jitrope.apply_rope(  # noqa: E731
        jitrope.prepare_qkv(q * 2, k * 1, v, cache=KVCache(*caches, slots), inplace=True, **words)[0], k, **words
    )
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    words: dict[str, Any] = {"cos_sin_cache": torch.rand(128, 64), "layout": "thd"}
    for tokens in (5, 7, 12, 33):
        qkv = [torch.randn(tokens, heads, 64) for heads in (4, 2, 2)]
        words["positions"], slots = torch.randint(0, 128, (tokens,)), torch.randperm(64)[:tokens]
        got, stored = compiled(*qkv, slots, **words), caches.clone()
        assert all(map(torch.equal, got, step(*qkv, slots, **words)))
        assert torch.equal(stored, caches)
    assert counter.frame_count == 1


CHANGING = {  # a call, and its arguments of a length
    "unrotated": (lambda x, n: jitrope.apply_rope(x, None, freqs=FREQS, unrotated=n)[0],
                  lambda n: (torch.randn(1, 40, 2, 64), n)),
    "max_seqlen": (lambda x, ends, n: jitrope.apply_rope(x, None, freqs=FREQS, positions=Packed(ends, n))[0],
                   lambda n: (torch.randn(20 + n, 2, 64), torch.tensor([0, 20, 20 + n]), 20 + n)),
    "text tokens": (
        lambda x, y, w: jitrope.prepare_joint_qkv((x,) * 3, (y,) * 3, freqs=FREQS, unrotated=x.shape[1],
                                                  norm=Norm(w, w))[0],
        lambda n: (torch.randn(1, n, 2, 64), torch.randn(1, 20, 2, 64), torch.ones(64, requires_grad=True))),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGING)
def test_a_changing_number_is_compiled_twice_at_most(name: str) -> None:
    """The text's length of each prompt, and the longest sequence of each batch."""
    call, made = CHANGING[name]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for n in range(3, 14):
        arguments = made(n)
        want, got = call(*arguments), compiled(*arguments)
        assert torch.equal(got, want)
        if got.requires_grad:
            weight = arguments[-1]
            torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), weight)[0] for y in (got, want)))
    assert counter.frame_count <= 2


EXPORTED = {  # a call, arguments of n sequences, and how many more than n the first axis of each has; None: it is fixed
    "packed": (lambda freqs, q, ends: jitrope.apply_rope(q, None, freqs=freqs, positions=Packed(ends))[0],
               lambda n: (torch.randn(12, 2, 64), torch.arange(n + 1, dtype=torch.int32) * 3), (None, 1)),
    "starts": (lambda freqs, q, starts: jitrope.apply_rope(q, None, freqs=freqs, positions=Starts(starts))[0],
               lambda n: (torch.randn(n, 5, 2, 64), torch.arange(n)), (0, 0)),
    "pages": (
        lambda freqs, q, table, lengths, ends: jitrope.prepare_qkv(
            q, q[:, :2], q[:, :2], freqs=freqs, layout="thd", positions=torch.zeros(q.shape[0], dtype=torch.int32),
            cache=KVCache(*torch.zeros(2, 32, 16, 2, 64), Pages(table, seq_lens=lengths, cu_seqlens_q=ends)))[0],
        lambda n: (torch.randn(12, 4, 64), torch.arange(3 * n, dtype=torch.int32).view(n, 3),
                   torch.arange(n, dtype=torch.int32) + 5, torch.arange(n + 1, dtype=torch.int32) * 3),
        (None, 0, 0, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_call_takes_any_number_of_sequences(name: str) -> None:
    call, made, more = EXPORTED[name]
    model = type("Model", (torch.nn.Module,), {"forward": lambda self, *arguments: call(self.freqs, *arguments)})()
    model.register_buffer("freqs", FREQS)
    count = torch.export.Dim("count", max=99)
    shapes = tuple({} if n is None else {0: count + n if n else count} for n in more)
    program = torch.export.export(model, made(3), dynamic_shapes=(shapes,)).module()
    arguments = made(4)
    assert torch.equal(program(*arguments), call(FREQS, *arguments))


@pytest.mark.filterwarnings("ignore")
def test_jit_trace() -> None:
    """A call in place is traced as a fresh one and a copy, which torch.jit keeps."""
    q, other = torch.randn(2, 1, 6, 2, 64)
    want = jitrope.apply_rope(other, None, freqs=FREQS)[0]
    traced = torch.jit.trace(lambda x: jitrope.apply_rope(x, None, freqs=FREQS, inplace=True)[0], q.clone())
    assert torch.equal(traced(other), want)
    assert torch.equal(other, want)
    with pytest.raises(InvalidInput, match=r"^apply_rope: torch.jit.trace loses what .* or to out; export the model$"):
        torch.jit.trace(lambda x: jitrope.apply_rope(x, None, freqs=FREQS, out=(torch.empty_like(x), None))[0], q)


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_checkpointing(policy: CheckpointPolicy) -> None:
    """A user names the op, to keep its results."""
    (q, k), others = torch.randn(2, 1, 6, 2, 64, requires_grad=True), CheckpointPolicy.PREFER_RECOMPUTE
    ours = torch.ops.jitrope.prepare.default
    choose = Mock(side_effect=lambda _, op, *given, **words: policy if op is ours else others)
    contexts = {"use_reentrant": False, "context_fn": lambda: create_selective_checkpoint_contexts(choose)}
    found = []
    for run in (partial(checkpoint, **contexts), lambda function, *given: function(*given)):
        y = run(lambda q, k: sum(x.sin().sum() for x in jitrope.apply_rope(q * 2, k * 2, freqs=FREQS)).square(), q, k)
        found.append(torch.autograd.grad(y, (q, k)))
    torch.testing.assert_close(*found)
    assert any(call.args[1] is ours for call in choose.call_args_list)


@pytest.mark.parametrize(("dtype", "other"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_autocast_to_another_dtype_changes_nothing(dtype: torch.dtype, other: torch.dtype) -> None:
    q, tables = torch.randn(2, 6, 2, 16).to(dtype), [x.requires_grad_() for x in torch.randn(2, 6, 8).unbind()]
    for call in (
        lambda: jitrope.apply_rope(q, q, *tables, rounding="dtype"),
        lambda: jitrope.prepare_qkv(q, q, None, *tables, norm=Norm(after_rope=True))[:2],
    ):
        want = call()
        want = (*want, *torch.autograd.grad(want, tables, [q, q]))
        with torch.autocast("cpu", other):
            got = call()
            got = (*got, *torch.autograd.grad(got, tables, [q, q]))
        assert all(map(torch.equal, got, want))
