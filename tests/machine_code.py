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

import pytest

from jitrope.jit import compiler

ARCHS = ["sm_80", "sm_90", "sm_100", "sm_120"]
# Machine code depends on the compiler. Bounds hold for the version that the gate names; with other versions kernels
# must only compile. The most bytes that a thread of a named call's kernels spills or keeps on its stack, for each
# architecture: kernels with limited registers spill some.
SPILLS = {
    (13, 5): {
        "sm_90": {**{"norm=of_k 32+8 128 grad": 20, "after number 32+8 128": 8, "twice ids nvfp4_blocks 32+8 128": 8}},
        "sm_120": {
            **{"pages ids 32+8 128 int32": 8, "indptr ids 32+8 128 int32": 8, "indices ids 32+8 128 int32": 8},
            **{"latent angles last into_halves 128+128 192 grad": 8, "norm=across interleaved 40+40 128 grad": 24},
            **{"streams once interleaved int8 head 24+24 128": 40, "streams once interleaved head 24+24 128": 48},
            **{"rope_alone angles full 8+8 128 grad": 8, "rope_alone angles full packed 8+8 128 grad": 8},
            "once 24+8 80": 8,
        },
    },
}


def bounds() -> dict[str, dict[str, int]]:
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
