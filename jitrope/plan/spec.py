"""What a call asks for, and what is compiled into a kernel, every field a constant of a template.

Pure Python, no torch: dtypes are the words "fp32", "fp16", "bf16".
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from ..base.spec import ACCESSES, C_TYPES, DTYPES, INDEX_DTYPES, MAX_THREADS, Spec, check_fields, refuse_unless
from . import arguments

LAUNCHES = ("token_linear", "grid_2d")
TABLES = ("cos_sin", "freqs", "cos_sin_cache", "freqs_cis")
ROUNDINGS = ("fp32", "complex64", "complex128", "dtype", "addcmul")
NORM_ROUNDINGS = ("none", "once", "twice")
ROPE_KINDS = ("rope", "qk_norm_rope", "qk_norm_rope_backward")
MAX_HEAD_DIM = 512

# Where a layout keeps (batch, seq, head, dim); None: it has no batch axis.
LAYOUT_AXES: dict[str, tuple[int | None, int, int, int]] = {
    "bshd": (0, 1, 2, 3),
    "sbhd": (1, 0, 2, 3),
    "bhsd": (0, 2, 1, 3),
    "thd": (None, 0, 1, 2),
}


class NormOptions(NamedTuple):
    """How q and k are normalised before they are rotated; the words are those of `Norm`."""

    rounding: str = "none"
    across_heads: bool = False
    zero_centered: bool = False
    eps: float = 1e-6


class Options(NamedTuple):
    """What a call asks for, beside its tensors; the words are `apply_rope`'s."""

    rotary_dim: int = 0  # first: torch keeps the sharding of an op by all arguments from its first int on
    layout: str = "bshd"
    interleaved: bool = False
    interleaved_out: bool = False
    rotary_offset: int = 0
    max_seqlen: int = 0
    cp_size: int = 1
    cp_rank: int = 0
    table: str = "cos_sin"  # of the others there is one tensor, at the place of cos: angles, cos | sin, complex64
    mrope_section: tuple[int, ...] = ()  # pairs of each axis of position_ids; (): there is one axis
    mrope_interleaved: bool = False
    mscale: float = 1.0
    packed_table: bool = False
    q_per_group: int = 0  # heads of q in a group of packed QKV; 0: q and k are tensors of their own
    copy_v: bool = True  # of packed QKV: v is copied out, or left as a view
    rotate_k: bool = False  # k is rotated in place beside its copy in a cache
    rounding: str = "fp32"
    launch: str = "auto"
    inverse: bool = False
    norm: NormOptions | None = None
    inplace: bool = False


def norm_of(options: Options) -> NormOptions:
    """The norm of a call that has one."""
    return options.norm or NormOptions()


def changed(options: Options, **fields: Any) -> Options:
    """The options with other values in some fields. Dynamo of torch 2.6 cannot trace `_replace`."""
    values: list[Any] = [fields.get(name, value) for name, value in zip(Options._fields, options)]
    return Options(*values)


@dataclass(frozen=True)
class Compiled:
    """The parts of a call that are compiled into its kernel; a problem and a spec have them in common.

    dtype, table_dtype: of q and k, and of the tables. rotary_dim elements from rotary_offset on are rotated; their
    pairs are (2i, 2i+1) if interleaved, otherwise (i, i + rotary_dim / 2), and interleaved_out says the same of the
    output. inverse: rotate back (the backward). rounding: the arithmetic, one of `ROUNDINGS`; "complex128" is the only
    one in fp64, and the only one with fp64 tables. wide: a stride (or a table's row) needs more than 31 bits.

    The tables. freqs: the table holds angles, not cos and sin. full_width: each member of a pair has an entry.
    per_head: each head has entries. packed_table: there is a row for each token of the packed batch.

    Rows of the tables. The dtypes of cu_seqlens, start_positions, position_ids and slot_mapping are None without them.
    cp_size: ranks that share each sequence. mrope_section: pairs of each axis of position_ids, () for one axis;
    mrope_interleaved: the pairs of the axes alternate. batch_inner: tokens of neighbouring batch rows are neighbours in
    memory, and are taken in that order.

    Outputs. q_out, kv_out: the stored type, dtype or "fp8". With a slot_mapping k and v go to a cache with pages of
    page_size slots (0: no pages), and rotate_k also rotates k in place. q_per_group: heads of q in a group of packed
    QKV, 1 elsewhere. copy_v: v's heads are copied.

    A norm. norm_rounding: one of `NORM_ROUNDINGS`, or "" without a norm. across_heads: the mean is over all heads of a
    token, and row_heads are the numbers of q's (and k's) heads. zero_centered: the factor is 1 + weight. weight_dtype:
    None without weights. two_streams, two_tables: q, k and v, or cos and sin too, come from two tensors each. gradient:
    the kernel is the norm's gradient, of q, k and the weights.
    """

    dtype: str
    table_dtype: str
    head_dim: int
    rotary_dim: int
    rotary_offset: int
    interleaved: bool
    interleaved_out: bool
    inverse: bool
    freqs: bool
    full_width: bool
    per_head: bool
    packed_table: bool
    rounding: str
    in_place: bool
    cu_seqlens_dtype: str | None
    start_positions_dtype: str | None
    cp_size: int
    position_ids_dtype: str | None
    mrope_section: tuple[int, ...]
    mrope_interleaved: bool
    slot_mapping_dtype: str | None
    page_size: int
    rotate_k: bool
    q_out: str
    kv_out: str
    norm_rounding: str
    across_heads: bool
    row_heads: tuple[int, ...]
    zero_centered: bool
    weight_dtype: str | None
    two_streams: bool
    two_tables: bool
    gradient: bool
    q_per_group: int
    copy_v: bool
    batch_inner: bool
    wide: bool

    @property
    def norm(self) -> bool:
        """Whether there is a norm."""
        return self.norm_rounding != ""


