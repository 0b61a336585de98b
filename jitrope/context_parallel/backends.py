"""The attention backends, and the choice of one for a call."""

from __future__ import annotations

from ..base import arguments
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
