"""Problem -> plan: the kernel and its grid. Integers in, integers out; no torch, no GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

from ..base.errors import InvalidInput
from ..base.spec import ACCESS_BYTES, ITEM_SIZES
from .options import NORM_KINDS, rotated
from .partition import number_of_chunks
from .spec import Compiled, RopeSpec

MAX_GRID_Y = 65_535
"""CUDA's limit on the second grid axis, in blocks."""

BLOCK_THREADS = 256
"""The target number of threads in a block. A block takes several tokens if the heads of one need fewer."""

MAX_BLOCK_THREADS = 768
"""The most threads in a block. Memory traffic is fastest when a block takes all heads of a token at once, with one
access for each thread: on an H100, (1, 4608, 24 + 24, 128) bf16 halves, a block of all 48 heads (384 threads) takes
1.036 x the copy, 24 heads twice in flight 1.049 x, 16 heads three times 1.051 x. Above 768 threads full-width tables
and packed input spill, because they need 80 registers a thread."""

MAX_WAITING_THREADS = 512
"""The same, without a norm, if threads wait for ids or slots, or convert: they have so many registers that of larger
blocks one or two fit on an SM. H100, x the copy, a block of all heads / of half, in two steps: bf16 by ids (1, 8192,
64 + 8, 128) 1.12 / 1.02, (1, 4096, 64 + 64, 128) 1.06 / 1.02; (1, 4096, 64 + 8 + 8, 128) into a cache 1.12 / 1.06, of
fp8 1.38 / 1.07. Smaller blocks are no faster: (1, 4096, 32 + 32, 128) by ids, 512 / 256 / 160 threads 1.01 / 1.03 /
1.05."""

MAX_CONVERTING_THREADS = 160
"""The same for caches of another dtype. H100, x the copy, 512 / 160 threads: (1, 4096, 32 + 8 + 8, 128) into fp8 1.12 /
1.08, with q in fp8 too 1.13 / 1.06; 512 tokens of 64 + 8 + 8, hot, 1.26 / 1.08, but 256 tokens 1.10 / 1.18. Without a
cache it is slower: FLUX's q and k in fp8 1.00 / 1.02."""

LATENT_BLOCK_THREADS = 192
"""The target with latent attention, where heads are always tiled, because there are hundreds. A tile has so many heads
that whole warps rotate. H200, x the copy, (1, 4096, 128 + 128, 192) bf16 with 64 rotated: 192
threads forward 1.11, backward 1.21; 96 1.15, 1.25; 384 1.11, 1.29; 16 + 16 heads 1.00, 1.34; 1.04, 1.29; 1.04, 1.80."""

FEW_THREADS_PER_SM = 1280
"""Heads are tiled too below this many threads an SM, counted with accesses of SMALL_ACCESS_BYTES. H100 (132 SMs), heads
of 128, bf16, position_ids, hot, in place, token_linear / grid_2d: 32 + 8 heads: 1 token 1.34 / 1.03 us, 64 1.52 / 1.34,
192 1.97 / 1.84, 256 2.27 / 2.15, 384 2.84 / 2.93; 64 + 8 heads: 4 tokens 1.75 / 1.09, 64 1.85 / 1.55, 132 2.23 / 2.07,
192 2.67 / 2.70."""

FEW_CACHED_THREADS_PER_SM = 1600
"""The same for a KV write without a norm, whose threads wait for slots. H100, hot, 256 tokens of 32 + 8 + 8 heads,
token_linear / grid_2d: 2.50 / 2.41 us, of 64 + 8 + 8 3.06 / 3.84."""

SMALL_BLOCK_THREADS = 128
SMALL_ACCESS_BYTES = 8
"""The target number of threads in a block, and the bytes of an access, if heads are tiled. A warp's instructions take
longest there, so more threads do less work each. The same calls with 16 bytes: 1 token 1.10 us, 64 1.64, 256 2.81;
with 256 threads 1.05, 1.42, 2.38."""

WARP_THREADS = 32

ROW_BLOCK_THREADS = 128
"""The target number of threads in a block of a norm across heads. H100, (1, 32760, 12 + 12, 128) bf16: 1.050 x the
copy, 64 threads 1.053, 256 1.135."""

