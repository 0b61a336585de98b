"""`jitrope bench qk-norm`: GPU time of RMSNorm + rope of q and k, beside a copy of the same bytes and peers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import apply_rope, apply_rope_, qk_norm_rope, qk_norm_rope_, qk_norm_rope_joint
from .thd import Progress
from .timing import cold_copies, copy_calls, copy_time, gpu_time, median_of_rounds

EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """shape: (B, S, Hq, Hk, D). text: how many of the S tokens are a stream of their own, with its own weights,
    that comes first. per_head: tables (B, S, H, D / 2), otherwise (S, D / 2)."""

    shape: tuple[int, int, int, int, int]
    interleaved: bool = False
    hot: bool = False
    across_heads: bool = False
    per_head: bool = False
    text: int = 0


CASES = {
    "flux": Case((1, 4608, 24, 24, 128), interleaved=True),
    "flux-joint": Case((1, 4608, 24, 24, 128), interleaved=True, text=512),
    "wan": Case((1, 32760, 12, 12, 128), interleaved=True, across_heads=True),
    "ltx": Case((1, 4992, 32, 32, 64), interleaved=True, across_heads=True, per_head=True),
    "prefill": Case((1, 8192, 32, 8, 128)),
    "qwen3": Case((1, 4096, 32, 8, 128)),
    "decode64": Case((64, 1, 32, 8, 128), hot=True),
    **{f"head{d}": Case((1, 4096, 16, 16, d)) for d in (64, 72, 80, 96, 112, 160, 192, 256)},
}
TRAINED = ("prefill", "flux")


class Inputs(NamedTuple):
    """One call's: bf16 activations and weights, fp32 half-width tables. v is moved only where there are two streams:
    then `first` is (q, k, v, q_weight, k_weight) of the first, and the rest the second's."""

    q: Tensor
    k: Tensor
    q_weight: Tensor
    k_weight: Tensor
    cos: Tensor
    sin: Tensor
    v: Tensor
    first: tuple[Tensor, ...]


Call = Callable[[Inputs], Any]
"""Returns q and k, normalized and rotated; with two streams joint q, k and v."""


