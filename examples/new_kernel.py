"""How to write a kernel: from a problem to a launch, with the parts that every kernel of jitrope has.

python examples/new_kernel.py

The kernel is small but real: what a diffusion block does with the output of its attention, `residual + gate * x` with a
gate for each batch row. Eager torch makes two kernels of it, with a rounding in between. It is written here as it would
be inside of the library, and uses the library as it is:

    problem     what is asked: integers and words, no tensors           (jitrope/plan/problem.py)
    plan        spec and grid                                           (jitrope/plan/heuristics.py)
    spec        all that is compiled in                                 (jitrope/plan/spec.py, jitrope/thd/spec.py)
    source      the template with the spec's constants                  (templates/, jitrope/jit/render.py)
    kernel      compiled, cached, loaded                      (jitrope/jit/kernels.py: compiler.py, cache.py, driver.py)

Compiling needs CuPy and NVRTC. On a CPU the kernel runs under g++, from a checkout. Each run is compared with plain
torch, bit by bit. The last comment lists what is left to do for a kernel that stays.
"""

from __future__ import annotations  # also, `Spec.check` reads the types of a spec's fields as text

import ctypes
import os
import platform
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import jitrope
from jitrope.base.spec import ACCESS_BYTES, ACCESSES, DTYPES, ITEM_SIZES, KINDS, MAX_INT, Spec, spec_from_dict
from jitrope.base.views import DTYPE_NAMES
from jitrope.jit import kernels, render

# ---- 1. what it is, in plain torch -------------------------------------------------------------------
# First, because everything else is held against it: the kernel under g++, the kernel on a GPU. The arithmetic is part
# of it: fp32, each product and sum rounded, and one rounding to the dtype at the end.


def reference(residual: Tensor, gate: Tensor, x: Tensor) -> Tensor:
    """residual + gate * x: (B, S, C), (B, C), (B, S, C)."""
    return (residual.float() + gate.float()[:, None] * x.float()).to(residual.dtype)


# ---- 2. the template ---------------------------------------------------------------------------------
# Plain CUDA below one block of constants, which has the only templated lines. Pieces of the house come by include:
# aligned accesses of several elements (vec.cuh), and programmatic dependent launch (dependents.cuh), for which a kernel
# waits before it first touches memory. In the library this is a file in templates/.
TEMPLATE = """\
// residual + gate * x, rounded once.
//
// Launch: one block for each row, a token's channels; its threads take VEC neighbours at a time.
{% include "dependents.cuh" %}
{% include "vec.cuh" %}

// ---- parameters: the only templated lines ----------------------------------------------------
using T = {{ c_type }};
constexpr int VEC = {{ vec }};                           // elements of an access
constexpr int THREADS = {{ threads }};
// ----------------------------------------------------------------------------------------------

struct Params {                                          // addresses, then words of 64 bits: what the launcher fills
    const T *residual, *gate, *x;                        // (rows, channels), (batch, channels), (rows, channels)
    T* out;
    long long channels, rows_of_a_gate;
};

extern "C" __global__ void __launch_bounds__(THREADS) jitrope_gated_add(const __grid_constant__ Params p) {
    wait_for_earlier_kernels();
    let_the_next_begin();
    const unsigned int row = blockIdx.x, batch = row / static_cast<unsigned int>(p.rows_of_a_gate);   // not by 64 bits
    const long long first = row * p.channels, of_gate = batch * p.channels;
    for (long long channel = threadIdx.x * VEC; channel < p.channels; channel += THREADS * VEC) {
        float residual[VEC], gate[VEC], x[VEC];
        unpack(load_once<T, VEC>(p.residual + first + channel), residual);
        unpack(load<T, VEC>(p.gate + of_gate + channel), gate);
        unpack(load_once<T, VEC>(p.x + first + channel), x);
        #pragma unroll                                   // intrinsics: a product and a sum are not contracted
        for (int i = 0; i < VEC; ++i) residual[i] = __fadd_rn(residual[i], __fmul_rn(gate[i], x[i]));
        Vec<T, VEC> out;
        pack(residual, out);
        store_whole(p.out + first + channel, out);
    }
}
"""


# ---- 3. the spec -------------------------------------------------------------------------------------
# Every field is a constant of the template; what is no field (sizes, strides, addresses) is a parameter, so that other
# sizes do not compile again. `check` lets nothing into source but words of a list, flags and whole numbers.


