"""The options of a call: its keywords, in one record, and the words that they take."""

from __future__ import annotations

from typing import NamedTuple

TABLES = ("cos_sin", "freqs", "cos_sin_cache", "freqs_cis")
ROUNDINGS = ("fp32", "complex64", "complex128", "dtype", "addcmul")
NORM_ROUNDINGS = ("none", "once", "twice")
NORM_KINDS = ("rms_norm", "layer_norm")
NORM_OF = ("qk", "q", "k", "v")
SCALED_DTYPES = ("fp8", "fp8_e5m2", "int8", "fp4")
SCALE_DTYPES = ("fp32", "e8m0", "fp8", "e8m0_fp32")
SCALE_FMTS = ("", "ue8m0")
QKV_ORDERS = {"grouped": 1, "qkv": 1, "qkv_gated": 2}
"""The orders of fused QKV, and the heads that q's projection has for each head of q: with a gate two."""
FUSED_AXES = {"bshd": "BS", "sbhd": "SB", "thd": "T"}
"""The layouts of fused QKV, and its axes before the heads."""
MAX_HEAD_DIM = 512

# The axes of (batch, seq, head, dim) in each layout; None: no batch axis.
LAYOUT_AXES: dict[str, tuple[int | None, int, int, int]]
LAYOUT_AXES = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3), "thd": (None, 0, 1, 2)}


class NormOptions(NamedTuple):
    """The norm of q and k, in the words of `Norm`."""

    rounding: str = "none"
    across_heads: bool = False
    zero_centered: bool = False
    after_rope: bool = False
    v_norm: bool = False
    kind: str = "rms_norm"
    of: str = "qk"  # one of `NORM_OF`
    eps: float = 1e-6

    def takes(self, name: str) -> bool:
        """Whether q, k or v is normalised."""
        return self.kind != "no_norm" and (name in self.of or (name == "v" and self.v_norm))


class Options(NamedTuple):
    """The words of a call, as `apply_rope` describes them."""

    rotary_dim: int = 0
    layout: str = "bshd"
    interleaved: bool = False
    interleaved_out: bool = False
    rotary_offset: int = 0
    max_seqlen: int = 0
    cp_size: int = 1
    cp_rank: int = 0
    table: str = "cos_sin"  # every other kind is a single tensor in the place of cos
    mrope_section: tuple[int, ...] = ()  # pairs of each axis of position_ids; () for one axis
    mrope_interleaved: bool = False
    shifts: bool = False  # position_ids are differences, and those below 0 rotate back
    mscale: float = 1.0
    packed_table: bool = False
    q_per_group: int = 0  # heads of q in a group of fused QKV; 0: separate q and k
    order: str = "grouped"  # of fused QKV, one of `QKV_ORDERS`
    copy_v: bool = True  # fused QKV: copy v, or return a view
    v_dim: int = 0  # latent attention: elements of a head of v
    unrotated: int = 0  # the first tokens of each sequence, before those of the tables
    rotate_k: bool = False  # rotate k in place too, beside its copy in a cache
    rounding: str = "fp32"
    launch: str = "auto"
    inverse: bool = False
    hadamard: bool = False
    clear_page: bool = False
    ulysses_degree: int = 0  # ranks, each with a group of heads in the results
    out_dtype: str = "fp8"  # of elements that are divided by scales
    group: int = 0  # neighbouring elements of a head with one dynamic scale; 0: the head
    scale_out: str = "fp32"  # the dtype of dynamic scales
    scale_fmt: str = ""  # "ue8m0": computed scales beside a cache are powers of two
    swizzled: bool = False  # in tiles of 128 tokens and 4 groups
    computed: bool = False  # the call computes the scales of q, and of k without a cache
    per_row: bool = False  # dynamic scales alone, each of a head of a batch row or a sequence
    dynamic_v: bool = False  # v has dynamic scales too
    norm: NormOptions | None = None
    inplace: bool = False


ALL_TOKENS = 2**31 - 1  # the number of unrotated tokens of a call that rotates none
NO_NORM = NormOptions(kind="no_norm")  # the norm of a call whose other stages need whole heads


def norm_of(options: Options) -> NormOptions:
    """The norm of a call that has one."""
    return options.norm or NormOptions()
