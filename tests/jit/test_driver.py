"""A GPU loads kernels with its driver alone: CuPy and NVRTC are not needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..caches import on_the_gpu

CALLS = """
import hashlib, threading
from pathlib import Path
from jitrope.base.spec import spec_from_dict
from jitrope.jit import kernels
from jitrope.tools import bundle
if LOADED:
    bundle.load(Path(LOADED))
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
if WRITTEN:
    specs = [spec_from_dict(entry.spec) for entry in kernels.kernel_cache().entries()]
    bundle.write(Path(WRITTEN), [(spec, kernels.arch_of(0)) for spec in specs], 1)
"""


@pytest.mark.gpu
@pytest.mark.hardware
def test_a_gpu_without_cupy_runs_from_a_bundle(tmp_path: Path) -> None:
    """Calls in two threads, a gradient and a CUDA graph, with the bits of a process that compiles."""
    path, no_cupy = str(tmp_path / "k.zip"), 'import sys\nsys.modules["cupy"] = sys.modules["cupy_backends"] = None\n'
    made = on_the_gpu(f"LOADED, WRITTEN = '', {path!r}\n" + CALLS, tmp_path / "made").split()
    assert made.pop() == "True"
    assert len(set(made)) == 2  # the rotated tensor, and the gradient
    for loaded, layer in (("", path), (path, "")):
        variables = {"JITROPE_NO_COMPILE": "1", "JITROPE_SYSTEM_CACHE": layer}
        code = f"{no_cupy}LOADED, WRITTEN = {loaded!r}, ''\n" + CALLS
        assert on_the_gpu(code, tmp_path / f"used{loaded and 1}", **variables).split() == [*made, "False"]


@pytest.mark.gpu
def test_errors_of_an_image_and_others_are_told_apart(tmp_path: Path) -> None:
    """A damaged image, another GPU's, one without the entry, and a context that an earlier kernel broke."""
    code = """
import cupy
from jitrope import CompileError
from jitrope.jit import compiler, driver, kernels, render

def raised(cubin, entry):
    try:
        driver.Kernel(cubin, entry, 0)
    except CompileError as error:
        return type(error).__name__

call()
((spec, _),) = kernels._kernels
good = kernels.build(spec, kernels.arch_of(0)).data
alien = compiler.compile_source(render.render(spec), "sm_75")[0]
print(*[raised(image, spec.entry) for image in (b"\\x7fELF" + bytes(500), alien, good)], raised(good, "other"))
cupy.RawKernel('extern "C" __global__ void f() { *reinterpret_cast<volatile int*>(0) = 1; }', "f")((1,), (1,), ())
try:
    torch.cuda.synchronize()
except RuntimeError:
    print(raised(good, spec.entry))
"""
    assert on_the_gpu(code, tmp_path / "k").split() == ["Refused", "Refused", "None", "Refused", "CompileError"]
