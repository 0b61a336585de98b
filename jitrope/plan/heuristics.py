"""Problem -> plan: the kernel and its grid. Integers in, integers out; no tensor, no GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from ..base.errors import InvalidInput
from ..base.partition import number_of_chunks
from ..base.spec import ACCESS_BYTES, ITEM_SIZES, TILE_TOKENS, TILE_WIDTH
from ..stages.norm import KINDS as NORM_KINDS
from .spec import Compiled, RopeSpec

# The rules of the launch. `templates/README.md`, "What decides the launch", has the reasons.
WARP_THREADS = 32
MAX_GRID_Y = 65_535  # CUDA's limit on the second and the third grid axis, in blocks
SHARED_BYTES = 48 * 1024  # the most shared memory of a block

# Threads of a block.
BLOCK_THREADS = 256  # the target; a block takes several tokens if the heads of one need fewer
MAX_BLOCK_THREADS = 768  # the most
MAX_CONVERTING_THREADS = 160  # without a norm, into caches of another dtype
SMALL_BLOCK_THREADS = 128  # the target if heads are tiled
FEW_TILED_THREADS_PER_SM = 896  # up to so many, without a norm; above, the target is BLOCK_THREADS
SMALL_ACCESS_BYTES = 8  # then the bytes of an access

# The grid over heads.
FEW_THREADS_PER_SM = 1280  # below so many, counted with small accesses, it is over heads
FEW_CACHED_THREADS_PER_SM = 1600  # the same for a write to a cache without a norm
FEW_PACKED_HEADS = 8192  # up to so many tokens x heads of even packed sequences, it is over sequences
LARGE_THREADS_PER_SM = 5120  # from so many on, tiles of heads come first: blocks side by side read memory side by side
MAX_UNEVEN = 2  # even: sequences x max_seqlen are at most so many times the tokens

# A norm of each head.
NORM_HEADS_PER_THREAD = 2  # neighbouring heads of a thread, also in its gradient
FEW_ELEMENTS = 8  # a thread with so few of each head takes twice as many heads
NORM_THREADS_PER_SM = 640  # so each has enough registers
MAX_NORM_THREADS_PER_SM = 768  # with those that idle; if angles are shared; or with neither a norm nor a cache
SHORT_THREADS_PER_SM = 512  # with wide angles, sines or fp64
MIN_RING_ACCESS = 8  # bytes of an access, at least, of a block whose next heads are on their way (`ring.cuh`)
RING_BYTES = 40 * 1024  # the most shared memory for those and for the stages together
FAST_MEMORY = 4.0  # TB/s by its clock and width: rings walk to the end, and blocks of large calls have parts of tokens
SHORT_WALK = 2  # groups of tokens that they walk over below it

# A norm across heads.
ROW_BLOCK_THREADS = 128  # the target
MAX_ROW_THREADS = 512  # of a row of q or of k
MAX_ROW_ACCESSES = 24  # of a row that a thread holds
MAX_GRADIENT_ACCESSES = 4  # the same for the gradient, which also holds the output's gradient and sums

# The gradient of a norm, whose blocks walk over the tokens.
GRADIENT_BLOCK_THREADS = 192  # the target
GRADIENT_THREADS_PER_SM = 384
ROW_GRADIENT_THREADS_PER_SM = 256  # across heads, where a thread holds sums of several heads


@dataclass(frozen=True)
class RopeProblem(Compiled):
    """One call in integers and words."""

    batch: int
    tokens: int
    heads: int  # of q and k, and of v where it is copied
    q_heads: int
    sequences: int  # 0 without cu_seqlens
    max_seqlen: int  # the whole sequence's, also under context parallelism; 0: not given
    vec_limit: int  # the most elements of an access, by addresses and strides of q and k; 1: not aligned, or strided
    table_vec_limit: int  # the same of the tables
    table_step_limit: int  # 2 if the tables use every other element
    weight_vec_limit: int  # of a norm's weights
    launch: str
    sm_count: int
    batch_invariant: bool = False  # a norm must add in an order that follows from the head alone
    memory_speed: float = 0.0  # TB/s of the GPU's memory by its clock and width; 0: not known


class Plan(NamedTuple):
    """The kernel and its grid."""

    spec: RopeSpec
    grid: tuple[int, ...]


_COUNTS = ("heads_per_thread", "blocks_per_sm", "tokens_per_block", "heads_per_block")
_SMALLEST: dict[str, Any] = {**dict.fromkeys(_COUNTS, 1), "one_step": False, "ring": False}


@lru_cache(maxsize=4096)
def plan(p: RopeProblem) -> Plan:
    """Choose the kernel and the grid of a call that has at least one token."""
    launch = choose_launch(p)
    tiled = launch == "grid_2d" and not by_sequence(p)
    of_call: dict[str, Any] = {field.name: getattr(p, field.name) for field in fields(Compiled)}
    spec = RopeSpec(**of_call, **accesses(p, tiled), **_SMALLEST, launch=launch, one_row=False, tiles=0)
    if p.projected:
        return _projection(p, spec)
    large = small_threads(p) >= LARGE_THREADS_PER_SM * p.sm_count or p.heads > MAX_GRID_Y
    tiled |= (part := part_of_token(p, spec, large)) > 0
    tiles = (1 if large and launch == "token_linear" else 2) if tiled or p.v_dim else 0
    # one_row: elsewhere the division is free, and this saves a kernel
    spec = replace(spec, tiles=tiles, one_row=tiled and p.batch == 1)
    if p.norm and not (tiled or p.across_heads or p.per_head):
        # A thread's heads are all of q, all of k or all of v. The token's last thread may have fewer. In a gradient a
        # thread may have one of k and one of v. Beside a k_pe_cache it has one, because the registers of two spill.
        of_q = p.q_heads // (1 + p.gated)
        others = p.heads if p.gradient else (p.heads - p.q_heads) // (1 + p.v_per_k) * p.copy_v + bool(p.pe_dtype)
        few = spec.chunks * spec.chunk <= FEW_ELEMENTS and not p.gradient
        spec = replace(spec, heads_per_thread=math.gcd(of_q, others, NORM_HEADS_PER_THREAD * (2 if few else 1)))
    length, second = p.tokens, 1  # tokens, and blocks along the other axis of the grid
    if p.across_heads:
        tokens, heads = _row_tile(p, spec)
    elif p.gradient:
        tokens, heads = tile(p.heads // spec.heads_per_thread, spec.team, GRADIENT_BLOCK_THREADS)
        second = -(-p.heads // (heads * spec.heads_per_thread))
    elif part:
        tokens, heads, second = max(1, SMALL_BLOCK_THREADS // (part * spec.lanes)), part, -(-p.heads // part)
    elif tiled or p.v_dim:
        sums = int(p.v_dim > 0 and p.inverse)  # a tile of its own
        few = p.tokens * p.heads * spec.team <= FEW_TILED_THREADS_PER_SM * p.sm_count and not p.norm
        most = max(1, (SMALL_BLOCK_THREADS if tiled and (few or p.v_dim) else BLOCK_THREADS) // spec.team)
        warp = 1 if tiled else min(most, WARP_THREADS // math.gcd(WARP_THREADS, spec.rotary_lanes))
        tokens, heads = 1, min(p.heads, most // warp * warp)
        second = sums + -(-(p.heads - sums) // heads)
    else:
        tokens, heads = _tile_with_stages(p, spec)
        if launch == "grid_2d":  # a longer sequence than this is walked in several steps
            length = min(length, longest_share(p) or -(-p.tokens // max(1, p.sequences)))
            second = p.sequences + 1
    one_step = p.gradient or tiled or p.v_dim > 0 or p.across_heads or heads * spec.heads_per_thread >= p.heads
    spec = replace(spec, tokens_per_block=tokens, heads_per_block=heads, one_step=one_step)
    blocks = -(-length // tokens)
    if p.gradient or (p.norm and not (tiled or p.across_heads)):
        spec = replace(spec, blocks_per_sm=_blocks_per_sm(p, spec), ring=has_ring(spec))
        if p.gradient or spec.ring:
            blocks = _walks(p, spec, blocks, max(1, p.sm_count * spec.blocks_per_sm // second))
    rows = -(-blocks // MAX_GRID_Y)
    return Plan(spec, (second, -(-blocks // rows), rows) if tiles == 1 else (blocks, second))


def _projection(p: RopeProblem, spec: RopeSpec) -> Plan:
    """The kernel of a projection, whose blocks walk over tiles in pairs."""
    spec = replace(spec, heads_per_thread=TILE_WIDTH // p.head_dim, tokens_per_block=TILE_TOKENS)
    pairs = -(-p.tokens // (2 * TILE_TOKENS)) * -(-p.heads // spec.heads_per_thread)
    return Plan(spec, (2 * max(1, min(pairs, p.sm_count // 2)), 1))


def _row_tile(p: RopeProblem, spec: RopeSpec) -> tuple[int, int]:
    """The tile of a norm across heads: of each token as many heads at a time as threads can hold."""
    warp = max(1, WARP_THREADS // spec.team)  # heads of a warp
    steps = (MAX_GRADIENT_ACCESSES if p.gradient else MAX_ROW_ACCESSES) // (spec.chunks * spec.chunk // spec.vec)
    heads = warp * -(-max(p.row_heads) // (warp * max(1, steps)))
    heads = min(heads, max(warp, MAX_ROW_THREADS // spec.team))
    tokens = 1 if p.gradient else max(1, ROW_BLOCK_THREADS // (len(p.row_heads) * heads * spec.team))
    while shared_by_stages(replace(spec, tokens_per_block=tokens, heads_per_block=heads)) > SHARED_BYTES:
        heads = -(-heads // (2 * warp)) * warp
    return tokens, heads


def _tile_with_stages(p: RopeProblem, spec: RopeSpec) -> tuple[int, int]:
    """The tile of the most threads whose stages fit in a block's shared memory."""
    most = MAX_CONVERTING_THREADS if p.cached and p.kv_out != p.dtype and not p.norm else MAX_BLOCK_THREADS
    while True:
        tokens, heads = tile(-(-p.heads // spec.heads_per_thread), spec.team, most)
        if shared_by_stages(replace(spec, tokens_per_block=tokens, heads_per_block=heads)) <= SHARED_BYTES:
            return tokens, heads
        most //= 2


def part_of_token(p: RopeProblem, spec: RopeSpec, large: bool) -> int:
    """The heads of a block that takes a part of a token, and leaves the others to its neighbours. 0: it takes all."""
    splits = large and p.memory_speed >= FAST_MEMORY and {p.q_out, p.kv_out} == {p.dtype}
    threads, least = p.heads * spec.lanes, 2 * SMALL_BLOCK_THREADS if splits else MAX_BLOCK_THREADS + 1
    if p.norm or p.v_dim or spec.launch != "token_linear" or threads < least:
        return 0
    even = math.gcd(p.heads, max(1, SMALL_BLOCK_THREADS // spec.lanes))
    whole = even * spec.lanes % (2 * WARP_THREADS) == 0  # smaller parts find the same angles too often
    return even if whole else (threads > MAX_BLOCK_THREADS) * max(1, BLOCK_THREADS // spec.lanes)


def _blocks_per_sm(p: RopeProblem, spec: RopeSpec) -> int:
    """The blocks of a norm that must fit on an SM."""
    if p.gradient:
        return max(1, (ROW_GRADIENT_THREADS_PER_SM if p.across_heads else GRADIENT_THREADS_PER_SM) // spec.threads)
    short = ((p.full_width or p.freqs) and not spec.shares_angles) or p.rounding == "complex128"  # of registers
    most = SHORT_THREADS_PER_SM if short else MAX_NORM_THREADS_PER_SM
    alone = p.norm_kind not in NORM_KINDS and not spec.cached
    threads = most if spec.shares_angles or alone else NORM_THREADS_PER_SM  # without those that idle
    return max(1, min(threads * spec.team // spec.lanes, most) // spec.threads)


def _walks(p: RopeProblem, spec: RopeSpec, groups: int, at_once: int) -> int:
    """The number of blocks for these groups of tokens. at_once: the blocks that fit on the GPU."""
    slow_start = spec.transforms or spec.dynamic or spec.team > spec.lanes
    sums = spec.gradient and (spec.weight_dtype is not None or spec.biased)
    stays = slow_start or sums or not spec.ring or p.memory_speed >= FAST_MEMORY
    return min(groups, at_once if stays else max(at_once, -(-groups // SHORT_WALK)))


def has_ring(spec: RopeSpec) -> bool:
    """Whether the next heads of a block with a norm are on their way while it works on others.

    Some kernels have no registers for it: the gradients of biases, of rows across heads and with angles that are not
    shared, and gates.
    """
    item, angles = ITEM_SIZES[spec.dtype], spec.freqs and not spec.shares_angles
    full = spec.gated or (spec.gradient and (spec.biased or spec.across_heads or angles))
    of_thread = (2 if spec.gradient else 1) * spec.heads_per_thread * spec.chunks * spec.chunk * item
    fits = spec.threads * of_thread <= RING_BYTES - shared_by_stages(spec)
    return fits and not full and spec.one_step and spec.vec * item >= MIN_RING_ACCESS


def shared_by_stages(spec: RopeSpec) -> int:
    """Bytes of shared memory that exchanged elements, the scales of groups and shared angles take at most."""
    teams = spec.threads // spec.team
    exchanges = spec.norm and (spec.transforms or spec.reorders)
    sums = 3 * spec.threads // 8 + 64 if spec.across_heads else 0  # three of each warp at most
    exchanged = teams * spec.head_dim * 4 + sums if exchanges else 0
    angles = 4 * spec.rotary_dim * spec.tokens_per_block * 4 if spec.shares_angles else 0
    return exchanged + angles + (teams * spec.head_dim // spec.vec * 4 if spec.dynamic else 0)


def choose_launch(p: RopeProblem) -> str:
    """The launch: over tokens alone, or also over heads, or over the sequences of a packed batch."""
    # Whole rows; a walk; a full axis.
    linear = p.across_heads or p.gradient or p.projected or (by_sequence(p) and (p.v_dim or p.sequences >= MAX_GRID_Y))
    if linear or p.launch != "auto":
        return "token_linear" if linear else p.launch
    if by_sequence(p):  # the cost follows the tokens, not sequences x max_seqlen, but a search takes long for few
        even = 0 < p.sequences * longest_share(p) <= MAX_UNEVEN * p.tokens
        return "grid_2d" if even and p.tokens * p.heads <= FEW_PACKED_HEADS else "token_linear"
    few = FEW_CACHED_THREADS_PER_SM if p.cached and not p.norm else FEW_THREADS_PER_SM
    return "grid_2d" if small_threads(p) < few * p.sm_count and p.heads > 1 else "token_linear"


def small_threads(p: RopeProblem) -> int:
    """The threads of a call, each with two small accesses."""
    return p.tokens * p.heads * (p.rotary_dim + p.copied) * ITEM_SIZES[p.dtype] // (2 * SMALL_ACCESS_BYTES)


def by_sequence(p: RopeProblem) -> bool:
    """Whether the grid depends on the sequences of a packed batch. With a norm each thread searches for its own."""
    return p.cu_seqlens_dtype is not None and not p.norm


def longest_share(p: RopeProblem) -> int:
    """The most tokens of a sequence of max_seqlen on one rank. Chunks differ by at most one token."""
    of = number_of_chunks(p.cp_size, "dual_chunk")
    return of // p.cp_size * -(-p.max_seqlen // of)


def accesses(p: RopeProblem, few: bool) -> dict[str, Any]:
    """The widest accesses of heads, tables and weights that addresses and the head allow. few: the call has few heads.

    A thread holds one or two runs of neighbouring elements, and an access of the tables a part of its angles.
    """
    vec = min(p.vec_limit, (SMALL_ACCESS_BYTES if few else ACCESS_BYTES) // ITEM_SIZES[p.dtype])
    one_order = p.batch_invariant and p.norm_kind in NORM_KINDS and not (p.gradient or p.given_means)
    if one_order:  # by the head alone
        vec = math.gcd(p.head_dim, ACCESS_BYTES // ITEM_SIZES[p.dtype])
    elif p.norm:  # torch sums in groups of four neighbours
        vec = max(vec, min(p.vec_limit, 4))
    vec = math.gcd(vec, p.copied, p.rotary_offset, p.v_dim, p.rotary_dim if p.keeps_pairs else p.rotary_dim // 2)
    if one_order and vec > p.vec_limit:
        must = f"with batch_invariant and a norm, addresses and strides must be multiples of {vec} elements"
        raise InvalidInput(f"{must}, and those of q, k, v or a result are of {p.vec_limit}")
    chunk = max(vec, 2) if p.keeps_pairs else vec
    chunks = 2 if p.rotary_dim % (2 * chunk) == 0 else 1
    run = chunk // 2 if p.keeps_pairs and not p.full_width else chunk
    step = p.rotary_dim // (2 if p.full_width or not p.keeps_pairs else 4)  # to the thread's second run
    members = 2 if p.full_width and p.interleaved else 1  # of a pair, neighbours
    table_vec = min(p.table_vec_limit, ACCESS_BYTES // (ITEM_SIZES[p.table_dtype] * p.table_step_limit))
    ends = [n * members for n, (x, y) in enumerate(pairwise(p.axis_of_pair), 1) if x != y]  # neighbours of one axis
    table_vec = math.gcd(table_vec, run, step if chunks == 2 else 0, *ends)
    of_table = {"table_vec": table_vec, "table_step": p.table_step_limit if table_vec > 1 else 1}
    return {"vec": vec, "chunks": chunks, "weight_vec": math.gcd(vec, p.weight_vec_limit), **of_table}


def tile(heads: int, lanes: int, block_threads: int = MAX_BLOCK_THREADS) -> tuple[int, int]:
    """(tokens of a block, heads of each at a time): whole tokens, with the fewest even steps for their heads."""
    steps = -(-heads // max(1, block_threads // lanes))
    at_once = -(-heads // steps)
    return max(1, min(BLOCK_THREADS, block_threads) // (at_once * lanes)), at_once
