"""The attention backends, and the choice of one for a call."""

from __future__ import annotations

from typing import Any

import torch

from ..base import arguments
from ..plan.partition import Mask
from .flash import Cudnn, Flash
from .flex import Flex
from .interface import NAME, Backend, Case, fail
from .plain import Math

_ALL: tuple[Backend, ...] = (
    Flash("flash4", "FA4", "flash_attn.cute.interface", range(9, 11)),
    Flash("flash3", "FA3", "flash_attn_interface", range(9, 10)),
    Flash("flash", None, "torch", range(8, 100), max_segments=65535),  # the limit of CUDA's second grid axis
    Cudnn(),
    Flex(),
    Math(),
)
BACKENDS = {backend.name: backend for backend in _ALL}
# "auto" takes the first that does not refuse. FlashAttention 3 and 4 refuse until the user activates them.
AUTO = {"cuda": ("flash4", "flash3", "flash", "flex", "math"), "cpu": ("math",)}


def backends(case: Case) -> dict[str, str | None]:
    """Every backend by name, with the reason why it refuses the case, or None if it accepts it.

    >>> case = Case(torch.device("cuda"), torch.bfloat16, heads=8, kv_heads=2, head_dim=60, head_dim_v=60)
    >>> backends(case)["cudnn"]
    'D is 60; it must be a multiple of 8 up to 128'

    Raises:
        InvalidInput: case is not a `Case`, or one of its fields has a wrong type or value.
    """
    if not isinstance(case, Case):
        arguments.refuse("backends", "case", case, "a jitrope.context_parallel.Case")
    changes: dict[str, Any] = {
        name: arguments.whole("backends", name, getattr(case, name), 1)
        for name in ("heads", "kv_heads", "head_dim", "head_dim_v", "segments")
    }
    changes |= {name: arguments.flag("backends", name, getattr(case, name)) for name in case._fields[8:]}
    try:
        changes["device"] = torch.device(case.device)  # it may be absent on this machine
    except (RuntimeError, TypeError, ValueError):
        arguments.refuse("backends", "device", case.device, "a device")
    if not isinstance(case.dtype, torch.dtype):
        arguments.refuse("backends", "dtype", case.dtype, "a torch.dtype")
    mask = arguments.wholes("backends", "mask", case.mask, -1)
    if len(mask) != 2:
        arguments.refuse("backends", "mask", case.mask, "(left, right)")
    case = case._replace(mask=Mask(*mask), **changes)
    return {name: backend.refuses(case) for name, backend in BACKENDS.items()}


def choose(name: str, case: Case) -> Backend:
    """The backend of that name, or for "auto" the first that accepts the case.

    Raises:
        InvalidInput: there is no such backend, or it refuses the case.
    """
    arguments.word(NAME, "backend", name, ("auto", *BACKENDS))
    if name == "auto":
        name = next(n for n in AUTO.get(case.device.type, ("math",)) if BACKENDS[n].refuses(case) is None)
    why = BACKENDS[name].refuses(case)
    if why is not None:
        fail(f"backend {name!r} cannot do this: {why}")
    return BACKENDS[name]