MAX_ROW_THREADS = 512
MAX_ROW_ACCESSES = 24
MAX_GRADIENT_ACCESSES = 4
"""The most accesses of a row of q or k that a thread holds in a norm across heads. A wider row has more threads, as
long as rows of q and of k fit in a block. 24 accesses of 16 bytes take 96 registers. The gradient kernel also holds as
many accesses of the output's gradient, and a sum for each element. Left out, because sums would have another order and
results other bits: threads with one head each, and two blocks of them on an SM. H200, x the copy, one head / 4
accesses, (1, 32760, 12 + 12, 128) 1.59 / 1.62, (1, 4992, 32 + 32, 64) 1.82 / 2.00, (1, 8192, 40 + 40, 128) 1.42 /
1.38."""

NORM_HEADS_PER_THREAD = 2
FEW_ELEMENTS = 8
NORM_THREADS_PER_SM = 640
MAX_NORM_THREADS_PER_SM = 768
SHORT_THREADS_PER_SM = 512
"""With a norm, a thread takes several neighbouring heads, with one set of weights and angles, and twice as many if it
has FEW_ELEMENTS of each. The threads on an SM are limited so that each has enough registers; the limit is higher if
some threads of a head idle, and lower with wide angles, sines or fp64. H200, x the copy, (1, 4096, 32 + 8, 128) halves
rounded twice / (1, 4608, 24 + 24, 128) interleaved rounded twice: 640 threads 1.08 / 1.08, 800, which spill, 1.27 /
1.15. (1, 4096, 16 + 16, 80): 819 threads 1.29, 1024, which spill, 1.63. Heads of 88 with LayerNorm: four heads 1.80,
two 1.96. Where threads share angles, and where there is neither a norm nor a cache, MAX_NORM_THREADS_PER_SM run: H100,
576 / 768 threads, Qwen3-VL's prefill 1.37 / 1.26, when a token's slot was loaded a token ahead; 512 / 768, DeepSeek's
indexer 1.28 / 1.22. Others are slower with them: norm and a cache in bf16 1.09 / 1.13. On an H200 too 640 are best:
(1, 4096, 64 + 8, 128) by ids into a cache 1.16 where 576 made it 1.50, because they leave one block."""

MIN_RING_ACCESS = 8
SHARED_BYTES = 48 * 1024
RING_BYTES = 40 * 1024
"""The most shared memory of a block, and the most of it for its stages and its next heads together, which are on their
way while it works on others (`ring.cuh`). Accesses have MIN_RING_ACCESS bytes at least. Such blocks walk the tokens.
H200, x the copy, with / without, and as many blocks as fit on the GPU at once: the calls above 1.09 / 1.19 and 1.10 /
1.18, the first one by ids and not rounded 1.08 / 1.37, by rows 1.08 / 1.09, its gradient 1.11 / 1.25. Two tokens on
their way are slower than one: by rows 1.16, when one took 1.10. Without a norm a thread needs few registers, so enough
threads run to hide the latency, and a walk costs more than it gains: rope of the same tokens 1.07 / 1.04, of 1024
packed sequences 1.10 / 1.04."""

FAST_MEMORY = 4.0
SHORT_WALK = 2
"""Below FAST_MEMORY, in TB/s by the memory's clock and width, a block of such a norm walks over so many groups of
tokens, and the GPU starts the next block where one ends. SMs are not equally fast, so blocks that walk to the end wait
for the slowest. H100, x the copy, walks to the end / over 4 / 3 / 2 groups / no walk: (1, 8192, 32 + 8, 128) 1.11 /
1.06 / 1.05 / 1.04 / 1.04, by ids 1.12 / 1.06 / 1.06 / 1.04 / 1.15; (1, 4608, 24 + 24, 128) 1.08 / 1.05 / 1.04 / 1.04 /
1.03; (1, 4096, 16 + 8, 256) with v 1.12 / - / 1.08 / 1.06 / 1.06. A block that takes long to begin walks to the end,
here beside 3 / 2 groups: with idle threads, heads of 72, 1.15 / 1.20 / 1.20; with a transform 1.14 / - / 1.22; with
scales, Qwen3-VL's prefill, 1.30 / 1.46 / 1.48. So does a gradient with weights, whose gradients it sums: the first call
1.11, with twice as many blocks 1.16. Without weights CogView4's takes 1.04, with four times as many blocks 1.00. On an
H200 no number of groups is better for all, to the end / 8 / 4 / 2: (1, 4096, 32 + 8, 128) 1.08 / 1.08 / 1.08 / 1.09,
behind the rotation 1.10 / 1.10 / 1.11 / 1.17; (1, 4096, 16 + 8, 256) with v 1.09 / 1.10 / 1.11 / 1.16; (1, 4352, 32 +
32, 128) 1.08 / 1.26 / 1.16 / 1.16; (1, 4096, 16 + 2, 256), 64 rotated, 1.16 / 1.12 / 1.14 / 1.20."""

