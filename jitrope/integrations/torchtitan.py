"""torchtitan: its rope modules, through its own overrides.

    --override.imports jitrope.integrations.torchtitan.cos_sin_rope jitrope.integrations.torchtitan.complex_rope

replaces each `CosSinRoPE.Config` and each `ComplexRoPE.Config` of the model. Subclasses are not replaced, because they
compute something else. One launch rotates q and k, and one their gradients; the kernel selects rows by positions, so
nothing is gathered. Outputs have the host's bits on the same device. Parameters and checkpoints do not change.

q and k are (B, S, H, D), as in torchtitan 0.3, or packed (T, H, D), as in versions since 2026-08-20. The host still
checks the positions. Calls left to the host are logged once for each reason; `calls` and `reasons` count them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ..api import apply_rope
from ..base.errors import InvalidInput
from . import _host

calls = _host.calls["torchtitan"]
"""Calls so far, by "jitrope" and "host"; a call of a compiled model counts when it is traced."""

reasons = _host.reasons["torchtitan"]
"""The reasons why calls were left to the host."""


def rotate_cos_sin(query: Tensor, key: Tensor, cache: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rotate halves by a table of `CosSinRoPE`.

    >>> q, k = torch.randn(2, 1, 16, 8, 64)
    >>> cache = torch.cat(jitrope.tables.cos_sin(16, jitrope.tables.inv_freq(rotary_dim=64)[0], width="full"), -1)
    >>> q, k = jitrope_torchtitan.rotate_cos_sin(q, k, cache)

    Args:
        query, key: (B, S, H, D) or (T, H, D), each with its number of heads, any strides.
        cache: (max_seq_len, 2 D): cosines of the D / 2 pairs twice, then sines.
        positions: int32 or int64 (B, S) or (1, S), or (T), rows of the cache; default 0, 1, ... A token with a position
            outside of the cache becomes NaN here; the modules run the host's check before.

    Returns:
        query and key rotated, in fp32 arithmetic rounded once. Gradients flow to both.

    Raises:
        InvalidInput: the arguments do not fit together.
    """
    half = cache.shape[-1] // 4  # both members of a pair have one angle, so half of the table is enough
    words = {"cos": cache[:, :half], "sin": cache[:, 2 * half : 3 * half], "rotary_dim": 2 * half}
    return _both(query, key, positions=positions, **words)


def rotate_complex(query: Tensor, key: Tensor, cache: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rotate neighbours by a table of `ComplexRoPE`: complex64 cos + i sin, (max_seq_len, D / 2).

    The other arguments, the result and the errors are those of `rotate_cos_sin`.

    >>> q, k = torch.randn(2, 1, 16, 8, 64)
    >>> cache = torch.complex(*jitrope.tables.cos_sin(16, jitrope.tables.inv_freq(rotary_dim=64)[0]))
    >>> q, k = jitrope_torchtitan.rotate_complex(q, k, cache)
    """
    words = {"freqs_cis": cache, "interleaved": True, "rounding": "complex64"}
    return _both(query, key, positions=positions, **words)


def _both(query: Tensor, key: Tensor, **words: Any) -> tuple[Tensor, Tensor]:
    q, k = apply_rope(query, key, layout="thd" if query.dim() == 3 else "bshd", **words)
    assert k is not None
    return q, k


def _rotate(rope: Any, function: Any, check: Any, query: Tensor, key: Tensor, positions: Any = None) -> Any:
    """query and key rotated by a module's table; each rank rotates its shards."""
    *heads, cache = (x.to_local() if isinstance(x, DTensor) else x for x in (query, key, rope.cache))
    ids = positions.to_local() if isinstance(positions, DTensor) else positions
    if any(x.shape[-1] != rope.config.dim for x in heads):  # the host broadcasts a partial rotation or refuses it
        raise InvalidInput("the heads and the table have different sizes")
    if not all(_by_tokens_and_heads(x, ids is None) for x in (query, key)):
        raise InvalidInput("the tensors are sharded so that a rank cannot rotate alone")
    given = () if ids is None else (ids,)
    if given and check is not None:
        check(ids, max_valid_pos=cache.shape[0] - 1)
    rotated = function(*heads, cache, *given)
    return tuple(_sharded(out, x) for out, x in zip(rotated, (query, key)))


def _by_tokens_and_heads(x: Tensor, numbered: bool) -> bool:
    """Whether each rank can rotate its part alone.

    A rank needs whole heads, in even parts, and, if tokens are numbered from 0 (no positions), whole sequences.
    """
    if not isinstance(x, DTensor):
        return True
    parts = [1] * (x.dim() - 1)
    for placement, ranks in zip(x.placements, x.device_mesh.shape):
        if isinstance(placement, Shard) and placement.dim < len(parts):
            parts[placement.dim] *= ranks
        elif not placement.is_replicate():
            return False
    return all(size % count == 0 for size, count in zip(x.shape, parts)) and not (numbered and parts[-2] > 1)


def _sharded(local: Tensor, like: Tensor) -> Tensor:
    if isinstance(like, DTensor):
        return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False)
    return local


