"""Kernels in memory, and the launch. In the steady state a call is one dict hit and one launch."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from . import compiler, heuristics
from .cache import KernelCache, Key, cubin_file
from .compiler import Kernel
from .config import cache_dir, log
from .errors import CompileError, JitropeError
from .problem import Views, empty_parts, head_views, plan_call, qkv_views, separate_views
from .render import ingredients, render
from .spec import Options, RopeSpec

MAX_LAUNCHES = 4096
"""Prepared launches a thread keeps; past it they are forgotten, which costs a few microseconds each."""

_POINTERS = 10
_Q_PER_GROUP, _VALUES = (Options._fields.index(name) for name in ("q_per_group", "values"))
_PACK = struct.Struct(f"{_POINTERS}q").pack_into

compiled: list[str] = []
"""Names of the kernels that this process compiled, in order."""

_kernels: dict[tuple[RopeSpec, int], Kernel] = {}
_build_lock = threading.Lock()
_local = threading.local()


# ---- spec -> kernel ---------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _cache_at(root: Any) -> KernelCache:
    return KernelCache(root)


def kernel_cache() -> KernelCache:
    """The cache that `JITROPE_CACHE_DIR` names now."""
    return _cache_at(cache_dir())


def get_kernel(spec: RopeSpec, device: int) -> Kernel:
    """The kernel of a spec on a device: from memory, else from disk, else compiled."""
    kernel = _kernels.get((spec, device))
    if kernel is None:
        if torch.cuda.is_current_stream_capturing():
            raise JitropeError(
                f"{spec.name} is not loaded yet, and nothing can be loaded while a CUDA graph is "
                "captured; make the same call once before the capture"
            )
        with _build_lock:
            kernel = _kernels.get((spec, device)) or _load(spec, device)
            _kernels[spec, device] = kernel
    return kernel


def arch_of(device: int) -> str:
    """`sm_90` and the like."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def build(spec: RopeSpec, arch: str, rebuild: bool = False) -> tuple[Any, bytes | None, bool]:
    """Make sure that a spec's cubin is cached: (its path or None, its bytes or None, was it compiled).

    The path is None where the cache cannot be written; the bytes are given whenever it was compiled.
    """
    cache = kernel_cache()
    try:
        options, version = compiler.options_for(arch), compiler.compiler_version()
        key = Key(spec.name, ingredients(spec), options, arch, version)
        if rebuild:
            cache.discard(key)
        elif path := cache.load(key):
            return path, None, False
        start = time.perf_counter()
        source = render(spec)
        cubin, _ = compiler.compile_source(source, arch)
    except ImportError as error:
        raise CompileError(missing_cupy(str(error))) from error
    compiled.append(spec.name)
    log.info("compiled %s for %s in %.0f ms", spec.name, arch, 1e3 * (time.perf_counter() - start))
    return cache.store(key, source.text, cubin, spec.to_dict()), cubin, True


def missing_cupy(error: str) -> str:
    """What to install, from the CUDA version that torch was built for."""
    extra = f"cuda{max(12, int((torch.version.cuda or '13').split('.')[0]))}"
    return f"jitrope compiles through CuPy, which cannot be imported ({error}): pip install 'jitrope[{extra}]'"


def _load(spec: RopeSpec, device: int) -> Kernel:
    arch = arch_of(device)
    path, cubin, was_compiled = build(spec, arch)
    try:
        return _open(path, cubin, spec, device)
    except CompileError:
        if was_compiled:
            raise
        log.warning("the driver refused the cached kernel %s; it is rebuilt", spec.name)
        path, cubin, _ = build(spec, arch, rebuild=True)
        return _open(path, cubin, spec, device)


def _open(path: Any, cubin: bytes | None, spec: RopeSpec, device: int) -> Kernel:
    if path is not None:
        return Kernel(path, spec.entry, device)
    assert cubin is not None
    with cubin_file(cubin) as temporary:
        return Kernel(temporary, spec.entry, device)


# ---- the launch -------------------------------------------------------------------------------


