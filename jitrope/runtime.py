"""Kernels in memory, and the launch. In the steady state a call is one dict hit and one launch."""

from __future__ import annotations

import ctypes
import math
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import compiler, heuristics
from .cache import KernelCache, Key, cubin_file
from .compiler import Kernel
from .config import cache_dir, log
from .errors import CompileError, JitropeError
from .reference import table_view
from .render import ingredients, render
from .spec import ACCESS_BYTES, LAYOUT_AXES, RopeSpec

DTYPE_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "int32",
    torch.int64: "int64",
}
MAX_LAUNCHES = 4096
"""Prepared launches a thread keeps; past it they are forgotten, which costs a few microseconds each."""

_POINTERS = 7
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
        """Enqueue on torch's current stream: q, k, q_out, k_out, cos, sin, cu_seqlens."""
        _PACK(self.args, 0, *addresses)
        device = self.device
        if device == torch._C._cuda_getDevice():
            stream = torch._C._cuda_getCurrentRawStream(device)
            self.enqueue(*self.shape, stream, ctypes.addressof(self.pointers), 0)
        else:
            with torch.cuda.device(device):
                stream = torch._C._cuda_getCurrentRawStream(device)
                self.enqueue(*self.shape, stream, ctypes.addressof(self.pointers), 0)


class Options(NamedTuple):
    """What a call asks for, beside its tensors; the words are `apply_rope`'s."""

    layout: str
    interleaved: bool
    rotary_dim: int
    max_seqlen: int
    rounding: str
    launch: str
    conjugate: bool
    in_place: bool


