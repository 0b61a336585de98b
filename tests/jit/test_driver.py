"""A GPU loads kernels with its driver alone: CuPy and NVRTC are not needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..caches import COUNTED, on_the_gpu

WRITE = """
from pathlib import Path
from jitrope.base.spec import spec_from_dict
from jitrope.jit import kernels
from jitrope.tools import bundle
call()
specs = [spec_from_dict(entry.spec) for entry in kernels.kernel_cache().entries()]
bundle.write(Path(r"%s"), [(spec, kernels.arch_of(0)) for spec in specs], 1)
"""


@pytest.mark.gpu
@pytest.mark.hardware
def test_a_gpu_without_cupy_runs_from_a_bundle(tmp_path: Path) -> None:
    """Calls in two threads, a gradient and a CUDA graph, with the bits of a process that compiles."""
    calls = """
import hashlib, threading
from jitrope.jit import kernels
def bits(x):
    return hashlib.sha256(bytes(x.detach().cpu().view(torch.uint8).flatten().tolist())).hexdigest()
seen = [bits(call())]
thread = threading.Thread(target=lambda: seen.append(bits(call())))
thread.start(); thread.join()
leaf = q.clone().requires_grad_()
out, _ = jitrope.apply_rope(leaf, None, cos, sin)
seen += [bits(out), bits(torch.autograd.grad(out.float().square().sum(), leaf)[0])]
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured, _ = jitrope.apply_rope(q, None, cos, sin)
graph.replay()
torch.cuda.synchronize()
seen.append(bits(captured))
print(*seen, len(kernels.compiled) > 0)
"""
    no_cupy = 'import sys\nsys.modules["cupy"] = sys.modules["cupy_backends"] = None  # importing one of them fails\n'
    made = on_the_gpu(calls + WRITE % (tmp_path / "kernels.zip"), tmp_path / "made").split()
    alone = {"JITROPE_NO_COMPILE": "1", "JITROPE_SYSTEM_CACHE": str(tmp_path / "kernels.zip")}
    used = on_the_gpu(no_cupy + calls, tmp_path / "used", **alone).split()
    assert made.pop() == "True"
    assert used.pop() == "False"
    assert used == made
    assert len(set(used)) == 2  # the rotated tensor, and the gradient


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["load", "system"])
def test_a_gpu_runs_from_a_bundle_with_nothing_compiled(tmp_path: Path, how: str) -> None:
    on_the_gpu(WRITE % (tmp_path / "kernels.zip"), tmp_path / "made")
    hidden = """
from pathlib import Path
from jitrope.tools import bundle
from jitrope.jit import compiler
from jitrope.base.errors import CompileError
def nothing(*_, **__):
    raise CompileError("there is no NVRTC")
compiler._nvrtc = compiler.compiler_version = nothing
"""
    environment = {"JITROPE_NO_COMPILE": "1"}
    if how == "load":
        hidden += f"bundle.load(Path(r'{tmp_path / 'kernels.zip'}'))\n"
    else:
        environment["JITROPE_SYSTEM_CACHE"] = str(tmp_path / "kernels.zip")
    assert on_the_gpu(hidden + COUNTED, tmp_path / "used", **environment) == "0 1"


@pytest.mark.gpu
def test_errors_of_an_image_and_others_are_told_apart(tmp_path: Path) -> None:
    """A damaged image, an image without the entry, and a context that an earlier kernel broke."""
    code = """
import cupy
from jitrope import CompileError
from jitrope.jit import driver, kernels

def raised(cubin, entry):
    try:
        driver.Kernel(cubin, entry, 0)
    except CompileError as error:
        return type(error).__name__

call()
((spec, _),) = kernels._kernels
good = kernels.build(spec, kernels.arch_of(0)).data
print(raised(b"\\x7fELF" + bytes(500), spec.entry), raised(good, "other"), raised(good, spec.entry))
cupy.RawKernel('extern "C" __global__ void f() { *reinterpret_cast<volatile int*>(0) = 1; }', "f")((1,), (1,), ())
try:
    torch.cuda.synchronize()
except RuntimeError:
    print(raised(good, spec.entry))
"""
    assert on_the_gpu(code, tmp_path / "k").split() == ["Refused", "Refused", "None", "CompileError"]
