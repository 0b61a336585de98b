"""Named rope calls: the inputs of the CPU kernel tests and of the GPU tests, one list for both."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jitrope.base.layouts import LAYOUT_AXES
from jitrope.base.views import FORMATS, TABLE_NAMES, canonical, fused_shape, head_view
from jitrope.plan.options import Options
from jitrope.run import dispatch, op_call
from jitrope.sources.fused import FUSED, FUSED_BACKWARD
from jitrope.sources.heads import HEADS, HEADS_BACKWARD
from jitrope.sources.latent import LATENT, LATENT_BACKWARD
from jitrope.sources.operation import Operation
from jitrope.sources.streams import STREAMED
from tests.said import norm_rope, norm_rope_joint

_SCALES, _WEIGHTS = ("q_scale", "k_scale", "v_scale"), ("q_weight", "k_weight")
_STAGE = (*_WEIGHTS, "q_bias", "k_bias", "q_mean_square", "k_mean_square")
_SECOND = ("second_q_weight", "second_k_weight", "second_cos", "second_sin")
_BIASES = ("q_bias", "k_bias", "second_q_bias", "second_k_bias")


class Kind(NamedTuple):
    """Calls of an operation: its tensors and results, in the order of these tests."""

    op: Operation
    tensors: tuple[str, ...]
    results: tuple[str, ...] = ("q", "k")


ROPE, NORM_ROPE = Kind(HEADS, ("q", "k")), Kind(HEADS, ("q", "k", *_STAGE))
ROPE_FP8 = Kind(HEADS, ("q", "k", *_SCALES))
ROPE_INTO = Kind(HEADS, ("q", "k", "v", "q_out", "k_out", "v_out"), ())
ROPE_CACHE = Kind(HEADS, ("q", "k", "v", "k_cache", "v_cache", "slot_mapping", *_SCALES), ("q",))
NORM_SCALES = Kind(HEADS, ("q", "k", "v", *_SCALES, *_STAGE))
ROPE_FUSED = Kind(FUSED, ("qkv", "bias"), ("q", "k", "v", "gate"))
ROPE_LATENT = Kind(LATENT, LATENT.needed, ("q", "k", "v"))
NORM_STREAMS = Kind(STREAMED, (*STREAMED.needed, *_WEIGHTS, *_SECOND, *_BIASES), ("q", "k", "v"))
HEADS_BACK = Kind(
    HEADS_BACKWARD, ("dq", "dk", "q", "k", *_STAGE), ("q", "k", "q_weight", "k_weight", "q_bias", "k_bias")
)
FUSED_BACK = Kind(FUSED_BACKWARD, ("dq", "dk", "dv", "dgate"), ("qkv",))
LATENT_BACK = Kind(LATENT_BACKWARD, ("dq", "dk", "dv"), ("q", "kv", "k_pe"))

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TABLE_DTYPES = {**DTYPES, "fp64": torch.float64}


@dataclass(frozen=True)
class Case:
    """A call of `apply_rope`; `why` is the reason for the case."""

    name: str
    why: str
    shape: tuple[int, int, int, int, int] = (2, 5, 4, 2, 64)  # B, S, Hq, Hk (0: no k), D
    dtype: str = "bf16"
    layout: str = "bshd"
    interleaved: bool = False
    rotary_dim: int | None = None
    table: str = "half"  # half | full (pair members differ) | repeated | complex | matrix | per_head | fused | expanded
    #                      | angles (freqs) | angles_full (members differ) | angles_repeated (they do not)
    #                      | cos_sin_cache | freqs_cis (the keywords)
    table_dtype: str = "fp32"
    table_batch: bool = False
    lengths: tuple[int, ...] | None = None  # of packed sequences; the rest of S is spare
    index_dtype: torch.dtype = torch.int32
    starts: tuple[int, ...] | None = None  # start_positions
    ids: str = ""  # position_ids: shared (S) | rows (B, S) | strided (B, S) | one-row (1, S) | past the table (B, S)
    cp: tuple[int, int] = (1, 0)  # cp_size, cp_rank; lengths are the whole sequences'
    table_rows: int = 0  # 0: as many as positions
    strides: str = (
        "plain"  # plain | qkv (slices of a fused projection) | offset (unaligned) | transposed | reversed dim
    )
    rounding: str = "fp32"
    q_scale: str = ""  # number | shared (S) | rows (B, S) | strided (B, S) | one-row (1, S)
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def end(self) -> int | None:
        """The number of this rank's tokens of a packed case, without the spare ones."""
        if self.lengths is None:
            return None
        size, rank = self.cp
        return len(dealt((0, *itertools.accumulate(self.lengths)), size)[rank])


def dealt(offsets: Sequence[int], cp_size: int) -> list[list[tuple[int, int]]]:
    """(sequence, position) of each rank's tokens of a packed batch, in order, dealt out one by one.

    Token t of the batch gives chunk t % (2 cp_size) of its sequence a place; the tokens of a sequence take its
    chunks' places from the first chunk on; a rank has one chunk from the front and its mirror image.
    """
    chunks = 2 * cp_size
    ranks: list[list[tuple[int, int]]] = [[] for _ in range(cp_size)]
    for sequence, (first, end) in enumerate(itertools.pairwise(offsets)):
        sizes = Counter(token % chunks for token in range(first, end))
        positions = iter(range(end - first))
        places = [[(sequence, next(positions)) for _ in range(sizes[chunk])] for chunk in range(chunks)]
        for rank, mine in enumerate(ranks):
            mine += places[rank] + places[-1 - rank]
    return ranks


