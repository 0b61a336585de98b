"""`jitrope bench decode`: the few tokens of a serving step, hot, and a prefill, cold; GPU and host time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import apply_rope_, apply_rope_kv_cache_, tables
from ..ops import reference
from ..plan.spec import Options
from . import peers as others
from .thd import Progress
from .timing import cold_copies, copy_calls, copy_time, gpu_time, host_time, median_of_rounds

PAGE, POSITIONS = 16, 8192
CACHES = ("k_cache", "v_cache")
SCALES = {"k_scale": 0.02, "v_scale": 0.03}
COPY, COPY_KV, COPY_FP8 = "COPY", "COPY, KV cache", "COPY, fp8 KV cache"


class Inputs(NamedTuple):
    """What a layer of a serving step has: T tokens, each at a position and with a slot of its own."""

    q: Tensor  # (1, T, Hq, D) bf16; k and v are (1, T, Hk, D)
    k: Tensor
    v: Tensor
    cos: Tensor  # (T, D / 2) fp32: the tokens' rows of the table, gathered beforehand
    sin: Tensor
    table: Tensor  # (POSITIONS, D) fp32, a cos_sin_cache
    positions: Tensor  # (T,) int64
    paged: dict[str, Any]  # of `apply_rope_kv_cache_`: tables, slots and caches (pages, PAGE, Hk, D) in bf16
    fp8_paged: dict[str, Any]  # the same in fp8, with scales on the device


def inputs(tokens: int, heads: int, kv_heads: int, head_dim: int, prefill: bool = False) -> Inputs:
    """Tokens of as many sequences, anywhere in them; or, of a prefill, one sequence, page after page."""
    x = torch.randn(1, tokens, heads + 2 * kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    q, k, v = (part.contiguous() for part in x.split((heads, kv_heads, kv_heads), 2))
    inv_freq, _ = tables.inv_freq(rotary_dim=head_dim, theta=500000.0, device="cuda")
    rows = max(POSITIONS, tokens)
    table = tables.cos_sin_cache(rows, inv_freq)
    pages = -(-rows // PAGE)
    index = torch.arange(tokens, device="cuda")
    if prefill:
        positions = index
        slots = torch.randperm(pages, device="cuda")[index // PAGE] * PAGE + index % PAGE
    else:
        positions = torch.randint(rows, (tokens,), device="cuda")
        slots = torch.randperm(pages * PAGE, device="cuda")[:tokens]
    cos, sin = (part.contiguous() for part in table[positions].chunk(2, -1))
    words = {"cos_sin_cache": table, "position_ids": positions, "slot_mapping": slots}
    paged, fp8_paged = (
        {**words, **{name: torch.zeros(pages, PAGE, kv_heads, head_dim, device="cuda", dtype=dtype) for name in CACHES}}
        for dtype in (torch.bfloat16, torch.float8_e4m3fn)
    )
    fp8_paged |= {name: torch.tensor(scale, device="cuda") for name, scale in SCALES.items()}
    return Inputs(q, k, v, cos, sin, table, positions, paged, fp8_paged)


def by_rows(x: Inputs) -> Any:
    """In place, by tables with a row for each token."""
    return apply_rope_(x.q, x.k, x.cos, x.sin)


def by_ids(x: Inputs) -> Any:
    """In place, by the table of all positions."""
    return apply_rope_(x.q, x.k, cos_sin_cache=x.table, position_ids=x.positions)


def to_cache(x: Inputs) -> Any:
    """q in place, k and v into the paged cache."""
    return apply_rope_kv_cache_(x.q, x.k, x.v, **x.paged)


def to_fp8_cache(x: Inputs) -> Any:
    """The same with a cache of e4m3."""
    return apply_rope_kv_cache_(x.q, x.k, x.v, **x.fp8_paged)


OURS: dict[str, tuple[str, Callable[[Inputs], Any]]] = {
    "jitrope, cos and sin rows": (COPY, by_rows),
    "jitrope, cos_sin_cache and ids": (COPY, by_ids),
    "jitrope, KV cache": (COPY_KV, to_cache),
    "jitrope, fp8 KV cache": (COPY_FP8, to_fp8_cache),
}
"""label: (the copy that moves the same bytes, the call)"""


def run(
    tokens: Sequence[int], heads: Sequence[tuple[int, ...]], head_dim: int, prefill: int, with_peers: bool,
    progress: Progress = lambda text: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each (heads, tokens) and implementation; "x COPY" is over a copy of the bytes that the row moves.

    Hot: every call has the same inputs. The KV writes of the prefill, of the first heads, go through
    inputs and caches that exceed L2. The gathering of cosine and sine rows is not timed.
    """
    torch.manual_seed(0)
    rows = []
    with torch.no_grad():
        for each in heads:
            for count in tokens:
                progress(f"{count} tokens, {each[0]}/{each[1]} heads")
                rows += _case(count, each, head_dim, False, with_peers)
        if prefill:
            progress(f"{prefill} tokens, {heads[0][0]}/{heads[0][1]} heads, cold")
            rows += _case(prefill, heads[0], head_dim, True, with_peers)
    return rows


