"""The library's real launch path on CPU tensors: kernels built by g++ replace the compiled ones.

After `install()` a process treats CPU tensors as GPU tensors. Dispatch, guards, the replay of known calls, checks,
plans, argument blocks, autograd and the torch.library ops are the real ones; the launch calls a shared library, built
from the rendered CUDA and the shim under ASan and UBSan. ASan must be loaded at the start of the process; then every
tensor that torch allocates has redzones:

    TEST_DEVICE=host LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)" \\
        ASAN_OPTIONS=detect_leaks=0:handle_sigill=2 pytest tests/test_stages.py

runs the tests marked `gpu` this way, except those marked `hardware`. `python -m tests.host` sets all that.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import threading
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from types import SimpleNamespace

import torch

from jitrope import torch_state as watch
from jitrope.base.spec import Spec
from jitrope.jit import kernels
from jitrope.jit.render import render
from jitrope.run import dispatch, enqueue
from jitrope.thd import ops as thd_ops

from . import harness

SMS = 4
"""Multiprocessors of the device: so few that small cases also choose the token-linear launch."""

DEVICE = "cpu" if os.environ.get("TEST_DEVICE") == "host" else "cuda"
"""The device of the tensors in tests marked `gpu`."""

launched: Counter[str] = Counter()
"""The number of launches of each kernel."""

_lock = threading.Lock()


def environment() -> dict[str, str]:
    """The environment of a process in which `install` works."""
    # What a process must load at its start, before a kernel that is a shared library: kernels name none.
    names = ("libasan.so", "libstdc++.so")
    preload = " ".join(harness.asked(("g++", f"-print-file-name={name}")).strip() for name in names)
    return {**os.environ, "TEST_DEVICE": "host", "LD_PRELOAD": preload, "ASAN_OPTIONS": harness.OPTIONS}


library = cache(lambda spec: ctypes.CDLL(str(harness.build(render(spec)))))


def launch(spec: Spec, grid: tuple[int, ...], block: int, *arguments: int) -> None:
    """Of a kernel: it returns when the kernel has run."""
    with _lock:  # threads of a block share static variables
        launched[spec.name] += 1
        library(spec).run(ctypes.c_void_p(arguments[0]), *map(ctypes.c_uint, (*(*grid, 1)[:3], block)))


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """After `install`: CPU tensors run in plain torch here, as beside a GPU."""
    on_gpu, watch.on_gpu = watch.on_gpu, lambda x: False
    dispatch._forget()
    try:
        yield
    finally:
        watch.on_gpu = on_gpu
        dispatch._forget()


@cache
def install() -> None:
    """From now on, treat CPU tensors as GPU tensors in this process."""
    kernels.get_kernel = enqueue.get_kernel = lambda spec, device: SimpleNamespace(
        bind_thread=lambda: None,
        enqueuer=lambda *given: partial(launch, spec, *given),
        tensor_maps=lambda maps: (0, lambda *addresses: None),
    )
    watch.get_device = enqueue.get_device = lambda: None  # the index of the device "cpu"
    watch.get_stream = enqueue.get_stream = lambda device: 0
    watch.on_gpu = lambda x: x.device.type == "cpu"
    watch.wgmma_count = lambda device: 132
    torch.cuda.device = lambda device: contextlib.nullcontext()
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=SMS)
    if "allow_override" in inspect.signature(thd_ops._lib.impl).parameters:  # torch 2.11 asks for it
        thd_ops._lib.impl = partial(thd_ops._lib.impl, allow_override=True)
    thd_ops.register("CPU", launches=True)
