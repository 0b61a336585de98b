"""NVRTC without a GPU: every prewarm spec for every architecture, and properties of the machine code."""

from __future__ import annotations

import itertools
import re
import shutil
import struct
import subprocess
import sysconfig
from collections.abc import Sequence
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import jitrope
from jitrope import KVCache, Norm, Pages, planning
from jitrope.base.errors import CompileError
from jitrope.jit import compiler
from jitrope.jit.render import Source, render
from jitrope.plan.options import Options
from jitrope.plan.problem import plan_call
from jitrope.plan.spec import RopeSpec
from jitrope.sources.backward import turned_back

from .cases import (
    CASES,
    HEADS_BACK,
    NORM_CASES,
    NormCase,
    head_views,
    lower,
    make,
    make_norm,
    named,
    named_tables,
    norm_kind,
)
from .described import popular, specs_of

ARCHS = ["sm_80", "sm_90", "sm_100", "sm_120"]
# Also the largest block, with the fewest registers for a thread, and the widest tables.
PACKED, PACKED64, IDS = {"cu_seqlens": "int32"}, {"cu_seqlens": "int64"}, "int64"
FP8_CACHE = {"slot_mapping": "int64", "k_cache": "fp8", "v_cache": "fp8", "k_scale": 1.0, "v_scale": 1.0}
LARGEST = [
    specs_of(heads=96, width="full"),
    specs_of(heads=96, width="full", interleaved=True, backward=True),
    specs_of(heads=96, width="full", positions=PACKED64, backward=True),
    specs_of(heads=48, width="full", dtype="fp32", positions=PACKED),
    # For training; kernels with shared work are limited to 40 registers.
    specs_of(heads=[[8], [24], [32], [64], [128]], table="freqs", width="full", positions=[None, PACKED],
             backward=True),
    specs_of(heads=40, table="freqs", positions={**PACKED64, "cp_size": 2, "start_positions": "int64"}, backward=True),
    specs_of(heads=40, table="freqs", positions={**PACKED64, "cp_size": 3, "packed_table": True}),
    specs_of(heads=24, positions={**PACKED, "cp_size": 6}),
    # Threads with several heads, one after the other.
    specs_of(heads=[64, 8], width="full", positions="int64", q_scale=0.5, backward=True),
    specs_of(heads=[64, 8], table_dtype="bf16", width="full", positions="int64", rounding="dtype"),
    specs_of(heads=[64, 8], table="freqs_cis", positions="int64", rounding="complex128", backward=True),
    specs_of(heads=[129, 5], rotary_dim=64, table="freqs", width="full", positions="int64", inplace=True),
    specs_of(heads=24, table="freqs", width="full", interleaved=True, positions={**PACKED, "packed_table": True}),
    specs_of(heads=64, positions=PACKED, backward=True),
    specs_of(heads=24, positions=PACKED, width="full", backward=True),
    specs_of(function="prepare_fused_qkv", heads=[32, 8], table="freqs", width="full", positions=PACKED,
             order="grouped", backward=True),
    specs_of(function="prepare_fused_qkv", order="grouped", heads=[16, 16], layout="sbhd", batch=2, backward=True),
    specs_of(function="prepare_fused_qkv", heads=[16, 2], head_dim=256, order="qkv_gated", backward=True),
    specs_of(function="prepare_fused_qkv", heads=[32, 8], bias=True, table="freqs", width="full", positions=PACKED,
             order="grouped"),
    specs_of(function="prepare_fused_qkv", heads=[28, 4], order="qkv", bias=True, inplace=True),
    specs_of(function="prepare_fused_qkv", heads=[16, 2], head_dim=256, order="qkv_gated", bias=True, backward=True),
    # DeepSeek-V3, whole and on one of eight ranks.
    *(specs_of(function="prepare_mla_qkv", heads=heads, head_dim=192, rotary_dim=64, interleaved=True,
               interleaved_out=False, table="freqs", positions=[None, PACKED], backward=True)
      for heads in ([128, 128], [16, 16])),
    specs_of(function="prepare_mla_qkv", heads=[40, 40], head_dim=96, rotary_dim=32, v_dim=64, backward=True),
    specs_of(function="prepare_mla_qkv", heads=[40, 40], head_dim=96, rotary_dim=32, table="freqs", width="full",
             unrotated=5, backward=True),
    *(specs_of(function="prepare_mla_qkv", heads=[16, 16], head_dim=192, rotary_dim=64, interleaved=True,
               interleaved_out=False, quantize={"q_scale": 1.0, "k_scale": 1.0, **more})
      for more in ({}, {"v_scale": 1.0})),
    # For serving.
    specs_of(heads=40, positions={"position_ids": "int32", "mrope_section": [16, 24, 24]}, inplace=True),
    specs_of(heads=40, positions={"position_ids": IDS, "mrope_section": [24, 20, 20], "mrope_interleaved": True},
         backward=True),
    specs_of(heads=24, positions=IDS, interleaved=True, table="freqs_cis"),
    specs_of(heads=72, positions=IDS, backward=True),
    specs_of(heads=24, positions=IDS, table="freqs"),
    specs_of(function="prepare_qkv", heads=[32, 8], positions=IDS, quantize={"q_scale": 1.0, "k_scale": 1.0}),
    specs_of(function="prepare_qkv", heads=[32, 8], positions=IDS, quantize=dict.fromkeys(
        ("q_scale", "k_scale", "v_scale"), 1.0), rounding="dtype", table_dtype="bf16", width="full"),
    specs_of(function="prepare_fused_qkv", heads=[28, 4], order="qkv", bias=True, positions=IDS, cache=FP8_CACHE),
    specs_of(function="prepare_qkv", heads=[32, 8], positions=IDS, quantize={"q_scale": 1.0},
         cache={**FP8_CACHE, "page_size": 16, "rotate_k": True}),
    specs_of(heads=16, head_dim=192, rotary_dim=64, rotary_offset=128, interleaved=True, interleaved_out=False,
         table="freqs", backward=True),
    # Roundings.
    specs_of(heads=48, rounding="complex128", table_dtype="fp64", interleaved=True, backward=True),
    specs_of(heads=40, rounding="dtype", table_dtype="bf16", width="full", backward=True),
    specs_of(heads=48, rounding="addcmul"),
    *(specs_of(heads=8, positions={"position_ids": IDS, "shifts": True}, inplace=True, width=width)
      for width in ("half", "full")),
    # A scale of q, and first tokens that are not rotated.
    specs_of(heads=[32, 8], q_scale=0.5, backward=True),
    specs_of(heads=[16, 16], unrotated=5, layout="bhsd", backward=True),
    specs_of(heads=[32, 8], rounding="dtype", table_dtype="bf16", width="full", q_scale=0.5, unrotated=1),
]  # fmt: skip
# With a norm first. FLUX and HunyuanVideo, Qwen-Image, both streams at once, Wan, LTX, a language model's
# prefill and decode, and unusual parts of a head.
BF16, FP32 = ({"q_weight": dtype, "k_weight": dtype} for dtype in ("bf16", "fp32"))
NONE, ONCE, TWICE = ({**BF16, "rounding": rounding} for rounding in ("none", "once", "twice"))
ACROSS = {**ONCE, "across_heads": True}
LAYER = {**ONCE, "kind": "layer_norm", "q_bias": "bf16", "k_bias": "bf16"}
prepared = partial(specs_of, function="prepare_qkv")
LARGEST += [
    prepared(heads=[24, 24], interleaved=True, norm=ONCE, backward=True),
    prepared(heads=[24, 24], interleaved=True, width="full", norm=ONCE),
    prepared(heads=[24, 24], interleaved=True, table="freqs_cis", rounding="complex64", norm=TWICE, inplace=True),
    prepared(function="prepare_joint_qkv", heads=[24, 24], interleaved=True, norm=ONCE),
    prepared(function="prepare_joint_qkv", heads=[24, 24], norm={**FP32, "rounding": "twice", "zero_centered": True}),
    prepared(function="prepare_joint_qkv", heads=[24, 24], interleaved=True, positions=IDS, backward=True),
    prepared(function="prepare_joint_qkv", heads=[24, 24], norm={**ONCE, "v_norm": True}, table="freqs", unrotated=512),
    prepared(function="prepare_joint_qkv", heads=[24, 24], interleaved=True, norm=ONCE,
             quantize=[{"dtype": "fp8", "per": "head", "v": True}, {"dtype": "int8", "hadamard": True}]),
    prepared(function="prepare_joint_qkv", heads=[24, 24], interleaved=True, norm=ONCE, hadamard=True),
    *(prepared(heads=heads, norm=ACROSS, interleaved=True, **more) for heads in ([12, 12], [40, 40])
      for more in ({"inplace": True}, {"backward": True})),
    prepared(heads=40, norm={"q_weight": "bf16", "rounding": "once", "across_heads": True}, interleaved=True),
    prepared(heads=[32, 32], head_dim=64, norm=ACROSS, rounding="addcmul", backward=True),
    prepared(heads=[32, 8], norm=NONE, positions=IDS, backward=True),
    prepared(heads=[8, 4], head_dim=256, norm={**ONCE, "v_norm": True}, backward=True),
    prepared(heads=[32, 8], norm=ONCE, interleaved=True, interleaved_out=False, backward=True),
    # In the largest block the stages would need more shared memory than there is.
    prepared(heads=[95, 1], head_dim=256, interleaved_out=True,
             quantize={"dtype": "fp8", "hadamard": True, "group": 32}),
    prepared(heads=[32, 8], norm=TWICE, rounding="dtype", positions=IDS, inplace=True),
    prepared(heads=[32, 8], norm=TWICE, positions=PACKED, table=["cos_sin", "freqs"], backward=True),
    prepared(function="prepare_fused_qkv", heads=[32, 8], norm=ONCE, positions={**PACKED, "cp_size": 2}, table="freqs",
             order="grouped", width="full", backward=True),
    prepared(heads=[32, 8], norm=TWICE,
         positions={"position_ids": IDS, "mrope_section": [24, 20, 20], "mrope_interleaved": True}),
    prepared(heads=[16, 8], head_dim=256, norm={**FP32, "rounding": "once", "zero_centered": True}, rotary_dim=64,
         backward=True),
    prepared(heads=[32, 16], head_dim=64, norm=TWICE), prepared(heads=[24, 8], head_dim=80, norm=ONCE),
    prepared(heads=[24, 8], head_dim=96, norm=ONCE, rounding="complex128", table_dtype="fp64", interleaved=True),
    prepared(heads=[24, 8], dtype="fp32", norm={**FP32, "rounding": "once"}, backward=True),
    prepared(heads=[8, 8], head_dim=512, norm=NONE),
    prepared(heads=[48, 48], head_dim=64, norm=LAYER, backward=True),
    prepared(heads=[32, 8], norm=TWICE, quantize={"dtype": "fp8"},
         positions={"position_ids": IDS, "mrope_section": [24, 20, 20]}),
    prepared(heads=[64, 1], rotary_dim=64, quantize={"dtype": "fp8", "hadamard": True}),
    prepared(heads=[64, 1], rotary_dim=64, quantize={"dtype": "fp8", "hadamard": True}, norm={
        "k_weight": "fp32", "k_bias": "fp32", "kind": "layer_norm", "of": "k",
    }),
    prepared(heads=[64, 1], rotary_dim=64, quantize={"dtype": "fp8", "hadamard": True}, norm={
        "k_weight": "fp32", "k_bias": "fp32", "kind": "layer_norm", "of": "k",
    }, cache={"k_cache": "fp8", "k_block_scale": "fp32", "group": 128, "slot_mapping": "int64"}),
    prepared(heads=[64, 1], rotary_dim=64, cache={
        "k_cache": "fp8", "k_block_scale": "fp32", "group": 128, "scale_fmt": "ue8m0", "slot_mapping": "int64",
    }),
    prepared(heads=[32, 8], norm={"k_weight": "bf16", "of": "k"}, backward=True),
    prepared(heads=[128, 1], head_dim=64, positions=IDS, norm={"v_weight": "bf16", "of": "v", "rounding": "once"},
             cache={"k_cache": "bf16", "v_cache": "bf16", "slot_mapping": "int64"}),
    prepared(function="prepare_fused_qkv", heads=[32, 8], norm=TWICE, positions=IDS, bias=True, cache=FP8_CACHE,
             order="grouped", quantize={"dtype": "fp8"}),
    prepared(heads=[24, 24], norm=ONCE, interleaved=True, quantize={"dtype": "int8", "hadamard": True}),
    prepared(heads=[32, 8], norm=TWICE, quantize={"dtype": "fp8_e5m2", "group": 32}),
    prepared(heads=[64, 8], rotary_dim=64, quantize={"q_scale": 1.0, "hadamard": True},
             cache={**FP8_CACHE, "page_size": 16}),
    prepared(heads=[32, 8], norm=TWICE, positions=IDS,
             quantize=[{"dtype": "fp8", "per": "kv_head", "v": v} for v in (False, True)]),
    prepared(heads=[24, 24], norm=ONCE, interleaved=True, quantize={"dtype": "int8", "v": True}),
    prepared(heads=[32, 8], norm=FP32, quantize={"dtype": "fp4", "group": 16, "scale_dtype": "fp8", "v": True}),
    prepared(function="prepare_fused_qkv", heads=[32, 8], order="qkv", bias=True, norm=TWICE,
             quantize={"dtype": "fp8", "group": 32, "scale_dtype": "e8m0", "v": True}),
    *(prepared(heads=[32, 8], positions=IDS, norm=norm, cache={
        **FP8_CACHE, "k_cache": "fp4", "v_cache": "fp4", "page_size": 16,
        "k_block_scale": "fp8", "v_block_scale": "fp8",
    }) for norm in (TWICE, None)),
    prepared(heads=[32, 8], positions=IDS, quantize={"dtype": "fp8", "group": 32, "scale_dtype": "e8m0"}),
    prepared(heads=[32, 8], norm=ONCE, quantize={"dtype": "fp4", "group": 32, "scale_dtype": "e8m0"}),
    prepared(heads=[32, 8], norm=ONCE, quantize={"dtype": "fp8", "group": 128, "scale_fmt": "ue8m0"}),
    *(prepared(heads=[32, 8], interleaved=True, quantize={
        "dtype": "fp4", "group": 16, "scale_dtype": "fp8", "q_global_scale": 0.01, "swizzled": swizzled,
    }) for swizzled in (False, True)),
    prepared(heads=64, head_dim=512, rotary_dim=64, rotary_offset=448, interleaved=True, inverse=True,
             quantize={"dtype": "fp8", "group": 128}),
    prepared(heads=[2, 2], head_dim=6, rotary_dim=2, norm=NONE),
    prepared(heads=[32, 8], norm={**LAYER, "after_rope": True}),
    prepared(heads=[16, 8], norm={"rounding": "once"}, interleaved=True, backward=True),
    *(prepared(heads=heads, norm={**ACROSS, "mean_squares": "fp32"}, **more) for heads, more in
      (([10, 10], {"interleaved": True, "backward": True}), ([24, 4], {"positions": IDS, "cache": FP8_CACHE}))),
    prepared(heads=[32, 8], norm={**TWICE, "after_rope": True}, q_scale=0.5, unrotated=1, backward=True),
    # Qwen3.5's fused projection with a gate.
    prepared(function="prepare_fused_qkv", heads=[16, 2], head_dim=256, rotary_dim=64, order="qkv_gated",
             norm={**FP32, "rounding": "once", "zero_centered": True}, bias=[False, True], backward=True),
]  # fmt: skip


