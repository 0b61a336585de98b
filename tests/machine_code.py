"""What a compiler made of a kernel: its instructions, and what each version may spill."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sysconfig
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from jitrope.jit import compiler

ARCHS = ["sm_80", "sm_90", "sm_100", "sm_120"]
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


def bounds() -> list[tuple[dict[str, Any], tuple[int, ...]]]:
    """This compiler's row of SPILLS. Without one the rest of the test, which is about machine code, is skipped."""
    version = compiler.nvrtc_version()
    if version not in SPILLS:
        known = ", ".join(f"{major}.{minor}" for major, minor in SPILLS)
        pytest.skip(f"machine code is held to bounds for NVRTC {known}; this is {version[0]}.{version[1]}")
    return SPILLS[version]


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
