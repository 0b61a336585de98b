"""`bench thd`, packed batches of ever more sequences, and `bench train`, other shapes: forward and backward."""

from __future__ import annotations

import re
from functools import partial
from math import prod
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from jitrope import Packed, apply_rope, configure

from . import peers as others
from .harness import COPY, DEVICE, Call, Case, Times, angles, bf16, measure, twice
from .plots import Plot
from .report import AS_JSON, OUT, PEERS, SMOKE, Rows, app, numbers, show
from .sections import PLAIN, Row, Section, Table, grouped, of, short, span

TABLES = ("freqs", "freqs-half", "cos-sin")
GRID = "jitrope, grid_2d"


class Inputs(NamedTuple):
    """One bf16 tensor."""

    x: Tensor


def offsets(tokens: int, sequences: int, uneven: bool = False) -> Tensor:
    """int32 cu_seqlens; lengths differ by one at most, or are drawn at random."""
    if uneven:
        cuts = torch.randint(0, tokens + 1, (sequences - 1,), generator=torch.Generator().manual_seed(0)).sort().values
        cuts = torch.cat((torch.tensor([0]), cuts, torch.tensor([tokens])))
    else:
        cuts = torch.arange(sequences + 1) * tokens // sequences
    return cuts.int().to(DEVICE)


def times_of(shape: tuple[int, ...], ours: Call, peers: dict[str, Call]) -> dict[str, Times]:
    """Forward and backward of one tensor; COPY moves the bytes of either."""
    case = Case(lambda: Inputs(bf16(*shape)), {"jitrope": ours}, {COPY: 2 * 2 * prod(shape)}, peers)
    return measure(case, trained=["x"])


# ---- thd -------------------------------------------------------------------------------------------------


def grid_2d(call: Call, x: Any) -> Any:
    """A call with the grid that has a second axis over the sequences. Its backward has it too."""
    configure(launch="grid_2d")
    try:
        return call(x)
    finally:
        configure(launch=None)


def thd_rows(sequences: int, shape: tuple[int, int, int], kind: str, uneven: bool, with_peers: bool) -> Rows:
    """Of (tokens, heads, head_dim) in so many sequences, by TransformerEngine's angles, each twice, or other tables."""
    tokens, heads, _ = shape
    cu_seqlens, half = offsets(tokens, sequences, uneven), angles(tokens, shape[-1])
    tables = {"freqs": {"freqs": twice(half)[:, None, None]}, "freqs-half": {"freqs": half}}
    words: dict[str, Any] = tables.get(kind, {"cos": half.cos(), "sin": half.sin()})
    peers = others.packed(cu_seqlens, tokens, half) if with_peers else {}
    if with_peers and heads % 2 == 0:  # the tensor's heads, half of them as q and half as k
        pairs = others.packed_pairs(cu_seqlens, tokens, half)
        peers |= {label: partial(lambda pair, x: pair(*x.x.chunk(2, 1)), pair) for label, pair in pairs.items()}
    call: Any = partial(apply_rope, **words, positions=Packed(cu_seqlens))

    def ours(x: Any) -> Any:
        return call(x.x, None)[0]

    times = times_of(shape, ours, {GRID: partial(grid_2d, ours), **peers})
    return [
        {
            "sequences": sequences,
            "by": by,
            "fwd us": t.forward,
            "bwd us": t.backward,
            "fwd+bwd us": t.both,
            "x 2 COPY": t.both / times[COPY].both,
        }
        for by, t in times.items()
    ]


@app.command("thd")
def thd(
    sequences: Annotated[str, typer.Option(help="Numbers of sequences.")] = "1,8,32,128,512,1024,2401",
    tokens: Annotated[int, typer.Option(help="Tokens of the pack.")] = 65536,
    heads: Annotated[int, typer.Option(help="Heads of the one tensor.")] = 32,
    table: Annotated[str, typer.Option(help="freqs (each angle twice), freqs-half or cos-sin.")] = "freqs",
    uneven: Annotated[bool, typer.Option("--uneven/--even", help="Random lengths, or all the same.")] = False,
    peers: PEERS = True,
    smoke: SMOKE = False,
    as_json: AS_JSON = False,
    out: OUT = None,
) -> None:
    """Forward and backward of a packed tensor over the number of sequences in it, beside two copies."""
    if table not in TABLES:
        raise typer.BadParameter(f"--table is {table!r}; allowed are {', '.join(TABLES)}")
    counts, shape = numbers("--sequences", sequences), (tokens, heads, 128)
    if smoke:
        counts, shape = counts[:2], (64, 2, 8)
    steps = {f"{count} sequences": partial(thd_rows, count, shape, table, uneven, peers) for count in counts}
    show(steps, smoke, as_json, out, plot_thd)


# ---- train -----------------------------------------------------------------------------------------------


def padded(shape: tuple[int, ...], with_peers: bool) -> tuple[Call, dict[str, Call]]:
    """(S, B, H, D), with TransformerEngine's angles."""
    half = angles(shape[0], shape[-1])
    freqs = twice(half)[:, None, None]
    peers = others.sbhd(half) if with_peers else {}
    return lambda x: apply_rope(x.x, None, freqs=freqs, layout="sbhd")[0], peers


def packed(shape: tuple[int, ...], sequences: int) -> tuple[Call, dict[str, Call]]:
    """Very many tokens, in uneven sequences."""
    positions, freqs = Packed(offsets(shape[0], sequences, uneven=True)), twice(angles(shape[0], shape[-1]))
    return lambda x: apply_rope(x.x, None, freqs=freqs, positions=positions)[0], {}