def paged(ragged: bool, page_size: int = 16, normed: bool = False, placed: bool = False, **own: Any) -> list[RopeSpec]:
    """Kernels with a page table, for ids and a cache of other calls."""
    q, k, v, weight = (torch.empty(9, n, 128, dtype=torch.bfloat16, device="meta") for n in (32, 8, 8, 1))
    caches = torch.empty(2, 99, page_size, 8, 128, dtype=torch.float8_e4m3fn, device="meta")
    table, lens, offsets = (torch.empty(size, dtype=torch.int32, device="meta") for size in ((9, 9), 9, 10))
    words = {"page_indptr": offsets, "last_page_len": lens} if ragged else {"seq_lens": lens}
    words |= {"cu_seqlens_q": offsets}
    if placed:
        words = {"page_indptr": offsets, "batch_indices": lens, "cache_positions": lens}
    pages = Pages(table[0] if ragged else table, **words, errors=lens[:1], **own)
    cache = KVCache(*caches, pages, k_scale=1.0, v_scale=1.0)
    rows = torch.empty(999, 128, device="meta")
    norm = Norm(weight[0, 0], weight[0, 0], rounding="twice") if normed else None
    with planning() as specs:
        jitrope.prepare_qkv(q, k, v, cos_sin_cache=rows, positions=lens, layout="thd", norm=norm, cache=cache)
    return specs