class Launch:
    """A kernel with its grid and its argument block; only the addresses change from call to call."""

    __slots__ = ("args", "device", "enqueue", "pointers", "shape")

    def __init__(self, plan: heuristics.Plan, device: int, words: list[int]) -> None:
        with torch.cuda.device(device):
            kernel = get_kernel(plan.spec, device)
            kernel.bind_thread()
        self.device = device
        self.args = (ctypes.c_int64 * (_POINTERS + len(words)))(*[0] * _POINTERS, *words)
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.args))  # one argument: the block
        self.enqueue = kernel.launch
        self.shape = (kernel.handle, *plan.grid, 1, plan.block, 1, 1, 0)

    def __call__(self, *addresses: int) -> None:
        """Enqueue on torch's current stream: q, k, v, their outputs, cos, sin, cu_seqlens, start_positions."""
        _PACK(self.args, 0, *addresses)
        device = self.device
        if device == torch._C._cuda_getDevice():
            stream = torch._C._cuda_getCurrentRawStream(device)
            self.enqueue(*self.shape, stream, ctypes.addressof(self.pointers), 0)
        else:
            with torch.cuda.device(device):
                stream = torch._C._cuda_getCurrentRawStream(device)
                self.enqueue(*self.shape, stream, ctypes.addressof(self.pointers), 0)


def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    start_positions: Tensor | None,
    options: tuple[Any, ...],
    check: Callable[..., None] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rotate CUDA tensors; `options` are the values of `Options`.

    `check` runs once for each kind of call, before anything else. The key holds all that it, the
    plan and the argument block look at.
    """
    q_at, cos_at, sin_at = q.data_ptr(), cos.data_ptr(), sin.data_ptr()
    device = q.get_device()
    k_at, k_key, cu_at, cu_key, start_at, start_key = q_at, None, 0, None, 0, None  # no head of a missing k is read
    if k is not None:
        k_at, k_key = k.data_ptr(), (k.shape, k.stride(), k.dtype, k.get_device())
    if cu_seqlens is not None:
        cu_at, cu_key = cu_seqlens.data_ptr(), _key(cu_seqlens)
    if start_positions is not None:
        start_at, start_key = start_positions.data_ptr(), _key(start_positions)
    key = (
        options, device, (q_at | k_at) & 15, (cos_at | sin_at) & 15, q.shape, q.stride(), q.dtype, k_key,
        cos.shape, cos.stride(), cos.dtype, cos.get_device(), sin.shape, sin.stride(), sin.dtype, sin.get_device(),
        cu_key, start_key,
    )  # fmt: skip
    try:
        launch = _local.launches[key]
    except (AttributeError, KeyError):
        if check is not None:
            check(q, k, cos, sin, cu_seqlens, start_positions, options)
        inputs, outputs = head_views(q, k, Options(*options))
        launch = _remember(key, _prepare(inputs, outputs, cos, sin, cu_seqlens, start_positions, Options(*options)))
    if options[-1]:
        if launch is not None:
            launch(q_at, k_at, q_at, q_at, k_at, q_at, cos_at, sin_at, cu_at, start_at)
        return q, k
    q_out = torch.empty_like(q)
    q_out_at = k_out_at = q_out.data_ptr()
    k_out = None
    if k is not None:
        k_out = torch.empty_like(k)
        k_out_at = k_out.data_ptr()
    if launch is not None:
        launch(q_at, k_at, q_at, q_out_at, k_out_at, q_out_at, cos_at, sin_at, cu_at, start_at)
    return q_out, k_out


def rope_qkv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    start_positions: Tensor | None,
    options: tuple[Any, ...],
    check: Callable[..., None] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed QKV -> q and k rotated, v copied or a view. In place: q and k where they are; three times qkv."""
    tables = (cos, sin, cu_seqlens, start_positions)
    key = (options, _key(qkv), qkv.data_ptr() & 15, *map(_key, tables), (cos.data_ptr() | sin.data_ptr()) & 15)
    in_place = options[-1]
    try:
        prepared = _local.launches[key]
    except (AttributeError, KeyError):
        if check is not None:
            check(qkv, *tables, options)
        o = Options(*options)
        views = qkv_views(qkv, o.q_per_group, o.layout)
        inputs: Views = views
        outputs: Views = views
        if not in_place:
            outputs = separate_views(*empty_parts(qkv, o.q_per_group, "meta", True), o)
        if in_place or not o.values:
            inputs, outputs = (*inputs[:2], None), (*outputs[:2], None)
        launch = _prepare(inputs, outputs, *tables, o)
        prepared = _remember(key, (launch, *_byte_offsets(views)))
    launch, k_offset, v_offset = prepared
    parts = (qkv, qkv, qkv) if in_place else empty_parts(qkv, options[_Q_PER_GROUP], qkv.device, options[_VALUES])
    if launch is not None:
        at = qkv.data_ptr()
        inputs_at = (at, at + k_offset, at + v_offset)
        outputs_at = inputs_at if in_place else [x.data_ptr() for x in parts]
        launch(*inputs_at, *outputs_at, *(0 if x is None else x.data_ptr() for x in tables))
    return parts