@dataclass(frozen=True)
class GatedAddSpec(Spec):
    """One kernel of `gated_add.cu.jinja`. vec: elements of an access; threads: of a block."""

    dtype: str
    vec: int
    threads: int

    words, bounds = {"dtype": DTYPES}, {"vec": ACCESSES}  # what the fields may be
    kind = "gated_add"  # names the template and, with `jitrope_` before it, the entry

    @property
    def name(self) -> str:
        """A readable name, for the cache's folder."""
        return f"{self.kind}_{self.dtype}_{self.vec}x{self.threads}"


# ---- 4. problem and plan -----------------------------------------------------------------------------
# A problem has what the choice depends on and no tensors, so a plan is a pure function that is tested without a GPU and
# knows what any call would compile. A threshold stands beside the measurement that set it; this one has none yet.
THREADS = 256
"""At most, of a block."""


@dataclass(frozen=True)
class Problem:
    """rows, channels: of x; alignment: a power of two of bytes that divides every address and a row's length."""

    dtype: str
    rows: int
    channels: int
    alignment: int


def plan(problem: Problem) -> tuple[GatedAddSpec, tuple[int, int]]:
    """(spec, grid)."""
    vec = problem.alignment // ITEM_SIZES[problem.dtype]
    warps = -(-problem.channels // (vec * 32))
    return GatedAddSpec(problem.dtype, vec, min(32 * warps, THREADS)), (problem.rows, 1)


def problem_of(residual: Tensor, gate: Tensor, x: Tensor, out: Tensor) -> Problem:
    """The problem of a call."""
    channels = x.shape[-1]
    numbers = [*(t.data_ptr() for t in (residual, gate, x, out)), channels * x.element_size()]
    alignment = min(ACCESS_BYTES, *(number & -number for number in numbers))
    return Problem(DTYPE_NAMES[x.dtype], x.numel() // channels, channels, alignment)


def prepared(
    residual: Tensor, gate: Tensor, x: Tensor, out: Tensor
) -> tuple[GatedAddSpec, Any, list[Tensor], list[int]]:
    """(spec, grid, tensors, words) of a call: what the launcher on a GPU gets and what the shim under g++ gets."""
    spec, grid = plan(problem_of(residual, gate, x, out))
    return spec, grid, [residual, gate, x, out], [x.shape[2], x.shape[1]]


# ---- 5. the launch -----------------------------------------------------------------------------------


def check(residual: Tensor, gate: Tensor, x: Tensor) -> None:
    """Refuse what does not fit: before anything is written, with what was given and what is allowed."""
    shapes = [tuple(t.shape) for t in (residual, gate, x)]
    if x.dim() != 3 or shapes != [shapes[2], (len(x), x.shape[2]), shapes[2]]:
        raise jitrope.InvalidInput(f"residual, gate and x are {shapes}, not (B, S, C), (B, C) and (B, S, C)")
    for name, t in (("residual", residual), ("gate", gate), ("x", x)):
        if (t.dtype, t.device) != (x.dtype, x.device) or DTYPE_NAMES.get(t.dtype) not in DTYPES:
            raise jitrope.InvalidInput(f"{name} is {t.dtype} on {t.device}, x {x.dtype} on {x.device}: {DTYPES}, alike")
        if not t.is_contiguous():
            raise jitrope.InvalidInput(f"{name} is not contiguous")
        if t.requires_grad and torch.is_grad_enabled():
            raise jitrope.InvalidInput(f"{name} wants a gradient, which there is not yet")
    if x.numel() > MAX_INT:
        raise jitrope.InvalidInput(f"x has {x.numel()} elements; at most {MAX_INT}")


def gated_add(residual: Tensor, gate: Tensor, x: Tensor) -> Tensor:
    """The user's function: on a CPU plain torch, on a GPU one launch on torch's current stream."""
    check(residual, gate, x)
    if not x.is_cuda or x.numel() == 0:  # nothing to do never reaches a launch
        return reference(residual, gate, x)
    out = torch.empty_like(x)
    spec, grid, tensors, words = prepared(residual, gate, x, out)
    with torch.cuda.device(x.device):
        kernel = kernels.get_kernel(spec, x.device.index)  # from memory, else from disk, else compiled
        kernel.bind_thread()
        numbers = [*(t.data_ptr() for t in tensors), *words]
        arguments = (ctypes.c_int64 * len(numbers))(*numbers)
        kernel.enqueuer(grid, spec.threads, ctypes.addressof(arguments))(torch.cuda.current_stream().cuda_stream)
    return out


def inputs(batch: int, tokens: int, channels: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((batch, tokens, channels), (batch, channels), (batch, tokens, channels))
    return tuple(torch.randn(shape, device=device).to(dtype) for shape in shapes)


# A row of several passes; rows that allow no access of 16 bytes, and none of several elements.
CASES = [(2, 37, 64, torch.float32), (2, 3, 2600, torch.bfloat16)]
CASES += [(3, 5, 12, torch.float16), (2, 7, 9, torch.bfloat16)]


def main(folder: Path) -> None:
    # The house finds templates by name in these folders, and specs that were written as JSON (recordings, bundles, the
    # cache) by their kind. A file in templates/ and a row in `KINDS` are these two lines.
    (folder / "gated_add.cu.jinja").write_text(TEMPLATE)
    render.TEMPLATE_PATHS.append(folder)
    KINDS["gated_add"] = GatedAddSpec
    os.environ["JITROPE_CACHE_DIR"] = str(folder / "cache")  # this kernel is not the reader's to keep

    print("1. A problem is planned; the plan's spec is rendered.")
    spec, grid = plan(Problem("bf16", rows=4608, channels=3072, alignment=16))
    assert spec_from_dict(spec.to_dict()) == spec
    source = render.render(spec)
    print(f"    {spec}, a grid of {grid}")
    block = source.text.split("only templated lines")[1].split("// ----")[0]
    print("".join(f"    {line}\n" for line in block.splitlines()[1:]), end="")

    print("2. The source is compiled and cached, for any architecture. The template's text is in the key.")
    for arch in ("sm_80", "sm_90", "sm_100"):
        for _ in range(2):
            found = kernels.build(spec, arch)
            print(f"    {arch}: {'compiled' if found.compiled else 'cached'}, {len(found.data)} bytes")

    # An error in the template is a `CompileError` with the template's own file and line. What NVRTC takes may still be
    # slow: tests/test_compile.py looks at the machine code for spills, narrow accesses and 64-bit divisions.

    print("3. On the CPU g++ builds the same text, under the address and undefined behaviour sanitizers.")
    checkout = Path(__file__).resolve().parent.parent
    needs = {
        "g++": shutil.which("g++"),
        "an x86 processor": platform.machine() in ("x86_64", "AMD64"),
        "a checkout": (checkout / "tests" / "host").exists(),
    }
    if missing := [name for name, there in needs.items() if not there]:
        print(f"    not here: it needs {' and '.join(missing)}")
    else:
        sys.path.insert(0, str(checkout))
        from tests.host import harness

        for batch, tokens, channels, dtype in CASES:
            tensors = inputs(batch, tokens, channels, dtype, "cpu")
            out = torch.full_like(tensors[0], float("nan"))  # what is not written shows
            spec, grid, addresses, words = prepared(*tensors, out)
            harness.run(render.render(spec), grid, spec.threads, addresses, words)
            assert torch.equal(out, reference(*tensors))
            print(f"    {spec.name}: {tuple(out.shape)}, the same bits as plain torch: yes")

    print("4. On a GPU it is launched.")
    for batch, tokens, channels, dtype in CASES if torch.cuda.is_available() else ():
        tensors = inputs(batch, tokens, channels, dtype, "cuda")
        assert torch.equal(gated_add(*tensors), reference(*tensors))
        print(f"    {tuple(tensors[0].shape)} {dtype}, the same bits as plain torch: yes")
    if not torch.cuda.is_available():
        print("    not here: CPU tensors take plain torch")
    residual, gate, x = inputs(*CASES[0], "cpu")
    assert torch.equal(gated_add(residual, gate, x), reference(residual, gate, x))
    try:
        gated_add(residual, gate[:1], x)
    except jitrope.InvalidInput as error:
        print(f"    refused: {error}")

    # What is left for a kernel that stays: a torch.library op with a fake and a backward (run/torch_op.py), which
    # torch.compile and autograd need; refusals that name the argument (checks.py); argument blocks that are made once
    # (launch.py), for the host's time; a case in each of tests/test_compile.py, test_kernels.py, test_gpu.py and
    # test_fuzz.py; and its time over a copy of the same bytes on the GPU that it is for (examples/bench).


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="jitrope-example-") as name:
        main(Path(name))
