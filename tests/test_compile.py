"""NVRTC without a GPU: every prewarm spec for every architecture, and properties of the machine code."""

from __future__ import annotations

import itertools
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch

import jitrope
from jitrope import Mrope, planning
from jitrope.base.config import LAUNCHES
from jitrope.base.errors import CompileError
from jitrope.jit import compiler
from jitrope.jit.render import Source, render
from jitrope.plan.spec import RopeSpec

from .calls import CALLS, GRADIENTS, LARGEST, MODELS, WIDE, named
from .machine_code import ARCHS, DIVISION, bounds, disassemble, opcode, tool
from .results import planned

TOKENS = 4096  # on which no kernel depends
EVERY = [*CALLS, *GRADIENTS, *map(named, WIDE)]
PARTS = [(arch, "models", slice(None)) for arch in ARCHS]
PARTS += [(arch, "largest", slice(half, None, 2)) for arch in ("sm_90", "sm_120") for half in range(2)]


@cache
def prewarmed(calls: tuple[str, ...]) -> dict[RopeSpec, str]:
    """The kernels of named calls, with both launches, and the first call of each."""
    return {spec: words for words in calls[::-1] for spec in planned(named(words), LAUNCHES, TOKENS)}


@cache
def compiled(spec: RopeSpec, arch: str) -> tuple[bytes, str]:
    return compiler.compile_source(render(spec), arch, ("--ptxas-options=-v",))


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "of", "part"), PARTS)
def test_prewarm_specs_compile_without_spills_and_move_16_bytes_an_access(
    arch: str, of: str, part: slice, tmp_path: Path
) -> None:
    every = prewarmed(MODELS if of == "models" else LARGEST)
    specs = [*every][part]
    counted = prewarmed(MODELS if of == "models" else MODELS + LARGEST)
    in_whole_accesses = {s for s in counted if s.dtype == "bf16" and s.vec == 8 and s.q_out == s.kv_out == "bf16"}
    linear = {s for s in counted if s.launch == "token_linear"}  # tiles of few tokens have smaller accesses
    assert len(in_whole_accesses & linear) > 3 / 4 * len(linear)
    code = {spec: compiled(spec, arch) for spec in specs}
    for spec, (cubin, _) in code.items():
        assert cubin.startswith(b"\x7fELF"), spec.name
    spilled = bounds().get(arch, {})
    allowed = {spec: spilled.get(every[spec], 0) for spec in specs}
    for spec, (cubin, log) in code.items():
        assert "warning" not in log, f"{spec.name}: {log}"
        report = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
        assert report, log
        stack, stores, loads = map(int, report.groups())
        # sincosf keeps 32 bytes for arguments past 105,615, beside a norm on sm_120 up to 56. A kernel limited to 40
        # registers may lack one, which it stores once and loads twice.
        sines = 56 if arch == "sm_120" and spec.norm else 40
        tight = spec.freqs and spec.full_width
        assert stack <= max(sines if spec.freqs else 0, allowed[spec]), (spec.name, every[spec])
        assert stores <= max(4 if tight else 0, allowed[spec]), (spec.name, every[spec])
        assert loads <= max(8 if tight else 0, allowed[spec]), (spec.name, every[spec])
        assert not DIVISION.search(cubin), spec.name
    aligned = [spec for spec in specs if spec in in_whole_accesses]
    for spec, found in zip(aligned, disassemble([code[spec][0] for spec in aligned], arch, tmp_path)):
        names = [opcode(line) for line in found]
        loads = [name for name in names if name.startswith("LDG") and name != "LDGDEPBAR"]  # a wait
        stores = [name for name in names if name.startswith("STG")]
        narrow_loads = [name for name in loads if ".128" not in name]
        # The heads, and the tables if every thread has its own part. A block that shares work loads a
        # table's entries one by one, once; cu_seqlens have 4 or 8 bytes each. Nothing else is narrow.
        searches = spec.cu_seqlens_dtype is not None or (spec.axis_of_pair and not spec.copy_v)
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
@pytest.mark.tenth
@pytest.mark.parametrize(("arch", "number"), zip(itertools.cycle(["sm_75", *ARCHS]), range(len(EVERY))))
def test_every_call_of_the_table_compiles(arch: str, number: int) -> None:
    """For the architectures in turn, and for the oldest one."""
    for spec in planned(EVERY[number]):
        assert compiler.compile_source(render(spec), arch)[0].startswith(b"\x7fELF")


@pytest.mark.parametrize("which", ["q", "cos", "ids", ""])
def test_a_stride_whose_bytes_take_more_than_32_bits_is_compiled_in(which: str) -> None:
    """Other kernels have strides of 32 bits. The test needs no tensor of this size."""
    steps = dict.fromkeys(("q", "cos", "ids"), (1 << 30) - 64) | {which: 1 << 30}  # of fp32
    q = torch.empty_strided((1, 2, 4, 64), (0, steps["q"], 64, 1), device="meta")
    cos = torch.empty_strided((9, 32), (steps["cos"], 1), device="meta")
    ids = torch.empty_strided((2, 1, 2), (steps["ids"], 2, 1), dtype=torch.int32, device="meta")
    with planning(["auto"]) as specs:
        jitrope.apply_rope(q, None, cos, cos, positions=Mrope(ids, (16, 16)), inplace=True)
    assert specs[0].wide == bool(which)
    assert f"using Stride = {'long long' if which else 'unsigned int'};" in render(specs[0]).text


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
    source = render(next(iter(prewarmed(MODELS))))
    assert compiler.compile_source(source, "sm_90") == compiler.compile_source(source, "sm_90")


def test_cubin_is_whole(tmp_path: Path) -> None:
    """CuPy's getCUBIN drops the last byte; without it the ELF file is invalid."""
    cubin = compiled(next(iter(prewarmed(MODELS))), "sm_90")[0]
    path = tmp_path / "kernel.cubin"
    for data, good in ((cubin, True), (cubin[:-1], False)):
        path.write_bytes(data)
        done = subprocess.run([tool("nvdisasm"), str(path)], capture_output=True, text=True)
        assert (done.returncode == 0) == good


def test_an_unknown_architecture_is_explained() -> None:
    with pytest.raises(CompileError, match=r"compiles for sm_75, .*, not for sm_20"):
        compiler.compile_source(render(next(iter(prewarmed(MODELS)))), "sm_20")


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
    text = (templates / "dependents.cuh").read_text() + (templates / "vec.cuh").read_text()
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