def rope_qkv_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    start_positions: Tensor | None,
    options: tuple[Any, ...],
) -> Tensor:
    """The other way: q and k rotated, and v, written into one packed tensor."""
    tables = (cos, sin, cu_seqlens, start_positions)
    grads = (dq, dk, dv)
    key = (
        "backward", options, *map(_key, grads), (dq.data_ptr() | dk.data_ptr() | dv.data_ptr()) & 15,
        *map(_key, tables), (cos.data_ptr() | sin.data_ptr()) & 15,
    )  # fmt: skip
    dqkv = dq.new_empty((*dk.shape[:-1], (options[_Q_PER_GROUP] + 2) * dk.shape[-1]))
    try:
        prepared = _local.launches[key]
    except (AttributeError, KeyError):
        o = Options(*options)
        outputs = qkv_views(dqkv, o.q_per_group, o.layout)
        launch = _prepare(separate_views(*grads, o), outputs, *tables, o)
        prepared = _remember(key, (launch, *_byte_offsets(outputs)))
    launch, k_offset, v_offset = prepared
    if launch is not None:
        at = dqkv.data_ptr()
        addresses = [x.data_ptr() for x in grads]
        launch(*addresses, at, at + k_offset, at + v_offset, *(0 if x is None else x.data_ptr() for x in tables))
    return dqkv


def _key(x: Tensor | None) -> Any:
    return None if x is None else (x.shape, x.stride(), x.dtype, x.get_device())


def _byte_offsets(views: tuple[Tensor, Tensor, Tensor]) -> tuple[int, int]:
    """Of k and v from q."""
    q, k, v = views
    size = q.element_size()
    start = int(q.storage_offset())
    return (int(k.storage_offset()) - start) * size, (int(v.storage_offset()) - start) * size


def _launches() -> dict[tuple[Any, ...], Any]:
    """What this thread has prepared: an argument block is filled by one thread at a time."""
    if not hasattr(_local, "launches"):
        _local.launches = {}
    launches: dict[tuple[Any, ...], Any] = _local.launches
    return launches


def _remember(key: tuple[Any, ...], launch: Any) -> Any:
    launches = _launches()
    if len(launches) >= MAX_LAUNCHES:
        launches.clear()
    launches[key] = launch
    return launch


def _prepare(
    inputs: Views,
    outputs: Views,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    start_positions: Tensor | None,
    options: Options,
) -> Launch | None:
    """Plan a kind of call, get its kernel and fill in all but the addresses; None: nothing to do."""
    device = inputs[0].device
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    planned = plan_call(inputs, outputs, cos, sin, cu_seqlens, start_positions, options, sm_count)
    if planned is None:
        return None
    plan, words = planned
    log.debug("%s: %s", plan.spec.name, plan.reason)
    return Launch(plan, device.index, words)
