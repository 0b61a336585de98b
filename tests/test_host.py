"""The harness that runs rendered CUDA on the CPU: what its sanitizers see, and its barriers and conversions."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jitrope.base.views import FORMATS
from jitrope.jit.render import Source, environment

from .host import backend, harness

pytestmark = pytest.mark.slow

ILLEGAL = "(ILL|stack-overflow)"
"""ASan's report of UBSan's illegal instruction; it is taken for an overflow if the kernel lies near its stacks."""


BROKEN = """
import torch
from tests.host import backend
backend.install()
real, line = backend.render, "wait_for_earlier_kernels();"
past = line + " { int a[4] = {}; volatile int* at = a; at[threadIdx.x + 4] = 1; }"
backend.render = lambda spec: real(spec)._replace(text=real(spec).text.replace(line, past))
import jitrope
jitrope.apply_rope(torch.ones(1, 8, 2, 64), None, *torch.ones(2, 8, 32))
print("it ran")
"""


@pytest.mark.parametrize("broken", [True, False])
def test_a_launch_that_writes_past_a_local_ends_the_process(broken: bool) -> None:
    """In the process of the tests, through the whole launch path."""
    code = BROKEN if broken else BROKEN.replace("+ 4]", "% 4]")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=backend.environment())
    assert ("it ran" in done.stdout) != broken
    assert ("AddressSanitizer: stack-buffer-overflow" in done.stderr) == broken


def test_a_kernel_is_built_once_and_again_if_it_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(harness, "folder", harness.folder.__wrapped__)
    source = Source('struct Params {}; extern "C" void probe(Params) {}', "probe", "probe")
    made = harness.build(source)
    good = made.read_bytes()
    begun = made.stat().st_ino
    assert harness.build(source) == made
    assert made.stat().st_ino == begun
    for bad in (b"", good[:-1], good[:-40] + good[-32:], b"x" + good[1:]):
        made.write_bytes(bad)
        assert harness.build(source) == made
        assert made.read_bytes()[:4] == b"\x7fELF"
        assert made.read_bytes()[-32:] == hashlib.sha256(made.read_bytes()[:-32]).digest()
    os.utime(made, (0, 0))
    assert made.parent == harness.folder()
    assert not made.exists()


WRONG = {  # what the body of a kernel does wrong, with a count of 1, and ASan's report
    "signed overflow": ("p.out[0] = 0x7fffffff + p.count;", ILLEGAL),
    "shift": ("p.out[0] = 1 << (31 + p.count);", ILLEGAL),
    "division": ("p.out[0] = 1 / (p.count - 1);", ILLEGAL),
    "index of an array": ("int a[4] = {}; p.out[0] = a[3 + p.count];", ILLEGAL),
    "misaligned": ("struct alignas(8) Two { int x; }; p.out[0] = reinterpret_cast<Two*>(p.out + p.count)->x;", ILLEGAL),
    "null": ("p.out[0] = *reinterpret_cast<int*>(p.count - 1);", "SEGV"),
    "no value": ("p.out[0] = sometimes(p.count);", ILLEGAL),
    "past a local": ("int a[4] = {}; int* at = a; p.out[0] = at[3 + p.count];", "stack-buffer-overflow"),
    "past a local, behind a barrier": (
        "int a[4] = {}; int* at = a; __syncthreads(); if (!threadIdx.x) p.out[0] = at[3 + p.count];",
        "stack-buffer-overflow",
    ),
    "out of scope": ("int* at; { int a = 1; at = &a; } p.out[0] = *at;", "stack-use-after-scope"),
    "past shared memory": ("__shared__ int a[4]; int* at = a; p.out[0] = at[3 + p.count];", "global-buffer-overflow"),
    "past a tensor": ("p.out[p.count] = 1;", "use-after-poison"),
    "before a tensor": ("p.out[-p.count] = 1;", "heap-buffer-overflow"),
}


@pytest.mark.parametrize("name", WRONG)
def test_sanitizers_see(name: str) -> None:
    """The harness can fail: each kind of mistake ends the process with a report that has its line."""
    body, report = WRONG[name]
    text = f"""
struct Params {{ int* out; union {{ int count; long long word; }}; }};
__device__ int sometimes(int count) {{ if (count > 1) return 1; }}
extern "C" __global__ void probe(const Params p) {{
#line 1 "probe.cu"
    {body}
}}
"""
    with pytest.raises(AssertionError, match=rf"(?s)AddressSanitizer: {report}.* in .*probe\.cu:1"):
        harness.run(Source(text, "probe", "probe"), (1, 1), 2, [torch.zeros(1, dtype=torch.int32)], [1])


CONVERT = """
{% include "dependents.cuh" %}
{% include "vec.cuh" %}
{% include "formats.cuh" %}
struct Params { const float* x; unsigned char* out; long long count; };
extern "C" __global__ void probe(const Params p) {
    for (long long at = threadIdx.x; at < p.count; at += blockDim.x) p.out[at] = float_to_FORM(p.x[at]);
}
"""


@pytest.mark.parametrize("form", ["fp8", "fp8_e5m2"])
def test_fp8_conversion_is_torchs(form: str) -> None:
    """The conversion for GPUs without an instruction: every fp16 and bf16 value, with ties and saturation."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    bits = torch.cat([every.view(dtype).float() for dtype in (torch.float16, torch.bfloat16)])
    x = torch.cat((bits, *[torch.nextafter(bits, torch.tensor(end)) for end in (torch.inf, -torch.inf)]))
    out = torch.zeros(len(x), dtype=torch.uint8)
    text = environment().from_string(CONVERT).render().replace("FORM", form)
    harness.run(Source(text, "probe", "probe"), (1, 1), 64, [x, out], [len(x)])
    dtype, largest, _ = FORMATS[form]
    want = x.clamp(-largest, largest).to(dtype)
    nan = x.isnan()
    assert torch.equal(out[~nan], want.view(torch.uint8)[~nan])
    assert out.view(dtype)[nan].float().isnan().all()


COLLECTIVES = """
struct Params { int* out; };
extern "C" __global__ void probe(const Params p) {
    __shared__ int sums[2];
    const int t = threadIdx.x;
    int value = t;
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    if (t % 32 == 0) sums[t / 32] = value;
    __syncthreads();
    const unsigned int odd = __ballot_sync(~0u, t % 2);
    if (t == 63) return;
    p.out[t] = sums[0] + sums[1] + (odd == 0xaaaaaaaau) + __shfl_sync(~0u, t, 3) * 10000;
}
"""


def test_shim_runs_barriers_and_shuffles() -> None:
    out = torch.zeros(64, dtype=torch.int32)
    harness.run(Source(COLLECTIVES, "probe", "probe"), (1, 1), 64, [out], [])
    expected = [63 * 32 + 1 + 10000 * (3 + t // 32 * 32) for t in range(63)] + [0]
    assert out.tolist() == expected


def test_shim_refuses_barriers_that_never_open() -> None:
    text = COLLECTIVES.replace("if (t == 63) return;", "if (t % 2) __syncthreads(); else __syncwarp();")
    with pytest.raises(AssertionError, match="the threads of a block wait at barriers that never open"):
        harness.run(Source(text, "probe", "probe"), (1, 1), 64, [torch.zeros(64, dtype=torch.int32)], [])