def inputs(case: Case, device: str = "cuda") -> Inputs:
    """Random ones for a case."""
    b, s, hq, hk, d = case.shape
    randn = partial(torch.randn, device=device, dtype=torch.bfloat16)

    def stream(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        q, k, v = (randn(b, tokens, heads, d) for heads in (hq, hk, hk))
        widths = (hq * d, hk * d) if case.across_heads else (d, d)
        q_weight, k_weight = (1 + 0.1 * randn(width) for width in widths)
        return q, k, v, q_weight, k_weight

    lead = (b, s, hq) if case.per_head else (s,)
    angles = torch.rand(*lead, d // 2, device=device) * 2 * torch.pi
    q, k, v, q_weight, k_weight = stream(s - case.text)
    return Inputs(q, k, q_weight, k_weight, angles.cos(), angles.sin(), v, stream(case.text) if case.text else ())


# ---- the implementations -----------------------------------------------------------------------------


def ours(case: Case, in_place: bool = False, norm_rounding: str = "none") -> Call:
    """jitrope's one launch."""
    words: dict[str, Any] = {"interleaved": case.interleaved, "eps": EPS, "norm_rounding": norm_rounding}
    if case.text:

        def joint(x: Inputs) -> Any:
            q, k, v, *weights = x.first
            return qk_norm_rope_joint(
                (q, k, v), (x.q, x.k, x.v), (weights[0], weights[1]), (x.q_weight, x.k_weight), x.cos, x.sin, **words
            )

        return joint
    function = qk_norm_rope_ if in_place else qk_norm_rope
    words["across_heads"] = case.across_heads
    return lambda x: function(x.q, x.k, x.q_weight, x.k_weight, x.cos, x.sin, **words)


def _rms_norm(x: Tensor, weight: Tensor, case: Case) -> Tensor:
    if case.across_heads:
        return F.rms_norm(x.flatten(-2), weight.shape, weight, EPS).view_as(x)
    return F.rms_norm(x, weight.shape, weight, EPS)


def _normed(x: Inputs, case: Case) -> list[Tensor]:
    """q and k normalized, in one piece where there are two streams, and then v as well."""
    parts = [_rms_norm(x.q, x.q_weight, case), _rms_norm(x.k, x.k_weight, case)]
    if not case.text:
        return parts
    q, k, v, q_weight, k_weight = x.first
    first = [_rms_norm(q, q_weight, case), _rms_norm(k, k_weight, case), v]
    return [torch.cat(pair, 1) for pair in zip(first, [*parts, x.v])]


def _rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    cos, sin = (table if table.dim() == 4 else table[None, :, None] for table in (cos, sin))
    if interleaved:
        x0, x1 = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((x0 * cos - x1 * sin, x1 * cos + x0 * sin), -1).flatten(-2).to(x.dtype)
    x0, x1 = x.float().chunk(2, -1)
    return torch.cat((x0 * cos - x1 * sin, x1 * cos + x0 * sin), -1).to(x.dtype)


def eager(case: Case) -> Call:
    """The chain in plain torch: F.rms_norm, then rope in fp32."""

    def chain(x: Inputs) -> Any:
        q, k, *v = _normed(x, case)
        return (*(_rope(y, x.cos, x.sin, case.interleaved) for y in (q, k)), *v)

    return chain


def separate(case: Case, rotate: Callable[..., Any]) -> Call:
    """F.rms_norm, then jitrope's rope."""

    def chain(x: Inputs) -> Any:
        q, k, *v = _normed(x, case)
        return (*rotate(q, k, x.cos, x.sin, interleaved=case.interleaved), *v)

    return chain


def liger(case: Case) -> Call | None:
    """Liger's RMSNorm and rope (in place), where they are installed and do this case."""
    if case.interleaved or case.across_heads or case.text:
        return None
    try:
        from liger_kernel.transformers import liger_rotary_pos_emb
        from liger_kernel.transformers.functional import liger_rms_norm
    except ImportError:
        return None
    tables: dict[int, list[Tensor]] = {}  # its own format, made in the first call

    def chain(x: Inputs) -> Any:
        if id(x.cos) not in tables:
            tables[id(x.cos)] = [torch.cat((table, table), -1)[None] for table in (x.cos, x.sin)]
        pairs = ((x.q, x.q_weight), (x.k, x.k_weight))
        q, k = (liger_rms_norm(y, weight, EPS, in_place=False).transpose(1, 2) for y, weight in pairs)
        return tuple(y.transpose(1, 2) for y in liger_rotary_pos_emb(q, k, *tables[id(x.cos)]))

    return chain


def implementations(case: Case, peers: bool, training: bool = False) -> Iterator[tuple[str, Call]]:
    """(name, call); for training those that autograd sees through."""
    yield "jitrope", ours(case)
    if not (training or case.text):
        yield "jitrope in place", ours(case, in_place=True)
    for rounding in ("once", "twice"):
        yield f"jitrope, rounded {rounding}", ours(case, norm_rounding=rounding)
    rotate = apply_rope if training else apply_rope_  # what F.rms_norm returned may be overwritten
    yield f"F.rms_norm + {rotate.__name__}", separate(case, rotate)
    if peers:
        torch._dynamo.reset()
        yield "torch.compile", torch.compile(eager(case), dynamic=False)
        yield "torch eager", eager(case)
        if (found := liger(case)) is not None:
            yield "Liger", found


# ---- what is measured --------------------------------------------------------------------------------


def run(
    names: Sequence[str], peers: bool, backward: bool = True, progress: Progress = lambda text: None,
    device: str = "cuda", cases: dict[str, Case] = CASES,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each case, pass and implementation. Cold: all inputs, tables and outputs rotate past L2."""
    rows = []
    for name in names:
        progress(name)
        rows += _forward(name, cases[name], peers, device)
        if backward and name in TRAINED:
            progress(f"{name} backward")
            rows += _backward(name, cases[name], peers, device)
    return rows


def bytes_moved(case: Case) -> int:
    """Of q and k, read and written once; of v too where two streams become one."""
    b, s, hq, hk, d = case.shape
    return 2 * 2 * b * s * (hq + (2 if case.text else 1) * hk) * d


def _forward(name: str, case: Case, peers: bool, device: str) -> list[dict[str, Any]]:
    moved = bytes_moved(case)
    copies, calls = (1, 200) if case.hot else (cold_copies(moved, at_least=3), 12)
    sets = [inputs(case, device) for _ in range(copies if device == "cuda" else 1)]
    check(case, sets[0])
    measured = {"COPY": _copy(moved, copies, calls, device)}
    if case.per_head:  # here the tables are as large as q and k, and they are fp32
        tables = moved + sum(table.nbytes for table in (sets[0].cos, sets[0].sin))
        measured["COPY, tables too"] = _copy(tables, copies, calls, device)
    with torch.no_grad():
        for label, call in implementations(case, peers):
            bound = [partial(call, each) for each in sets]
            bound[0]()  # compiled now, not between the timings
            measured[label] = partial(_time, bound, device, 30, calls)
        times = median_of_rounds(measured)
    return _rows(name, "forward", times, moved)


def _backward(name: str, case: Case, peers: bool, device: str) -> list[dict[str, Any]]:
    """Backward is forward and backward less forward; COPY is of x and dy, which are read, and dx, which is written."""
    moved = bytes_moved(case) // 2 * 3
    copies, calls = cold_copies(moved, at_least=3, at_most=8), 6
    sets = [inputs(case, device) for _ in range(copies if device == "cuda" else 1)]
    measured: dict[str, Callable[[], tuple[float, float]]] = {}
    copied = _copy(moved, copies, calls, device)
    measured["COPY"] = lambda: (0.0, copied())
    for label, call in implementations(case, peers, training=True):
        forward, both = zip(*(_train_step(call, each) for each in sets))
        measured[label] = lambda forward=forward, both=both: (  # type: ignore[misc]
            _time(forward, device, 15, calls), _time(both, device, 15, calls)
        )  # fmt: skip
    rounds = [{label: measure() for label, measure in measured.items()} for _ in range(3)]
    times = {label: statistics.median(r[label][1] - r[label][0] for r in rounds) for label in measured}
    return _rows(name, "backward", times, moved)


def _train_step(call: Call, x: Inputs) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(forward alone, forward and backward) for the gradients of q, k and both weights."""
    q, k, q_weight, k_weight = leaves = [y.detach().requires_grad_() for y in x[:4]]
    grads = [torch.randn_like(y) for y in (q, k)]
    training = Inputs(q, k, q_weight, k_weight, *x[4:])

    def forward() -> Any:
        with torch.no_grad():
            return call(x)

    return forward, lambda: torch.autograd.grad(call(training), leaves, grads)


def _rows(name: str, direction: str, times: dict[str, float], moved: int) -> list[dict[str, Any]]:
    base = times["COPY"]
    return [
        {"case": name, "pass": direction, "by": by, "us": us, "x COPY": us / base, "TB/s": moved / us / 1e6}
        for by, us in times.items()
    ]


def _copy(moved: int, copies: int, calls: int, device: str) -> Callable[[], float]:
    if device != "cuda":
        x = torch.zeros(moved // 2, dtype=torch.uint8)
        return partial(_time, [x.clone], device, 1, 1)
    copy = copy_calls(moved, copies)
    return lambda: copy_time(copy, calls)


def _time(calls: Sequence[Callable[[], Any]], device: str, repeats: int, calls_per_graph: int) -> float:
    """Microseconds a call; where there is no GPU, as in the tests, of the host, which says nothing."""
    if device == "cuda":
        return gpu_time(calls, repeats, calls_per_graph)
    start = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - start) * 1e6 / len(calls)


def check(case: Case, x: Inputs) -> None:
    """What is timed is the chain: to bf16's rounding, of which the chain has one more than norm_rounding="none"."""
    want = eager(case)(x)
    for rounding in ("none", "once", "twice"):
        for got, right in zip(ours(case, norm_rounding=rounding)(x), want):
            torch.testing.assert_close(got.float(), right.float(), rtol=2**-6, atol=2**-5)


def plot(rows: list[dict[str, Any]], title: str, path: str) -> None:
    """Times over COPY, bars for each case, pass and implementation; eager torch, tens of COPYs, is left out."""
    from .report import bars

    shown = [
        {**row, "case": row["case"] + (" backward" if row["pass"] == "backward" else "")}
        for row in rows if row["by"] not in ("COPY", "torch eager")
    ]  # fmt: skip
    bars(shown, "case", "x COPY", "by", title, "time over a copy of what must be read and written", path, most=3.0)
