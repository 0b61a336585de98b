"""The attention backends, and which one a call takes."""

from __future__ import annotations

from ..errors import InvalidInput
from .flash import Cudnn, Flash
from .flex import Flex
from .interface import Backend, Case
from .plain import Math

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (Flash("flash4"), Flash("flash3"), Flash("flash"), Cudnn(), Flex(), Math())
}  # fmt: skip
# "auto": the first that does not refuse. A newer FlashAttention is there only where the user has made it active.
AUTO = {"cuda": ("flash4", "flash3", "flash", "flex", "math"), "cpu": ("math",)}


def backends(case: Case) -> dict[str, str | None]:
    """Every backend by name, with why it refuses the case; None: it takes it. Raises nothing.

    >>> case = Case(torch.device("cuda"), torch.bfloat16, heads=32, kv_heads=8, head_dim=128, head_dim_v=128)
    >>> backends(case)["flash"]
    """
    return {name: backend.refuses(case) for name, backend in BACKENDS.items()}


def choose(name: str, case: Case) -> Backend:
    """The backend of that name, or for "auto" the first that takes the case.

    Raises:
        InvalidInput: there is none of that name, or it refuses the case.
    """
    if name == "auto":
        name = next(n for n in AUTO.get(case.device.type, ("math",)) if BACKENDS[n].refuses(case) is None)
    if name not in BACKENDS:
        raise InvalidInput(f"all_gather_attention: backend is {name!r}; allowed are auto, {', '.join(BACKENDS)}")
    why = BACKENDS[name].refuses(case)
    if why is not None:
        raise InvalidInput(f"all_gather_attention: backend {name!r} cannot do this: {why}")
    return BACKENDS[name]
