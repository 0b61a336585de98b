"""The public functions."""

from ..ops.compiled import FUNCTIONS
from .projections import prepare_fused_qkv, prepare_mla_qkv
from .rope import apply_rope, prepare_qkv
from .streams import prepare_joint_qkv

FUNCTIONS.update(
    {x.__name__: x for x in (apply_rope, prepare_qkv, prepare_fused_qkv, prepare_mla_qkv, prepare_joint_qkv)}
)

__all__ = ["apply_rope", "prepare_fused_qkv", "prepare_joint_qkv", "prepare_mla_qkv", "prepare_qkv"]
