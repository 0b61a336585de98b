"""The frequencies of every common kind of rope.

They have the bits of transformers' `ROPE_INIT_FUNCTIONS` (5.24) on the same device, because the functions below do the
same floating-point operations in the same order. A new kind of rope is one function and one row of `ROPE_TYPES`.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base import arguments
from ..base.errors import require
from ..base.fit import INTEGERS

Device = torch.device | str | int | None
"""The device of new tensors; None: torch's default."""

Found = tuple[Tensor, float]
"""Frequencies, and a factor for their cosines and sines."""

Length = int | Tensor | None
"""The number of tokens of the longest sequence, as a number or a tensor of one integer."""


ABOVE_ONE = ("theta", "max_position_embeddings", "original_max_position_embeddings")
ANY = ("mscale", "mscale_all_dim", "partial_rotary_factor")
"""Parameters of `inv_freq` that must be above 1, because their logarithm is a divisor, and parameters that may be any
number. All others must be above 0."""


def inv_freq(
    rope_type: str = "default", *, rotary_dim: int, theta: float = 10000.0, device: Device = None, **parameters: Any
) -> Found:
    """Return the frequencies of rotary_dim / 2 pairs, and a factor for their cosines and sines.

    Pair i of d = rotary_dim elements turns by theta^(-2 i / d) radians for each position (RoFormer, arXiv:2104.09864,
    section 3.2.2). The other types change this, usually for sequences longer than in training. Parameters in brackets
    are optional; their defaults come from the source.

    | rope_type | parameters | source |
    | --- | --- | --- |
    | default | | RoFormer |
    | linear | factor | position interpolation, arXiv:2306.15595 |
    | ntk | factor | arXiv:2309.00071, section 3.1 |
    | dynamic | factor, max_position_embeddings, [seq_len] | arXiv:2309.00071, section 3.3 |
    | yarn | factor, original_max_position_embeddings, [beta_fast=32, beta_slow=1, attention_factor, mscale, \
mscale_all_dim, truncate=True] | YaRN, arXiv:2309.00071, 3.2 to 3.4; mscale: DeepSeek-V2, arXiv:2405.04434 |
    | llama3 | factor, low_freq_factor, high_freq_factor, original_max_position_embeddings | Llama 3.1's rope_scaling |
    | longrope | factor, short_factor, long_factor, [attention_factor, seq_len], original_max_position_embeddings | \
LongRoPE, arXiv:2402.13753; Phi-3's configuration |
    | proportional | partial_rotary_factor, [factor=1] | Gemma 4's configuration |
    | axial | [axes=2, in_turn=False] | Qwen2-VL, arXiv:2409.12191, section 2.1; in_turn: Pixtral, arXiv:2410.07073 |

    >>> tables.inv_freq("linear", rotary_dim=4, factor=2.0)
    (tensor([0.5000, 0.0050]), 1.0)

    Args:
        rope_type: one of the above. Types and parameters have the names of transformers, which lacks "ntk": it
            multiplies theta by factor^(d / (d - 2)).
        rotary_dim: the number of rotated elements of a head, even. For "proportional" it is the whole head; pairs
            beyond partial_rotary_factor of it have frequency 0 and do not change.
        theta: the base, above 1; the default is RoFormer's.
        device: the device that computes the frequencies; None: torch's default. Frequencies of a GPU may differ from
            those of a CPU in the last bit, by up to 0.1 radians at a million positions. If a model computes them on the
            CPU and moves them, as in transformers, do the same.
        seq_len: beyond max_position_embeddings "dynamic" stretches theta; beyond original_max_position_embeddings
            "longrope" takes long_factor, else short_factor. With a tensor of one integer, as transformers passes it,
            "dynamic" computes theta in fp32.
        attention_factor: replaces the value that follows from factor.
        truncate: whether YaRN's ramp begins and ends at whole pairs.
        axes: the axes of the positions, such as height and width. Each has rotary_dim / 2 / axes pairs, one axis after
            the other: pass `Mrope` that many for each.
        in_turn: True: the axes take the frequencies of the whole head in turn. False: each axis has the frequencies of
            a head of rotary_dim / axes elements.
        parameters: as in the table; None means not given.

    Returns:
        ((rotary_dim / 2,) fp32 in radians per position, attention_factor: 1.0 except for yarn and longrope).

    Raises:
        InvalidInput: a parameter is unknown to the type, missing or out of range.
    """
    rope_type = arguments.word("inv_freq", "rope_type", rope_type, ROPE_TYPES)
    device = arguments.device("inv_freq", "device", device)
    least = 4 if rope_type in ("ntk", "dynamic") else 2  # their exponent is d / (d - 2)
    rotary_dim = arguments.whole("inv_freq", "rotary_dim", rotary_dim, least)
    _require(rotary_dim % 2 == 0, f"rotary_dim is {rotary_dim}; it must be even")
    function, accepted = ROPE_TYPES[rope_type]
    words = {"dim": rotary_dim, "theta": number("theta", theta), "device": device, **accepted}
    for name, value in [(name, value) for name, value in parameters.items() if value is not None]:
        takes = ", ".join(accepted) or "no parameters"
        _require(name in accepted, f"{name} is not a parameter of {rope_type!r}, which takes {takes}")
        words[name] = _PARAMETERS.get(name, number)(name, value)
    missing = [name for name, value in words.items() if value is ...]
    _require(not missing, f"{rope_type!r} needs {', '.join(missing)}")
    frequencies, attention_factor = function(_Words(words))
    return frequencies, float(attention_factor)