def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    options: tuple[Any, ...],
    check: Callable[..., None] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rotate CUDA tensors; `options` are the values of `Options`.

    `check` runs once for each kind of call, before anything else. The key holds all that it, the
    plan and the argument block look at.
    """
    q_at, cos_at, sin_at = q.data_ptr(), cos.data_ptr(), sin.data_ptr()
    device = q.get_device()
    k_at, k_key, cu_at, cu_key = q_at, None, 0, None  # without k no head of it is read
    if k is not None:
        k_at, k_key = k.data_ptr(), (k.shape, k.stride(), k.dtype, k.get_device())
    if cu_seqlens is not None:
        cu_at = cu_seqlens.data_ptr()
        cu_key = (cu_seqlens.shape, cu_seqlens.stride(), cu_seqlens.dtype, cu_seqlens.get_device())
    key = (
        options, device, (q_at | k_at) & 15, (cos_at | sin_at) & 15, q.shape, q.stride(), q.dtype, k_key,
        cos.shape, cos.stride(), cos.dtype, cos.get_device(), sin.shape, sin.stride(), sin.dtype, sin.get_device(),
        cu_key,
    )  # fmt: skip
    try:
        launch = _local.launches[key]
    except (AttributeError, KeyError):
        if check is not None:
            check(q, k, cos, sin, cu_seqlens, options)
        launch = _remember(key, _prepare(q, k, cos, sin, cu_seqlens, Options(*options)))
    if options[-1]:
        if launch is not None:
            launch(q_at, k_at, q_at, k_at, cos_at, sin_at, cu_at)
        return q, k
    q_out = torch.empty_like(q)
    q_out_at = k_out_at = q_out.data_ptr()
    k_out = None
    if k is not None:
        k_out = torch.empty_like(k)
        k_out_at = k_out.data_ptr()
    if launch is not None:
        launch(q_at, k_at, q_out_at, k_out_at, cos_at, sin_at, cu_at)
    return q_out, k_out


def _launches() -> dict[tuple[Any, ...], Launch | None]:
    """What this thread has prepared: an argument block is filled by one thread at a time."""
    if not hasattr(_local, "launches"):
        _local.launches = {}
    launches: dict[tuple[Any, ...], Launch | None] = _local.launches
    return launches


def _remember(key: tuple[Any, ...], launch: Launch | None) -> Launch | None:
    launches = _launches()
    if len(launches) >= MAX_LAUNCHES:
        launches.clear()
    launches[key] = launch
    return launch


def _prepare(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, cu_seqlens: Tensor | None, options: Options
) -> Launch | None:
    """Plan a kind of call, get its kernel and fill in all but the addresses; None: nothing to do."""
    sm_count = torch.cuda.get_device_properties(q.device).multi_processor_count
    planned = plan_call(q, k, cos, sin, cu_seqlens, options, sm_count)
    if planned is None:
        return None
    plan, words = planned
    log.debug("%s: %s", plan.spec.name, plan.reason)
    return Launch(plan, q.get_device(), words)


def plan_call(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    options: Options,
    sm_count: int,
) -> tuple[heuristics.Plan, list[int]] | None:
    """The plan of a call and its kernel's arguments after the addresses; None: nothing to do.

    Looks at shapes, strides and alignment only, so the tensors may be on any device.
    """
    xs = [q, q if k is None else k]
    order = LAYOUT_AXES[options.layout]
    batch, seqlen, q_heads, head_dim = _pick(q.shape, order, 1)
    k_heads = 0 if k is None else _pick(k.shape, order, 1)[2]
    tokens, heads = batch * seqlen, q_heads + k_heads
    if tokens * heads == 0:
        return None
    outputs = xs if options.in_place else [torch.empty_like(x, device="meta") for x in xs]
    strides = [_strides(x, options.layout) for x in (*xs, *outputs)]
    full_width = cos.shape[-1] == options.rotary_dim
    tables = [_table_strides(table) for table in (cos, sin)]
    problem = heuristics.RopeProblem(
        dtype=DTYPE_NAMES[q.dtype],
        table_dtype=DTYPE_NAMES[cos.dtype],
        head_dim=head_dim,
        rotary_dim=options.rotary_dim,
        interleaved=options.interleaved,
        conjugate=options.conjugate,
        full_width=full_width,
        per_head=any(table[2] for table in tables),
        rounding=options.rounding,
        in_place=options.in_place,
        index_dtype=None if cu_seqlens is None else DTYPE_NAMES[cu_seqlens.dtype],
        tokens=tokens,
        heads=heads,
        num_sequences=0 if cu_seqlens is None else len(cu_seqlens) - 1,
        max_seqlen=options.max_seqlen,
        vec_limit=_elements_per_access(xs, strides),
        table_vec_limit=_elements_per_access([cos, sin], tables),
        launch=options.launch,
        sm_count=sm_count,
    )
    table_rows = cos.shape[0] if cos.dim() == 2 else cos.shape[1]
    counts = [tokens, seqlen, q_heads, k_heads, problem.num_sequences, table_rows]
    words = [word for group in (*strides, *tables, counts) for word in group]
    return heuristics.plan(problem), words


def _pick(values: Sequence[int], order: Sequence[int | None], missing: int) -> list[int]:
    return [missing if axis is None else values[axis] for axis in order]


def _strides(x: Tensor, layout: str) -> list[int]:
    """Strides over (batch, seq, head, dim) in elements; 0 along an axis of size 1."""
    order = LAYOUT_AXES[layout]
    strides = _pick(x.stride(), order, 0)
    return [0 if size == 1 else stride for size, stride in zip(_pick(x.shape, order, 1), strides)]


def _table_strides(table: Tensor) -> list[int]:
    """Strides over (batch, position, head, width) in elements; 0 where shared."""
    view = table_view(table)
    strides = [0 if size == 1 else stride for size, stride in zip(view.shape, view.stride())]
    return [*strides[:3], 1 if view.shape[3] == 1 else strides[3]]


def _elements_per_access(tensors: list[Tensor], strides: Sequence[Sequence[int]]) -> int:
    """Elements that one aligned access may span, from addresses and strides; the last stride is the inner one."""
    size = tensors[0].element_size()
    if any(inner != 1 for *_, inner in strides):
        return 1
    steps = [stride * size for *outer, _ in strides for stride in outer]
    return max(1, math.gcd(ACCESS_BYTES, *steps, *(x.data_ptr() for x in tensors)) // size)