CASES = [
    Case("halves", "the default"),
    Case("interleaved", "the other pairing", interleaved=True),
    Case("fp32", "16-byte accesses of 4 elements", dtype="fp32"),
    Case("fp16-interleaved", "the third dtype", dtype="fp16", interleaved=True),
    Case("q-alone", "k=None", shape=(2, 5, 4, 0, 64)),
    Case("odd-heads", "heads that no tile divides", shape=(1, 3, 7, 3, 128)),
    Case("one-token", "decode", shape=(1, 1, 8, 2, 128)),
    Case("many-heads", "more heads than one step of a block", shape=(1, 2, 70, 10, 128)),
    Case("d80", "FlashInfer is wrong here", shape=(1, 6, 5, 5, 80)),
    Case("d80-interleaved", "10 lanes a head", shape=(1, 6, 5, 5, 80), interleaved=True),
    Case("d72", "half a head is not 16 bytes wide", shape=(1, 4, 3, 3, 72)),
    Case("d96", "6 lanes a head", shape=(1, 4, 3, 1, 96)),
    Case("d256", "a large head", shape=(1, 3, 4, 1, 256)),
    Case("d512", "the largest head", shape=(1, 2, 2, 1, 512)),
    Case("d6", "rotary_dim / 2 is odd: scalar accesses", shape=(1, 4, 3, 2, 6)),
    Case("d6-interleaved", "the same, pairs of scalars", shape=(1, 4, 3, 2, 6), interleaved=True),
    Case("d2", "a single pair", shape=(1, 3, 2, 1, 2)),
    Case("partial", "the rest is copied", shape=(1, 5, 4, 2, 128), rotary_dim=64),
    Case("partial-interleaved", "vLLM's qk-norm kernel is wrong for partial halves", rotary_dim=32, interleaved=True),
    Case("partial-odd", "an odd rest: scalar accesses", shape=(1, 4, 3, 1, 45), rotary_dim=20),
    Case("sbhd", "Megatron's layout", layout="sbhd"),
    Case("bhsd", "transformers' layout, a transposed view", layout="bhsd", strides="transposed"),
    Case("bhsd-contiguous", "the same in memory order", layout="bhsd"),
    Case("thd", "an angle row for each token", shape=(1, 9, 4, 2, 64), layout="thd"),
    Case("packed", "positions restart, empty sequences and spare rows", shape=(1, 23, 4, 2, 64), layout="thd",
         lengths=(5, 0, 7, 0, 0, 6)),
    Case("packed-int64", "int64 offsets, partial", shape=(1, 17, 3, 1, 64), layout="thd", lengths=(0, 9, 8),
         index_dtype=torch.int64, rotary_dim=32),
    Case("packed-none", "no sequence at all", shape=(1, 3, 2, 1, 64), layout="thd", lengths=()),
    Case("packed-too-long", "a sequence longer than the table: NaN, no read past it", shape=(1, 12, 2, 1, 64),
         layout="thd", lengths=(9, 3), table_rows=6),
    Case("full", "pair members with angles of their own (ERNIE)", table="full"),
    Case("full-interleaved", "the same, neighbours", table="full", interleaved=True),
    Case("full-partial", "full width and partial", table="full", rotary_dim=32, shape=(1, 4, 3, 1, 64)),
    Case("repeated", "an interleaved-repeated table read as a view (FLUX)", table="repeated", interleaved=True),
    Case("complex", "a complex64 table read as a view (Qwen-Image)", table="complex", interleaved=True),
    Case("matrix", "2x2 matrices read as views (HiDream)", table="matrix", interleaved=True),
    Case("per-head", "learned angles of each head (Mochi)", table="per_head", interleaved=True, shape=(2, 5, 4, 4, 64)),
    Case("fused-cache", "cos | sin in one tensor, two views (vLLM)", table="fused"),
    Case("batched-table", "a table for each batch row", table_batch=True),
    Case("longer-table", "more rows than positions", table_rows=11),
    Case("bf16-table", "tables in the model's dtype", table_dtype="bf16"),
    Case("fp16-table", "tables in fp16 beside fp32", table_dtype="fp16", dtype="fp32"),
    Case("expanded-table", "one angle for all: strides of 0", table="expanded"),
    Case("fused-qkv", "slices of fused QKV", strides="qkv"),
    Case("unaligned", "addresses off by one element", strides="offset"),
    Case("strided-dim", "the last axis is not contiguous", strides="reversed"),
    Case("complex64-rounding", "torch's complex contraction", rounding="complex64", interleaved=True),
    Case("complex128", "products in fp64 (Lumina2): tables too", rounding="complex128", table_dtype="fp64",
         interleaved=True),
    Case("complex128-cis", "a complex128 table read as a view", rounding="complex128", table_dtype="fp64",
         table="freqs_cis", interleaved=True, ids="rows", table_rows=20),
    Case("complex128-full", "a full-width table in fp64, partial", rounding="complex128", table_dtype="fp64",
         table="full", rotary_dim=32, dtype="fp16"),
    Case("complex128-fp32", "the tables in fp32, the products not", rounding="complex128", dtype="fp32"),
    Case("dtype", "each product rounded to bf16 (rotate-half in the model's dtype)", rounding="dtype"),
    Case("dtype-bf16-full", "tables in bf16, full width (transformers)", rounding="dtype", table_dtype="bf16",
         table="full"),
    Case("dtype-fp16", "the same in fp16, neighbours, partial", rounding="dtype", dtype="fp16", rotary_dim=32,
         interleaved=True, shape=(1, 5, 3, 1, 80)),
    Case("dtype-fp32", "fp32: nothing is rounded twice", rounding="dtype", dtype="fp32", table_dtype="bf16"),
    Case("dtype-angles", "sines that are rounded before they turn", rounding="dtype", table="angles_repeated",
         shape=(2, 7, 1, 1, 64)),
    Case("dtype-packed", "staged tables are rounded too", rounding="dtype", shape=(1, 9, 2, 1, 64), layout="thd",
         lengths=(4, 3)),
    Case("addcmul", "the second product joins the sum (LTX-2)", rounding="addcmul"),
    Case("addcmul-per-head", "LTX-2's split tables of each head, fp32", rounding="addcmul", dtype="fp32",
         table="per_head", layout="bhsd", shape=(2, 5, 4, 4, 64)),
    Case("starts", "a cache's rows begin at positions of their own", starts=(3, 0), table_rows=8),
    Case("starts-past", "beyond the table on either side: NaN", starts=(7, -2), table_rows=8),
    Case("starts-sbhd", "the same, sequence first, int64", starts=(2, 4), table_rows=9, layout="sbhd",
         index_dtype=torch.int64),
    Case("starts-packed", "one for each sequence, an empty one too", shape=(1, 14, 4, 2, 64), layout="thd",
         lengths=(5, 0, 7), starts=(2, 9, 1), table_rows=8),
    Case("cp", "dual chunks of a dense batch", shape=(2, 6, 4, 2, 64), cp=(2, 1), table_rows=12),
    Case("cp-last", "the last rank of four, starts too", shape=(2, 4, 4, 2, 64), cp=(4, 3), starts=(1, 0),
         table_rows=17, interleaved=True),
    Case("cp-packed", "dual chunks of each sequence", shape=(1, 11, 4, 2, 64), layout="thd", lengths=(8, 0, 4, 8),
         cp=(2, 1), table_rows=9),
    Case("cp-packed-starts", "starts, spare rows, int64", shape=(1, 9, 2, 1, 64), layout="thd", lengths=(16, 8),
         cp=(4, 2), starts=(3, 0), table_rows=20, index_dtype=torch.int64),
    Case("packed-table", "a row for each token of the pack (mRoPE; Megatron-LM 5243)", shape=(1, 12, 4, 2, 64),
         layout="thd", lengths=(5, 0, 6), table_rows=11, options={"packed_table": True}),
    Case("packed-table-cp", "the same under context parallelism", shape=(1, 7, 4, 2, 64), layout="thd",
         lengths=(4, 8), cp=(2, 0), table_rows=12, options={"packed_table": True}),
    *(Case(f"ragged-{size}-{rank}", "lengths that no chunks divide, every rank", shape=(1, 2267 // size + 3, 2, 1, 8),
           layout="thd", lengths=(137, 2041, 89), cp=(size, rank), table_rows=2041)
      for size in (2, 4) for rank in range(size)),
    *(Case(f"ragged-short-{rank}", "fewer tokens than ranks, empty sequences", shape=(1, 7, 2, 1, 64), layout="thd",
           lengths=(3, 0, 1, 0, 0, 2, 1, 9, 1), cp=(4, rank), table_rows=9) for rank in range(4)),
    Case("ragged-none", "all tokens are other ranks'", shape=(1, 3, 2, 1, 64), layout="thd", lengths=(0, 1, 0, 1),
         cp=(4, 2), table_rows=1),
    Case("ragged-three", "an odd number of ranks, int64, starts", shape=(1, 13, 2, 1, 64), layout="thd",
         lengths=(19, 0, 4, 11), cp=(3, 1), starts=(2, 5, 0, 1), table_rows=21, index_dtype=torch.int64),
    Case("ragged-table", "a row for each token of the whole pack", shape=(1, 9, 2, 1, 64), layout="thd",
         lengths=(5, 9), cp=(2, 1), table_rows=14, options={"packed_table": True}),
    Case("ragged-angles", "angles, starts, mscale", table="angles_repeated", shape=(1, 15, 3, 1, 64), layout="thd",
         lengths=(7, 0, 13, 5), cp=(2, 0), starts=(1, 0, 0, 2), table_rows=13, options={"mscale": 1.25}),
    Case("inverse", "rotated back", options={"inverse": True}),
    Case("offset", "a slice inside the head (MLA)", shape=(1, 5, 3, 1, 192), rotary_dim=64,
         options={"rotary_offset": 128}),
    Case("offset-odd", "in the middle, not aligned", shape=(1, 4, 3, 1, 45), rotary_dim=20,
         options={"rotary_offset": 7}),
    Case("mla", "interleaved pairs into halves, at an offset", shape=(1, 5, 3, 1, 192), rotary_dim=64,
         interleaved=True, options={"rotary_offset": 128, "interleaved_out": False}),
    Case("mla-back", "and halves into pairs: its gradient", interleaved=False, options={"interleaved_out": True}),
    Case("mixed-scalar", "the same in scalar accesses", shape=(1, 3, 2, 1, 6), interleaved=True,
         options={"interleaved_out": False}),
    Case("angles", "sine and cosine in the kernel", table="angles"),
    Case("angles-interleaved", "pairs of neighbours, several tokens a block", table="angles", interleaved=True,
         shape=(2, 7, 1, 1, 64)),
    Case("angles-repeated", "TransformerEngine's table: each angle twice", table="angles_repeated", dtype="fp16"),
    Case("angles-repeated-interleaved", "the same, neighbours", table="angles_repeated", interleaved=True),
    Case("angles-full", "members with angles of their own", table="angles_full"),
    Case("angles-full-interleaved", "the same, neighbours", table="angles_full", interleaved=True, dtype="fp32"),
    Case("angles-batched", "mRoPE with a batch", table="angles", table_batch=True, layout="sbhd"),
    Case("angles-packed", "packed, spare rows, positions past the table", table="angles", shape=(1, 15, 3, 1, 64),
         layout="thd", lengths=(5, 0, 7), table_rows=6, rotary_dim=32),
    Case("angles-packed-cp", "all at once", table="angles_repeated", shape=(1, 11, 3, 1, 64), layout="thd",
         lengths=(8, 0, 4, 8), cp=(2, 0), starts=(1, 0, 0, 2), table_rows=12, options={"mscale": 1.25}),
    Case("ids", "positions of each batch row", ids="rows", table_rows=40),
    Case("ids-shared", "one row of positions for all", ids="shared", table_rows=9, index_dtype=torch.int64),
    Case("ids-one-row", "transformers' (1, S)", ids="one-row", table_rows=9, layout="bhsd", strides="transposed"),
    Case("ids-past", "outside of the table on both sides: NaN", ids="past", table_rows=6, interleaved=True),
    Case("ids-strided", "a transposed view of positions", ids="strided", table_rows=12, layout="sbhd"),
    Case("ids-decode", "a token a batch row: the rows are the tokens", shape=(7, 1, 4, 2, 64), ids="rows",
         table_rows=90, table="cos_sin_cache"),
    Case("decode-batched-table", "the same with a table each", shape=(3, 1, 4, 2, 64), table_batch=True),
    Case("decode-shared-table", "and one row for all", shape=(3, 1, 4, 2, 64), table_rows=5),
    Case("ids-cache", "vLLM: [T], cos | sin, partial, bf16", shape=(1, 9, 4, 2, 128), layout="thd", ids="shared",
         table="cos_sin_cache", rotary_dim=64, table_rows=33, table_dtype="bf16", index_dtype=torch.int64),
    Case("ids-cis", "complex64 rows", ids="rows", table="freqs_cis", table_rows=20, interleaved=True),
    Case("ids-angles", "angles of any row", ids="rows", table="angles", table_rows=20),
    Case("ids-full", "members with angles of their own", ids="rows", table="full", table_rows=20),
    Case("ids-per-head", "each head its own", ids="rows", table="per_head", table_rows=8, shape=(2, 5, 3, 3, 64)),
    Case("mrope", "Qwen2-VL: sections", ids="rows", table_rows=30, options={"mrope_section": (8, 12, 12)}),
    Case("mrope-odd", "sections that no access divides, one empty", ids="rows", table_rows=30,
         options={"mrope_section": (5, 0, 20, 7)}, interleaved=True),
    Case("mrope-interleaved", "Qwen3-VL: every third pair", shape=(2, 5, 4, 2, 128), ids="strided", table_rows=30,
         options={"mrope_section": (24, 20, 20), "mrope_interleaved": True}),
    Case("mrope-cache", "T tokens, cos | sin, fp8-sized heads", shape=(1, 6, 2, 1, 64), layout="thd", ids="shared",
         table="cos_sin_cache", table_rows=12, options={"mrope_section": (8, 12, 12)}),
    Case("mrope-full", "transformers' full-width table", ids="rows", table="full", table_rows=12,
         options={"mrope_section": (8, 12, 12)}),
    Case("mrope-full-interleaved", "spread, pairs of neighbours", ids="rows", table="full", table_rows=12,
         interleaved=True, options={"mrope_section": (12, 10, 10), "mrope_interleaved": True}),
    Case("mrope-angles", "axial angles of a video", ids="rows", table="angles_repeated", table_rows=12,
         interleaved=True, options={"mrope_section": (8, 12, 12)}),
    Case("axial-2d", "rows and columns of an image", ids="shared", table_rows=6, options={"mrope_section": (16, 16)}),
    Case("prefix", "DINOv3: class and register tokens", shape=(2, 9, 4, 4, 64), layout="bhsd", strides="transposed",
         table_rows=4, options={"unrotated": 5}),
    Case("prefix-full", "timm's EVA-02: neighbours, full width, partial, scaled", shape=(2, 6, 3, 3, 80), table_rows=5,
         table="full", interleaved=True, rotary_dim=48, q_scale="rows", options={"unrotated": 1}),
    Case("prefix-angles", "staged angles, back", shape=(2, 6, 1, 1, 64), table_rows=3, table="angles",
         options={"unrotated": 3, "inverse": True}),
    Case("prefix-per-head", "learned tables of each head (RoPE-mixed), fp32", shape=(1, 6, 3, 3, 64), table_rows=5,
         table="per_head", dtype="fp32", options={"unrotated": 1}),
    Case("prefix-one", "a batch of single tokens, none of which is rotated", shape=(5, 1, 3, 1, 64), table_rows=1,
         options={"unrotated": 1}),
    Case("prefix-packed", "of each sequence, one shorter than that, spare tokens", shape=(1, 17, 4, 2, 64),
         layout="thd", lengths=(5, 0, 2, 7), table_rows=4, table="angles_repeated", options={"unrotated": 3}),
    Case("prefix-packed-partial", "the same without angles, a rest", shape=(1, 11, 4, 2, 64), layout="thd",
         lengths=(6, 5), table_rows=5, rotary_dim=32, options={"unrotated": 1}, dtype="fp16"),
    Case("prefix-cp", "the first tokens of the whole sequence, on the rank that has them", shape=(2, 6, 3, 1, 64),
         cp=(2, 0), table_rows=9, options={"unrotated": 3}),
    Case("prefix-packed-cp", "and starts, lengths that no chunks divide", shape=(1, 13, 2, 1, 64), layout="thd",
         lengths=(7, 0, 5, 10), cp=(2, 1), starts=(0, 1, 4, 0), table_rows=9, options={"unrotated": 2}),
    Case("shifts", "cached keys move by differences of positions", ids="signed", table_rows=9,
         options={"shifts": True}),
    Case("shifts-full", "members with angles of their own, back, int64", ids="signed", table_rows=9, table="full",
         index_dtype=torch.int64, options={"shifts": True, "inverse": True}),
    Case("shifts-full-interleaved", "the same, neighbours, past the table on both sides", ids="signed-past",
         table_rows=3, table="full", interleaved=True, options={"shifts": True}, dtype="fp32"),
    Case("shifts-cache", "cos | sin, partial, T tokens", shape=(1, 9, 2, 0, 128), layout="thd", ids="signed",
         table="cos_sin_cache", rotary_dim=64, table_rows=12, options={"shifts": True}),
    Case("scaled", "softmax's scale in q, a number for all tokens", q_scale="number"),
    Case("scaled-tokens", "Llama 4's temperature of each token", q_scale="shared", shape=(2, 5, 4, 2, 128)),
    Case("scaled-rows", "each batch row has its own, partial: the rest of q too", q_scale="strided", layout="sbhd",
         rotary_dim=32, dtype="fp16", interleaved=True),
    Case("scaled-alone", "q alone, fp32, scalar accesses", q_scale="rows", shape=(2, 5, 4, 0, 6), dtype="fp32"),
    Case("scaled-decode", "a token a batch row, with positions", shape=(7, 1, 4, 2, 64), ids="rows", table_rows=90,
         q_scale="rows"),
    Case("scaled-dtype", "rounded before the product too", rounding="dtype", q_scale="one-row", rotary_dim=48),
    Case("scaled-packed", "spare tokens stay zero, angles in the kernel", shape=(1, 15, 3, 1, 64), layout="thd",
         lengths=(5, 0, 7), table="angles_repeated", q_scale="shared", rotary_dim=32),
    Case("scaled-per-head", "a table for each head, a pairing into the other", q_scale="rows", table="per_head",
         interleaved=True, options={"interleaved_out": False}, shape=(2, 5, 3, 3, 64)),
    Case("angles-mla", "MLA with angles and mscale", table="angles", shape=(1, 5, 3, 1, 96), rotary_dim=32,
         interleaved=True, options={"rotary_offset": 64, "interleaved_out": False, "mscale": 0.5}),
]  # fmt: skip


# Fused QKV: the shape is B, S, groups, heads of q in a group, D.
QKV_CASES = [
    Case("qkv", "each head of q with its k and v", shape=(2, 3, 3, 1, 64)),
    Case("qkv-grouped", "four heads of q to one of k and v, interleaved", shape=(2, 3, 2, 4, 64), interleaved=True),
    Case("qkv-sbhd", "partial, fp16", shape=(2, 3, 2, 2, 64), layout="sbhd", dtype="fp16", rotary_dim=32),
    Case("qkv-starts", "starts and context parallelism together", shape=(2, 4, 2, 2, 64), cp=(2, 1), starts=(1, 4),
         table_rows=13),
    Case("qkv-packed", "packed, spare rows, context parallelism", shape=(1, 9, 2, 2, 64), layout="thd",
         lengths=(8, 0, 4), cp=(2, 0), table_rows=9, table="angles_repeated"),
    Case("qkv-ragged", "lengths that no chunks divide", shape=(1, 13, 2, 2, 64), layout="thd", lengths=(7, 0, 5, 10),
         cp=(2, 1), table_rows=10),
    Case("qkv-mrope", "positions on three axes", shape=(2, 3, 2, 2, 64), ids="rows", table_rows=9,
         options={"mrope_section": (8, 12, 12)}),
    Case("qkv-flat", "all heads of q, then k, then v", shape=(2, 3, 2, 4, 64), options={"order": "qkv"}),
    Case("qkv-gated", "a gate after each head of q, partial", shape=(2, 3, 2, 2, 64), rotary_dim=16,
         options={"order": "qkv_gated"}),
    Case("qkv-gated-packed", "the same, packed with spare rows", shape=(1, 9, 1, 2, 64), layout="thd", lengths=(5, 2),
         table="angles", dtype="fp16", options={"order": "qkv_gated"}),
    Case("qkv-prefix", "class tokens in fused QKV", shape=(2, 5, 2, 3, 64), table_rows=4, options={"unrotated": 1}),
    Case("qkv-scaled", "q of each group, partial: in place the rest of k stays", shape=(2, 3, 2, 3, 64), rotary_dim=32,
         q_scale="rows"),
    Case("qkv-scalar", "a head that no access divides", shape=(1, 3, 2, 3, 6), dtype="fp32"),
]  # fmt: skip


@dataclass(frozen=True)
class LatentCase:
    """A call of `prepare_mla_qkv`. rope: its q, with k_heads heads of k; v_dim: elements of a head of v."""

    name: str
    why: str
    rope: Case
    v_dim: int = 32

    def __str__(self) -> str:
        return self.name


MIXED = {"interleaved": True, "options": {"interleaved_out": False}}
LATENT_CASES = [
    LatentCase(
        "latent", "interleaved pairs into halves, as DeepSeek's", Case("", "", (2, 3, 4, 4, 48), rotary_dim=16, **MIXED)
    ),
    LatentCase(
        "latent-halves", "fewer heads of k than of q, fp32", Case("", "", (2, 3, 3, 2, 48), "fp32", rotary_dim=16)
    ),
    LatentCase(
        "latent-wide",
        "v wider than q, fp16, positions",
        Case("", "", (2, 3, 2, 5, 64), "fp16", rotary_dim=32, ids="rows", table_rows=9, interleaved=True),
        160,
    ),
    LatentCase(
        "latent-narrow",
        "v of one access, full-width tables",
        Case("", "", (1, 5, 2, 2, 48), rotary_dim=32, table="full"),
        8,
    ),
    LatentCase(
        "latent-sbhd",
        "context parallelism",
        Case("", "", (2, 4, 2, 2, 48), layout="sbhd", rotary_dim=16, cp=(2, 1), table_rows=8),
    ),
    LatentCase(
        "latent-bhsd", "heads before the sequence", Case("", "", (2, 3, 2, 4, 48), layout="bhsd", rotary_dim=16)
    ),
    LatentCase(
        "latent-packed",
        "packed, spare rows, context parallelism, angles",
        Case(
            "",
            "",
            (1, 9, 2, 2, 48),
            layout="thd",
            rotary_dim=16,
            lengths=(8, 0, 4),
            cp=(2, 0),
            table_rows=9,
            table="angles",
            **MIXED,
        ),
    ),
    LatentCase(
        "latent-full-angles",
        "packed, full-width angles",
        Case("", "", (1, 9, 2, 3, 48), layout="thd", rotary_dim=16, lengths=(5, 3), table="angles_full"),
    ),
    LatentCase("latent-scalar", "sizes that no access divides", Case("", "", (1, 3, 2, 3, 9), "fp32", rotary_dim=6), 5),
    LatentCase("latent-decode", "one token in each row", Case("", "", (5, 1, 3, 3, 48), rotary_dim=16, ids="rows")),
    LatentCase(
        "latent-mrope",
        "positions on three axes",
        Case("", "", (2, 3, 2, 2, 48), rotary_dim=16, ids="rows", table_rows=9, options={"mrope_section": (4, 2, 2)}),
    ),
    LatentCase(
        "latent-dtype",
        "sums rounded to bf16",
        Case("", "", (1, 3, 2, 2, 48), rotary_dim=16, rounding="dtype", table_dtype="bf16"),
    ),
    LatentCase(
        "latent-fp64",
        "fp64 tables, which are not staged",
        Case("", "", (1, 3, 2, 2, 48), rotary_dim=16, rounding="complex128", table_dtype="fp64", interleaved=True),
    ),
    LatentCase("latent-whole", "no first part: a head is rotated whole", Case("", "", (1, 3, 2, 2, 16))),
]


@dataclass(frozen=True)
class NormCase:
    """A call with a norm before the rotation of a `Case`, or behind it."""

    name: str
    why: str
    rope: Case = Case("", "")
    rounding: str = "none"  # norm_rounding
    across_heads: bool = False
    zero_centered: bool = False
    weights: str = "qk"  # the given weights; the second stream's default to the first's
    weight_dtype: str = "bf16"
    first: int | None = None  # a joint call: the first stream's part of S
    two_tables: bool = False  # each stream has its own tables
    after_rope: bool = False
    kind: str = "rms_norm"  # norm_kind
    biases: bool = False  # beside each weight
    of: str = "qk"  # is normalised

    def __str__(self) -> str:
        return self.name

    @property
    def norm(self) -> dict[str, Any]:
        """The words of `Norm`."""
        flags = {name: getattr(self, name) for name in ("across_heads", "zero_centered", "after_rope")}
        return {"rounding": self.rounding, **flags, "kind": self.kind, "of": self.of}


def _normed(name: str, why: str, shape: tuple[int, ...] = (1, 3, 4, 2, 64), **words: Any) -> NormCase:
    """Make a NormCase; words of a `Case` go to its case."""
    own = (
        "across_heads",
        "zero_centered",
        "after_rope",
        "weights",
        "weight_dtype",
        "first",
        "two_tables",
        "kind",
        "biases",
        "of",
    )
    norm = {n: words.pop(n) for n in own if n in words}
    norm["rounding"] = words.pop("norm", "none")
    return NormCase(name, why, Case("", "", shape=shape, **words), **norm)  # type: ignore[arg-type]


LAYER = {"kind": "layer_norm"}
NORM_CASES = [
    _normed("none", "fp32 all the way"),
    _normed("once", "FLUX: neighbours, the bits of torch's rms_norm", (1, 3, 4, 4, 128), norm="once", interleaved=True),
    _normed("twice", "Qwen3: halves, GQA, the bits of its RMSNorm", (1, 3, 4, 1, 128), norm="twice"),
    _normed("twice-d64", "leaves of one square", norm="twice", interleaved=True),
    _normed("twice-d256", "leaves of two chunks", (1, 2, 2, 1, 256), norm="twice"),
    _normed("once-d256", "a warp a head", (1, 2, 2, 2, 256), norm="once", interleaved=True),
    _normed("d72", "9 lanes of 16", (1, 3, 3, 3, 72), norm="once"),
    _normed("d80-interleaved", "10 lanes of 16, batch", (2, 3, 5, 2, 80), norm="twice", interleaved=True),
    _normed("d96", "6 lanes of 8, MQA", (1, 3, 3, 1, 96), norm="once", weight_dtype="fp32"),
    _normed("d112", "7 lanes of 8, fp16", (1, 3, 4, 4, 112), norm="twice", dtype="fp16", weight_dtype="fp16"),
    _normed("d160", "10 lanes of 16", (1, 2, 3, 1, 160)),
    _normed("d192", "12 lanes of 16, q alone", (1, 3, 3, 0, 192), norm="once"),
    _normed("d512", "the largest head, fp32", (1, 2, 2, 1, 512), dtype="fp32", weight_dtype="fp32",
            norm="twice"),
    _normed("d6", "scalar accesses", (1, 4, 3, 2, 6), norm="once"),
    _normed("partial", "what is not rotated is normalised too", (1, 4, 4, 2, 128), rotary_dim=64, norm="once"),
    _normed("partial-looped", "a lane that is not rotated reads no table, in a loop whose loads could be hoisted",
            (1, 4, 9, 3, 80), rotary_dim=26, dtype="fp32", weight_dtype="fp32", norm="twice"),
    _normed("partial-offset", "the rotary part behind, fp16 tables, in the model's dtype", (1, 4, 3, 1, 96),
            rotary_dim=32, options={"rotary_offset": 64}, norm="twice", rounding="dtype", table_dtype="fp16"),
    _normed("zero-centered", "Gemma: 1 + weight", zero_centered=True, norm="none", weight_dtype="fp32"),
    _normed("unweighted", "no weights", weights="", norm="once"),
    _normed("only-q-weight", "k has none", weights="q", norm="once"),
    _normed("only-k-weight", "q has none, 1 + weight", weights="k", zero_centered=True),
    _normed("of-k", "DeepSeek's indexer: LayerNorm of k alone", (1, 4, 6, 1, 128), **LAYER, of="k", weights="k",
            biases=True, rotary_dim=64, norm="once"),
    _normed("of-k-after", "behind the rotation, rounded between; q has no norm", (2, 3, 5, 2, 80), of="k",
            weights="", after_rope=True, rotary_dim=48, norm="twice", q_scale="rows"),
    _normed("of-q-after", "behind the rotation, kept in fp32, tables of each head", (2, 3, 2, 2, 64), of="q",
            weights="q", after_rope=True, table="per_head"),
    _normed("of-q-across", "a row is a token", (1, 3, 6, 2, 64), **LAYER, of="q", weights="q", across_heads=True),
    _normed("of-q-joint", "two streams", (2, 5, 4, 2, 64), of="q", weights="q", first=2, norm="once"),
    _normed("across-d128", "Wan: a row is a token", (1, 3, 3, 3, 128), across_heads=True, norm="once",
            interleaved=True),
    _normed("across-d64", "heads that a warp does not divide, GQA", (1, 4, 7, 2, 64), across_heads=True, norm="twice"),
    _normed("across-per-head", "LTX-2: angles of each head", (1, 3, 3, 3, 64), across_heads=True, norm="once",
            rounding="addcmul", table="per_head", layout="bhsd", strides="transposed"),
    _normed("across-wide", "a row of several warps", (1, 2, 50, 3, 128), across_heads=True, norm="once"),
    _normed("across-alone", "no k, a rest, no weights", (1, 5, 5, 0, 80), across_heads=True, rotary_dim=32, weights=""),
    _normed("across-scalar", "strided elements: rows wider than a warp", (1, 2, 3, 2, 128), across_heads=True,
            strides="reversed", norm="once"),
    _normed("unaligned", "addresses off by one: teams of two warps", (1, 2, 2, 1, 128), strides="offset", norm="once"),
    _normed("fused-qkv", "slices of fused QKV, batch", (2, 3, 2, 2, 64), strides="qkv", norm="twice"),
    _normed("per-head", "tables of each head", (2, 3, 2, 2, 64), table="per_head", norm="once"),
    _normed("ids", "positions, one outside: NaN", (2, 3, 4, 2, 64), ids="past", table_rows=5, norm="once",
            table="cos_sin_cache"),
    _normed("mrope", "Qwen3-VL", (1, 4, 4, 2, 64), ids="shared", table_rows=12, norm="twice", layout="thd",
            options={"mrope_section": (8, 12, 12), "mrope_interleaved": True}),
    _normed("cis-starts", "complex64 rows from a position on, sequence first", (2, 3, 4, 2, 64), table="freqs_cis",
            starts=(2, 0), table_rows=7, layout="sbhd", interleaved=True, rounding="complex64", norm="once"),
    _normed("complex128", "Lumina2: tables in fp64", (1, 3, 4, 2, 96), rounding="complex128", table_dtype="fp64",
            interleaved=True, norm="once"),
    _normed("full", "full-width tables whose members differ", table="full", norm="once", dtype="fp32",
            weight_dtype="fp32"),
    _normed("after", "Hunyuan: the rotated heads are normalised", (1, 4, 4, 2, 128), after_rope=True, norm="twice"),
    _normed("after-unweighted", "Llama 4: pairs of neighbours", after_rope=True, weights="", interleaved=True),
    _normed("after-partial", "lanes of which some are not rotated, 1 + weight, fp32 until the store", (2, 3, 9, 3, 80),
            after_rope=True, rotary_dim=32, zero_centered=True, ids="rows", table_rows=9),
    _normed("after-across", "a row is a token, in the model's dtype", (1, 3, 3, 3, 64), after_rope=True, norm="once",
            across_heads=True, table="per_head", rounding="dtype"),
    _normed("after-full", "members of a pair differ, so the rotation changes the sum", table="full", after_rope=True,
            norm="once", dtype="fp16", weight_dtype="fp32"),
    _normed("after-joint", "two streams", (1, 7, 4, 4, 64), first=3, after_rope=True, norm="twice", interleaved=True),
    _normed("layer", "StableLM: the mean is subtracted, no biases", (1, 4, 4, 2, 128), **LAYER, norm="once"),
    _normed("layer-biased", "HunyuanDiT: biases, idle lanes, a rest, batch", (2, 3, 9, 3, 80), **LAYER, biases=True,
            rotary_dim=32, norm="twice", weight_dtype="fp32"),
    _normed("layer-unweighted", "k alone has a weight and a bias, neighbours", (1, 3, 4, 2, 64), **LAYER, weights="k",
            biases=True, interleaved=True),
    _normed("layer-across", "a row is a token", (1, 3, 6, 2, 64), **LAYER, biases=True, across_heads=True, norm="once"),
    _normed("layer-after", "TransformerEngine: after the rotation, 1 + weight", (1, 4, 3, 3, 72), **LAYER, biases=True,
            after_rope=True, zero_centered=True, rotary_dim=48),
    _normed("layer-per-head", "tables of each head, fp32", (2, 3, 2, 2, 64), **LAYER, table="per_head", dtype="fp32",
            weight_dtype="fp32", after_rope=True),
    _normed("after-per-head", "a table for each head; the last step of a block has fewer heads", (1, 1, 97, 97, 128),
            table="per_head", after_rope=True),
    _normed("layer-scalar", "rows wider than a warp", (1, 2, 3, 2, 128), **LAYER, strides="reversed", norm="once",
            biases=True),
    _normed("layer-joint", "two streams", (1, 7, 4, 4, 64), **LAYER, first=3, biases=True, norm="once"),
    _normed("joint", "two streams, the split inside a block", (1, 7, 4, 4, 64), first=3, norm="once", interleaved=True),
    _normed("joint-batch", "two batch rows, GQA, strided", (2, 5, 4, 2, 64), first=2, norm="twice", strides="qkv"),
    _normed("joint-first", "the second is empty", (1, 3, 2, 2, 64), first=3),
    _normed("joint-second", "the first is empty, complex64, no weights", (1, 3, 2, 2, 64), first=0, weights="",
            table="complex", interleaved=True, rounding="complex64"),
    _normed("joint-two-tables", "tables of each stream, with other strides (Qwen-Image)", (2, 5, 3, 1, 64), first=2,
            two_tables=True, interleaved=True, norm="once", zero_centered=True),
    _normed("scaled", "a number for each token, after the rotation", q_scale="rows", shape=(2, 3, 4, 2, 64),
            norm="once", layout="sbhd"),
    _normed("scaled-after", "Llama 4: after the norm behind the rotation", q_scale="shared", after_rope=True,
            weights="", interleaved=True),
    _normed("scaled-after-dtype", "rounded before the product", q_scale="number", after_rope=True, rounding="dtype",
            rotary_dim=32),
    _normed("scaled-across", "a row is a token, in the model's dtype, a rest", (1, 3, 3, 3, 64), across_heads=True,
            q_scale="shared", rounding="dtype", norm="twice", rotary_dim=32),
    _normed("scaled-layer", "biases, q alone", (1, 3, 3, 0, 72), **LAYER, biases=True, q_scale="rows"),
    _normed("prefix", "the first tokens are normalised too, batch, partial", shape=(2, 5, 4, 2, 80), rotary_dim=48,
            norm="once", table_rows=3, options={"unrotated": 2}),
    _normed("prefix-after", "and scaled", shape=(2, 5, 4, 2, 64), after_rope=True, q_scale="number", table_rows=4,
            options={"unrotated": 1}, norm="twice"),
    _normed("prefix-across", "a row is a token, tables of each head", (1, 4, 3, 3, 64), across_heads=True,
            table="per_head", table_rows=3, options={"unrotated": 1}, after_rope=True),
    _normed("prefix-layer", "LayerNorm, tables of each head", (1, 4, 3, 3, 64), **LAYER, biases=True,
            table="per_head", table_rows=3, options={"unrotated": 1}),
    _normed("joint-scaled", "two streams, tables of each", (2, 5, 3, 1, 64), first=2, two_tables=True, q_scale="rows",
            norm="once"),
    _normed("joint-two-cis", "complex64 rows of each stream", (1, 4, 2, 2, 64), first=3, two_tables=True,
            table="freqs_cis", interleaved=True, norm="twice", rounding="complex64"),
    _normed("thd", "Qwen3 with packed sequences, an empty one, spare tokens", (1, 11, 4, 2, 128), layout="thd",
            lengths=(5, 0, 3), norm="twice"),
    _normed("thd-cp", "a rank's chunks, first positions, spare tokens with biases behind the rotation",
            (1, 7, 4, 2, 64), **LAYER, layout="thd", lengths=(8, 3), cp=(2, 1), starts=(1, 4), table_rows=12,
            biases=True, after_rope=True),
    _normed("thd-across", "a row is a token, angles, a row of them for each token", (1, 9, 3, 2, 64), layout="thd",
            lengths=(2, 5), across_heads=True, table="angles", options={"packed_table": True}, norm="once"),
    _normed("thd-prefix", "first tokens of each sequence, a number for each, int64", (1, 9, 4, 2, 80), layout="thd",
            lengths=(2, 5), index_dtype=torch.int64, rotary_dim=48, q_scale="shared", options={"unrotated": 3}),
    _normed("thd-none", "no sequence at all", (1, 3, 2, 1, 64), layout="thd", lengths=(), norm="once"),
    _normed("cp", "chunks of batch rows", (2, 4, 4, 2, 64), cp=(2, 1), table_rows=8, norm="once", interleaved=True),
    _normed("angles", "Megatron: sines in the kernel, a scale of them, each pair twice", (2, 3, 4, 2, 80),
            table="angles_repeated", options={"mscale": 1.5}, layout="sbhd", norm="once"),
    _normed("angles-dtype", "sines rounded, positions, behind the rotation", (2, 3, 4, 2, 64), table="angles",
            ids="rows", table_rows=9, rounding="dtype", after_rope=True, norm="twice", interleaved=True),
]  # fmt: skip


# Fused QKV with a norm. The shape is B, S, groups, heads of q in a group, D.
QKV_NORM_CASES = [
    _normed("grouped", "Megatron's qk_layernorm as RMSNorm; a gradient's blocks walk over tokens",
            (2, 29, 2, 4, 64), norm="once"),
    _normed("grouped-sbhd", "as LayerNorm with biases, in its layout, partial, fp16", (2, 3, 2, 2, 64), **LAYER,
            biases=True, layout="sbhd", rotary_dim=32, dtype="fp16", weight_dtype="fp16"),
    _normed("grouped-one", "each head of q with its k and v; no weights, after the rotation, neighbours",
            (2, 3, 3, 1, 64), weights="", after_rope=True, interleaved=True),
    _normed("flat", "the fused qkv_proj of Qwen3: T tokens, positions, a fused cache", (1, 7, 2, 4, 128),
            layout="thd", ids="shared", table="cos_sin_cache", table_rows=12, norm="twice", options={"order": "qkv"}),
    _normed("flat-mqa", "a thread has the head of k and that of v; after the rotation, scaled", (2, 3, 1, 4, 64),
            after_rope=True, q_scale="rows", norm="once", options={"order": "qkv"}),
    _normed("flat-layer", "the same with LayerNorm, k alone has a weight and a bias", (2, 3, 1, 2, 80), **LAYER,
            weights="k", biases=True, options={"order": "qkv"}),
    _normed("gated", "Qwen3.5: a gate, 1 + weight, partial", (2, 3, 2, 8, 256), zero_centered=True, rotary_dim=64,
            norm="once", weight_dtype="fp32", options={"order": "qkv_gated"}),
    _normed("gated-mrope", "and positions on three axes", (2, 3, 2, 2, 64), zero_centered=True, ids="rows",
            table_rows=9, options={"order": "qkv_gated", "mrope_section": (12, 10, 10), "mrope_interleaved": True}),
    _normed("prefix", "first tokens without a rotation, complex64, q alone has a weight", (2, 5, 2, 3, 64),
            weights="q", table="freqs_cis", table_rows=4, interleaved=True, rounding="complex64", norm="twice",
            options={"unrotated": 1}),
    _normed("of-k", "k alone", (2, 3, 2, 2, 64), of="k", weights="k", norm="once", options={"order": "qkv"}),
    _normed("of-q-gated", "q alone, and a gate", (2, 3, 2, 4, 64), of="q", weights="q", options={"order": "qkv_gated"}),
    _normed("scalar", "a head that no access divides, fp32", (1, 3, 2, 3, 6), dtype="fp32", weight_dtype="fp32"),
    _normed("unaligned", "addresses off by one element, one first position for each row", (2, 3, 1, 2, 64),
            strides="offset", starts=(1, 4), table_rows=9, options={"order": "qkv"}),
    _normed("grouped-thd", "Megatron with packed sequences and context parallelism, angles, spare tokens",
            (1, 7, 2, 2, 64), layout="thd", lengths=(6, 5), cp=(2, 0), table="angles_repeated", norm="once"),
    _normed("flat-thd", "packed sequences", (1, 9, 1, 4, 64), layout="thd", lengths=(4, 3), norm="twice",
            options={"order": "qkv"}),
    _normed("flat-across", "OLMo 2 with one projection: a row is all heads of a token", (2, 5, 2, 4, 64),
            across_heads=True, norm="once", options={"order": "qkv"}),
    _normed("grouped-across", "rows in groups, LayerNorm, q alone has a weight, partial, sequence first",
            (2, 5, 3, 2, 64), across_heads=True, **LAYER, weights="q", biases=True, rotary_dim=32, layout="sbhd"),
    _normed("gated-across", "a gate, behind the rotation, packed sequences, spare tokens", (1, 9, 2, 3, 64),
            across_heads=True, after_rope=True, layout="thd", lengths=(4, 3), options={"order": "qkv_gated"}),
]  # fmt: skip


@dataclass
class NormTensors:
    """The tensors of a case; for a joint one q, k, v and the weights of both streams."""

    streams: list[Tensor | None]
    weights: tuple[Tensor | None, ...]
    biases: tuple[Tensor | None, ...]
    arguments: dict[str, Any]  # the others: tables, the norm's, the options
    tables: Any  # the ops' arguments
    second_tables: tuple[Tensor | None, Tensor | None]
    options: Options
    norm: dict[str, Any]  # those of the options that are a norm's


def make_norm(case: NormCase, device: str = "cpu", seed: int = 0, **changes: Any) -> NormTensors:
    """The call of a case, with `changes` of its options."""
    call = make(case.rope, device, seed)
    q, k, _, _, keywords = call
    (_, _, *tables), options = lower(call, **changes)
    generator = torch.Generator().manual_seed(seed + 1)
    streams, number = [q, k], 1
    if case.first is not None:
        v = torch.randn(k.shape, generator=generator).to(k.dtype).to(device)
        parts = [x.split((case.first, x.shape[1] - case.first), 1) for x in (q, k, v)]
        streams, number = [part[n] for n in range(2) for part in parts], 2
    weights: list[Tensor | None] = []
    biases: list[Tensor | None] = []
    for _ in range(number):
        for name, x in (("q", q), ("k", k)):
            if x is None or name not in case.weights:
                weights.append(None)
                biases.append(None)
                continue
            _, _, heads, dim = canonical(x, case.rope.layout).shape
            for made, given in ((weights, True), (biases, case.biases)):
                x = torch.randn(dim * (heads if case.across_heads else 1), generator=generator) if given else None
                made.append(None if x is None else x.to(DTYPES[case.weight_dtype]).to(device))
    words = {"norm_rounding": case.rounding, "zero_centered": case.zero_centered, "after_rope": case.after_rope,
             "norm_kind": case.kind, "of": case.of}  # fmt: skip
    if number == 1:
        words["across_heads"] = case.across_heads
    else:
        del keywords["layout"]
    tables, second = _split(tables, case)
    names = ("cos", "sin") if options.table == "cos_sin" else (options.table,)
    given = dict(zip(names, tables[:2] if second[0] is None else zip(tables[:2], second)))
    norm = {**words, "across_heads": case.across_heads}
    options = options._replace(**norm)
    found = {**keywords, **words, **given}
    return NormTensors(
        streams, tuple(weights), tuple(biases), found, tuple(tables), second, options, norm
    )  # fmt: skip


def _split(tables: list[Any], case: NormCase) -> tuple[list[Any], tuple[Any, Any]]:
    """The tables of each stream, if it has its own. The second's are padded, so they have other strides."""
    cos, sin, *rest = tables
    if not case.two_tables:
        return tables, (None, None)
    first = case.first
    padded = [
        None if t is None else torch.cat((t[first:], torch.full_like(t[first:], 9)), -1)[..., : t.shape[-1]]
        for t in (cos, sin)
    ]
    return [cos[:first], None if sin is None else sin[:first], *rest], (padded[0], padded[1])


def random_norm_case(seed: int) -> NormCase:
    """A random case with a norm, from all options that calls may combine; equal seeds give equal cases."""
    draw = random.Random(seed)
    dim = draw.choice((6, 8, 32, 48, 64, 72, 80, 100, 112, 128, 160, 256))
    joint, across = draw.random() < 0.3, draw.random() < 0.4
    across = across and not joint
    heads = draw.randint(1, 6)
    table = draw.choice(("half", "full", "fused") if joint else ("half", "full", "fused", "per_head", "angles_full"))
    k_heads = heads if table == "per_head" else draw.randint(1 if joint else 0, heads)
    tokens = draw.randint(1, 6)
    rotary = draw.choice((None, 2 * draw.randint(1, dim // 2)))
    layout = "bshd" if joint else draw.choice(list(LAYOUT_AXES))
    ids = "" if joint else draw.choice(("", "", "shared" if layout == "thd" else "rows"))
    packed = layout == "thd" and not ids and draw.random() < 0.7
    rounding = draw.choice(("fp32", "dtype", "complex128"))
    dtype = draw.choice(("bf16", "fp16", "fp32"))
    case = Case(
        "", "", shape=(1 if layout == "thd" else draw.randint(1, 2), tokens, heads, k_heads, dim), layout=layout,
        dtype=dtype, interleaved=draw.random() < 0.5, rotary_dim=rotary, table=table, ids=ids,
        table_rows=tokens + draw.randint(0, 3), strides=draw.choice(("plain", "plain", "offset", "reversed")),
        rounding="fp32" if packed or table == "angles_full" else rounding,
        lengths=(draw.randint(0, 2), 0, draw.randint(0, tokens)) if packed else None,
    )  # fmt: skip
    layer = draw.random() < 0.3
    kind = {"kind": "layer_norm", "biases": draw.random() < 0.5} if layer else {}
    return NormCase(
        f"norm-seed-{seed}", "the unforeseen", case, draw.choice(("none", "once", "twice")), across,
        draw.random() < 0.3, draw.choice(("", "qk", "qk", "qk")), draw.choice((dtype, "fp32")),
        draw.randint(0, tokens) if joint else None, joint and draw.random() < 0.5, after_rope=draw.random() < 0.25,
        **kind,
    )  # fmt: skip


def norm_call(call: NormTensors, in_place: bool = False) -> tuple[Tensor | None, ...]:
    """The results of the user's function."""
    if len(call.streams) == 6:
        weights = (*call.weights[:2], *call.biases[:2]), (*call.weights[2:], *call.biases[2:])
        pairs = (call.streams[:3], call.streams[3:], *weights)
        return norm_rope_joint(*pairs, **call.arguments)  # type: ignore[arg-type]
    biases = {name: x for name, x in zip(("q_bias", "k_bias"), call.biases) if x is not None}
    return norm_rope(*call.streams, *call.weights, inplace=in_place, **biases, **call.arguments)  # type: ignore[arg-type,no-any-return]


def norm_reference(call: NormTensors) -> tuple[Tensor | None, ...]:
    """The results of the reference, on the tensors' device."""
    kind, tensors = norm_kind(call)
    results = kind.op.on_cpu(tensors, call.options)
    return tuple([results.get(name) for name in kind.results])


def norm_kind(call: NormTensors) -> tuple[Kind, dict[str, Tensor]]:
    """The kind of a call, and its tensors by name."""
    joint = len(call.streams) == 6
    tensors = (*call.streams, *call.weights, *(call.second_tables if joint else ()), *call.biases)
    kind = NORM_STREAMS if joint else NORM_ROPE
    return kind, named(kind, tensors, call.tables)


@dataclass(frozen=True)
class CacheCase:
    """A call with a cache."""

    name: str
    why: str
    shape: tuple[int, int, int, int, int] = (1, 6, 4, 2, 64)
    layout: str = "thd"
    dtype: str = "bf16"
    cache: tuple[int, ...] = (11,)  # slots, or pages and rows of each
    heads_first: bool = False  # in a page, heads come before rows
    padding: tuple[int, ...] = (2,)  # tokens whose slot is negative
    fp8: bool = False
    q_fp8: bool = False
    form: str = "fp8"  # of both
    rotate_k: bool = False
    table: str = "cos_sin_cache"
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def page_size(self) -> int:
        """The compiled page size: 0 if slots are consecutive through all pages."""
        return self.cache[1] if self.heads_first and self.shape[3] > 1 else 0


CACHE_CASES = [
    CacheCase("slots", "SGLang: a row a slot"),
    CacheCase("paged", "vLLM: pages that follow each other", cache=(5, 4), rotate_k=True),
    CacheCase("paged-heads-first", "pages with a head's rows together", cache=(5, 4), heads_first=True),
    CacheCase("fp8", "scaled e4m3 caches", fp8=True, cache=(3, 8)),
    CacheCase("fp8-query", "and q for attention in fp8", fp8=True, q_fp8=True, cache=(3, 8), heads_first=True),
    CacheCase("e5m2", "scaled e5m2 caches, and q", fp8=True, q_fp8=True, form="fp8_e5m2", cache=(3, 8)),
    CacheCase("query-fp8-alone", "q in fp8 beside caches that are not", q_fp8=True, dtype="fp16"),
    CacheCase("partial", "the rest of k goes along, that of q stays", shape=(1, 5, 3, 2, 80), rotate_k=True,
              options={"rotary_dim": 32}),
    CacheCase("partial-fp8", "and is scaled", shape=(1, 5, 3, 2, 80), fp8=True,
              options={"rotary_dim": 32, "rotary_offset": 16}),
    CacheCase("decode", "a token a batch row", shape=(6, 1, 4, 2, 64), layout="bshd", cache=(4, 16)),
    CacheCase("batch", "several tokens a row, interleaved, fp32", shape=(2, 3, 4, 2, 64), layout="bshd", dtype="fp32",
              options={"interleaved": True}, cache=(7, 2), heads_first=True),
    CacheCase("odd", "a head that no access divides", shape=(1, 4, 3, 2, 6), fp8=True),
    CacheCase("odd-e5m2", "the same without an instruction for pairs", shape=(1, 4, 3, 2, 6), fp8=True,
              form="fp8_e5m2"),
    CacheCase("mrope", "three axes", options={"mrope_section": (8, 12, 12)}),
    CacheCase("angles", "sines in the kernel", table="freqs"),
    CacheCase("steps", "more heads than a block takes at once", shape=(1, 3, 60, 3, 128)),
    CacheCase("steps-fp8", "and converts", shape=(1, 3, 60, 3, 128), fp8=True, q_fp8=True),
]  # fmt: skip


@dataclass
class CacheCall:
    """The tensors of a case."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slots: Tensor
    scales: tuple[Tensor | None, Tensor | None, Tensor | None]
    tables: Any
    options: Options


def make_cache(case: CacheCase, device: str = "cpu", launch: str = "auto", in_place: bool = False) -> CacheCall:
    """A call: caches full of noise, random slots without repetition, and a scale of q so small that it saturates."""
    b, s, _, hk, d = case.shape
    rope = Case("", "", shape=case.shape, layout=case.layout, dtype=case.dtype, table_rows=50,
                rotary_dim=case.options.get("rotary_dim"), interleaved=case.options.get("interleaved", False),
                ids="shared" if case.layout == "thd" else "rows",
                table="angles" if case.table == "freqs" else case.table,
                options={n: v for n, v in case.options.items() if n not in ("rotary_dim", "interleaved")})  # fmt: skip
    (q, k, *tables), options = lower(
        make(rope, device), launch=launch, inplace=in_place, rotate_k=case.rotate_k, out_dtype=case.form
    )
    generator = torch.Generator().manual_seed(7)
    v = torch.randn(k.shape, generator=generator).to(k.dtype).to(device)
    rows = torch.Size(case.cache).numel()
    slots = torch.randperm(rows, generator=generator)[: b * s]
    slots[list(case.padding)] = -1
    caches = []
    for _ in range(2):
        shape = (*case.cache[:-1], hk, case.cache[-1], d) if case.heads_first else (*case.cache, hk, d)
        cache = torch.randn(shape, generator=generator).to(FORMATS[case.form].dtype if case.fp8 else k.dtype).to(device)
        caches.append(cache.transpose(-3, -2) if case.heads_first else cache)
    scales = (torch.tensor(0.004, device=device) if case.q_fp8 else None,
              *(torch.tensor(x, device=device) if case.fp8 else None for x in (0.7, 0.3)))  # fmt: skip
    return CacheCall(q, k, v, *caches, slots.to(device), scales, tuple(tables), options)


def random_case(seed: int) -> Case:
    """A random case, from all options that calls may combine; equal for equal seeds."""
    draw = random.Random(seed)
    layout = draw.choice(list(LAYOUT_AXES))
    packed = layout == "thd" and draw.random() < 0.7
    batch = 1 if layout == "thd" else draw.randint(1, 3)
    cp_size = draw.choice((1, 1, 2, 3))
    seqlen = draw.randint(1, 40) if packed else 2 * draw.randint(1, 20)
    head_dim = draw.choice((2, 6, 8, 32, 48, 64, 72, 80, 100, 112, 128, 160, 256))
    heads = draw.randint(1, 9)
    table = draw.choice(("half", "half", "full", "fused", "per_head", "angles", "angles_full", "angles_repeated"))
    k_heads = draw.choice((0, heads)) if table == "per_head" else draw.randint(0, heads)
    rotary = draw.choice((None, 2 * draw.randint(1, head_dim // 2)))
    tokens, multiple = cp_size * seqlen, draw.choice((1, 2 * cp_size))
    lengths = []
    while packed and sum(lengths) < tokens and draw.random() < 0.8:
        lengths.append(multiple * draw.randint(0, (tokens - sum(lengths)) // multiple))
    rows = tokens + draw.randint(0, 5)
    options: dict[str, Any] = {}
    if rotary is not None and draw.random() < 0.5:
        options["rotary_offset"] = draw.randint(0, head_dim - rotary)
    interleaved = draw.random() < 0.5
    if table in ("half", "fused", "angles") and draw.random() < 0.3:
        options["interleaved_out"] = not interleaved
    if draw.random() < 0.3:
        options["inverse"] = True
    if packed and draw.random() < 0.2:
        options["packed_table"] = True
    if table.startswith("angles") and draw.random() < 0.5:
        options["mscale"] = 1.5
    ids = ""
    if not packed and cp_size == 1 and draw.random() < 0.4:
        ids = draw.choice(("shared", "rows", "strided", "one-row")) if layout != "thd" else "shared"
        cuts = sorted(draw.randint(0, (rotary or head_dim) // 2) for _ in range(draw.choice((0, 1, 2, 3))))
        if cuts:
            ends = [0, *cuts, (rotary or head_dim) // 2]
            options["mrope_section"] = tuple(b - a for a, b in itertools.pairwise(ends))
            options["mrope_interleaved"] = draw.random() < 0.4
        rows = draw.randint(1, 40)
        if table == "fused":
            table = draw.choice(("cos_sin_cache", "freqs_cis"))
    starts = tuple(draw.randint(0, 6) for _ in range(len(lengths) if packed else batch))
    return Case(
        f"seed-{seed}", "the unforeseen", shape=(batch, seqlen, heads, k_heads, head_dim), layout=layout,
        dtype=draw.choice(("bf16", "fp16", "fp32")), interleaved=interleaved, rotary_dim=rotary, table=table,
        table_dtype=draw.choice(("fp32", "fp32", "bf16")), table_batch=not packed and draw.random() < 0.3,
        lengths=tuple(lengths) if packed else None,
        index_dtype=draw.choice((torch.int32, torch.int64)), ids=ids,
        starts=None if ids else draw.choice((None, starts)),
        cp=(cp_size, draw.randrange(cp_size)), table_rows=rows, strides=draw.choice(("plain", "plain", "offset")),
        options=options,
    )  # fmt: skip


Call = tuple[Tensor, "Tensor | None", "Tensor | None", "Tensor | None", dict[str, Any]]
Lowered = tuple[Tensor, "Tensor | None", Tensor, Tensor, "Tensor | None", "Tensor | None", "Tensor | None"]


def lower(call: Call, **changes: Any) -> tuple[Lowered, Options]:
    """The arguments of the op for a call: seven tensors, or eight with a scale of q; the options with `changes`."""
    q, k, cos, sin, keywords = call
    words = dict(keywords)
    cu_seqlens, starts, ids = (words.pop(name, None) for name in ("cu_seqlens", "start_positions", "position_ids"))
    factor = (words.pop("q_factor"),) if "q_factor" in words else ()
    table = next((name for name in ("freqs", "cos_sin_cache", "freqs_cis") if name in words), "cos_sin")
    words.setdefault("interleaved_out", words["interleaved"])
    words.setdefault("rotary_dim", q.shape[-1] - words.get("rotary_offset", 0))
    if table != "cos_sin":
        cos, sin = words.pop(table), None
    return (q, k, cos, sin, cu_seqlens, starts, ids, *factor), Options(**{**words, "table": table, **changes})


def head_views(q: Tensor, k: Tensor | None, options: Options, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """The heads that a call of q and k reads, and the heads that it writes."""
    out = (q, k)
    if not options.inplace:
        out = tuple(None if x is None else torch.empty_like(x, dtype=dtype, device="meta") for x in (q, k))
    inputs, outputs = (
        (*[None if x is None else head_view(x, options.layout) for x in xs], None) for xs in ((q, k), out)
    )
    return inputs, outputs


def named(kind: Kind, tensors: Any, tables: Any) -> dict[str, Tensor]:
    """A call's tensors by name, from a list in its order; None for a missing one."""
    return {**{name: x for name, x in zip(kind.tensors, tensors) if x is not None}, **named_tables(tables)}


def named_tables(tables: Any) -> dict[str, Tensor]:
    """Tables by name, from a list in their order; None for a missing one."""
    return {name: x for name, x in zip(TABLE_NAMES, tables) if x is not None}


def referenced(kind: Kind, tensors: Any, tables: Any, options: Options) -> dict[str, Tensor]:
    """The results of a call in plain torch."""
    return kind.op.on_cpu(named(kind, tensors, tables), options)


def rope_reference(*arguments: Any) -> list[Tensor | None]:
    """Rotate q and k in plain torch. Takes q, k, the tables in order, and the options."""
    q, k, *tables, options = arguments
    found = referenced(ROPE, (q, k), tables, options)
    return [found.get("q"), found.get("k")]


def launched(kind: Kind, tensors: Any, tables: Any, options: Options) -> list[Tensor | None]:
    """The results of a call's launch; None for a missing result."""
    results = dispatch.call(kind.op, named(kind, tensors, tables), options)
    return [results.get(name) for name in (results if "qkv" in results else kind.results)]


def op_arguments(kind: Kind, tensors: Any, tables: Any, options: Options) -> tuple[Any, ...]:
    """A call as arguments of torch's op."""
    given = named(kind, tensors, tables)
    return op_call.arguments(kind.op, op_call.filled(kind.op, given, options), options)


def make_qkv(case: Case, device: str = "cpu", **changes: Any) -> tuple[list[Any], Options]:
    """([qkv, cos, sin, cu_seqlens, start_positions], options) of a fused case."""
    (qkv, _, *tables), options = lower(make(as_fused(case), device), q_per_group=case.shape[3], **changes)
    return [qkv, *tables], options


def as_fused(case: Case) -> Case:
    """A fused case, (B, S, groups, heads of q in a group, D), with the shape of its one tensor."""
    b, s, groups, q_per_group, d = case.shape
    options = {"order": "grouped", **case.options}
    axes = fused_shape(groups, d, Options(q_per_group=q_per_group, order=options["order"]))
    return replace(case, shape=(b, s, axes[0], 0, axes[1]), rotary_dim=case.rotary_dim or d, options=options)


def heads_of(case: Case) -> tuple[int, int]:
    """The heads of q and of k of a fused case."""
    _, _, groups, q_per_group, _ = case.shape
    return groups * q_per_group, groups


def qkv_norm_call(case: NormCase, device: str = "cpu", seed: int = 0) -> tuple[Tensor, dict[str, Tensor], Any]:
    """(qkv, the weights and biases by name, the flat words) of a fused case with a norm."""
    qkv, _, cos, sin, words = make(as_fused(case.rope), device, seed)
    generator, dtype = torch.Generator().manual_seed(seed + 1), DTYPES[case.weight_dtype]
    names = [f"{x}_{kind}" for x in case.weights for kind in ("weight", "bias")[: 1 + case.biases]]
    *_, groups, each, size = case.rope.shape
    heads = {"q": groups * each, "k": groups} if case.across_heads else {"q": 1, "k": 1}
    weights = {name: torch.randn(heads[name[0]] * size, generator=generator).to(device, dtype) for name in names}
    tables = {} if cos is None else {"cos": cos, "sin": sin}
    return qkv, weights, {**words, **tables, "heads": heads_of(case.rope)}


BIASES = {
    "flat": "one axis, as `Linear` has it",
    "heads": "the last two axes of the projection's output",
    "offset": "its address is off by one element",
    "strided": "every other element of a longer tensor",
}
"""Forms of a projection's bias, each with its reason."""


def make_bias(qkv: Tensor, form: str, seed: int = 0) -> Tensor:
    """The bias of a projection with this output, in one of `BIASES`."""
    shape = qkv.shape[-2:]
    every = torch.randn(2 * shape.numel() + 1, generator=torch.Generator().manual_seed(seed + 2)).to(qkv)
    begin, step = int(form == "offset"), 1 + (form == "strided")
    flat = every[begin : begin + step * shape.numel() : step]
    return flat.view(shape) if form == "heads" else flat


def make_latent(case: LatentCase, device: str = "cpu", seed: int = 0, **changes: Any) -> tuple[list[Any], Options]:
    """([q, kv, k_pe, cos, sin, cu_seqlens, start_positions, ids], options) of a case."""
    (q, k, *tables), options = lower(make(case.rope, device, seed), **changes)
    offset = q.shape[-1] - options.rotary_dim
    generator = torch.Generator().manual_seed(1)
    axis = LAYOUT_AXES[options.layout][2]
    kv = torch.randn(*k.shape[:-1], offset + case.v_dim, generator=generator).to(q)
    k_pe = torch.randn(*k.shape[:-1], options.rotary_dim, generator=generator).to(q).narrow(axis, 0, 1)
    return [q, kv, k_pe, *tables], options._replace(rotary_offset=offset, v_dim=case.v_dim)


def latent_call(
    case: LatentCase, device: str = "cpu", seed: int = 0
) -> tuple[list[Tensor], dict[str, Any], dict[str, Any]]:
    """(q, kv, k_pe), the flat words of the call, and those of `apply_rope` for a whole head."""
    (*tensors, cos, sin, cu_seqlens, starts, ids), o = make_latent(case, device, seed)
    tables = {"freqs": cos} if o.table == "freqs" else {"cos": cos, "sin": sin}
    places = {"cu_seqlens": cu_seqlens, "start_positions": starts, "position_ids": ids}
    words = {name: getattr(o, name) for name in ("layout", "interleaved", "interleaved_out", "cp_size", "cp_rank")}
    words |= {"rounding": o.rounding, "mrope_section": o.mrope_section}
    words = {**tables, **{name: x for name, x in {**places, **words}.items() if x is not None}}
    return tensors, words, {**words, "rotary_dim": o.rotary_dim, "rotary_offset": o.rotary_offset}


def make(case: Case, device: str = "cpu", seed: int = 0) -> Call:
    """(q, k, cos, sin, keywords) of a case."""
    generator = torch.Generator().manual_seed(seed)
    b, s, hq, hk, d = case.shape
    rotary = case.rotary_dim or d
    q, k = (_activation(case, b, s, h, d, generator, device) if h else None for h in (hq, hk))
    rows = case.table_rows or s
    cos, sin = _tables(case, b, rows, hq, rotary, generator)
    keywords: dict[str, Any] = {
        "layout": case.layout, "interleaved": case.interleaved, "rounding": case.rounding, **case.options,
    }  # fmt: skip
    if case.rotary_dim:
        keywords["rotary_dim"] = case.rotary_dim
    if case.lengths is not None:
        ends = torch.tensor((0, *case.lengths)).cumsum(0)
        keywords["cu_seqlens"] = ends.to(case.index_dtype).to(device)
    if case.starts is not None:
        keywords["start_positions"] = torch.tensor(case.starts, dtype=case.index_dtype, device=device)
    if case.ids:
        keywords["position_ids"] = _ids(case, b, s, rows, generator).to(device)
    if case.q_scale:
        keywords["q_factor"] = _factor(case, b, s, generator).to(device)
    if case.cp[0] > 1:
        keywords["cp_size"], keywords["cp_rank"] = case.cp
    name = "freqs" if case.table.startswith("angles") else case.table
    if name in ("freqs", "cos_sin_cache", "freqs_cis"):
        keywords[name] = cos.to(device)
        return q, k, None, None, keywords
    return q, k, cos.to(device), sin.to(device), keywords


def _activation(case: Case, b: int, s: int, h: int, d: int, generator: torch.Generator, device: str) -> Tensor:
    order = LAYOUT_AXES[case.layout]
    sizes = {axis: size for axis, size in zip(order, (b, s, h, d)) if axis is not None}
    shape = [sizes[axis] for axis in range(len(sizes))]
    dtype = DTYPES[case.dtype]
    if case.strides == "qkv":  # [..., 3 h, d]: heads in the middle third
        x = torch.randn(b, s, 3 * h, d, generator=generator).to(dtype).to(device)
        return x[:, :, h : 2 * h]
    if case.strides == "transposed":  # (B, H, S, D) over memory in (B, S, H, D)
        return torch.randn(b, s, h, d, generator=generator).to(dtype).to(device).transpose(1, 2)
    if case.strides == "offset":
        x = torch.randn(b * s * h * d + 1, generator=generator).to(dtype).to(device)
        return x[1:].view(shape)
    if case.strides == "reversed":
        return torch.randn(*shape[:-2], d, shape[-2], generator=generator).to(dtype).to(device).transpose(-1, -2)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def _factor(case: Case, b: int, s: int, generator: torch.Generator) -> Tensor:
    if case.q_scale == "strided":
        return torch.rand((s, b), generator=generator).t() + 0.5
    shape = {"number": (), "shared": (s,), "rows": (b, s), "one-row": (1, s)}[case.q_scale]
    return torch.rand(shape, generator=generator) + 0.5


def _ids(case: Case, b: int, s: int, rows: int, generator: torch.Generator) -> Tensor:
    low = {"past": -3, "signed": 1 - rows, "signed-past": -rows - 1}.get(case.ids, 0)
    high = rows + (3 if case.ids == "past" else 2 if case.ids == "signed-past" else 0)
    lead = {"shared": (), "one-row": (1,)}.get("shared" if case.layout == "thd" else case.ids, (b,))
    axes = len(case.options.get("mrope_section", ()))
    shape = (*((axes,) if axes else ()), *lead, s)
    ids = torch.randint(low, high, shape, generator=generator).to(case.index_dtype)
    return ids.transpose(-1, -2).contiguous().transpose(-1, -2) if case.ids == "strided" else ids


def _tables(
    case: Case, b: int, rows: int, heads: int, rotary: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    batched = (case.table_batch and case.table != "cos_sin_cache") or case.table == "per_head"
    lead = (b,) if batched else ()
    angles = torch.rand(*lead, rows, rotary // 2, generator=generator) * 20
    dtype = TABLE_DTYPES[case.table_dtype]
    if case.table == "cos_sin_cache":
        cache = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
        return cache, cache
    if case.table == "freqs_cis":
        angles = angles.double() if dtype == torch.float64 else angles
        table = torch.polar(torch.ones_like(angles), angles)
        return table, table
    if case.table == "angles":
        return angles, angles
    if case.table == "angles_repeated":
        angles = angles.repeat_interleave(2, -1) if case.interleaved else torch.cat((angles, angles), -1)
        return angles, angles
    if case.table == "angles_full":
        angles = torch.rand(*lead, rows, rotary, generator=generator) * 20
        return angles, angles
    if case.table == "full":
        angles = torch.rand(*lead, rows, rotary, generator=generator) * 20
    if case.table == "per_head":
        angles = torch.rand(b, rows, heads, rotary // 2, generator=generator) * 20
    if dtype == torch.float64:
        angles = angles.double()
    if case.table == "repeated":
        cos, sin = (f(angles).repeat_interleave(2, -1) for f in (torch.cos, torch.sin))
        return cos[..., ::2], sin[..., ::2]
    if case.table == "complex":
        both = torch.view_as_real(torch.polar(torch.ones_like(angles), angles))
        return both[..., 0], both[..., 1]
    if case.table == "matrix":
        c, s = angles.cos(), angles.sin()
        matrix = torch.stack((c, -s, s, c), -1).unflatten(-1, (2, 2))
        return matrix[..., 0, 0], matrix[..., 1, 0]
    if case.table == "expanded":
        one = angles[:1, :1].cos()
        return one.expand(rows, rotary // 2), one.expand(rows, rotary // 2)
    if case.table == "fused":
        cache = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
        return cache[..., : rotary // 2], cache[..., rotary // 2 :]
    return angles.cos().to(dtype), angles.sin().to(dtype)