class _Words:
    """Values by name: `types.SimpleNamespace`, which torch.compile cannot trace."""

    def __init__(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


class RopeType(NamedTuple):
    """The function of a type and its parameters. It takes `_Words` with dim, theta, device and these parameters."""

    function: Callable[[Any], Found]
    parameters: dict[str, Any]  # name: default, or ... if it must be given


def _powers(p: Any, theta: Any = None, end: int | None = None, step: int = 2) -> Tensor:
    """theta^(2i / dim) for each pair i, (dim / 2,) fp32. theta: a number or a tensor of one, by default p.theta.

    end: the number of elements in the pairs, in place of dim. step: 2 A for each A-th pair. A power's last bit depends
    on how many torch computes.
    """
    exponents = torch.arange(0, p.dim if end is None else end, step, device=p.device).float() / p.dim
    return torch.pow(p.theta if theta is None else theta, exponents)


def _dynamic(p: Any) -> Found:
    """NTK with a factor that grows with the sequence; it is 1 up to max_position_embeddings."""
    trained, seq = p.max_position_embeddings, p.seq_len  # a tensor stays on its device
    longest = seq.max().clamp(min=trained).float() if isinstance(seq, Tensor) else max(seq or 0, trained)
    base = p.theta * ((p.factor * longest / trained) - (p.factor - 1)) ** (p.dim / (p.dim - 2))
    return 1.0 / _powers(p, base), 1.0


def _yarn(p: Any) -> Found:
    """Pairs with over beta_fast turns in the trained length do not change; those below beta_slow are interpolated."""
    _require(p.beta_fast >= p.beta_slow, f"beta_fast is {p.beta_fast}; it must be at least beta_slow {p.beta_slow}")

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(p.factor) + 1.0 if p.factor > 1 else 1.0

    if p.attention_factor is None:
        both = p.mscale and p.mscale_all_dim
        p.attention_factor = temperature(p.mscale) / temperature(p.mscale_all_dim) if both else temperature(1.0)
    low, high = (
        p.dim * math.log(p.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(p.theta))
        for turns in (p.beta_fast, p.beta_slow)
    )
    if p.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, p.dim - 1)
    if low == high:
        high += 0.001  # avoids a ramp of length 0; transformers' number
    # The ramp is made on the default device, as in transformers, so its bits are equal on a GPU.
    ramp = ((torch.arange(p.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp.to(device=p.device)
    powers = _powers(p)
    # Do not simplify: 1 - kept differs from the ramp in the last bit, and 1 / powers / factor from the first term.
    return 1.0 / (p.factor * powers) * (1 - kept) + 1.0 / powers * kept, p.attention_factor


def _llama3(p: Any) -> Found:
    """Short wavelengths do not change, long ones are interpolated, and those between are blended."""
    low, high, trained = p.low_freq_factor, p.high_freq_factor, p.original_max_position_embeddings
    _require(low < high, f"low_freq_factor is {low}; it must be below high_freq_factor {high}")
    plain = 1.0 / _powers(p)
    wavelength = 2 * math.pi / plain
    blend = (trained / wavelength - low) / (high - low)
    between = (1 - blend) * plain / p.factor + blend * plain
    slow = torch.where(wavelength > trained / low, plain / p.factor, between)
    return torch.where(wavelength < trained / high, plain, slow), 1.0


def _longrope(p: Any) -> Found:
    """A factor for each pair, from one list for short sequences and one for long ones."""
    for name, factors in (("short_factor", p.short_factor), ("long_factor", p.long_factor)):
        entries, pairs = len(factors), p.dim // 2
        _require(entries == pairs, f"{name} has {entries} entries for rotary_dim / 2 = {pairs} pairs")
    trained = p.original_max_position_embeddings
    if p.attention_factor is None:
        p.attention_factor = math.sqrt(1 + math.log(p.factor) / math.log(trained)) if p.factor > 1 else 1.0
    factors = p.long_factor if p.seq_len is not None and p.seq_len > trained else p.short_factor
    return 1.0 / (torch.tensor(factors, dtype=torch.float32, device=p.device) * _powers(p)), p.attention_factor


def _proportional(p: Any) -> Found:
    """The frequencies of the whole head; all but the fastest are 0."""
    part = p.partial_rotary_factor
    _require(0 <= part <= 1, f"partial_rotary_factor is {part}; it must be from 0 to 1")
    rotated = int(part * p.dim // 2)
    frequencies = 1.0 / _powers(p, end=2 * rotated)
    return torch.nn.functional.pad(frequencies, (0, p.dim // 2 - rotated)) / p.factor, 1.0


def _axial(p: Any) -> Found:
    """Each axis has the frequencies of a head of its own, one axis after the other."""
    step = 2 * p.axes
    _require(p.dim % step == 0, f"rotary_dim is {p.dim}; it must be a multiple of 2 x axes = {step}")
    if not p.in_turn:
        return (1.0 / _powers(p, step=step)).repeat(p.axes), 1.0
    plain = 1.0 / _powers(p)
    return torch.cat([plain[axis :: p.axes] for axis in range(p.axes)]), 1.0


_FACTOR, _TRAINED = {"factor": ...}, {"original_max_position_embeddings": ...}
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.0, "mscale_all_dim": 0.0, "truncate": True}
_LISTS, _SET = {"short_factor": ..., "long_factor": ...}, {"attention_factor": None}

ROPE_TYPES = {
    "default": RopeType(lambda p: (1.0 / _powers(p), 1.0), {}),
    "linear": RopeType(lambda p: (1.0 / _powers(p) / p.factor, 1.0), _FACTOR),
    "ntk": RopeType(lambda p: (1.0 / _powers(p, p.theta * p.factor ** (p.dim / (p.dim - 2))), 1.0), _FACTOR),
    "dynamic": RopeType(_dynamic, {**_FACTOR, "max_position_embeddings": ..., "seq_len": None}),
    "yarn": RopeType(_yarn, {**_FACTOR, **_TRAINED, **_YARN, **_SET}),
    "llama3": RopeType(_llama3, {**_FACTOR, "low_freq_factor": ..., "high_freq_factor": ..., **_TRAINED}),
    "longrope": RopeType(_longrope, {**_FACTOR, **_LISTS, **_TRAINED, **_SET, "seq_len": None}),
    "proportional": RopeType(_proportional, {"partial_rotary_factor": ..., "factor": 1.0}),
    "axial": RopeType(_axial, {"axes": 2, "in_turn": False}),
}


def number(name: str, value: Any, function: str = "inv_freq") -> float:
    """A finite number. A whole one stays an int, for the same arithmetic as in transformers."""
    found = arguments.number(function, name, value, None if name in ANY else float(name in ABOVE_ONE))
    return int(value) if isinstance(value, numbers.Integral) else found


def _numbers(name: str, value: Any) -> list[float]:
    given = arguments.items("inv_freq", name, value, "a list of numbers")
    return [number(f"{name}[{i}]", item) for i, item in enumerate(given)]


def length(name: str, value: Any, function: str = "inv_freq") -> int | Tensor:
    if not isinstance(value, Tensor):
        return arguments.whole(function, name, value, 0)
    if value.numel() != 1 or value.dtype not in INTEGERS or value.is_meta:
        arguments.refuse(function, name, value, "a whole number, or a tensor of one with a value")
    return value


_require = functools.partial(require, "inv_freq")
_PARAMETERS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("short_factor", "long_factor"), _numbers),
    "seq_len": length,
    **dict.fromkeys(("truncate", "in_turn"), functools.partial(arguments.flag, "inv_freq")),
    "axes": functools.partial(arguments.whole, "inv_freq", least=1),
}
"""The checks of parameters that are not numbers."""
