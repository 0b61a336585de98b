"""The specs of the rope kernels. Their fields become constants of the templates.

No tensor: dtypes are the words "fp32", "fp16", "bf16".
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from ..base.config import LAUNCHES
from ..base.errors import require
from ..base.layouts import MAX_HEAD_DIM
from ..base.spec import ACCESSES, DTYPES, INDEX_DTYPES, KINDS, MAX_AXES, NUMBERS, OF_NORM, Spec
from ..sinks import cache
from ..stages import Fields
from . import arguments

_COUNTS = "cp_size q_per_group kv_per_group v_per_k heads_per_thread blocks_per_sm tokens_per_block heads_per_block"
_UNNAMED = ("two_streams", "two_tables", "weight_dtype", "biased", "gradient", "dynamic_q")  # in a kernel's name
ROPE_KINDS = ("rope", "qk_norm_rope", "qk_norm_rope_backward", "project_qkv")


for part in (*Fields.__mro__[-2::-1], *cache.Fields.__mro__[-2::-1]):  # here, because a dataclass takes a while to make
    dataclass(frozen=True)(part)


@dataclass(frozen=True)
class Compiled(cache.Fields, Fields):
    """The parts of a call that are compiled into its kernel. A problem and a spec share these fields."""

    dtype: str = field(metadata={"words": DTYPES})  # of q and k
    head_dim: int
    in_place: bool
    two_streams: bool = field(metadata=OF_NORM | {"given": "second_q"})  # q, k and v come from two tensors each
    projected: bool = field(metadata=OF_NORM | {"given": "weight"})  # the kernel multiplies x by weight
    round_projection: bool = field(metadata=OF_NORM)  # projected: the sums are rounded to the dtype before the stages
    gradient: bool  # the kernel computes the gradients of q, k, the weights and the biases
    q_per_group: int  # heads in a group of fused QKV, or of a rank, else 1
    kv_per_group: int
    copy_v: bool
    v_per_k: int  # heads of v for each of k
    v_dim: int  # with latent attention, elements of a head of v, else 0
    batch_inner: bool  # tokens of neighbouring batch rows are neighbours in memory, and are taken in that order
    wide: bool  # a stride, or a table's number of rows, is 2^30 or more

    @property
    def norm(self) -> bool:
        return self.norm_rounding != ""

    @property
    def keeps_pairs(self) -> bool:
        """Whether a thread holds interleaved pairs, members side by side. With a norm they are reordered behind it."""
        return self.interleaved and (self.norm or not self.reorders)

    @property
    def copied(self) -> int:
        """Elements of a head that are copied without a rotation; in place they stay where they are."""
        stay = self.in_place and not (self.cached or self.norm or self.scales_q or self.added_bias)
        return 0 if stay else self.head_dim - self.rotary_dim


SUM_LANES = 4  # threads that have the sums of a token's heads, by the layout of `wgmma`


def _bits(axis_of_pair: tuple[int, ...], axes: int) -> list[str]:
    """Whether pairs are of an axis, in words of 32 bits: those of axis 0, then those of the next."""
    words = [axis_of_pair[n : n + 32] for n in range(0, len(axis_of_pair), 32)] or [()]
    return [str(sum((x == axis) << n for n, x in enumerate(word))) for axis in range(axes) for word in words]


@dataclass(frozen=True)
class RopeSpec(Compiled, Spec):
    """One kernel, rendered from `rope.cu.jinja`, or with a norm from `qk_norm_rope.cu.jinja` or its backward."""

    one_row: bool  # there is one batch row
    tiles: int  # the axis of the grid over tiles of heads, or 0
    launch: str = field(metadata={"words": LAUNCHES})
    vec: int  # elements in one access of q and k; 1 serves any element stride
    chunks: int  # runs of neighbouring elements of a head that a thread holds, 1 or 2 (halves: always 2)
    table_vec: int  # elements in one access of the tables
    table_step: int  # their element stride, 1 or 2
    weight_vec: int = field(metadata=OF_NORM)  # elements in one access of the weights
    heads_per_thread: int = field(metadata=OF_NORM)
    blocks_per_sm: int = field(metadata=OF_NORM)  # at least, with a norm
    ring: bool = field(metadata=OF_NORM)  # blocks walk the tokens, with their next heads on their way
    tokens_per_block: int
    heads_per_block: int  # of a token at a time, times heads_per_thread
    one_step: bool  # a block takes its heads in one step

    bounds: ClassVar = {
        **dict.fromkeys(("vec", "table_vec", "weight_vec"), ACCESSES),
        **dict.fromkeys(("chunks", "table_step"), (1, 2)),
        "axis_of_pair": range(MAX_AXES),
        **dict.fromkeys(_COUNTS.split(), NUMBERS[1:]),
    }

    @property
    def unused(self) -> tuple[str, ...]:
        """Fields that the template knows by other names or not at all."""
        of_norm = () if self.norm else ["gradient", *[x.name for x in fields(self) if "of_norm" in x.metadata]]
        return ("wide", "launch", "row_heads", "axis_of_pair", *of_norm)

    @property
    def kind(self) -> str:
        """The kind of kernel, which names its file and its entry."""
        return ROPE_KINDS[3 if self.projected else 0 if not self.norm else 2 if self.gradient else 1]

    @property
    def name(self) -> str:
        """A readable name. Kernels that differ only in a detail may share it."""
        parts = [
            *(self.kind, self.dtype, f"d{self.head_dim}" + f"r{self.rotary_dim}" * (self.rotary_dim != self.head_dim)),
            *(self.pairing, "backward" if self.inverse else "forward", f"cache_{self.kv_out}" * self.cached),
            *(f"to_{self.q_out}" * (self.q_out != self.dtype), self.norm_kind),
            *[x for x in self.stages if x not in _UNNAMED],
            self.launch,
        ]
        return "_".join(part for part in parts if part)

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages with arguments of their own (`arguments.OPTIONAL`)."""
        of_v = {"dynamic_v": self.dynamic_q and self.convert_v, "v_gradient": self.gradient and self.v_norm}
        has = {**vars(self), "paged": self.paged, "dynamic_q": self.dynamic_q, **of_v}
        return tuple([stage for stage in arguments.OPTIONAL if has[stage]])

    @property
    def lanes(self) -> int:
        """Threads along one head."""
        return self.rotary_lanes + self.copied // (self.vec * self.copy_accesses)

    @property
    def rotary_lanes(self) -> int:
        """Threads along one head that rotate."""
        return self.rotary_dim // (self.chunk * self.chunks)

    @property
    def copy_accesses(self) -> int:
        """Accesses of a thread that does not rotate.

        Two, as many as a thread that rotates has, if the rest of the head is in one piece. With a norm, only if the
        rest is laid out as the rotated part is: the order of the sum depends on it.
        """
        in_one_piece = self.copied % (2 * self.vec) == 0 and self.rotary_offset in (0, self.copied)
        alike = self.rotary_offset == 0 and self.copied % self.rotary_dim == 0 and self.copied > 0
        two_each = self.chunks == 2 and self.chunk == self.vec
        sums = self.norm and not (self.transforms or self.dynamic)
        return 2 if two_each and (alike if sums else in_one_piece) else 1

    @property
    def chunk(self) -> int:
        """Neighbouring elements that a thread holds: an access, and at least a pair if interleaved."""
        if self.projected:
            return self.head_dim // (self.chunks * SUM_LANES)
        return max(self.vec, 2) if self.keeps_pairs else self.vec

    @property
    def team(self) -> int:
        """Threads of a head: its lanes; with a norm, also idle threads up to a power of two."""
        return 1 << (self.lanes - 1).bit_length() if self.norm else self.lanes

    @property
    def shares_angles(self) -> bool:
        """Whether the threads of a token find its angles together, with a norm. A block without one always does."""
        long = self.freqs or (any(self.axis_of_pair) and self.table_vec == 1 and not self.gradient)
        own = self.per_head or self.two_tables or self.across_heads or self.rounding == "complex128"
        several = self.launch == "token_linear" and self.team * self.heads_per_block >= self.rotary_dim // 2
        return self.norm and long and several and not own

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a launch asks for: four slots of tokens' and weights' rows, aligned."""
        return self.projected * (4 * (self.tokens_per_block + self.heads_per_thread * self.head_dim) * 128 + 1024)

    @property
    def features(self) -> str:
        """What the name of an architecture ends in: "a" for instructions that later ones have not."""
        return "a" * self.projected

    @property
    def threads(self) -> int:
        """Threads of a block, in whole warps."""
        if self.projected:
            return 384  # two groups of threads with sums, and one that copies
        rows = self.tokens_per_block * (len(self.row_heads) or 1)
        return -(-rows * self.heads_per_block * self.team // 32) * 32

    def check(self) -> None:
        """Raise InvalidInput if a field has a wrong value, or if no kernel can have these fields together."""
        super().check()
        dims = f"head_dim {self.head_dim}, rotary_dim {self.rotary_dim}: both must be even and at most {MAX_HEAD_DIM}"
        even = self.rotary_dim % 2 == 0
        require("RopeSpec", even and 0 < self.rotary_dim <= self.head_dim <= MAX_HEAD_DIM, dims)
        require("RopeSpec", not self.norm or self.norm_kind != "", "a norm must have a norm_kind")
        require("RopeSpec", not (self.norm and self.v_dim), "v_dim goes with no norm_kind")
        require("RopeSpec", self.vec > 1 or "fp4" not in (self.q_out, self.kv_out), "fp4 needs vec above 1")

    def constants(self) -> dict[str, Any]:
        """The fields, and what the template needs of those that it does not know."""
        own = super().constants()
        found: dict[str, Any] = {
            "real_c_type": "double" if self.rounding == "complex128" else "float",
            "stride_c_type": "long long" if self.wide else "unsigned int",
            "packed": self.cu_seqlens_dtype is not None,
            **{x: getattr(self, f"{x}_dtype") is not None for x in ("start_positions", "position_ids")},
            "cache": self.cached,
            "pe_cache": self.pe_dtype is not None,
            "converts": self.q_out != self.dtype or self.kv_out != self.dtype,
            "axes": (axes := max(self.axis_of_pair, default=0) + 1),
            "pairs_of_axes": f"{{{', '.join(_bits(self.axis_of_pair, axes))}}}",
            "token_linear": self.launch == "token_linear",
            "arguments": arguments.declarations(self.stages),
            **{name: getattr(self, name) for name in ("paged", "norm", "copy_accesses", "team", "threads")},
        }
        if self.projected:
            found |= {"sums": self.heads_per_thread * self.head_dim // 2, "shared_bytes": self.shared_bytes}
            found["ptx_type"] = {"bf16": "bf16", "fp16": "f16"}[self.dtype]
        if self.norm:
            q_heads, k_heads, *_ = (*self.row_heads, 0, 0)
            found |= {"weighted": self.weight_dtype is not None, "row_q_heads": q_heads, "row_k_heads": k_heads}
            found["shares_angles"] = self.shares_angles
        return found | own


INDICES = tuple(x.name.removesuffix("_dtype") for x in fields(RopeSpec) if x.metadata.get("words") is INDEX_DTYPES)
GIVEN = {x.name: x.metadata["given"] for x in fields(Compiled) if "given" in x.metadata}
RopeSpec.words = {x.name: x.metadata["words"] for x in fields(RopeSpec) if "words" in x.metadata}


KINDS.update(dict.fromkeys(ROPE_KINDS, RopeSpec))