def deepspeed(shape: tuple[int, ...], with_peers: bool) -> tuple[Call, dict[str, Call]]:
    """DeepSpeed's entry, with its full-width tables, beside the plain torch that it takes without ours."""
    from jitrope.integrations.deepspeed import apply_rotary_pos_emb

    half = angles(shape[0], shape[-1])
    cos, sin = (twice(table)[:, None, None].bfloat16() for table in (half.cos(), half.sin()))
    peers: dict[str, Call] = {
        "DeepSpeed's torch path": lambda x: x.x * cos + torch.cat((-x.x.chunk(2, -1)[1], x.x.chunk(2, -1)[0]), -1) * sin
    }
    return lambda x: apply_rotary_pos_emb(x.x, cos, sin), peers if with_peers else {}


def rows(name: str, shape: tuple[int, ...], make: Any, option: int) -> Rows:
    """Of a case of `command`."""
    times = times_of(shape, *make(shape, option))
    base = times[COPY].forward
    return [
        {
            "case": name,
            "by": by,
            "fwd us": t.forward,
            "bwd us": t.backward,
            "fwd x COPY": t.forward / base,
            "bwd x COPY": t.backward / base,
        }
        for by, t in times.items()
    ]


@app.command("train")
def command(peers: PEERS = True, smoke: SMOKE = False, as_json: AS_JSON = False) -> None:
    """Forward and backward of padded SBHD, of a million packed tokens, and of DeepSpeed's entry."""
    tokens, many = (64, 8) if smoke else (1_000_000, 100_000)
    long, wide, one = ((8, 2, 2, 16),) * 3 if smoke else ((4096, 1, 128, 128), (512, 32, 24, 128), (4096, 1, 32, 128))
    cases: dict[str, tuple[tuple[int, ...], Any, int]] = {
        f"sbhd {list(long)}": (long, padded, peers),
        f"sbhd {list(wide)}": (wide, padded, peers),
        f"{many} sequences in {tokens} tokens, 8 heads": ((tokens, 8, 128), packed, many),
        f"{many} sequences in {tokens} tokens, 32 heads": ((tokens, 32, 128), packed, many),
        f"DeepSpeed {list(one)}": (one, deepspeed, peers),
    }
    show({name: partial(rows, name, *case) for name, case in cases.items()}, smoke, as_json)


# ---- in examples/results/README.md -----------------------------------------------------------------------


def plot_thd(rows: Rows) -> Plot:
    """All but eager torch, which takes many times as long."""
    series = {"jitrope": "jitrope", GRID: GRID, "torch.compile": "torch.compile", "Liger": "Liger"}
    groups = grouped(rows, lambda row: f"{row['sequences']:,}", series, value="x 2 COPY")
    ours = span(group["jitrope"] for group in groups.values())
    message = f"Packed: {ours} times two copies, whatever the number of sequences"
    return Plot(message, "forward + backward over two COPYs", groups, "two COPYs", "sequences in the pack")


THD = Section(
    "Packed training",
    """
    GPU time of forward and backward of one packed tensor: 65,536 tokens, 32 heads of 128, angles in
    TransformerEngine's format (each twice, 65,536 rows), over two COPYs. The cost follows the tokens, whatever the
    number of sequences; one long sequence reads the whole table, 3 % of the bytes. torch.compile and eager torch take
    cosines that are gathered beforehand; so does Liger, with half of the heads as q and half as k. grid_2d is the
    launch with a block for each sequence and part of it, which jitrope takes for small packs alone.
    """,
    "jitrope bench thd",
    (
        Table(
            "sequences",
            lambda row: str(row["sequences"]),
            {
                "two COPYs, ms": of(lambda row: f"{row['fwd+bwd us'] / 1e3:.3f}", by=COPY),
                "jitrope": of("x 2 COPY", by="jitrope"),
                "grid_2d": of("x 2 COPY", by=GRID),
                **{peer: of("x 2 COPY", by=peer) for peer in ("TransformerEngine", "flash-attn", "Liger")},
                **{head: of("x 2 COPY", by=by) for by, head in PLAIN.items()},
            },
        ),
    ),
    plot_thd,
)


def passes(row: Row) -> str:
    """Forward / backward over COPY."""
    return f"{short(row['fwd x COPY'])} / {short(row['bwd x COPY'])}"


def short_case(row: Row) -> str:
    """The case without its number of tokens."""
    return re.sub(r" in \d+ tokens", "", row["case"])


def plot_train(rows: Rows) -> Plot:
    """Each pass as a series."""
    groups: dict[str, dict[str, float]] = {}
    for by in ("jitrope", "torch.compile"):
        for word, key in (("forward", "fwd x COPY"), ("backward", "bwd x COPY")):
            for name, group in grouped(rows, short_case, {by: f"{by}, {word}"}, value=key).items():
                groups.setdefault(name, {}).update(group)
    ours = span(value for group in groups.values() for name, value in group.items() if name.startswith("jitrope"))
    return Plot(f"Padded or packed, either pass: {ours} times a copy", "time over COPY", groups, "COPY")


TRAIN = Section(
    "Padded batches, very many sequences, DeepSpeed's entry",
    """
    GPU time of forward / backward of one tensor, each over COPY of its bytes: padded (S, B, H, D) with
    TransformerEngine's angles, sequences of random lengths, and DeepSpeed's function with its full-width tables,
    beside the paths that DeepSpeed takes without jitrope.
    """,
    "jitrope bench train",
    (
        Table(
            "forward / backward",
            lambda row: str(row["case"]),
            {
                "COPY, us": of("fwd us", by=COPY),
                **{by: of(passes, by=by) for by in ("jitrope", "TransformerEngine")},
                **{head: of(passes, by=by) for by, head in PLAIN.items()},
                **{by: of(passes, by=by) for by in ("DeepSpeed's torch path", "DeepSpeed's torchembed path")},
            },
        ),
    ),
    plot_train,
)