LARGEST += [
    paged(False),
    paged(True, placed=True),
    paged(True, clear_page=True),
    paged(True, 48, normed=True, clear_page=True),
]
DEFAULT = popular()
PREWARM = list(dict.fromkeys([*DEFAULT, *itertools.chain.from_iterable(LARGEST)]))
SWEPT = ("sm_80", "sm_90")  # get every spec; the other architectures get the default ones


@cache
def compiled(spec: RopeSpec, arch: str) -> tuple[bytes, str]:
    return compiler.compile_source(render(spec), arch, ("--ptxas-options=-v",))


# Machine code depends on the compiler. Bounds hold for CI's NVRTC versions, which are that of torch's wheels and the
# newest; with other versions kernels must only compile. For each version: the most bytes that a thread spills, on each
# of ARCHS, for kernels with limited registers.
# Two rows of 40 heads, their gradients and sums: 320 threads with 168 registers each, one block at a time.
PLAIN = {"dtype": "bf16", "table_dtype": "fp32", "full_width": False, "freqs": False}
LARGE = {**PLAIN, "head_dim": 128, "interleaved": True, "gradient": True, "row_heads": (40, 40)}
# Gradients of weights and biases: two sums for each element.
BIASED = {**PLAIN, "head_dim": 64, "interleaved": False, "gradient": True, "norm_kind": "layer_norm"}
# Keys and values in a cache with scales of groups: 80 registers.
FP4_CACHE = {**PLAIN, "head_dim": 128, "interleaved": False, "kv_out": "fp4", "norm_rounding": "twice", "group": 16}
# The widest angles without a norm: 40 registers, as many as 1,536 threads have.
ANGLES = {"kind": "rope", "dtype": "bf16", "head_dim": 128, "interleaved": False, "freqs": True, "full_width": True}
# Two streams that are transformed: 96 registers. The bounds were read with 13.5 alone.
TWO = {**PLAIN, "head_dim": 128, "interleaved": True, "norm_rounding": "once", "hadamard": True, "two_streams": True}
STREAMS = [({**TWO, "q_out": "int8", "dynamic": True}, (0, 0, 8, 8)), ({**TWO, "dynamic": False}, (0, 0, 40, 40))]
SPILLS = {
    (13, 2): [
        (LARGE, (0, 0, 32, 32)),
        (BIASED, (8, 0, 0, 0)),
        (FP4_CACHE, (0, 8, 16, 0)),
        (ANGLES, (0, 0, 0, 16)),
        *STREAMS,
    ],
    (13, 5): [(LARGE, (0, 0, 24, 24)), (FP4_CACHE, (0, 8, 0, 0)), (ANGLES, (0, 0, 0, 8)), *STREAMS],
}


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "head_dim"), [(96, 128), (64, 256)])
def test_other_pairs_of_wide_rows_fit_in_shared_memory(heads: int, head_dim: int) -> None:
    """Norms across heads exchange whole rows; the gradient's largest block would need more memory than there is."""
    words = {"norm": ACROSS, "interleaved": True, "interleaved_out": False, "backward": True}
    for spec in prepared(heads=[heads, heads], head_dim=head_dim, **words):
        assert compiled(spec, "sm_90")[0].startswith(b"\x7fELF")