@dataclass(frozen=True)
class RopeSpec(Compiled, Spec):
    """One kernel: of `rope.cu.jinja`, or with a norm of `qk_norm_rope.cu.jinja` and its backward.

    one_row: there is one batch row. vec, table_vec, weight_vec: elements of an access of q and k, of
    the tables and of the weights; 1 also serves any element stride; table_step: the
    tables' own, 2 if they take every other element. chunks: a thread holds one or two runs of
    neighbouring elements of a head (halves: always two). A block has tokens_per_block tokens and heads_per_block
    heads (times heads_per_thread: neighbours) of each at a time; one_step: these are all the heads it has of it.
    blocks_per_sm: at least, with a norm.
    """

    one_row: bool
    launch: str
    vec: int
    chunks: int
    table_vec: int
    table_step: int
    weight_vec: int
    heads_per_thread: int
    blocks_per_sm: int
    tokens_per_block: int
    heads_per_block: int
    one_step: bool

    @property
    def kind(self) -> str:
        """What the kernel does, in its file's name and its entry's."""
        return ROPE_KINDS[0 if not self.norm else 2 if self.gradient else 1]

    @property
    def name(self) -> str:
        """A readable name; kernels that differ in a detail only may share it."""
        pairings = [("halves", "interleaved")[flag] for flag in (self.interleaved, self.interleaved_out)]
        parts = [
            self.kind,
            self.dtype,
            f"d{self.head_dim}" + (f"r{self.rotary_dim}" if self.rotary_dim != self.head_dim else ""),
            "_to_".join(dict.fromkeys(pairings)),
            f"{self.table_dtype}_{'full' if self.full_width else 'half'}_{'freqs' if self.freqs else 'table'}"
            + ("_per_head" if self.per_head else ""),
            "backward" if self.inverse else "forward",
            "in_place" if self.in_place else "",
            "packed" if self.cu_seqlens_dtype else "",
            f"cp{self.cp_size}" if self.cp_size > 1 else "",
            "ids" + (f"{len(self.mrope_section)}" if self.mrope_section else "") if self.position_ids_dtype else "",
            f"cache_{self.kv_out}" if self.slot_mapping_dtype else f"qkv{self.q_per_group}" if self.copy_v else "",
            f"to_{self.q_out}" if self.q_out != self.dtype else "",
            self.rounding if self.rounding != "fp32" else "",
            f"round_{self.norm_rounding}" if self.norm else "",
            "_".join(map(str, ("across", *self.row_heads))) if self.across_heads else "",
            "two_streams" if self.two_streams else "",
            self.launch,
        ]
        return "_".join(part for part in parts if part)

    @property
    def lanes(self) -> int:
        """Threads along one head."""
        rest = 0 if self.in_place and not self.slot_mapping_dtype and not self.norm else self.head_dim - self.rotary_dim
        return self.rotary_dim // (self.chunk * self.chunks) + rest // self.vec

    @property
    def chunk(self) -> int:
        """Neighbouring elements that a thread holds: an access, and at least a pair if interleaved."""
        return max(self.vec, 2) if self.interleaved and self.interleaved_out else self.vec

    @property
    def team(self) -> int:
        """Threads of a head: its lanes, and with a norm some that idle, up to a power of two."""
        return 1 << (self.lanes - 1).bit_length() if self.norm else self.lanes

    @property
    def threads(self) -> int:
        """Threads of a block, in whole warps."""
        rows = self.tokens_per_block * (len(self.row_heads) or 1)
        return -(-rows * self.heads_per_block * self.team // 32) * 32

    def check(self) -> None:
        """Raise InvalidInput where a field is not a constant of its kind, or these cannot be a kernel's."""
        check_fields(self, _WORDS)
        dims = f"head_dim {self.head_dim}, rotary_dim {self.rotary_dim}: even, and at most {MAX_HEAD_DIM}"
        refuse_unless("RopeSpec", 0 < self.rotary_dim <= self.head_dim <= MAX_HEAD_DIM, dims)
        refuse_unless("RopeSpec", self.rotary_dim % 2 == 0, dims)
        refuse_unless("RopeSpec", {self.chunks, self.table_step} <= {1, 2}, "chunks and table_step are 1 or 2")
        for name in ("vec", "table_vec", "weight_vec"):
            refuse_unless("RopeSpec", getattr(self, name) in ACCESSES, f"{name} is one of {ACCESSES}")
        for name in _COUNTS:
            refuse_unless("RopeSpec", getattr(self, name) > 0, f"{name} is at least 1")
        refuse_unless("RopeSpec", 0 < self.threads <= MAX_THREADS, f"a block has 1 to {MAX_THREADS} threads")

    def constants(self) -> dict[str, Any]:
        """The values of the template's parameter block."""
        self.check()
        return {
            "c_type": C_TYPES[self.dtype],
            "q_out_c_type": C_TYPES[self.q_out],
            "kv_out_c_type": C_TYPES[self.kv_out],
            "table_c_type": C_TYPES[self.table_dtype],
            "cu_seqlens_c_type": C_TYPES[self.cu_seqlens_dtype or "int32"],
            "start_positions_c_type": C_TYPES[self.start_positions_dtype or "int32"],
            "position_ids_c_type": C_TYPES[self.position_ids_dtype or "int32"],
            "slot_mapping_c_type": C_TYPES[self.slot_mapping_dtype or "int32"],
            "position_ids": self.position_ids_dtype is not None,
            "axes": len(self.mrope_section) or 1,
            "mrope_interleaved": self.mrope_interleaved,
            "mrope_section_ends": "{" + ", ".join(map(str, accumulate(self.mrope_section or (0,)))) + "}",
            "cache": self.slot_mapping_dtype is not None,
            "rotate_k": self.rotate_k,
            "page_size": self.page_size,
            "head_dim": self.head_dim,
            "rotary_dim": self.rotary_dim,
            "rotary_offset": self.rotary_offset,
            "interleaved": self.interleaved,
            "interleaved_out": self.interleaved_out,
            "inverse": self.inverse,
            "freqs": self.freqs,
            "full_width": self.full_width,
            "per_head": self.per_head,
            "packed_table": self.packed_table,
            "rounding": self.rounding.upper(),
            "real_c_type": "double" if self.rounding == "complex128" else "float",
            "in_place": self.in_place,
            "norm": self.norm,
            "packed": self.cu_seqlens_dtype is not None,
            "start_positions": self.start_positions_dtype is not None,
            "cp_size": self.cp_size,
            "q_per_group": self.q_per_group,
            "copy_v": self.copy_v,
            "batch_inner": self.batch_inner,
            "one_row": self.one_row,
            "stride_c_type": "long long" if self.wide else "unsigned int",
            "token_linear": self.launch == "token_linear",
            "vec": self.vec,
            "chunks": self.chunks,
            "table_vec": self.table_vec,
            "table_step": self.table_step,
            "tokens_per_block": self.tokens_per_block,
            "heads_per_block": self.heads_per_block,
            "one_step": self.one_step,
            "team": self.team,
            "threads": self.threads,
            "arguments": arguments.declarations(self.norm),
            **(self._norm_constants() if self.norm else {}),
        }

    def _norm_constants(self) -> dict[str, Any]:
        q_heads, k_heads, *_ = (*self.row_heads, 0, 0)
        return {
            "weight_c_type": C_TYPES[self.weight_dtype or "fp32"],
            "weighted": self.weight_dtype is not None,
            "across_heads": self.across_heads,
            "zero_centered": self.zero_centered,
            "norm_rounding": self.norm_rounding.upper(),
            "two_streams": self.two_streams,
            "two_tables": self.two_tables,
            "row_q_heads": q_heads,
            "row_k_heads": k_heads,
            "weight_vec": self.weight_vec,
            "heads_per_thread": self.heads_per_thread,
            "blocks_per_sm": self.blocks_per_sm,
        }


_WORDS = {
    "dtype": DTYPES,
    "table_dtype": (*DTYPES, "fp64"),
    "q_out": (*DTYPES, "fp8"),
    "kv_out": (*DTYPES, "fp8"),
    "weight_dtype": DTYPES,
    "cu_seqlens_dtype": INDEX_DTYPES,
    "start_positions_dtype": INDEX_DTYPES,
    "position_ids_dtype": INDEX_DTYPES,
    "slot_mapping_dtype": INDEX_DTYPES,
    "rounding": ROUNDINGS,
    "norm_rounding": ("", *NORM_ROUNDINGS),
    "launch": LAUNCHES,
}
_COUNTS = ("cp_size", "q_per_group", "heads_per_thread", "blocks_per_sm", "tokens_per_block", "heads_per_block")
