"""The public functions."""

from .projections import prepare_fused_qkv, prepare_mla_qkv, project_qkv
from .rope import apply_rope, prepare_qkv
from .streams import prepare_joint_qkv

__all__ = ["apply_rope", "prepare_fused_qkv", "prepare_joint_qkv", "prepare_mla_qkv", "prepare_qkv", "project_qkv"]
