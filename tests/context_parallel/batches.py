"""Packed batches, which token is on which rank, what each sees, attention in fp64 with an explicit mask, and memory."""

from __future__ import annotations

import random
import weakref
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jitrope.base.partition import RULES, chunks_of, number_of_chunks
from jitrope.context_parallel import Schedule, all_gather_attention
from jitrope.thd.shape import Mask


@dataclass
class Batch:
    """Sequences, a mask, and options. pads: lengths with padding, or a multiple to pad to; spare: rows after all.

    separate: padding is cut apart.
    """

    lengths: tuple[int, ...]
    pads: tuple[int, ...] | int = 1
    spare: int = 0
    window: tuple[int, int] = (-1, 0)
    rule: str = "dual_chunk"
    heads: tuple[int, int, int, int] = (4, 2, 8, 8)  # Hq, Hk, D, Dv
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)  # of a call
    grad: bool = True
    max_seqlen: int | None = None
    separate: bool = False

    def __post_init__(self) -> None:
        multiple = self.pads if isinstance(self.pads, int) else 0
        self.slots = [-(-n // multiple) * multiple for n in self.lengths] if multiple else list(self.pads)
        pairs = zip(self.lengths, self.slots)
        self.cut = [n for length, slot in pairs for n in (length, slot - length)] if self.separate else self.slots
        self.tokens, self.mask = sum(self.slots) + self.spare, Mask(*self.window)
        self.cu_seqlens = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32)
        self.offsets = torch.tensor([0, *accumulate(self.slots)], dtype=torch.int32)  # by which the rows are cut
        self.padded = None if list(self.lengths) == self.slots and not self.separate else self.offsets
        each = enumerate(zip(self.lengths, self.slots))
        places = [(i if p < length else -1, p) for i, (length, n) in each for p in range(n)] + [(-1, 0)] * self.spare
        self.sequence, self.position = torch.tensor(places, dtype=torch.int64).view(-1, 2).T  # of padding: sequence -1


def schedule_of(batch: Batch, device: str = "cpu", **ranks: Any) -> Schedule:
    """ranks: the group, or cp_size and cp_rank; or other words."""
    padded = None if batch.padded is None else batch.padded.to(device)
    words = {"causal": False, "window": batch.window, "rule": batch.rule, "max_seqlen": batch.max_seqlen}
    words |= {"separate_padding": batch.separate, **ranks}
    return Schedule(batch.cu_seqlens.to(device), batch.tokens, cu_seqlens_padded=padded, **words)


def visible(batch: Batch) -> Tensor:
    """(T, T): the rows that each row sees."""
    sequence, distance = batch.sequence, batch.position[None] - batch.position[:, None]
    seen = (sequence[:, None] == sequence) & (sequence >= 0)[:, None]
    if batch.mask.left >= 0:
        seen &= distance >= -batch.mask.left
    if batch.mask.right >= 0:
        seen &= distance <= batch.mask.right
    return seen


def dealt(batch: Batch, cp_size: int) -> list[list[int]]:
    """Every rank's tokens. The length of chunk c is the number of the sequence's tokens t with t % of == c.

    If padding is cut apart, it is like another sequence.
    """
    of = number_of_chunks(cp_size, batch.rule)
    ranks: list[list[int]] = [[] for _ in range(cp_size)]
    for first, end in pairwise([0, *accumulate(batch.cut), batch.tokens]):
        sizes = [sum(t % of == chunk for t in range(first, end)) for chunk in range(of)]
        starts = [first, *accumulate(sizes, initial=first)][1:]
        for rank, rows in enumerate(ranks):
            for chunk in chunks_of(rank, cp_size, batch.rule):
                rows += range(starts[chunk], starts[chunk + 1])
    return ranks


MASKS = [(-1, 0), (-1, -1), (3, 0), (2, 2), (0, 0), (4, 1), (-1, 2), (3, -1), (0, 5)]


def random_batch(seed: int, times: int = 1) -> tuple[Batch, int]:
    """A batch with a mask, whose sequences are so many times as long, and a number of ranks."""
    rng = random.Random(seed)
    cp_size, rule = 1 + seed % 8, rng.choice(RULES)
    multiple = rng.choice([1, 1, 2 * cp_size])
    pads = [rng.choice([0, 1, 3, 9, 17, 30]) * multiple for _ in range(rng.choice([1, 2, 3, 6]))]
    lengths = [rng.randint(0, n) for n in pads] if rng.random() < 0.5 else pads
    spare = rng.choice([0, 0, 5, 2 * cp_size]) or int(not sum(pads))
    of = {"spare": times * spare, "window": rng.choice(MASKS), "rule": rule}
    separate = rng.random() < 0.3
    return Batch(tuple(times * n for n in lengths), tuple(times * n for n in pads), separate=separate, **of), cp_size


def random_call(seed: int) -> tuple[Batch, int]:
    """A batch of `random_batch` with heads, a dtype and keywords of a call, and a number of ranks."""
    (batch, cp_size), rng = random_batch(seed), random.Random(f"call {seed}")
    heads, groups = rng.choice([((4, 2, 8, 8), 2), ((4, 1, 8, 6), 1), ((3, 3, 6, 10), 3), ((8, 4, 8, 8), 2)])
    of: dict[str, Any] = {"head_groups": rng.choice([1, groups]), "keep_gathered": rng.random() < 0.3}
    words = {"heads": heads, "dtype": rng.choice([torch.float32, torch.bfloat16]), "options": of}
    words["window"] = rng.choice([(-1, 0), (-1, -1), batch.window, batch.window])
    return replace(batch, max_seqlen=rng.choice([None, max(batch.slots)]), **words), cp_size


def made(batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
    """q, k, v and dout of the whole batch, NaN in padding and spare rows; and out, dq, dk, dv, lse, max_logit."""
    (hq, hk, d, dv), generator = batch.heads, torch.Generator().manual_seed(batch.tokens)
    shapes = [(batch.tokens, *size) for size in ((hq, d), (hk, d), (hk, dv), (hq, dv))]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).to(batch.dtype) for shape in shapes]
    if batch.tokens == 0:
        return inputs, [*(inputs[n] for n in (3, 0, 1, 2)), torch.zeros(0, hq), torch.full((hq,), -torch.inf)]
    q, k, v, dout = (x.to(torch.float64, copy=True).requires_grad_() for x in inputs)
    seen, scale = visible(batch), batch.options.get("softmax_scale", d**-0.5)
    keys, values = (x.repeat_interleave(hq // hk, 1) for x in (k, v))
    scores = (torch.einsum("qhd,khd->hqk", q, keys) * scale).masked_fill(~seen, -torch.inf)
    weights = torch.where(seen, scores, -1e30).softmax(-1) * seen
    out = torch.einsum("hqk,khd->qhd", weights, values)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    for x in inputs:
        x[batch.sequence < 0] = torch.nan
    return inputs, [out.detach(), *grads, scores.detach().logsumexp(-1).T, scores.detach().amax((1, 2))]


CLOSE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def assert_rows(got: Tensor | None, want: Tensor, spare: Tensor | None, atol: float, what: str) -> None:
    assert got is not None, what
    got = got.detach().cpu()
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=atol, msg=lambda text: f"{what}: {text}")
    assert spare is None or not got[spare].any(), f"{what}: padding is not zero"


def assert_attention(batch: Batch, group: Any = None, device: str = "cpu") -> None:
    """This rank's rows of out, lse, max_logit and the gradients are those of fp64."""
    (inputs, wants), schedule = made(batch), schedule_of(batch, device, group=group)
    q, k, v, dout = (schedule.shard(x.to(device)).requires_grad_(batch.grad) for x in inputs)
    max_logit = batch.options.get("backend", "math") == "math"
    with torch.set_grad_enabled(batch.grad):
        asked = {"return_lse": True, "return_max_logit": max_logit, **batch.options}
        out, lse, *rest = all_gather_attention(q, k, v, schedule, **asked)
    if batch.grad:
        out.backward(dout)
    # No assertion before this line: if a rank fails earlier, the others wait for ever.
    atol, rows = CLOSE[batch.dtype], schedule.indices.long().cpu()
    spare, wants[:5] = (batch.sequence < 0)[rows], [x[rows] for x in wants[:5]]
    assert out.dtype == batch.dtype
    assert lse.dtype == torch.float32
    assert_rows(out, wants[0], spare, atol, "out")
    assert_rows(lse, wants[4], None, max(atol, 1e-5), "lse")
    if max_logit:
        assert_rows(rest[0], wants[5], None, max(atol, 1e-5), "max_logit")
    for name, x, want in zip(("dq", "dk", "dv"), (q, k, v), wants[1:4] if batch.grad else ()):
        largest = max([1.0, *want.abs().flatten().tolist()])  # sums over many rows are larger than 1
        assert_rows(x.grad, want, spare, atol * largest, name)


RAGGED = (37, 0, 141, 29, 1, 3)
FULL, TWO_SIDED = (-1, -1), {"window": (7, 5)}
FP32, BF16 = {"dtype": torch.float32}, {"dtype": torch.bfloat16}
FLEX = {**FP32, "options": {"backend": "flex"}, "grad": False}
EXCHANGED, SOME_GROUPS = {"lengths": (203, 98), "window": (3, 0)}, {"lengths": RAGGED, "heads": (8, 4, 8, 6)}
CASES = {
    "causal": Batch(RAGGED), "full": Batch(RAGGED, window=FULL), "window": Batch(RAGGED, window=(20, 0)),
    "two-sided": Batch(RAGGED, **TWO_SIDED), "diagonal": Batch(RAGGED, window=(0, 0)),
    "to the right alone": Batch(RAGGED, window=(-1, 6)), "to the left and all behind": Batch(RAGGED, window=(6, -1)),
    "one long, short window": Batch((301,), window=(5, 0)), "one long, two-sided": Batch((301,), window=(4, 6)),
    # TransformerEngine shifts one window for all sequences, and by a rounded max_seqlen for a single one.
    "unequal": Batch((36, 16), window=(8, 8)), "one alone": Batch((258,), window=(50, 50)),
    "contiguous, causal": Batch(RAGGED, rule="contiguous"),
    "contiguous, full": Batch(RAGGED, rule="contiguous", window=FULL),
    "contiguous, two-sided": Batch(RAGGED, rule="contiguous", window=(6, 4)),
    "contiguous, short window": Batch(rule="contiguous", **EXCHANGED),
    "padded, causal": Batch(RAGGED, pads=16), "padded, full": Batch(RAGGED, pads=16, window=FULL, spare=5),
    "padded, window": Batch(RAGGED, pads=16, window=(11, 0)),
    "padded, two-sided": Batch(RAGGED, pads=16, window=(11, 3), spare=7),
    "padded, short window": Batch((150, 40), pads=(160, 64), window=(2, 0)),
    "apart, causal": Batch(RAGGED, pads=48, separate=True, spare=5),
    "apart, full": Batch(RAGGED, pads=16, separate=True, window=FULL),
    "apart, window": Batch((150, 40), pads=(160, 64), separate=True, window=(2, 0)),
    "apart, two-sided": Batch(RAGGED, pads=16, separate=True, rule="contiguous", window=(11, 3), spare=7),
    "all padding": Batch((0, 0), pads=(9, 16)), "no tokens": Batch((0, 0)),
    "spare": Batch(RAGGED, spare=21), "spare, two-sided": Batch(RAGGED, spare=21, window=(5, 5)),
    "shorter than ranks": Batch((1, 2, 1, 3, 2), window=FULL), "more ranks than tokens": Batch((2, 1)),
    "more ranks than tokens, two-sided": Batch((2, 1), window=(1, 1)),
    "more ranks than tokens, window": Batch((3,), window=(1, 0), rule="contiguous"),
    "MHA": Batch(RAGGED, heads=(3, 3, 8, 8)), "MQA": Batch(RAGGED, heads=(4, 1, 8, 8), window=FULL),
    "Dv larger": Batch(RAGGED, heads=(4, 2, 6, 10)),
    "Dv smaller": Batch(RAGGED, heads=(2, 2, 24, 16), window=(9, 9), pads=8),
    "scale": Batch(RAGGED, options={"softmax_scale": 0.5}), "kept": Batch(RAGGED, options={"keep_gathered": True}),
    "kept, groups": Batch(**SOME_GROUPS, options={"keep_gathered": True, "head_groups": 4}),
    "groups": Batch(**SOME_GROUPS, options={"head_groups": 2}, pads=8),
    "groups, exchange": Batch(heads=(4, 4, 8, 8), options={"head_groups": 4}, **EXCHANGED),
    "checked": Batch(RAGGED, pads=16, options={"check": True}, max_seqlen=144),
    "fp32": Batch(RAGGED, pads=8, **FP32), "fp32, two-sided": Batch(RAGGED, **FP32, **TWO_SIDED),
    "bf16": Batch(RAGGED, pads=8, **BF16), "bf16, exchange": Batch(**BF16, **EXCHANGED),
    "fp16": Batch(RAGGED, dtype=torch.float16, window=FULL),
    "flex": Batch(RAGGED, pads=8, **FLEX), "flex, two-sided": Batch(RAGGED, **FLEX, **TWO_SIDED),
}  # fmt: skip


class Living(TorchDispatchMode):
    """Counts the bytes of the tensors that ops return, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.most, self.known = 0, 0, set[int]()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        results = op(*args, **(kwargs or {}))
        if op is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # a fake one returns another tensor, a real one its argument
        for x in tree_leaves(results):
            storage = x.untyped_storage() if isinstance(x, Tensor) else None
            if storage is not None and storage._cdata not in given | self.known:
                self.known.add(storage._cdata)
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.bytes)
        return results

    def freed(self, storage: int, size: int) -> None:
        self.known.discard(storage)
        self.bytes -= size