GRADIENT_HEADS_PER_THREAD = 2
GRADIENT_BLOCK_THREADS = 192
GRADIENT_THREADS_PER_SM = 384
ROW_GRADIENT_THREADS_PER_SM = 256
"""The same for the gradient of a norm, whose blocks walk over the tokens and sum weights' gradients. H100, x the copy
of all bytes read and written, the same calls: 1.20 / 1.20 (the kernel alone 1.09 / 1.12), 480 threads 1.21 / 1.37; one
head with 480 1.29 / 1.20. Across heads a thread holds sums of several heads, and 384 threads spill. A block takes
another token only within its target, so 288 to 384 threads run where blocks of 256 leave 256; that is not timed."""

FEW_PACKED_HEADS = 8192
"""Up to this many tokens x heads of a packed batch, a second grid axis over the sequences is faster than the search, if
lengths are even. H100, angles, bf16, head size 128, 4 sequences, token_linear / grid_2d: 64 tokens of 8 heads 2.71 /
2.50 us, 64 of 32 2.86 / 2.64, 256 of 32 3.95 / 3.56, 1024 of 8 3.88 / 3.61; above it 1024 of 32 7.37 / 7.85, 4096 of 8
7.08 / 7.82."""

MAX_UNEVEN = 2
"""The bound on sequences x max_seqlen over tokens for that grid, because uneven lengths waste blocks."""


@dataclass(frozen=True)
class RopeProblem(Compiled):
    """One call in integers and words."""

    batch: int
    tokens: int
    heads: int  # of q and k, and of v where it is copied
    q_heads: int
    num_sequences: int  # 0 without cu_seqlens
    max_seqlen: int  # the whole sequence's, also under context parallelism; 0: not given
    vec_limit: int  # the most elements of an access, by addresses and strides of q and k; 1: not aligned, or strided
    table_vec_limit: int  # the same of the tables
    table_step_limit: int  # 2 if the tables use every other element
    weight_vec_limit: int  # of a norm's weights
    launch: str
    sm_count: int
    batch_invariant: bool = False  # a norm must add in an order that follows from the head alone
    memory_speed: float = 0.0  # TB/s of the GPU's memory by its clock and width; 0: not known


@dataclass(frozen=True)
class Plan:
    """The kernel, its grid and block, and the reason for them."""

    spec: RopeSpec
    grid: tuple[int, int]
    block: int
    reason: str


_SMALLEST: dict[str, Any] = dict.fromkeys(
    ("table_vec", "table_step", "heads_per_thread", "blocks_per_sm", "tokens_per_block", "heads_per_block"), 1
)