def bounds() -> list[tuple[dict[str, Any], tuple[int, ...]]]:
    """This compiler's row of SPILLS. Without one the rest of the test, which is about machine code, is skipped."""
    version = compiler.nvrtc_version()
    if version not in SPILLS:
        known = ", ".join(f"{major}.{minor}" for major, minor in SPILLS)
        pytest.skip(f"machine code is held to bounds for NVRTC {known}; this is {version[0]}.{version[1]}")
    return SPILLS[version]


@pytest.mark.slow
@pytest.mark.parametrize("half", range(2))  # for two processes
@pytest.mark.parametrize("arch", ARCHS)
def test_prewarm_specs_compile_without_spills_and_move_16_bytes_an_access(arch: str, half: int, tmp_path: Path) -> None:
    every = PREWARM if arch in SWEPT else DEFAULT
    in_whole_accesses = {s for s in every if s.dtype == "bf16" and s.vec == 8 and s.q_out == s.kv_out == "bf16"}
    assert len(in_whole_accesses) > len(every) / 2
    specs = every[half::2]
    code = {spec: compiled(spec, arch) for spec in specs}
    for spec, (cubin, _) in code.items():
        assert cubin.startswith(b"\x7fELF"), spec.name
    row = [(of, sizes[ARCHS.index(arch)]) for of, sizes in bounds()]
    allowed = {
        spec: next((size for of, size in row if all(getattr(spec, name) == x for name, x in of.items())), 0)
        for spec in specs
    }
    for spec, (cubin, log) in code.items():
        assert "warning" not in log, f"{spec.name}: {log}"
        report = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
        assert report, log
        stack, stores, loads = map(int, report.groups())
        # sincosf keeps 32 bytes for arguments past 105,615. A kernel limited to 40 registers may lack one, which
        # it stores once and loads twice; on sm_120 ANGLES allows more.
        tight = spec.freqs and spec.full_width
        assert stack <= max(40 if spec.freqs else 0, allowed[spec]), spec.name
        assert stores <= max(4 if tight else 0, allowed[spec]), spec.name
        assert loads <= max(8 if tight else 0, allowed[spec]), spec.name
        assert not DIVISION.search(cubin), spec.name
    aligned = [spec for spec in specs if spec in in_whole_accesses]
    for spec, found in zip(aligned, disassemble([code[spec][0] for spec in aligned], arch, tmp_path)):
        names = [opcode(line) for line in found]
        loads = [name for name in names if name.startswith("LDG") and name != "LDGDEPBAR"]  # a wait
        stores = [name for name in names if name.startswith("STG")]
        narrow_loads = [name for name in loads if ".128" not in name]
        # The heads, and the tables if every thread has its own part. A block that shares work loads a
        # table's entries one by one, once; cu_seqlens have 4 or 8 bytes each. Nothing else is narrow.
        searches = spec.cu_seqlens_dtype is not None or (spec.mrope_section and not spec.copy_v)
        shares = spec.shares_angles or (not spec.norm and (spec.freqs or (searches and spec.launch == "token_linear")))
        per_entry = spec.table_vec == 1  # complex64 tables, and axes that alternate from pair to pair
        of_tokens = spec.scales_q or spec.given_means
        integers = spec.cu_seqlens_dtype is not None or spec.position_ids_dtype is not None or of_tokens
        assert len(loads) - len(narrow_loads) >= spec.chunks + (0 if shares or per_entry else 2), spec.name
        if spec.freqs:  # the constants of sincosf for large angles, in some versions of NVRTC
            narrow_loads = [name for name in narrow_loads if not name.endswith("CONSTANT")]
        assert bool(narrow_loads) == (shares or per_entry or integers), (spec.name, narrow_loads)
        assert stores, spec.name
        wide = [name for name in stores if ".128" in name]
        # A block of a norm's gradient stores its sums of the weights' gradients one by one, once.
        assert wide if spec.gradient and spec.weight_dtype else len(wide) == len(stores), spec.name
        local = [name for name in names if name.startswith(("LDL", "STL"))]
        assert spec.freqs or allowed[spec] or not local, spec.name


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_75", *ARCHS])
def test_every_case_compiles(arch: str) -> None:
    """Each case of the numeric tests, for the architectures in turn, and for the oldest one."""
    number = ["sm_75", *ARCHS].index(arch)
    for case in CASES[number :: len(ARCHS) + 1]:
        (q, k, *tables), options = lower(make(case))
        plan, _ = plan_call(*head_views(q, k, options), named_tables(tables), options, 132)
        assert compiler.compile_source(render(plan.spec), arch)[0].startswith(b"\x7fELF")
    for case in NORM_CASES[number :: len(ARCHS) + 1]:
        for spec in norm_specs(case):
            assert compiler.compile_source(render(spec), arch)[0].startswith(b"\x7fELF")


