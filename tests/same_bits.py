"""Trainer = server: `python -m tests.same_bits` counts the elements of q and k whose bits differ between their calls.

    python -m tests.same_bits                        # all models; without a GPU with kernels built by g++, in minutes
    python -m tests.same_bits --model Qwen3 Gemma    # some

Each line of its table is a way to call jitrope for the tokens of a trainer's call: one row of a batch, with gradients.
The exit code is 1 if an element of a promised line differs. `test_same_bits.py` tests the same lines.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import jitrope
from jitrope import KVCache, Norm, Packed, Pages, prepare_qkv

from . import oracle
from .host import backend
from .host.backend import DEVICE

S, HQ, HK, PAGE = 96, 4, 2, 8
BITS = {2: torch.int16, 4: torch.int32}
Model = SimpleNamespace
Results = Iterator[Sequence[Tensor]]
"""q and k of all tokens, (S, H, D) each, once or several times."""
Form = Callable[[Model], Results]

RMS, LAYER = {"rounding": "once"}, {"kind": "layer_norm"}
MODELS: dict[str, tuple[int, int, torch.dtype, dict[str, Any], dict[str, Any] | None]] = {
    # elements of a head, rotated ones, dtype, words of the call, of its norm
    "Llama": (128, 128, torch.float16, {}, None),
    "interleaved-dtype": (80, 80, torch.float16, {"interleaved": True, "rounding": "dtype"}, None),
    "part-of-a-head": (96, 32, torch.float16, {}, None),
    "Qwen3": (128, 128, torch.float16, {}, {"rounding": "twice"}),
    "Qwen3-64": (64, 64, torch.bfloat16, {}, {}),
    "Gemma": (256, 256, torch.float16, {}, {"zero_centered": True, **RMS}),
    "Qwen3-Next": (256, 64, torch.float16, {}, {"zero_centered": True, **RMS}),
    "half-a-head": (128, 64, torch.float16, {}, {"rounding": "twice"}),
    "heads-of-80-fp32": (80, 80, torch.float32, {}, RMS),
    "a-third-of-a-head": (96, 32, torch.float16, {}, RMS),
    "heads-of-80": (80, 80, torch.float16, {}, RMS),
    "heads-of-88-interleaved": (88, 88, torch.float16, {"interleaved": True}, RMS),
    "LayerNorm": (128, 128, torch.float16, {}, LAYER),
    "after-rope": (96, 96, torch.float16, {}, {"after_rope": True, **RMS}),
}
INVARIANT = [*MODELS][9:]
"""Those that need `configure(batch_invariant=True)`."""


def model(name: str, device: str = DEVICE) -> Model:
    """q, k and v of the tokens, (S, H, D), the words of a call, and its q and k as a trainer gets them.

    With a norm a head has one large element. The squares of the others are too small to change its square one by one,
    but not together, so the order of the sum shows in the results.
    """
    dim, rotary, dtype, words, norm = MODELS[name]
    seeds = [torch.Generator().manual_seed(n) for n in range(6)]
    x = torch.randn(S, HQ + 2 * HK, dim, generator=seeds[1]).to(device, dtype)
    if norm is not None:
        place = torch.randint(dim, (S, HQ + 2 * HK, 1), generator=seeds[5]).to(device)
        small = x.sign() * (0.5 + (x.abs() / 8).clamp(max=0.4)) * 2**-12
        small = x * 2**-12.5 if "kind" in norm else small  # less their mean they must differ
        x = small.scatter(-1, place, x.gather(-1, place).sign())
        weights, biases = (torch.randn(2, dim, generator=seeds[n]).to(device, dtype) for n in (2, 3))
        own = dict(zip(("q_bias", "k_bias"), biases)) if "kind" in norm else {}
        words = {**words, "norm": Norm(*weights, **own, **norm)}
    table = jitrope.tables.cos_sin_cache(128, jitrope.tables.inv_freq(rotary_dim=rotary)[0])
    q, k, v = x.split([HQ, HK, HK], 1)
    ids = torch.arange(S, device=device)
    m = Model(name=name, q=q, k=k, v=v, ids=ids, words={**words, "cos_sin_cache": table.to(device)})
    m.leaves = [x.clone().unsqueeze(0).requires_grad_() for x in (q, k)]
    jitrope.configure(batch_invariant=name in INVARIANT, launch="token_linear")
    m.trained = [x[0].detach() for x in prepare_qkv(*m.leaves, None, **m.words)[:2]]
    jitrope.configure(launch="auto")
    return m


def differing(got: Sequence[Tensor], want: Sequence[Tensor]) -> int:
    """The number of elements with other bits."""
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in want]
    pairs = [[x.contiguous().view(BITS[x.element_size()]) for x in pair] for pair in zip(got, want)]
    return sum(int((x != y).sum()) for x, y in pairs)


# ---- what is promised: a function for each line, whose docstring is its name -------------------------


def the_other_launch(m: Model) -> Results:
    """the other launch"""
    jitrope.configure(launch="grid_2d")
    yield [x[0] for x in prepare_qkv(*m.leaves, None, **m.words)[:2]]
    jitrope.configure(launch="auto")


def other_layouts(m: Model) -> Results:
    """other layouts: sbhd, bhsd"""
    for layout in ("sbhd", "bhsd"):
        given = [oracle.heads(x[None], layout).contiguous() for x in (m.q, m.k)]
        got = prepare_qkv(*given, None, layout=layout, **m.words)[:2]
        yield [oracle.heads(x, layout)[0] for x in got]


def a_padded_batch(m: Model) -> Results:
    """a padded batch: two sequences, NaN behind the first"""
    first, rest = 7, S - 7
    given = [torch.full((2, rest, *x.shape[1:]), torch.nan, device=x.device, dtype=x.dtype) for x in (m.q, m.k)]
    ids = m.ids[:rest].repeat(2, 1)
    ids[1] += first
    for batch, x in zip(given, (m.q, m.k)):
        batch[0, :first], batch[1] = x[:first], x[first:]
    got = prepare_qkv(*given, None, positions=ids, **m.words)[:2]
    yield [torch.cat((x[0, :first], x[1])) for x in got]


def another_batch(m: Model) -> Results:
    """three rows of tokens in any order"""
    order = torch.randperm(S, generator=torch.Generator().manual_seed(4)).to(m.ids.device)
    given = [x[order].unflatten(0, (3, -1)) for x in (m.q, m.k)]
    got = prepare_qkv(*given, None, positions=order.view(3, -1), **m.words)[:2]
    yield [x.flatten(0, 1)[order.argsort()] for x in got]


def a_packed_batch(m: Model) -> Results:
    """a packed batch: two sequences, the second begins later"""
    packed = Packed(m.ids.new_tensor([0, 7, S]), start_positions=m.ids.new_tensor([0, 7]))
    yield prepare_qkv(m.q, m.k, None, positions=packed, **m.words)[:2]


def context_parallel(m: Model) -> Results:
    """both ranks of context parallelism"""
    whole, chunks = [torch.empty_like(x) for x in m.trained], m.ids.chunk(4)
    for rank in range(2):
        rows = torch.cat((chunks[rank], chunks[3 - rank]))
        packed = Packed(m.ids.new_tensor([0, S]), S, cp_size=2, cp_rank=rank)
        for x, own in zip(whole, prepare_qkv(m.q[rows], m.k[rows], None, positions=packed, **m.words)):
            x[rows] = own
    yield whole


def a_fused_projection(m: Model) -> Results:
    """a fused projection"""
    q, k, _ = jitrope.prepare_fused_qkv(torch.cat((m.q, m.k, m.v), 1)[None], heads=(HQ, HK), **m.words)
    yield q[0], k[0]


def in_place(m: Model) -> Results:
    """in place in a fused projection"""
    q, k, _ = torch.cat((m.q, m.k, m.v), 1).split([HQ, HK, HK], 1)
    prepare_qkv(q, k, None, positions=m.ids, layout="thd", inplace=True, **m.words)
    yield q, k


def prefill_into_slots(m: Model) -> Results:
    """prefill into slots"""
    caches = torch.zeros(2, *m.k.shape, device=m.k.device, dtype=m.k.dtype)
    words = {"cache": KVCache(*caches, m.ids.flip(0)), "positions": m.ids, "layout": "thd"}
    q, *_ = prepare_qkv(m.q, m.k, m.v, **words, **m.words)
    yield q, caches[0].flip(0)


def tokens_alone(m: Model) -> Results:
    """each token alone, at any address"""
    got = [
        prepare_qkv(m.q[None, n : n + 1], m.k[None, n : n + 1], None, positions=m.ids[n : n + 1], **m.words)[:2]
        for n in range(S)
    ]
    yield [torch.cat(x, 1)[0] for x in zip(*got)]


def tokens_as_batch(m: Model) -> Results:
    """all tokens as rows of a batch"""
    got = prepare_qkv(m.q[:, None], m.k[:, None], None, positions=m.ids[:, None], **m.words)[:2]
    yield [x[:, 0] for x in got]


def decoded(m: Model, sequences: int) -> Sequence[Tensor]:
    """q and k after decode steps into pages; a step has a token of each sequence."""
    each, pages = S // sequences, -(-S // sequences // PAGE)
    caches = torch.zeros(2, sequences * pages, PAGE, *m.k.shape[1:], device=m.k.device, dtype=m.k.dtype)
    table = torch.arange(sequences * pages, device=m.ids.device).flip(0).view(sequences, pages)
    q = torch.empty_like(m.q)
    for at in m.ids.view(sequences, each).t():
        cache = KVCache(*caches, Pages(table, seq_lens=at - m.ids[::each] + 1))
        words = {"cache": cache, "positions": at, "layout": "thd"}
        q[at], *_ = prepare_qkv(m.q[at], m.k[at], m.v[at], **words, **m.words)
    return q, caches[0][table].flatten(1, 2)[:, :each].flatten(0, 1)


def decode_steps_alone(m: Model) -> Results:
    """decode steps into pages, one sequence"""
    yield decoded(m, 1)


def decode_steps_in_a_batch(m: Model) -> Results:
    """decode steps into pages, eight sequences"""
    yield decoded(m, 8)


def a_second_gpu(m: Model) -> Results:
    """a second GPU"""
    if DEVICE == "cuda" and torch.cuda.device_count() > 1:
        yield [x.to(m.q.device) for x in model(m.name, "cuda:1").trained]


PROMISED: list[Form] = [
    *(the_other_launch, other_layouts, a_padded_batch, another_batch, a_packed_batch, context_parallel),
    *(a_fused_projection, in_place, prefill_into_slots, tokens_alone, tokens_as_batch, decode_steps_alone),
    *(decode_steps_in_a_batch, a_second_gpu),
]


def without_the_switch(m: Model) -> int:
    """The elements that differ between both launches without `batch_invariant=True`."""
    found = []
    jitrope.configure(batch_invariant=False)
    for launch in ("token_linear", "grid_2d"):
        jitrope.configure(launch=launch)
        found.append([x.detach() for x in prepare_qkv(*m.leaves, None, **m.words)[:2]])
    jitrope.configure(launch="auto", batch_invariant=m.name in INVARIANT)
    return differing(*found)


# ---- the command -------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.same_bits", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=[*MODELS], metavar="NAME")
    names = parser.parse_args(arguments).model
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "a CPU, kernels built by g++"
    print(f"{device}; torch {torch.__version__}, jitrope {jitrope.__version__}")
    print(f"{len(names)} models, each with {S} tokens of {HQ} + {HK} heads: {', '.join(names)}\n")
    print(f"{'promised: the bits of a training call':60} models  elements  differ")
    models, wrong = [model(name) for name in names], 0
    for form in PROMISED:
        elements, differ = 0, {}
        for m in models:
            jitrope.configure(batch_invariant=m.name in INVARIANT)
            for got in form(m):
                elements += sum(x.numel() for x in got)
                differ[m.name] = differ.get(m.name, 0) + differing(got, m.trained)
        wrong += sum(differ.values())
        note = ", ".join(name for name, count in differ.items() if count) if differ else "there is one device"
        print(f"{form.__doc__:60} {len(differ):6}  {elements:8}  {sum(differ.values()):6}  {note}".rstrip())
    without = [without_the_switch(m) for m in models if m.name in INVARIANT]
    counts = f"for {sum(map(bool, without))} of {len(without)} models, in {sum(without)} elements"
    if without:
        print(f"\nWhere configure(batch_invariant=True) was on, both launches differ without it: {counts}.")
    print("What else is not promised: tests/README.md.")
    print(f"\n{'PROMISED BITS DIFFER' if wrong else 'all promised bits are the same'}")
    jitrope.configure(launch=None, batch_invariant=False)
    return int(wrong > 0)


if __name__ == "__main__":
    if DEVICE == "cpu":
        backend.install()
    elif not torch.cuda.is_available():  # again, with the sanitizers, which must be loaded at the start
        if not shutil.which("g++"):
            sys.exit("there is no GPU: install g++, and kernels are built for the CPU")
        command = [sys.executable, "-m", "tests.same_bits", *sys.argv[1:]]
        os.execve(sys.executable, command, backend.environment())
    sys.exit(main())