@lru_cache(maxsize=4096)
def plan(problem: RopeProblem) -> Plan:
    """Choose the kernel and the grid of a call that has at least one token."""
    p = problem
    launch, reason = choose_launch(p)
    tiled = launch == "grid_2d" and not by_sequence(p)
    vec, chunks = widest_access(p, tiled)
    of_call: dict[str, Any] = {field.name: getattr(p, field.name) for field in fields(Compiled)}
    chosen: dict[str, Any] = {"vec": vec, "chunks": chunks, "weight_vec": math.gcd(vec, p.weight_vec_limit)}
    spec = RopeSpec(**of_call, **chosen, **_SMALLEST, launch="token_linear", one_step=False, one_row=False, ring=False)
    table_vec = table_access(p, spec)
    spec = replace(spec, table_vec=table_vec, table_step=p.table_step_limit if table_vec > 1 else 1)
    if p.across_heads or p.gradient:
        return _plan_rows(p, spec, reason)
    if p.norm and not tiled:
        most = NORM_HEADS_PER_THREAD * (2 if spec.chunks * spec.chunk <= FEW_ELEMENTS else 1)
        k_heads = (p.heads - p.q_heads) // (1 + p.v_per_k * p.copy_v)  # a thread's heads are all of q, of k or of v
        spec = replace(spec, heads_per_thread=1 if p.per_head else math.gcd(p.q_heads, k_heads, most))
    tokens, heads = _tile_with_stages(p, spec)
    if tiled or p.v_dim:
        sums = int(p.v_dim > 0 and p.inverse)  # a tile of its own
        most = max(1, (SMALL_BLOCK_THREADS if tiled else LATENT_BLOCK_THREADS) // spec.team)
        warp = 1 if tiled else min(most, WARP_THREADS // math.gcd(WARP_THREADS, spec.rotary_lanes))
        tokens, heads = 1, min(p.heads, most // warp * warp)
        grid = (p.tokens, sums + -(-(p.heads - sums) // heads))
    elif launch == "grid_2d":
        # A longer sequence than this is walked in several steps.
        length = longest_share(p) or -(-p.tokens // max(1, p.num_sequences))
        grid = (-(-min(p.tokens, length) // tokens), p.num_sequences + 1)
    else:
        grid = (-(-p.tokens // tokens), 1)
    one_step = tiled or p.v_dim > 0 or heads * spec.heads_per_thread >= p.heads
    one_row = tiled and p.batch == 1  # elsewhere the division is free, and this saves a kernel
    spec = replace(spec, launch=launch, one_step=one_step, one_row=one_row)
    spec = replace(spec, tokens_per_block=tokens, heads_per_block=heads)
    short = ((p.full_width or p.freqs) and not spec.shares_angles) or p.rounding == "complex128"  # of registers
    if p.norm and not tiled:
        most = SHORT_THREADS_PER_SM if short else MAX_NORM_THREADS_PER_SM
        alone = p.norm_kind not in NORM_KINDS and not spec.cached
        threads = most if spec.shares_angles or alone else NORM_THREADS_PER_SM
        spec = replace(spec, blocks_per_sm=_blocks_per_sm(spec, threads, most), ring=has_ring(spec))
        if spec.ring:
            grid = (_walks(p, spec, grid[0], p.sm_count * spec.blocks_per_sm), 1)
    return Plan(spec, grid, spec.threads, reason)


def _most_threads(p: RopeProblem) -> int:
    """The most threads of a block."""
    converts = p.dtype != p.q_out or p.dtype != p.kv_out
    if p.norm or not (converts or p.cached or p.position_ids_dtype):
        return MAX_BLOCK_THREADS
    return MAX_CONVERTING_THREADS if p.cached and p.dtype != p.kv_out else MAX_WAITING_THREADS


def _tile_with_stages(p: RopeProblem, spec: RopeSpec) -> tuple[int, int]:
    """The tile of the most threads whose stages fit in a block's shared memory."""
    most = _most_threads(p)
    while True:
        tokens, heads = tile(p.heads // spec.heads_per_thread, spec.team, most)
        if shared_by_stages(replace(spec, tokens_per_block=tokens, heads_per_block=heads)) <= SHARED_BYTES:
            return tokens, heads
        most //= 2


def _blocks_per_sm(spec: RopeSpec, threads: int, most: int) -> int:
    """Blocks of a norm with so many threads on an SM, without those that idle, and at most so many with them."""
    return max(1, min(threads * spec.team // spec.lanes, most) // spec.threads)


def _walks(p: RopeProblem, spec: RopeSpec, groups: int, at_once: int) -> int:
    """The number of blocks for these groups of tokens. at_once: the blocks that fit on the GPU."""
    slow_start = spec.hadamard or spec.dynamic or spec.team > spec.lanes
    sums = spec.gradient and (spec.weight_dtype is not None or spec.biased)
    stays = slow_start or sums or not spec.ring or p.memory_speed >= FAST_MEMORY
    return min(groups, at_once if stays else max(at_once, -(-groups // SHORT_WALK)))


def _plan_rows(p: RopeProblem, spec: RopeSpec, reason: str) -> Plan:
    """The plan of a norm across heads, and of a norm's gradient, whose blocks walk over many tokens."""
    tiles = 1
    if not p.across_heads:
        # One head may be of k and the next of v.
        of_thread = 1 if p.per_head else math.gcd(p.q_heads, p.heads, GRADIENT_HEADS_PER_THREAD)
        spec = replace(spec, heads_per_thread=of_thread)
        teams = p.heads // spec.heads_per_thread
        tokens, heads = tile(teams, spec.team, GRADIENT_BLOCK_THREADS)
        tiles = -(-teams // heads)
    else:
        warp = max(1, WARP_THREADS // spec.team)  # heads of a warp
        accesses = spec.chunks * spec.chunk // spec.vec
        steps = (MAX_GRADIENT_ACCESSES if p.gradient else MAX_ROW_ACCESSES) // accesses
        heads = warp * -(-max(p.row_heads) // (warp * max(1, steps)))
        heads = min(heads, max(warp, MAX_ROW_THREADS // spec.team))
        rows = len(p.row_heads) * heads * spec.team
        tokens = 1 if p.gradient else max(1, ROW_BLOCK_THREADS // rows)
        while shared_by_stages(replace(spec, tokens_per_block=tokens, heads_per_block=heads)) > SHARED_BYTES:
            heads = -(-heads // (2 * warp)) * warp
    spec = replace(spec, tokens_per_block=tokens, heads_per_block=heads, one_step=True)
    groups = -(-p.tokens // tokens)
    if p.gradient:
        threads = ROW_GRADIENT_THREADS_PER_SM if p.across_heads else GRADIENT_THREADS_PER_SM
        spec = replace(spec, blocks_per_sm=max(1, threads // spec.threads), ring=has_ring(spec))
        groups = _walks(p, spec, groups, max(1, p.sm_count * spec.blocks_per_sm // tiles))
    return Plan(spec, (groups, tiles), spec.threads, reason)


def has_ring(spec: RopeSpec) -> bool:
    """Whether the next heads of a block with a norm are on their way while it works on others.

    Some kernels have no registers for it: the gradients of biases, of rows across heads and with angles that are not
    shared, and gates.
    """
    access, item = spec.vec * ITEM_SIZES[spec.dtype], ITEM_SIZES[spec.dtype]
    angles = spec.freqs and not spec.shares_angles
    full = spec.gated or (spec.gradient and (spec.biased or spec.across_heads or angles))
    if full or not spec.one_step or access < MIN_RING_ACCESS:
        return False
    of_thread = (2 if spec.gradient else 1) * spec.heads_per_thread * spec.chunks * spec.chunk * item
    return spec.threads * of_thread <= RING_BYTES - shared_by_stages(spec)


def shared_by_stages(spec: RopeSpec) -> int:
    """Bytes of shared memory that exchanged elements, the scales of groups and shared angles take at most."""
    teams = spec.threads // spec.team
    exchanges = spec.norm and (spec.hadamard or spec.interleaved != spec.interleaved_out)
    sums = 3 * spec.threads // 8 + 64 if spec.across_heads else 0  # three of each warp at most
    exchanged = teams * spec.head_dim * 4 + sums if exchanges else 0
    angles = 4 * spec.rotary_dim * spec.tokens_per_block * 4 if spec.shares_angles else 0
    return exchanged + angles + (teams * spec.head_dim // spec.vec * 4 if spec.dynamic else 0)


def choose_launch(p: RopeProblem) -> tuple[str, str]:
    """The launch and the rule that chose it.

    A packed batch is token-linear at any number of sequences: on an H100 65,536 tokens of 32 heads of 128, bf16 with
    angles, in 1, 8, 32, 128, 512, 1024 and 2401 sequences of one length took 371, 359, 359, 360, 362, 362 and 362 us
    with token_linear, and 482, 405, 401, 404, 405, 406 and 420 with grid_2d, which uneven lengths make slower. Small
    packed batches are the exception (`FEW_PACKED_HEADS`).
    """
    packed = by_sequence(p)
    if p.across_heads:
        return "token_linear", "across_heads: a block has whole rows"
    if p.gradient:
        return "token_linear", "the gradient kernel: blocks walk over the tokens"
    if p.v_dim and packed:
        return "token_linear", "latent attention: the second grid axis is over heads"
    if p.launch == "grid_2d" and packed and p.num_sequences >= MAX_GRID_Y:
        return "token_linear", f"{p.num_sequences} sequences exceed the grid's limit of {MAX_GRID_Y} rows"
    if p.launch != "auto":
        return p.launch, f"launch={p.launch!r} is configured"
    if packed:
        even = 0 < p.num_sequences * longest_share(p) <= MAX_UNEVEN * p.tokens
        if even and p.tokens * p.heads <= FEW_PACKED_HEADS and p.num_sequences < MAX_GRID_Y:
            return "grid_2d", f"{p.tokens} packed tokens of {p.num_sequences} even sequences: no search"
        return "token_linear", "packed: cost follows the tokens, not sequences x max_seqlen"
    threads = p.tokens * p.heads * p.rotary_dim * ITEM_SIZES[p.dtype] // (2 * SMALL_ACCESS_BYTES)
    few = FEW_CACHED_THREADS_PER_SM if p.cached and not p.norm else FEW_THREADS_PER_SM
    if threads < few * p.sm_count and p.heads > 1:
        return "grid_2d", f"{p.tokens} tokens leave room on {p.sm_count} SMs: heads are tiled too"
    return "token_linear", f"{p.tokens} tokens fill {p.sm_count} SMs"


def by_sequence(p: RopeProblem) -> bool:
    """Whether the grid depends on the sequences of a packed batch. With a norm each thread searches for its own."""
    return p.cu_seqlens_dtype is not None and not p.norm


def longest_share(p: RopeProblem) -> int:
    """The most tokens of a sequence of max_seqlen on one rank. Chunks differ by at most one token."""
    of = number_of_chunks(p.cp_size, "dual_chunk")
    return of // p.cp_size * -(-p.max_seqlen // of)


def widest_access(p: RopeProblem, few: bool = False) -> tuple[int, int]:
    """(elements of an access, runs of them in a thread): the widest that addresses and head allow."""
    first, _ = rotated(p)
    vec = min(p.vec_limit, (SMALL_ACCESS_BYTES if few else ACCESS_BYTES) // ITEM_SIZES[p.dtype])
    one_order = p.batch_invariant and p.norm_kind in NORM_KINDS and not (p.gradient or p.given_means)
    if one_order:  # by the head alone
        vec = math.gcd(p.head_dim, ACCESS_BYTES // ITEM_SIZES[p.dtype])
    elif p.norm:  # torch sums in groups of four neighbours
        vec = max(vec, min(p.vec_limit, 4))
    others = (p.copied, first, p.v_dim)
    while vec > 1 and (any(x % vec for x in others) or p.rotary_dim % (vec if p.keeps_pairs else 2 * vec)):
        vec //= 2
    if one_order and vec > p.vec_limit:
        must = f"with batch_invariant and a norm, addresses and strides must be multiples of {vec} elements"
        raise InvalidInput(f"{must}, and those of q, k, v or a result are of {p.vec_limit}")
    chunk = max(vec, 2) if p.keeps_pairs else vec
    return vec, 2 if p.rotary_dim % (2 * chunk) == 0 else 1


def table_access(p: RopeProblem, spec: RopeSpec) -> int:
    """Elements of an access of the tables: a divisor of a thread's run of neighbouring angles."""
    run = spec.chunk // 2 if p.keeps_pairs and not p.full_width else spec.chunk
    step = p.rotary_dim // (2 if p.full_width or not p.keeps_pairs else 4)  # to the thread's second run
    table_vec = min(p.table_vec_limit, ACCESS_BYTES // (ITEM_SIZES[p.table_dtype] * p.table_step_limit))
    members = 2 if p.full_width and p.interleaved else 1  # of a pair, neighbours
    ends = [end * members for end in accumulate(p.mrope_section)]
    if p.mrope_interleaved:
        table_vec = min(table_vec, members)
    while run % table_vec or (spec.chunks == 2 and step % table_vec) or any(end % table_vec for end in ends):
        table_vec //= 2
    return table_vec


@lru_cache(maxsize=1024)
def tile(heads: int, lanes: int, block_threads: int = MAX_BLOCK_THREADS) -> tuple[int, int]:
    """(tokens of a block, heads of each at a time): whole tokens, with the fewest even steps for their heads."""
    steps = -(-heads // max(1, block_threads // lanes))
    at_once = -(-heads // steps)
    return max(1, min(BLOCK_THREADS, block_threads) // (at_once * lanes)), at_once
