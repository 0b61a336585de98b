"""Readable names of kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .spec import RopeSpec


def name_of(spec: RopeSpec) -> str:
    """A readable name. Kernels that differ only in a detail may share it."""
    pairings = [("halves", "interleaved")[flag] for flag in (spec.interleaved, spec.interleaved_out)]
    qkv = f"qkv{spec.q_per_group}" if spec.copy_v and not spec.v_dim else ""
    parts = [
        spec.kind,
        spec.dtype,
        f"d{spec.head_dim}" + (f"r{spec.rotary_dim}" if spec.rotary_dim != spec.head_dim else ""),
        "_to_".join(dict.fromkeys(pairings)),
        f"{spec.table_dtype}_{'full' if spec.full_width else 'half'}_{'freqs' if spec.freqs else 'table'}"
        + ("_per_head" if spec.per_head else ""),
        "backward" if spec.inverse else "forward",
        "in_place" if spec.in_place else "",
        "packed" if spec.cu_seqlens_dtype else "",
        f"cp{spec.cp_size}" if spec.cp_size > 1 else "",
        "ids" + (f"{len(spec.mrope_section)}" if spec.mrope_section else "") if spec.position_ids_dtype else "",
        "shifts" if spec.shifts else "",
        f"cache_{spec.kv_out}" if spec.cached else qkv,
        f"to_{spec.q_out}" + "_v" * spec.convert_v if spec.q_out != spec.dtype else "",
        f"latent_v{spec.v_dim}" if spec.v_dim else "",
        spec.rounding if spec.rounding != "fp32" else "",
        f"round_{spec.norm_rounding}" if spec.norm else "",
        spec.norm_kind if spec.norm_kind != "rms_norm" else "",
        f"hadamard_{spec.hadamard}" if spec.hadamard else "",
        "dynamic" if spec.dynamic else "",
        f"group{spec.group}" if spec.group else "",
        spec.scale_out if spec.scale_out != "fp32" else "",
        "swizzled" if spec.swizzled else "",
        "per_row" if spec.per_row else "",
        "after_rope" if spec.after_rope else "",
        "" if spec.norm_q == spec.norm_k else "of_q" if spec.norm_q else "of_k",
        "v_norm" if spec.v_norm and not spec.latent_norm else "",
        "_".join(map(str, ("across", *spec.row_heads))) if spec.across_heads else "",
        "two_streams" if spec.two_streams else "",
        *spec.stages,
        spec.launch,
    ]
    return "_".join(part for part in parts if part)