def bytes_moved(tokens: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    """What a call reads and writes of q, k, v and caches; tables and indices are left out."""
    return {
        COPY: tokens * head_dim * 4 * (heads + kv_heads),
        COPY_KV: tokens * head_dim * 4 * (heads + 2 * kv_heads),
        COPY_FP8: tokens * head_dim * (4 * heads + (2 + 1) * 2 * kv_heads),
    }


def _case(
    tokens: int, heads: tuple[int, ...], head_dim: int, prefill: bool, with_peers: bool
) -> list[dict[str, Any]]:  # fmt: skip
    moved = bytes_moved(tokens, heads[0], heads[1], head_dim)
    if prefill:
        del moved[COPY]
    copies, calls = (cold_copies(moved[COPY_FP8], at_least=3), 12) if prefill else (1, 200)
    sets = [inputs(tokens, heads[0], heads[1], head_dim, prefill) for _ in range(copies)]
    check(sets[0])

    measured: dict[str, Callable[[], float]] = {}
    for label, size in moved.items():
        measured[label] = lambda copy=copy_calls(size, copies): copy_time(copy, calls)  # type: ignore[misc]  # noqa: B008
    bases = {label: label for label in moved}
    candidates = {**OURS, **(dict(_peers(sets)) if with_peers else {})}
    for label, (base, call) in candidates.items():
        if base in moved:
            bound = [lambda x=x, call=call: call(x) for x in sets]  # type: ignore[misc]
            bound[0]()  # compiled now, not between the timings
            measured[label] = lambda bound=bound: gpu_time(bound, calls_per_graph=calls)  # type: ignore[misc]
            bases[label] = base
    times = median_of_rounds(measured)
    hosts = {} if prefill else _host_times(sets[0])
    return [
        {
            "heads": f"{heads[0]}/{heads[1]}", "tokens": tokens, "L2": "cold" if prefill else "hot", "by": label,
            "us": times.get(label), "x COPY": times[label] / times[bases[label]] if label in times else None,
            "host us": hosts.get(label),
        }
        for label in (*times, *(label for label in hosts if label not in times))
    ]  # fmt: skip


def _host_times(x: Inputs) -> dict[str, float]:
    """Of jitrope's calls, beside torch's own in-place add."""
    one = torch.ones(64, device="cuda")
    times = {"x.add_(1)": host_time(lambda: one.add_(1))}
    return times | {label: host_time(lambda call=call: call(x)) for label, (_, call) in OURS.items()}  # type: ignore[misc]


def _peers(sets: Sequence[Inputs]) -> Iterator[tuple[str, tuple[str, Callable[[Inputs], Any]]]]:
    """What is installed, as `OURS`; those without position_ids get gathered rows."""
    for label, plain in others.available(False, [x[:2] + x[3:5] for x in sets]):  # type: ignore[misc]
        yield label, (COPY, lambda x, plain=plain: plain(x.q, x.k, x.cos, x.sin))  # type: ignore[misc]
    for label, write in others.kv_cache().items():
        for word, base, fp8 in (("KV cache", COPY_KV, False), ("fp8 KV cache", COPY_FP8, True)):

            def call(x: Inputs, write: Any = write, fp8: bool = fp8) -> Any:
                words = x.fp8_paged if fp8 else x.paged
                # As rows and, of fp8, as bytes: what index_put takes.
                caches = [words[name].flatten(0, 1).view(torch.uint8 if fp8 else torch.bfloat16) for name in CACHES]
                scales = [x.fp8_paged[name] for name in SCALES]
                return write(x.q, x.k, x.v, x.table, x.positions, *caches, words["slot_mapping"], *scales)

            yield f"{label}, {word}", (base, call)


def check(x: Inputs) -> None:
    """The bits that are timed are the reference's: of q and k, and of the whole caches."""
    options = Options(rotary_dim=x.q.shape[-1], table="cos_sin_cache")
    ids = (x.table, x.table, None, None, x.positions)
    want = reference.rope(x.q, x.k, *ids, options)
    for call in (by_rows, by_ids):
        mine = x._replace(q=x.q.clone(), k=x.k.clone())
        call(mine)
        _same((mine.q, mine.k), want)
    for words in (x.paged, x.fp8_paged):
        mine = x._replace(q=x.q.clone())
        (k_cache, v_cache), (k_want, v_want) = ([words[name].clone() for name in CACHES] for _ in range(2))
        apply_rope_kv_cache_(mine.q, x.k, x.v, **{**words, "k_cache": k_cache, "v_cache": v_cache})
        k_scale, v_scale = (words.get(name) for name in SCALES)
        q, _ = reference.rope_kv_cache(
            x.q, x.k, x.v, k_want, v_want, words["slot_mapping"], None, k_scale, v_scale, ids, options
        )  # fmt: skip
        _same((mine.q, k_cache, v_cache), (q, k_want, v_want))


def _same(got: tuple[Tensor, ...], want: tuple[Tensor | None, ...]) -> None:
    for a, b in zip(got, want):
        assert b is not None
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), "jitrope differs from its reference"


def plot(rows: list[dict[str, Any]], title: str, path: str) -> None:
    """Microseconds over the tokens of a step, a line for each implementation, and of the copies one."""
    from .report import figure

    shown = [row for row in rows if row["L2"] == "hot" and row["us"] is not None]
    shown = [row for row in shown if row["by"] not in (COPY_KV, COPY_FP8)]
    figure(shown, "tokens", "us", "by", title, "tokens of the step", "GPU time of a call, us", path, "heads")