def _typed(function: Any) -> Any:
    """The function with the types of its inputs and outputs, for torchtitan's sharding checker."""
    import spmd_types as spmd

    table = {"dp": spmd.R, "cp": spmd.R, "tp": spmd.R}
    parts, same = {"dp": spmd.V, "cp": spmd.V, "tp": spmd.V}, {"dp": spmd.V, "cp": spmd.V, "tp": spmd.R}
    typed = {}
    for dim, tokens in ((4, ("dp", "cp")), (3, (("dp", "cp"),))):
        heads, ids = (parts, spmd.PartitionSpec(*tokens, "tp", None)), (same, spmd.PartitionSpec(*tokens))
        for types in ((heads, heads, table, ids), (heads, heads, table)):
            typed[dim, len(types)] = spmd.local_map(in_types=types, out_types=(heads, heads))(function)
    return lambda *tensors: typed.get((tensors[0].dim(), len(tensors)), function)(*tensors)


@lru_cache
def _subclass(name: str) -> Any:
    """Our subclass of the host's class of this name. The host is imported here, at first use."""
    from torchtitan.models.common import rope as rope_module

    host = getattr(rope_module, name)
    function = _typed(rotate_cos_sin if name == "CosSinRoPE" else rotate_complex)
    check = getattr(rope_module, "_maybe_check_max_pos", None)  # not in all versions

    def forward(self: Any, query: Tensor, key: Tensor, positions: Tensor | None = None) -> Any:
        ours, theirs = partial(_rotate, self, function, check), partial(host.forward, self)
        return _host.take("torchtitan", ours, theirs, query, key, positions)

    words = {"__module__": __name__, "__qualname__": f"{name}.Config"}
    config: Any = dataclass(kw_only=True, slots=True)(type("Config", (host.Config,), words))
    return type(name, (host,), {"__module__": __name__, "Config": config, "forward": forward})


def __getattr__(name: str) -> Any:
    """Return `CosSinRoPE` or `ComplexRoPE`, for configurations written by hand, and for pickle."""
    if name in ("CosSinRoPE", "ComplexRoPE"):
        return _subclass(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _derived(config: Any, name: str) -> Any:
    from torchtitan.config.override import derive

    return derive(config, _subclass(name).Config)


def cos_sin_rope(config: Any) -> Any:
    """The override of `CosSinRoPE.Config`: name it in `override.imports`.

    >>> from torchtitan.models.common.rope import CosSinRoPE
    >>> rope = jitrope_torchtitan.cos_sin_rope(CosSinRoPE.Config(dim=64, max_seq_len=16)).build()
    """
    return _derived(config, "CosSinRoPE")


def complex_rope(config: Any) -> Any:
    """The override of `ComplexRoPE.Config`: name it in `override.imports`.

    >>> from torchtitan.models.common.rope import ComplexRoPE
    >>> rope = jitrope_torchtitan.complex_rope(ComplexRoPE.Config(dim=64, max_seq_len=16)).build()
    """
    return _derived(config, "ComplexRoPE")


@lru_cache(maxsize=1)
def register() -> None:
    """Register the two overrides with torchtitan. Importing this module after torchtitan does it too.

    >>> jitrope_torchtitan.register()

    Raises:
        ImportError: torchtitan is not installed.
    """
    from torchtitan.config.override import override
    from torchtitan.models.common import rope as host

    for target, factory in ((host.CosSinRoPE, cos_sin_rope), (host.ComplexRoPE, complex_rope)):
        override(target=target.Config, exact=True, description=factory.__doc__)(factory)


if "torchtitan.config.override" in sys.modules:  # true when torchtitan imports this module as an override
    register()
