"""Cubin -> kernel on a GPU, and its launch, through the CUDA driver alone. CuPy only compiles (`compiler`).

The driver's functions are those of https://docs.nvidia.com/cuda/cuda-driver-api; ctypes calls them.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ..base.errors import CompileError


class Refused(CompileError):
    """The driver refuses a cubin: it is damaged, or made for another GPU or CUDA."""


class DriverError(RuntimeError):
    """A function of the driver failed. The argument is its CUresult."""

    def __str__(self) -> str:
        texts = [ctypes.c_char_p(), ctypes.c_char_p()]
        for name, text in zip(("cuGetErrorName", "cuGetErrorString"), texts):
            getattr(_library(), name)(self.args[0], ctypes.byref(text))
        return ": ".join((text.value or b"unknown error").decode() for text in texts)


@lru_cache(maxsize=1)
def _library() -> Any:
    """The driver. Raises CompileError if it is not installed."""
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError as error:
        raise CompileError(f"NVIDIA's driver cannot be loaded ({error}); install it, and check nvidia-smi") from error


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the driver. Raises DriverError."""
    if status := getattr(_library(), name)(*arguments):
        raise DriverError(status)


class _Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


class _LaunchConfig(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        *(("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint)),
        *(("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint)),
    )


_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
_COMPUTE_CAPABILITY_MAJOR = 75  # CUdevice_attribute
_MAX_DYNAMIC_SHARED_BYTES = 8  # CUfunction_attribute
_MAP_BYTES = 128  # of a CUtensorMap, and twice its alignment
_MAP_TYPES = {"fp16": 6, "bf16": 9}  # CUtensorMapDataType
_SWIZZLE_128B, _PROMOTE_256B = 3, 3  # CUtensorMapSwizzle, CUtensorMapL2promotion

_OF_THE_IMAGE = (200, 209, 218, 222, 300, 301, 500)
"""Errors (CUresult) of a bad image: it is damaged, made for another GPU or CUDA, or lacks the entry. Any other error,
such as out of memory or a fault of an earlier kernel, would occur with a new image too."""


class TensorMap(NamedTuple):
    """What the copy engine takes out of a tensor: a box of it, in 128-byte rows. All but the last axes first."""

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes, without the first axis, whose elements are neighbours
    box: tuple[int, ...]


class Kernel:
    """A kernel that is loaded on one GPU, in the context that torch uses, until the process ends.

    Args:
        cubin: the image.
        entry: the name of the kernel in the image.
        device: the index of the GPU.
        shared_bytes: of shared memory that each launch asks for.

    Raises:
        Refused: the driver refuses the image.
        CompileError: loading fails for another reason, such as memory, an error of an earlier kernel, or no driver.
    """

    def __init__(self, cubin: bytes, entry: str, device: int, shared_bytes: int = 0) -> None:
        self._shared_bytes = shared_bytes
        self._context, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        before, module = ctypes.c_void_p(), ctypes.c_void_p()
        place, major, cuda = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        try:
            _call("cuInit", 0)
            _call("cuDeviceGet", ctypes.byref(place), device)
            _call("cuDeviceGetAttribute", ctypes.byref(major), _COMPUTE_CAPABILITY_MAJOR, place)
            self._may_overlap = major.value >= 9
            _call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), place)
            _call("cuCtxGetCurrent", ctypes.byref(before))
            _call("cuCtxSetCurrent", self._context)
            try:
                _call("cuModuleLoadData", ctypes.byref(module), cubin)
                _call("cuModuleGetFunction", ctypes.byref(self._function), module, entry.encode())
                if shared_bytes:
                    _call("cuFuncSetAttribute", self._function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
            finally:
                _call("cuCtxSetCurrent", before)
        except DriverError as error:
            if error.args[0] not in _OF_THE_IMAGE:
                raise CompileError(f"the kernel {entry} cannot be loaded: {error}") from error
            _call("cuDriverGetVersion", ctypes.byref(cuda))
            version = f"{cuda.value // 1000}.{cuda.value % 1000 // 10}"
            raise Refused(f"the driver (CUDA {version}) refuses the kernel {entry}: {error}") from error

    def bind_thread(self) -> None:
        """Set the kernel's context in a thread that has not used the GPU yet; a launch needs one."""
        current = ctypes.c_void_p()
        _call("cuCtxGetCurrent", ctypes.byref(current))
        if not current:
            _call("cuCtxSetCurrent", self._context)

    @staticmethod
    def tensor_maps(maps: Sequence[TensorMap]) -> tuple[int, Callable[..., None]]:
        """Return the address of an array of CUtensorMap, and a function that fills it, given the tensors' addresses.

        The function keeps the memory.
        """
        memory = ctypes.create_string_buffer((len(maps) + 1) * _MAP_BYTES)
        first = -(-ctypes.addressof(memory) // _MAP_BYTES) * _MAP_BYTES
        encode, each = _library().cuTensorMapEncodeTiled, []
        for n, (dtype, sizes, strides, box) in enumerate(maps):
            rank = len(sizes)
            words = (ctypes.c_uint64 * rank)(*sizes), (ctypes.c_uint64 * rank)(*strides)
            steps = (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank)
            head = ctypes.c_void_p(first + n * _MAP_BYTES), _MAP_TYPES[dtype], rank
            each.append((head, (*words, *steps, 0, _SWIZZLE_128B, _PROMOTE_256B, 0)))

        def fill(*addresses: int, memory: Any = memory) -> None:
            for (head, tail), address in zip(each, addresses):
                if status := encode(*head, ctypes.c_void_p(address), *tail):
                    raise DriverError(status)

        return first, fill

    def enqueuer(self, grid: tuple[int, ...], block: int, *arguments: int) -> Callable[[int], None]:
        """Return a function that enqueues the kernel on a stream. arguments: the addresses of its arguments, structs.

        From sm_90 on it uses programmatic dependent launch; the templates wait for earlier kernels (`dependents.cuh`).
        """
        overlaps = ctypes.pointer(_Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1))
        sizes = (*grid, 1)[:3], (block, 1, 1), self._shared_bytes
        config = _LaunchConfig(*sizes, None, overlaps, int(self._may_overlap))
        parameters = (ctypes.c_void_p * len(arguments))(*arguments)
        launch = _library().cuLaunchKernelEx  # its arguments are made once and reused
        where = (ctypes.byref(config), self._function, parameters, None)

        def enqueue(stream: int) -> None:
            config.stream = stream
            if status := launch(*where):
                raise DriverError(status)

        return enqueue