def norm_specs(case: NormCase) -> list[RopeSpec]:
    """The kernels of a case and, unless it is a joint one, of its gradient."""
    call = make_norm(case)
    _, tensors = norm_kind(call)
    if case.first is not None:
        parts = [tuple(x.unsqueeze(3) for x in xs) for xs in (call.streams[:3], call.streams[3:])]
        out = [torch.empty(*a.shape[:1], a.shape[1] + b.shape[1], *a.shape[2:], dtype=a.dtype) for a, b in zip(*parts)]
        return [plan_call(parts[0], tuple(out), tensors, call.options, 132)[0].spec]
    specs = [plan_call(*head_views(*call.streams, call.options), tensors, call.options, 132)[0].spec]
    back = turned_back(call.options)._replace(rounding="complex64", **{**call.norm, "norm_rounding": "none"})
    tensors = named(HEADS_BACK, (*call.streams, *call.streams, *call.weights), call.tables)
    return [*specs, plan_call(*head_views(*call.streams, back), tensors, back, 132)[0].spec]


def nearer(x: torch.Tensor) -> torch.Tensor:
    """The same with strides just below 2^30 in place of those from there on."""
    return torch.empty_strided(
        x.shape, [min(step, (1 << 30) - 64) for step in x.stride()], dtype=x.dtype, device="meta"
    )


