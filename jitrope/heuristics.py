"""Problem -> plan: which kernel, and on what grid. Integers in, integers out; no torch, no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .spec import ACCESS_BYTES, ITEM_SIZES, RopeSpec, lanes

MAX_GRID_Y = 65_535
"""CUDA's limit on the second grid axis, in blocks."""

BLOCK_THREADS = 128
"""Threads a block aims at. Small blocks leave the short last wave of a 100 MB tensor cheap."""

MAX_BLOCK_THREADS = 256
"""Threads a block of a single token may grow to before it walks its heads in several steps."""

ACCESSES_IN_FLIGHT = 8
"""Loads that a thread issues before it uses the first one, at most."""

FEW_BLOCKS_PER_SM = 1
"""Blocks an SM: below it one token a block leaves the chip idle, and heads are tiled too."""

SMALL_BLOCK_THREADS = 64
"""Threads a block aims at when the grid is too small to fill the chip."""

EVEN_PACK = 1.25
"""max_seqlen x sequences over tokens up to which a packed batch counts as even."""

FEW_SEQUENCES = 8
"""Sequences up to which an even packed batch takes (position, sequence) blocks: no search."""


@dataclass(frozen=True)
class RopeProblem:
    """One call in integers and words.

    vec_limit, table_vec_limit: elements an access that the addresses and strides of q and k, and of
    the tables, allow (1: no alignment, or strided elements). num_sequences is 0 without cu_seqlens;
    max_seqlen is 0 where the caller did not say.
    """

    dtype: str
    table_dtype: str
    head_dim: int
    rotary_dim: int
    interleaved: bool
    conjugate: bool
    full_width: bool
    per_head: bool
    rounding: str
    in_place: bool
    index_dtype: str | None
    tokens: int
    heads: int
    num_sequences: int
    max_seqlen: int
    vec_limit: int
    table_vec_limit: int
    launch: str
    sm_count: int


@dataclass(frozen=True)
class Plan:
    """The kernel, its grid and block, and why."""

    spec: RopeSpec
    grid: tuple[int, int]
    block: int
    reason: str


@lru_cache(maxsize=4096)
def plan(problem: RopeProblem) -> Plan:
    """Choose the kernel and the grid of a call that has at least one token."""
    p = problem
    vec = widest_access(p)
    lane_count = lanes(p.head_dim, p.rotary_dim, p.interleaved, p.in_place, vec)
    loads = (1 if p.interleaved else 2) * max(1, (2 if p.interleaved else 1) // vec)
    tokens_per_block, rows, unroll = tile(p.heads, lane_count, loads, BLOCK_THREADS)
    blocks = -(-p.tokens // tokens_per_block)
    launch, reason = choose_launch(p, blocks)
    if launch == "grid_2d" and p.index_dtype is None:
        small = max(1, SMALL_BLOCK_THREADS // lane_count)
        tokens_per_block, rows, unroll = 1, min(small, p.heads), 1
        grid = (p.tokens, -(-p.heads // rows))
    elif launch == "grid_2d":
        longest = min(p.tokens, p.max_seqlen) if p.max_seqlen else p.tokens
        grid = (-(-longest // tokens_per_block), p.num_sequences + 1)
    else:
        grid = (blocks, 1)
    spec = RopeSpec(
        dtype=p.dtype,
        table_dtype=p.table_dtype,
        head_dim=p.head_dim,
        rotary_dim=p.rotary_dim,
        interleaved=p.interleaved,
        conjugate=p.conjugate,
        full_width=p.full_width,
        per_head=p.per_head,
        rounding=p.rounding,
        in_place=p.in_place,
        index_dtype=p.index_dtype,
        launch=launch,
        vec=vec,
        table_vec=table_access(p, vec),
        tokens_per_block=tokens_per_block,
        rows_per_token=rows,
        heads_per_thread=unroll,
    )
    return Plan(spec, grid, spec.threads, reason)


def choose_launch(p: RopeProblem, blocks: int) -> tuple[str, str]:
    """The launch and the rule that chose it; `blocks`: the blocks of a token-linear grid."""
    packed = p.index_dtype is not None
    fits = not packed or p.num_sequences < MAX_GRID_Y
    if p.launch == "grid_2d" and not fits:
        return "token_linear", f"{p.num_sequences} sequences pass the grid's limit of {MAX_GRID_Y} rows"
    if p.launch != "auto":
        return p.launch, f"launch={p.launch!r} was asked for"
    if packed:
        positions = p.num_sequences * p.max_seqlen
        if 0 < p.num_sequences <= FEW_SEQUENCES and 0 < positions <= EVEN_PACK * p.tokens:
            return "grid_2d", f"{p.num_sequences} even sequences: a (position, sequence) grid has no search"
        return "token_linear", "packed: cost follows the tokens, not sequences x max_seqlen"
    if blocks < FEW_BLOCKS_PER_SM * p.sm_count and p.heads > 1:
        return "grid_2d", f"{p.tokens} tokens leave some of {p.sm_count} SMs idle: heads are tiled too"
    return "token_linear", f"{blocks} token blocks fill {p.sm_count} SMs"


def widest_access(p: RopeProblem) -> int:
    """Elements an access of q and k: what addresses allow and every part of a head divides by."""
    vec = min(p.vec_limit, ACCESS_BYTES // ITEM_SIZES[p.dtype])
    while vec > 1:
        group = vec if p.interleaved else 2 * vec
        rest = 0 if p.in_place else p.head_dim - p.rotary_dim
        # halves: the second half must start on an access, which group | rotary_dim gives.
        if p.rotary_dim % group == 0 and rest % vec == 0:
            return vec
        vec //= 2
    return 1


def table_access(p: RopeProblem, vec: int) -> int:
    """Elements an access of the tables: a divisor of the pairs that one lane rotates."""
    pairs = max(vec, 2) // 2 if p.interleaved else vec
    table_vec = min(p.table_vec_limit, pairs, ACCESS_BYTES // ITEM_SIZES[p.table_dtype])
    while pairs % table_vec or (p.rotary_dim // 2) % table_vec:
        table_vec //= 2
    return table_vec


@lru_cache(maxsize=1024)
def tile(heads: int, lane_count: int, loads: int, threads: int) -> tuple[int, int, int]:
    """(tokens a block, head rows in parallel, heads a thread): the split that idles the fewest threads.

    `loads` is the number of accesses one head costs a thread; of equal splits the one with the most
    loads in flight wins.
    """
    best, best_score = (1, 1, 1), (0.0, 0)
    for unroll in range(1, max(1, ACCESSES_IN_FLIGHT // loads) + 1):
        if unroll > heads:
            break
        rows = min(-(-heads // unroll), max(1, MAX_BLOCK_THREADS // lane_count))
        tokens = max(1, threads // (lane_count * rows))
        block = -(-tokens * rows * lane_count // 32) * 32
        steps = -(-heads // (rows * unroll))
        useful = heads * lane_count * tokens / (block * unroll * steps)
        score = (round(useful, 2), unroll)
        if score > best_score:
            best, best_score = (tokens, rows, unroll), score
    return best
