"""The public functions."""

from .projections import prepare_mla_qkv, prepare_packed_qkv
from .rope import apply_rope, prepare_joint_qkv, prepare_qkv

__all__ = ["apply_rope", "prepare_joint_qkv", "prepare_mla_qkv", "prepare_packed_qkv", "prepare_qkv"]