@pytest.mark.parametrize("which", ["q", "cos", "ids"])
def test_a_stride_whose_bytes_take_more_than_32_bits_is_compiled_in(which: str) -> None:
    """Other kernels have strides of 32 bits. The test needs no tensor of this size."""
    far = 1 << 30  # of fp32
    q = torch.empty_strided((1, 2, 4, 64), (0, far if which == "q" else 256, 64, 1), device="meta")
    cos = torch.empty_strided((9, 32), (far if which == "cos" else 32, 1), device="meta")
    ids = torch.empty_strided((2, 1, 2), (far if which == "ids" else 2, 2, 1), dtype=torch.int32, device="meta")
    options = Options(rotary_dim=64, mrope_section=(16, 16), inplace=True)
    near = [nearer(x) for x in (q, cos, ids)]
    for tensors, wide in (((q, cos, ids), True), (near, False)):
        q, cos, ids = tensors
        plan, _ = plan_call(*head_views(q, None, options), named_tables((cos, cos, None, None, ids)), options, 132)
        assert plan.spec.wide == wide
        assert f"using Stride = {'long long' if wide else 'unsigned int'};" in render(plan.spec).text


def tool(name: str) -> str:
    """A CUDA binary utility: on the path, or from its wheel."""
    folders = Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/bin")
    found = shutil.which(name) or next((str(f / name) for f in folders if (f / name).exists()), None)
    assert found, f"{name} is missing: pip install -e '.[test]'"
    return found


