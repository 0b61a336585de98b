"""NVRTC without a GPU: every prewarm spec for every architecture, and what the machine code holds."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

import pytest
import torch

from jitrope import compiler
from jitrope.errors import CompileError
from jitrope.ops import turned_back
from jitrope.prewarm import DEFAULT_CALLS, Call
from jitrope.problem import NormCall, head_views, plan_call
from jitrope.render import Source, render
from jitrope.spec import Options, RopeSpec

from .cases import CASES, NORM_CASES, NormCase, lower, make, make_norm

ARCHS = ["sm_80", "sm_90", "sm_100", "sm_120"]
# Beside them the largest block, in which a thread has the fewest registers, with the widest tables.
LARGEST = [
    Call(96, width="full"),
    Call(96, width="full", interleaved=True, backward=True),
    Call(96, width="full", packed="int64", backward=True),
    Call(48, width="full", dtype="fp32", packed="int32"),
    # What training asks for; kernels whose threads share work are held to 40 registers.
    *(Call(heads, angles=True, width="full", packed=packed, backward=True) for heads in (8, 24, 32, 64, 128)
      for packed in (None, "int32")),
    Call(40, angles=True, packed="int64", cp_size=2, start_positions="int64", backward=True),
    Call(40, angles=True, packed="int64", cp_size=3, packed_table=True), Call(24, packed="int32", cp_size=6),
    Call(24, angles=True, width="full", interleaved=True, packed="int32", packed_table=True),
    Call(64, packed="int32", backward=True), Call(24, packed="int32", width="full", backward=True),
    Call(48, q_per_group=4, angles=True, width="full", packed="int32", backward=True),
    Call(48, q_per_group=1, batch_inner=True, backward=True),
    # And serving.
    Call(40, position_ids="int32", mrope_section=(16, 24, 24), in_place=True),
    Call(40, position_ids="int64", mrope_section=(24, 20, 20), mrope_interleaved=True, backward=True),
    Call(24, position_ids="int64", interleaved=True, freqs_cis=True), Call(72, position_ids="int64", backward=True),
    Call(24, position_ids="int64", angles=True), Call(40, fp8=True, position_ids="int64"),
    Call(48, position_ids="int64", slots="int64", page_size=16, rotate_k=True, kv_dtype="fp8", fp8=True),
    Call(16, head_dim=192, rotary_dim=64, rotary_offset=128, interleaved=True, interleaved_out=False, angles=True,
         backward=True),
]  # fmt: skip
# With a norm in front. FLUX and HunyuanVideo, Qwen-Image, both streams at once, Wan, LTX, a language model's
# prefill and decode, and what the least usual ones hold of a head.
BF16 = {"weight_dtype": "bf16"}
NORMS = [
    Call(48, interleaved=True, norm="once", **BF16, backward=True),
    Call(48, interleaved=True, width="full", norm="once", **BF16),
    Call(48, interleaved=True, freqs_cis=True, rounding="complex64", norm="twice", **BF16, in_place=True),
    Call(72, interleaved=True, norm="once", **BF16, two_streams=True),
    Call(72, norm="twice", weight_dtype="fp32", two_streams=True, zero_centered=True),
    Call(24, norm="once", **BF16, across_heads=(12, 12), interleaved=True, in_place=True, backward=True),
    Call(80, norm="once", **BF16, across_heads=(40, 40), interleaved=True, in_place=True, backward=True),
    Call(40, norm="once", **BF16, across_heads=(40,), interleaved=True),
    Call(64, head_dim=64, norm="once", **BF16, across_heads=(32, 32), rounding="addcmul", backward=True),
    Call(40, norm="none", **BF16, position_ids="int64", backward=True),
    Call(40, norm="twice", **BF16, rounding="dtype", position_ids="int64", in_place=True),
    Call(40, norm="twice", **BF16, position_ids="int64", mrope_section=(24, 20, 20), mrope_interleaved=True),
    Call(24, head_dim=256, norm="once", weight_dtype="fp32", zero_centered=True, rotary_dim=64, backward=True),
    Call(48, head_dim=64, norm="twice", **BF16), Call(32, head_dim=80, norm="once", **BF16),
    Call(32, head_dim=96, norm="once", **BF16, rounding="complex128", table_dtype="fp64", interleaved=True),
    Call(32, dtype="fp32", weight_dtype="fp32", norm="once", backward=True),
    Call(16, head_dim=512, norm="none", **BF16), Call(24, norm="once", interleaved=True),
]  # fmt: skip
# And roundings alone.
LARGEST += [
    Call(48, rounding="complex128", table_dtype="fp64", interleaved=True, backward=True),
    Call(40, rounding="dtype", table_dtype="bf16", width="full", backward=True), Call(48, rounding="addcmul"),
]  # fmt: skip
LARGEST += NORMS
PREWARM = list(dict.fromkeys(spec for call in [*DEFAULT_CALLS, *LARGEST] for spec in call.specs()))


@cache
def compiled(spec: RopeSpec, arch: str) -> tuple[bytes, str]:
    return compiler.compile_source(render(spec), arch, ("--ptxas-options=-v",))


# Norms that are held to fewer registers than they would take: bytes that a thread keeps elsewhere, at most.
SPILLS = {
    # Two rows of 40 heads, their gradients and sums: 320 threads, of which one block has 168 registers each.
    "qk_norm_rope_backward_bf16_d128_interleaved_fp32_half_table_backward_complex64_round_none_across_40_40": 88,
    "qk_norm_rope_backward_bf16_d256r64_halves": 16,
    # 64 to 80 registers, so that as many threads are there as hide what memory takes.
    "qk_norm_rope_bf16_d64_halves_fp32_half_table_forward_round_twice_token_linear": 8,
    "qk_norm_rope_bf16_d80_halves_fp32_half_table_forward_round_once_token_linear": 40,
    "qk_norm_rope_bf16_d96_interleaved_fp64_half_table_forward_complex128_round_once_token_linear": 144,
}


def allowed_to_spill(spec: RopeSpec) -> int:
    return next((size for name, size in SPILLS.items() if spec.name.startswith(name)), 0)


@pytest.mark.parametrize("arch", ARCHS)
def test_prewarm_specs_compile_without_spills(arch: str) -> None:
    for spec in PREWARM:
        cubin, log = compiled(spec, arch)
        assert cubin.startswith(b"\x7fELF"), spec.name
        assert "warning" not in log, f"{spec.name}: {log}"
        report = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
        assert report, log
        stack, stores, loads = map(int, report.groups())
        # sincosf keeps 32 bytes for arguments past 105,615. A kernel held to 40 registers may lack one, which
        # it stores once and loads twice.
        tight = spec.angles and spec.full_width
        spills = allowed_to_spill(spec)
        assert stack <= max(40 if spec.angles else 0, spills), spec.name
        assert stores <= max(4 if tight else 0, spills), spec.name
        assert loads <= max(8 if tight else 0, spills), spec.name


@pytest.mark.parametrize("arch", ["sm_75", *ARCHS])
def test_every_case_compiles(arch: str) -> None:
    """Each case of the numeric tests, for an architecture each in turn, and the oldest one too."""
    number = ["sm_75", *ARCHS].index(arch)
    for case in CASES[number :: len(ARCHS) + 1]:
        (q, k, *tables), options = lower(make(case))
        plan, _ = plan_call(*head_views(q, k, options), tuple(tables), None, options, 132)
        assert compiler.compile_source(render(plan.spec), arch)[0].startswith(b"\x7fELF")
    for case in NORM_CASES[number :: len(ARCHS) + 1]:
        for spec in norm_specs(case):
            assert compiler.compile_source(render(spec), arch)[0].startswith(b"\x7fELF")


def norm_specs(case: NormCase) -> list[RopeSpec]:
    """The kernels of a case and, unless it is a joint one, of its gradient."""
    call = make_norm(case)
    tables = call.tables
    if case.first is not None:
        parts = [tuple(x.unsqueeze(3) for x in xs) for xs in (call.streams[:3], call.streams[3:])]
        out = [torch.empty(*a.shape[:1], a.shape[1] + b.shape[1], *a.shape[2:], dtype=a.dtype) for a, b in zip(*parts)]
        second_tables = tuple(x for x in call.second_tables if x is not None)
        normed = NormCall(call.norm, call.weights, parts[1], second_tables)
        return [plan_call(parts[0], tuple(out), tables, None, call.options, 132, normed)[0].spec]
    views = head_views(*call.streams, call.options)
    specs = [plan_call(*views, tables, None, call.options, 132, NormCall(call.norm, call.weights))[0].spec]
    back = Options(*turned_back(tuple(call.options)))._replace(rounding="complex64")
    views = head_views(*call.streams, back)
    normed = NormCall(call.norm._replace(rounding="none"), call.weights, grads=views[0][:2])
    return [*specs, plan_call(*views, tables, None, back, 132, normed)[0].spec]


@pytest.mark.parametrize("which", ["q", "cos", "ids"])
def test_a_stride_past_31_bits_is_compiled_in(which: str) -> None:
    """Elsewhere strides have 32 bits in the kernel; nothing of this size needs to be allocated to see it."""
    far = 1 << 31
    q = torch.empty_strided((1, 2, 4, 64), (0, far if which == "q" else 256, 64, 1), device="meta")
    cos = torch.empty_strided((9, 32), (far if which == "cos" else 32, 1), device="meta")
    ids = torch.empty_strided((2, 1, 2), (far if which == "ids" else 2, 2, 1), dtype=torch.int32, device="meta")
    options = Options(rotary_dim=64, mrope_section=(16, 16), in_place=True)
    for tensors, wide in (((q, cos, ids), True), ([x.contiguous() for x in (q, cos, ids)], False)):
        q, cos, ids = tensors
        plan, _ = plan_call(*head_views(q, None, options), (cos, cos, None, None, ids), None, options, 132)
        assert plan.spec.wide == wide
        assert f"using Stride = {'long long' if wide else 'unsigned int'};" in render(plan.spec).text


def tool(name: str) -> str:
    """A CUDA binary utility: on the path, or from its wheel."""
    folders = Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/bin")
    found = shutil.which(name) or next((str(f / name) for f in folders if (f / name).exists()), None)
    assert found, f"{name} is missing: pip install 'jitrope[test]'"
    return found


DIVISION = re.compile(r"__cuda_sm\d+_(div|rem)_[su]64")  # what a 64-bit division calls; 32 bits are inline


def disassemble(cubin: bytes, folder: Path) -> str:
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    return subprocess.run([tool("nvdisasm"), str(path)], capture_output=True, text=True, check=True).stdout


def instructions(text: str) -> list[str]:
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text, re.MULTILINE)


ALIGNED = [s for s in PREWARM if s.dtype == "bf16" and s.vec == 8 and "fp8" not in (s.q_out, s.kv_out)]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_aligned_kernels_move_16_bytes_an_access(arch: str, tmp_path: Path) -> None:
    assert len(ALIGNED) > 10
    turn = {"sm_80": 0, "sm_90": None, "sm_100": 1}[arch]  # norms are many, and large: of two in turn
    norms = [spec for spec in ALIGNED if spec.norm]
    for spec in [spec for spec in ALIGNED if not spec.norm] + (norms if turn is None else norms[turn::2]):
        text = disassemble(compiled(spec, arch)[0], tmp_path)
        found = instructions(text)
        loads = [name for name in found if name.startswith("LDG")]
        stores = [name for name in found if name.startswith("STG")]
        narrow_loads = [name for name in loads if ".128" not in name]
        # The heads, and the tables where every thread has its own part. A block that shares work loads a
        # table's entries one by one, once; cu_seqlens too are 4 or 8 bytes each. Nothing else is narrow.
        shares = spec.angles or (spec.index_dtype is not None and spec.launch == "token_linear")
        per_entry = spec.table_vec == 1  # complex64 tables, and axes that alternate from pair to pair
        integers = spec.index_dtype is not None or spec.position_dtype is not None
        assert len(loads) - len(narrow_loads) >= spec.chunks + (0 if shares or per_entry else 2), spec.name
        assert bool(narrow_loads) == (shares or per_entry or integers), (spec.name, narrow_loads)
        assert stores, spec.name
        wide = [name for name in stores if ".128" in name]
        # A block of a norm's gradient stores its sums of the weights' gradients one by one, once.
        assert wide if spec.gradient and spec.weight_dtype else len(wide) == len(stores), spec.name
        local = [name for name in found if name.startswith(("LDL", "STL"))]
        assert spec.angles or allowed_to_spill(spec) or not local, spec.name
        assert not DIVISION.search(text), spec.name


def test_the_gate_sees_a_64_bit_division(tmp_path: Path) -> None:
    source = Source('extern "C" __global__ void f(long long* x) { x[0] = x[1] / x[2]; }', "f", "division")
    assert DIVISION.search(disassemble(compiler.compile_source(source, "sm_90")[0], tmp_path))


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
    with pytest.raises(CompileError, match="this NVRTC compiles for sm_75"):
        compiler.compile_source(render(PREWARM[0]), "sm_20")


def test_ptx_for_what_no_cubin_can_be_made_for() -> None:
    """For a GPU that this NVRTC does not know yet; that a driver takes it is tested on a GPU (test_cache.py)."""
    ptx, _ = compiler.compile_source(render(PREWARM[0]), "compute_90")
    assert b".target sm_90" in ptx
    assert ptx.endswith(b"\n\0")
    newest = max(int(name.removeprefix("sm_")) for name in compiler.supported_archs())
    assert compiler.virtual_arch("sm_90") == "compute_90"
    assert compiler.virtual_arch("sm_999") == f"compute_{newest}"
    assert compiler.virtual_arch("sm_50") is None
    with pytest.raises(compiler.Refused, match="sm_999 is newer than NVRTC"):
        compiler.compile_source(render(PREWARM[0]), "sm_999")


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
    """Assembly that is not volatile was: it is arithmetic, and moves out of a loop."""
    text = (Path(__file__).parent.parent / "templates" / "vec.cuh").read_text()
    for width in (1, 2, 4):
        source = Source(text + GUARDED.format(load=load, width=width), "guarded", "guarded")
        loads = [
            x for x in disassemble(compiler.compile_source(source, "sm_90")[0], tmp_path).splitlines() if "LDG" in x
        ]
        assert loads
        assert all(re.search(r"@!?P\d\s+LDG", x) for x in loads), "\n".join(loads)
    if load == "load_kept":
        source = Source(text.replace("asm volatile", "asm") + GUARDED.format(load=load, width=1), "guarded", "guarded")
        hoisted = disassemble(compiler.compile_source(source, "sm_90")[0], tmp_path)
        assert re.search(r"\*/\s+LDG", hoisted), "this compiler would not have; the test says nothing"
