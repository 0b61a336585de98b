"""Tables of cosines, sines or angles for every common kind of rope, computed on the device.

>>> frequencies, factor = tables.inv_freq("yarn", rotary_dim=64, factor=4.0, original_max_position_embeddings=4096)
>>> cos, sin = tables.cos_sin(16384, frequencies, attention_factor=factor)
>>> q, k = jitrope.apply_rope(torch.randn(1, 16, 8, 64), torch.randn(1, 16, 2, 64), cos, sin)

Frequencies have the bits of transformers' `ROPE_INIT_FUNCTIONS` (5.24) on the same device. Angles are computed from
them in fp64, where position x frequency is exact below 2^29 positions. An fp32 product is off by 0.03 radians at a
million positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..base import arguments
from ..base.fit import INTEGERS, Fail
from .config import from_config
from .frequencies import ROPE_TYPES, inv_freq

__all__ = ["ROPE_TYPES", "cos_sin", "cos_sin_cache", "freqs", "from_config", "inv_freq"]

BLOCK_ANGLES = 2**20
"""Angles computed at a time: 8 MiB in fp64, and as much for their cosines and sines. 2^22 took half the time on an H100
(9 of 18 ms for 2^22 positions of 64 pairs), but twice the time on a CPU, because it exceeds the caches."""


def cos_sin(
    positions: int | Tensor,
    inv_freq: Tensor,
    *,
    attention_factor: float = 1.0,
    width: str = "half",
    interleaved: bool = False,
    dtype: torch.dtype = torch.float32,
    angles: str = "fp64",
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position x frequency for `apply_rope`, on inv_freq's device.

    >>> cos, sin = tables.cos_sin(3, tables.inv_freq(rotary_dim=4)[0])
    >>> cos
    tensor([[ 1.0000,  1.0000],
            [ 0.5403,  0.9999],
            [-0.4161,  0.9998]])

    Args:
        positions: a number P for positions 0 to P - 1, or an int32 or int64 tensor of any shape on that device.
        inv_freq: (R / 2,) fp32, radians per position.
        attention_factor: a factor of both tables, as `inv_freq` returns it.
        width: "half": one angle for each pair, W = R / 2; "full": one for each element of a head, W = R.
        interleaved: the order with full width. True: each angle twice in a row, for pairs (0, 1), (2, 3), ... False:
            all angles, then all again, for halves.
        dtype: fp32, fp16 or bf16.
        angles: "fp64": exact products below 2^29 positions; fp32 tables are within 2^-25 of the exact
            cosines and sines, with an attention_factor from 1 to 2 within 2^-24. "fp32": rounded products, with the
            bits of transformers' modules, off by up to 0.03 at 2^20 positions.

    Returns:
        cos and sin, (P, W) or (*positions.shape, W) each, contiguous.

    Raises:
        InvalidInput: an argument is not one of the above.
    """
    cos, sin = _tables("cos_sin", positions, inv_freq, attention_factor, dtype, angles, width, interleaved)
    return cos, sin


def cos_sin_cache(
    positions: int | Tensor,
    inv_freq: Tensor,
    *,
    attention_factor: float = 1.0,
    dtype: torch.dtype = torch.float32,
    angles: str = "fp64",
) -> Tensor:
    """The `cos_sin_cache` of vLLM and SGLang, (P, R) or (*positions.shape, R): a row has R / 2 cosines and R / 2 sines.

    Arguments and errors are those of `cos_sin`. The table serves both pairings (is_neox_style).

    >>> tables.cos_sin_cache(3, tables.inv_freq(rotary_dim=4)[0])
    tensor([[ 1.0000,  1.0000,  0.0000,  0.0000],
            [ 0.5403,  0.9999,  0.8415,  0.0100],
            [-0.4161,  0.9998,  0.9093,  0.0200]])
    """
    return torch.cat(_tables("cos_sin_cache", positions, inv_freq, attention_factor, dtype, angles), dim=-1)


def freqs(positions: int | Tensor, inv_freq: Tensor, *, width: str = "half", interleaved: bool = False) -> Tensor:
    """Angles for `apply_rope(freqs=...)`, fp32, from -pi to pi.

    Whole turns are subtracted in fp64 before rounding, so an angle is within 1.5e-7 of the exact one (modulo 2 pi) at
    any position below 2^29, where fp32 could not hold the whole angle. An angle below pi has the bits of the fp32
    product. Pass the attention_factor as `apply_rope`'s mscale.

    Arguments and errors are those of `cos_sin`; the table is (P, W) or (*positions.shape, W).

    >>> tables.freqs(torch.tensor([0, 3, 4]), tables.inv_freq(rotary_dim=4)[0])
    tensor([[ 0.0000,  0.0000],
            [ 3.0000,  0.0300],
            [-2.2832,  0.0400]])
    """
    turned = [lambda angle: angle.sub((angle / (2 * math.pi)).round_(), alpha=2 * math.pi)]
    return _tables("freqs", positions, inv_freq, width=width, interleaved=interleaved, functions=turned)[0]


def _tables(
    name: str,
    positions: int | Tensor,
    inv_freq: Tensor,
    attention_factor: float = 1.0,
    dtype: torch.dtype = torch.float32,
    angles: str = "fp64",
    width: str = "half",
    interleaved: bool = False,
    functions: Sequence[Callable[[Tensor], Tensor]] = (torch.cos, torch.sin),
) -> list[Tensor]:
    """A table (*positions.shape, W) for each function, computed from at most BLOCK_ANGLES angles at a time."""
    factor = arguments.number(name, "attention_factor", attention_factor)
    arguments.word(name, "width", width, ("half", "full"))
    arguments.word(name, "angles", angles, ("fp64", "fp32"))
    interleaved = arguments.flag(name, "interleaved", interleaved)
    arguments.word(name, "dtype", dtype, (torch.float32, torch.float16, torch.bfloat16))
    device, fail = arguments.tensor(name, "inv_freq", inv_freq).device, Fail(name, "inv_freq")
    fail.unlike("inv_freq", inv_freq, device, (torch.float32,), ("R / 2",))
    if not isinstance(positions, Tensor):
        positions = torch.arange(arguments.whole(name, "positions", positions, 0), device=device)
    fail.unlike("positions", arguments.tensor(name, "positions", positions), device, INTEGERS)

    times, pairs = 2 if width == "full" else 1, len(inv_freq)
    tables = [torch.empty((*positions.shape, times * pairs), dtype=dtype, device=device) for _ in functions]
    exact = torch.float64 if angles == "fp64" else torch.float32
    rows, frequencies = positions.reshape(-1, 1), inv_freq.detach().to(exact)
    step = max(1, BLOCK_ANGLES // max(1, pairs))
    for start in range(0, len(rows), step):
        angle = rows[start : start + step].to(exact) * frequencies
        for table, function in zip(tables, functions):
            each = table.view(len(rows), pairs, times).mT if interleaved else table.view(len(rows), times, pairs)
            each[start : start + step] = function(angle).mul_(factor)[:, None]
    return tables