DIVISION = re.compile(rb"__cuda_sm\d+_(div|rem)_[su]64")  # functions of a 64-bit division; 32 bits are inline


def machine_code(cubin: bytes) -> bytes:
    """The section .text.NAME of a cubin, which is an ELF file with one kernel."""
    (start,), (count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<HH", cubin, 60)
    sections = [struct.unpack_from("<I20xQQ", cubin, start + 64 * i) for i in range(count)]  # name, offset, size
    (found,) = [(at, size) for name, at, size in sections if cubin.startswith(b".text.", sections[names][1] + name)]
    return cubin[found[0] : sum(found)]


def disassemble(cubins: Sequence[bytes], arch: str, folder: Path) -> list[list[str]]:
    """The instructions of each cubin. One nvdisasm reads all, because its start takes longer than many kernels."""
    parts = [machine_code(cubin) for cubin in cubins]
    (folder / "code").write_bytes(b"".join(parts))
    command = [tool("nvdisasm"), "--no-dataflow", "--binary", arch.replace("sm_", "SM"), str(folder / "code")]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(\S.*);", text, re.MULTILINE)
    assert len(lines) == sum(map(len, parts)) // 16  # bytes an instruction
    rest = iter(lines)
    return [list(islice(rest, len(part) // 16)) for part in parts]


def opcode(line: str) -> str:
    return re.sub(r"^@!?U?P\w+\s+", "", line).split()[0]


def test_the_gate_sees_a_64_bit_division() -> None:
    source = Source('extern "C" __global__ void f(long long* x) { x[0] = x[1] / x[2]; }', "f", "division")
    assert DIVISION.search(compiler.compile_source(source, "sm_90")[0])


def test_the_gate_sees_a_spill() -> None:
    body = "".join(f"float a{i} = x[{i}];" for i in range(300)) + "__syncthreads();"
    body += "".join(f"x[{i}] = a{i} * a{(i * 7) % 300};" for i in range(300))
    text = f'extern "C" __global__ void __launch_bounds__(1024) f(float* x) {{ {body} }}'
    _, log = compiler.compile_source(Source(text, "f", "spill"), "sm_90", ("--ptxas-options=-v",))
    assert not re.search(r"\b0 bytes spill stores", log)


def test_compiling_is_deterministic() -> None:
    source = render(PREWARM[0])
    assert compiler.compile_source(source, "sm_90") == compiler.compile_source(source, "sm_90")


def test_cubin_is_whole(tmp_path: Path) -> None:
    """CuPy's getCUBIN drops the last byte; without it the ELF file is invalid."""
    cubin = compiled(PREWARM[0], "sm_90")[0]
    path = tmp_path / "kernel.cubin"
    for data, good in ((cubin, True), (cubin[:-1], False)):
        path.write_bytes(data)
        done = subprocess.run([tool("nvdisasm"), str(path)], capture_output=True, text=True)
        assert (done.returncode == 0) == good


def test_an_unknown_architecture_is_explained() -> None:
    with pytest.raises(CompileError, match=r"compiles for sm_75, .*, not for sm_20"):
        compiler.compile_source(render(PREWARM[0]), "sm_20")


GUARDED = """
extern "C" __global__ void guarded(const float* from, float* to, int n, int lanes) {{
    const int lane = threadIdx.x;
    #pragma unroll 1
    for (int i = blockIdx.x; i < n; i += 7) {{
        Vec<float, {width}> x = {{}};
        if (lane < lanes) x = {load}<float, {width}>(from + {width} * lane);   // the same in every round
        to[i * 128 + lane] = x.item[0] * i;
    }}
}}
"""


@pytest.mark.parametrize("load", ["load", "load_global", "load_kept", "load_once"])
def test_no_load_is_done_before_its_condition(load: str, tmp_path: Path) -> None:
    """Assembly that is not volatile counts as arithmetic, and was moved out of a loop."""
    bounds()
    templates = Path(__file__).parent.parent / "templates"
    text = (templates / "device.cuh").read_text() + (templates / "vec.cuh").read_text()
    texts = [text + GUARDED.format(load=load, width=width) for width in (1, 2, 4)]
    if load == "load_kept":
        texts.append(text.replace("asm volatile", "asm") + GUARDED.format(load=load, width=1))
    cubins = [compiler.compile_source(Source(x, "guarded", "guarded"), "sm_90")[0] for x in texts]
    found = [[line for line in lines if "LDG" in line] for lines in disassemble(cubins, "sm_90", tmp_path)]
    for loads in found[:3]:
        assert loads
        assert all(re.match(r"@!?P\d\s+LDG", x) for x in loads), "\n".join(loads)
    for loads in found[3:]:
        assert any(x.startswith("LDG") for x in loads), "this compiler would not have; the test says nothing"
