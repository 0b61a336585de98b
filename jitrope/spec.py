"""What is compiled into a kernel: frozen dataclasses, every field a constant of a template.

Pure Python, no torch: dtypes are the words "fp32", "fp16", "bf16".
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

C_TYPES = {"fp32": "float", "fp16": "fp16", "bf16": "bf16", "int32": "int", "int64": "long long"}
ITEM_SIZES = {"fp32": 4, "fp16": 2, "bf16": 2}
DTYPES = tuple(ITEM_SIZES)
LAUNCHES = ("token_linear", "grid_2d")
ROUNDINGS = ("fp32", "complex64")
MAX_HEAD_DIM = 512
ACCESS_BYTES = 16  # the widest load or store of one thread

# Where a layout keeps (batch, seq, head, dim); None: it has no batch axis.
LAYOUT_AXES: dict[str, tuple[int | None, int, int, int]] = {
    "bshd": (0, 1, 2, 3),
    "sbhd": (1, 0, 2, 3),
    "bhsd": (0, 2, 1, 3),
    "thd": (None, 0, 1, 2),
}


@dataclass(frozen=True)
class RopeSpec:
    """One `rope.cu.jinja` kernel.

    dtype, table_dtype: of q and k, and of cos and sin. interleaved: pairs are (2i, 2i+1), else
    (i, i + rotary_dim / 2). conjugate: rotate back (the backward). full_width: the table has an
    angle for each member of a pair. per_head: the table has angles for each head. rounding: "fp32"
    rounds every product and sum, "complex64" contracts as torch's complex multiply does on a GPU.
    index_dtype: of cu_seqlens, None if there are none. vec, table_vec: elements an access of q and
    k, and of the tables; 1 also serves any element stride. chunks: a thread holds one or two runs of
    neighbouring elements of a head, half the rotary part apart (halves: always two). A block has
    tokens_per_block tokens and heads_per_block heads of each at a time.
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
    launch: str
    vec: int
    chunks: int
    table_vec: int
    tokens_per_block: int
    heads_per_block: int

    template = "rope.cu.jinja"
    entry = "jitrope_rope"

    @property
    def name(self) -> str:
        """A readable name; kernels that differ in a detail only may share it."""
        parts = [
            "rope",
            self.dtype,
            f"d{self.head_dim}" + (f"r{self.rotary_dim}" if self.rotary_dim != self.head_dim else ""),
            "interleaved" if self.interleaved else "halves",
            f"{self.table_dtype}_{'full' if self.full_width else 'half'}_table{'_per_head' if self.per_head else ''}",
            "backward" if self.conjugate else "forward",
            "in_place" if self.in_place else "",
            "packed" if self.index_dtype else "",
            self.launch,
        ]
        return "_".join(part for part in parts if part)

    @property
    def lanes(self) -> int:
        """Threads along one head."""
        rest = 0 if self.in_place else self.head_dim - self.rotary_dim
        return self.rotary_dim // (self.chunk * self.chunks) + rest // self.vec

    @property
    def chunk(self) -> int:
        """Neighbouring elements that a thread holds: an access, and at least a pair if interleaved."""
        return max(self.vec, 2) if self.interleaved else self.vec

    @property
    def threads(self) -> int:
        """Threads of a block, in whole warps."""
        return -(-self.tokens_per_block * self.heads_per_block * self.lanes // 32) * 32

    def constants(self) -> dict[str, Any]:
        """The values of the template's parameter block."""
        return {
            "c_type": C_TYPES[self.dtype],
            "table_c_type": C_TYPES[self.table_dtype],
            "index_c_type": C_TYPES[self.index_dtype or "int32"],
            "head_dim": self.head_dim,
            "rotary_dim": self.rotary_dim,
            "interleaved": self.interleaved,
            "conjugate": self.conjugate,
            "full_width": self.full_width,
            "per_head": self.per_head,
            "fma": self.rounding == "complex64",
            "in_place": self.in_place,
            "packed": self.index_dtype is not None,
            "token_linear": self.launch == "token_linear",
            "vec": self.vec,
            "chunks": self.chunks,
            "table_vec": self.table_vec,
            "tokens_per_block": self.tokens_per_block,
            "heads_per_block": self.heads_per_block,
        }

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RopeSpec:
        """The inverse of `to_dict`; names a missing or an unknown field."""
        known = {field.name for field in fields(cls)}
        if data.keys() != known:
            raise ValueError(f"RopeSpec: missing {sorted(known - data.keys())}, unknown {sorted(data.keys() - known)}")
        return cls(**data)
