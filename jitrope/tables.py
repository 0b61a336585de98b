"""Tables of cosines, sines or angles for every common kind of rope, made on the device.

>>> frequencies, factor = tables.inv_freq("yarn", rotary_dim=128, factor=4.0, original_max_position_embeddings=32768)
>>> cos, sin = tables.cos_sin(131072, frequencies, attention_factor=factor)
>>> q, k = jitrope.apply_rope(q, k, cos, sin)

Frequencies have the bits of transformers' `ROPE_INIT_FUNCTIONS` (5.23) on the same device: the functions below do the
same floating-point operations in the same order. Angles are taken from them in fp64, where position x frequency is
exact below 2^29 positions; an fp32 product alone is off by 0.03 radians at a million positions. A new kind of rope is
one function and one row of `ROPE_TYPES`.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from .base import arguments
from .base.errors import InvalidInput

__all__ = ["ROPE_TYPES", "cos_sin", "cos_sin_cache", "freqs", "from_config", "inv_freq"]

Device = torch.device | str | int | None
"""Where tensors are made; None: torch's default."""

Length = int | Tensor | None
"""Tokens of the longest sequence, on the host or in a tensor of one integer."""

INTEGERS = (torch.int32, torch.int64)
"""Dtypes of positions."""

ABOVE = {
    "theta": 1, "max_position_embeddings": 1, "original_max_position_embeddings": 1, "factor": 0, "attention_factor": 0,
    "beta_fast": 0, "beta_slow": 0, "low_freq_factor": 0, "high_freq_factor": 0, "short_factor": 0, "long_factor": 0,
}  # fmt: skip
"""Parameters of `inv_freq` that have to be above something; logarithms of those above 1 are divided by."""

BLOCK_ANGLES = 2**20
"""Angles worked on at a time: 8 MiB in fp64, beside their cosines and sines. 2^22 took half the time on an H100 (9 of
18 ms for 2^22 positions of 64 pairs) and twice as long on a CPU, whose caches it exceeds."""


# ---- frequencies ---------------------------------------------------------------------------------


def inv_freq(
    rope_type: str = "default", *, rotary_dim: int, theta: float = 10000.0, device: Device = None, **parameters: Any
) -> tuple[Tensor, float]:
    """The frequencies of rotary_dim / 2 pairs, and the factor of their cosines and sines.

    Pair i of d = rotary_dim elements turns by theta^(-2 i / d) radians a position (RoFormer, arXiv:2104.09864, section
    3.2.2), which the other types change, most of them for sequences longer than those of the training. Parameters in
    brackets are optional, by default as the source has them.

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

    Args:
        rope_type: one of the above, by transformers' names, as all parameters. "ntk", which is not
            there, multiplies theta by factor^(d / (d - 2)).
        rotary_dim: even; elements of a head that are rotated. For "proportional" that is the whole
            head; the pairs past partial_rotary_factor of it have frequency 0, and stay as they are.
        theta: the base, above 1; the default is RoFormer's.
        device: where they are computed; None: torch's default. Some of a GPU's differ from the CPU's
            in the last bit, up to 0.1 radians at a million positions: where a host computes them
            on the CPU and moves them (as transformers' models do), do the same.
        seq_len: beyond max_position_embeddings "dynamic" stretches theta; beyond
            original_max_position_embeddings "longrope" takes long_factor, else short_factor. With a
            tensor of one integer, which transformers' forwards pass, "dynamic" computes theta in fp32.
        attention_factor: in place of the one that follows from factor.
        truncate: whether YaRN's ramp begins and ends at whole pairs.
        parameters: as in the table; None counts as not given.

    Returns:
        ((rotary_dim / 2,) fp32 in radians per position, attention_factor: 1.0 but for yarn and longrope).

    Raises:
        InvalidInput: a parameter is unknown to the type, missing or out of range.
    """
    rope_type = arguments.word("inv_freq", "rope_type", rope_type, ROPE_TYPES)
    device = arguments.device("inv_freq", "device", device)
    least = 4 if rope_type in ("ntk", "dynamic") else 2  # their exponent is d / (d - 2)
    rotary_dim = arguments.whole("inv_freq", "rotary_dim", rotary_dim, least)
    if rotary_dim % 2:
        arguments.refuse("inv_freq", "rotary_dim", rotary_dim, "even")
    given = {name: value for name, value in parameters.items() if value is not None}
    accepted = _parameters(rope_type)
    theta = _number("theta", theta)
    for name, value in given.items():
        if name not in accepted:
            takes = ", ".join(accepted) or "no parameters"
            raise InvalidInput(f"inv_freq: {name} is not a parameter of {rope_type!r}, which takes {takes}")
        given[name] = _PARAMETERS.get(name, _number)(name, value)
    missing = [name for name, default in accepted.items() if default is inspect.Parameter.empty and name not in given]
    if missing:
        raise InvalidInput(f"inv_freq: {rope_type!r} needs {', '.join(missing)}")
    frequencies, attention_factor = ROPE_TYPES[rope_type](rotary_dim, theta, device, **given)
    return frequencies, float(attention_factor)


def _default(dim: int, theta: float, device: Device) -> tuple[Tensor, float]:
    return 1.0 / _powers(theta, dim, device), 1.0


def _linear(dim: int, theta: float, device: Device, *, factor: float) -> tuple[Tensor, float]:
    return 1.0 / _powers(theta, dim, device) / factor, 1.0


def _ntk(dim: int, theta: float, device: Device, *, factor: float) -> tuple[Tensor, float]:
    """The slowest pair is interpolated by factor, the fastest stays."""
    return 1.0 / _powers(theta * factor ** (dim / (dim - 2)), dim, device), 1.0


def _dynamic(
    dim: int, theta: float, device: Device, *, factor: float, max_position_embeddings: int, seq_len: Length = None
) -> tuple[Tensor, float]:
    """NTK by a factor that grows with the sequence: 1 up to max_position_embeddings."""
    trained = max_position_embeddings
    seq: Any = seq_len  # a tensor stays on its device
    longest = seq.max().clamp(min=trained) if isinstance(seq, Tensor) else max(seq or 0, trained)
    base = theta * ((factor * longest / trained) - (factor - 1)) ** (dim / (dim - 2))
    return 1.0 / _powers(base, dim, device), 1.0


def _yarn(
    dim: int, theta: float, device: Device, *, factor: float, original_max_position_embeddings: int,
    beta_fast: float = 32.0, beta_slow: float = 1.0, attention_factor: float | None = None, mscale: float = 0.0,
    mscale_all_dim: float = 0.0, truncate: bool = True,
) -> tuple[Tensor, float]:  # fmt: skip
    """Pairs that turn more than beta_fast times in the trained length stay, those below beta_slow are interpolated."""
    if beta_fast < beta_slow:
        raise InvalidInput(f"inv_freq: beta_fast is {beta_fast}; it is at least beta_slow {beta_slow}")

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if attention_factor is None:
        both = mscale and mscale_all_dim
        attention_factor = temperature(mscale) / temperature(mscale_all_dim) if both else temperature(1.0)

    low, high = (
        dim * math.log(original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (beta_fast, beta_slow)
    )
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a ramp of no length; transformers' number
    # The ramp is made where transformers makes it, on the default device, and so has the same bits on a GPU.
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp.to(device=device)
    powers = _powers(theta, dim, device)
    # 1 - kept is not the ramp again, in the last bit; nor is 1 / powers / factor the first term.
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept, attention_factor


def _llama3(
    dim: int, theta: float, device: Device, *, factor: float, low_freq_factor: float, high_freq_factor: float,
    original_max_position_embeddings: int,
) -> tuple[Tensor, float]:  # fmt: skip
    """Short wavelengths stay, long ones are interpolated, those between are blended."""
    if low_freq_factor >= high_freq_factor:
        raise InvalidInput(
            f"inv_freq: low_freq_factor is {low_freq_factor}; it is below high_freq_factor {high_freq_factor}"
        )
    trained = original_max_position_embeddings
    plain = 1.0 / _powers(theta, dim, device)
    wavelength = 2 * math.pi / plain
    blend = (trained / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    between = (1 - blend) * plain / factor + blend * plain
    slow = torch.where(wavelength > trained / low_freq_factor, plain / factor, between)
    return torch.where(wavelength < trained / high_freq_factor, plain, slow), 1.0


def _longrope(
    dim: int, theta: float, device: Device, *, factor: float, short_factor: Sequence[float],
    long_factor: Sequence[float], original_max_position_embeddings: int, attention_factor: float | None = None,
    seq_len: Length = None,
) -> tuple[Tensor, float]:  # fmt: skip
    """A searched factor for each pair, of which there is a set for short and one for long sequences."""
    for name, factors in (("short_factor", short_factor), ("long_factor", long_factor)):
        if len(factors) != dim // 2:
            raise InvalidInput(f"inv_freq: {name} has {len(factors)} entries for rotary_dim / 2 = {dim // 2} pairs")
    trained = original_max_position_embeddings
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    factors = long_factor if seq_len is not None and seq_len > trained else short_factor
    each = torch.tensor(factors, dtype=torch.float32, device=device)
    return 1.0 / (each * _powers(theta, dim, device)), attention_factor


def _proportional(
    dim: int, theta: float, device: Device, *, partial_rotary_factor: float, factor: float = 1.0
) -> tuple[Tensor, float]:
    """The whole head's frequencies, of which only the fastest are kept."""
    if not 0 <= partial_rotary_factor <= 1:
        raise InvalidInput(f"inv_freq: partial_rotary_factor is {partial_rotary_factor}; it is from 0 to 1")
    rotated = int(partial_rotary_factor * dim // 2)
    frequencies = 1.0 / _powers(theta, dim, device)[:rotated]
    return torch.nn.functional.pad(frequencies, (0, dim // 2 - rotated)) / factor, 1.0


ROPE_TYPES: dict[str, Callable[..., tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "ntk": _ntk,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
}
"""What computes each type; the keyword-only parameters of a function are the type's."""


def _powers(theta: Any, dim: int, device: Device) -> Tensor:
    """theta^(2i / dim) for each pair i, (dim / 2,) fp32. theta is a number or a tensor of one."""
    powers: Tensor = theta ** (torch.arange(0, dim, 2, device=device).float() / dim)
    return powers


def _parameters(rope_type: str) -> dict[str, Any]:
    """The names of a type's own parameters, with their defaults."""
    parameters = inspect.signature(ROPE_TYPES[rope_type]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def _number(name: str, value: Any) -> float:
    """A finite number; a whole one stays whole, for arithmetic in the order and the types of transformers'."""
    found = arguments.number("inv_freq", name, value, ABOVE.get(name.partition("[")[0]))
    return int(value) if isinstance(value, numbers.Integral) else found


def _numbers(name: str, value: Any) -> list[float]:
    if not isinstance(value, (list, tuple)):
        if type(value).__module__ != "numpy" or getattr(value, "ndim", 0) != 1:
            arguments.refuse("inv_freq", name, value, "a list of numbers")
        value = value.tolist()
    return [_number(f"{name}[{i}]", item) for i, item in enumerate(value)]


def _length(name: str, value: Any, function: str = "inv_freq") -> int | Tensor:
    if not isinstance(value, Tensor):
        return arguments.whole(function, name, value, 0)
    if value.numel() != 1 or value.dtype not in INTEGERS or value.is_meta:
        arguments.refuse(function, name, value, "a whole number, or a tensor of one that has a value")
    return value


_PARAMETERS: dict[str, Callable[[str, Any], Any]] = {
    "short_factor": _numbers,
    "long_factor": _numbers,
    "seq_len": _length,
    "truncate": functools.partial(arguments.flag, "inv_freq"),
}
"""What a parameter may be, where it is not a number."""


# ---- from a model's configuration ----------------------------------------------------------------


def from_config(
    config: Any,
    *,
    layer_type: str | None = None,
    seq_len: Length = None,
    head_dim: int | None = None,
    device: Device = None,
) -> tuple[Tensor, float]:
    """`inv_freq` of a model's configuration: transformers' object, or a dict of the same names (config.json).

    >>> inv_freq, attention_factor = tables.from_config(model.config, device="cuda")

    Args:
        config: rope_parameters (or the older rope_scaling and rope_theta), head_dim (or hidden_size and
            num_attention_heads), partial_rotary_factor, max_position_embeddings and
            original_max_position_embeddings are read, nothing is written; of a dict also
            qk_rope_head_dim, for multi-head latent attention.
        layer_type: which, where rope_parameters has an entry for each type of layer; else None.
        seq_len: for "dynamic" and "longrope"; the others do not depend on it.
        head_dim: in place of the configuration's, where a dict has it by a name of its own.

    Returns:
        As `inv_freq`, (R / 2,) fp32 and a number; R, the rotated elements, is twice the number of frequencies.

    Raises:
        InvalidInput: as `inv_freq`; or the configuration has no such parameters, or not for this layer_type.
    """
    if layer_type is not None and not isinstance(layer_type, str):
        arguments.refuse("from_config", "layer_type", layer_type, "the name of a type of layer, or None")
    if head_dim is not None:
        head_dim = arguments.whole("from_config", "head_dim", head_dim, 2)
    if seq_len is not None:
        _length("seq_len", seq_len, "from_config")
    parameters = _rope_parameters(config, layer_type)
    if layer_type is not None and not isinstance(config, Mapping):
        with suppress(AttributeError, TypeError, ValueError):  # transformers': head sizes that vary over the layers
            config = config.per_layer_config[layer_type]
    found: dict[str, Any] = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0, "seq_len": seq_len}
    length = found["max_position_embeddings"] = _get(config, "max_position_embeddings")
    for source in ({name: _get(config, name) for name in ("rope_theta", "partial_rotary_factor")}, parameters):
        found.update((name, value) for name, value in source.items() if value is not None)
    trained = found.get("original_max_position_embeddings")
    if layer_type is None:  # Phi-3's is beside rope_parameters, and goes before one inside
        trained = _get(config, "original_max_position_embeddings") or trained
    found["original_max_position_embeddings"] = trained = trained or length
    for name in ("max_position_embeddings", "original_max_position_embeddings", "partial_rotary_factor"):
        if found[name] is not None:
            arguments.number("from_config", name, found[name], ABOVE.get(name))
    rope_type = found.get("rope_type") or found.get("type") or "default"
    arguments.word("from_config", "rope_type", rope_type, ROPE_TYPES)
    if rope_type in ("yarn", "longrope") and length and trained:
        found.setdefault("factor", length / trained)
    accepted = _parameters(rope_type)
    known = {name: value for name, value in found.items() if name in accepted}
    rotary_dim = _rotary_dim(config, rope_type, head_dim, found["partial_rotary_factor"])
    return inv_freq(rope_type, rotary_dim=rotary_dim, theta=found["rope_theta"], device=device, **known)


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _rope_parameters(config: Any, layer_type: str | None) -> dict[str, Any]:
    """The parameters of one type of layer, or of all."""
    names = ("rope_parameters", "rope_scaling", "rope_theta")
    if not any(name in config if isinstance(config, Mapping) else hasattr(config, name) for name in names):
        raise InvalidInput(f"from_config: config has none of {', '.join(names)}; perhaps its text_config has")
    found = _get(config, "rope_parameters") or _get(config, "rope_scaling") or {}
    if not isinstance(found, Mapping):
        arguments.refuse("from_config", "config's rope_parameters", found, "a dict")
    layer_types = [name for name, value in found.items() if isinstance(value, Mapping)]
    if layer_type is None and not layer_types:
        return dict(found)
    if layer_type not in layer_types:
        allowed = " or ".join(map(repr, layer_types)) or "None, as the parameters are those of every layer"
        raise InvalidInput(f"from_config: layer_type is {layer_type!r}; allowed is {allowed}")
    # transformers looks for truncate beside the layer types, not inside, and has its models compute that.
    return {**found[layer_type], "truncate": found.get("truncate", True)}


def _rotary_dim(config: Any, rope_type: str, head_dim: int | None, partial: float) -> int:
    if head_dim is None and isinstance(config, Mapping):
        if _get(config, "global_head_dim") or _get(config, "per_layer_config"):
            raise InvalidInput("from_config: config has heads of several sizes; pass head_dim, or transformers' object")
        if _get(config, "qk_rope_head_dim"):
            return arguments.whole("from_config", "config's qk_rope_head_dim", config["qk_rope_head_dim"])
    head_dim = head_dim or _get(config, "head_dim")
    if head_dim is None:
        sizes = [_get(config, name) for name in ("hidden_size", "num_attention_heads")]
        if None in sizes:
            raise InvalidInput("from_config: config has neither head_dim nor hidden_size and num_attention_heads")
        width, heads = (arguments.whole("from_config", "config's sizes", size, 1) for size in sizes)
        head_dim = width // heads
    head_dim = arguments.whole("from_config", "config's head_dim", head_dim, 1)
    return int(head_dim) if rope_type == "proportional" else int(head_dim * partial)


# ---- tables --------------------------------------------------------------------------------------


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
    """Cosines and sines of position x frequency, on inv_freq's device; `apply_rope` takes them.

    Args:
        positions: a number P, for 0 to P - 1, or an int32 or int64 tensor of any shape on that device.
        inv_freq: (R / 2,) fp32, radians per position.
        attention_factor: of both tables, as `inv_freq` returns it.
        width: "half": an angle a pair, W = R / 2; "full": an angle an element of a head, W = R.
        interleaved: with full width: an angle twice in a row, for pairs (0, 1), (2, 3), ...; else all
            angles and then all again, for halves.
        dtype: fp32, fp16 or bf16.
        angles: "fp64": exact products below 2^29 positions; fp32 tables are within 2^-25 (times
            attention_factor) of the exact cosines and sines, as near as fp32 goes. "fp32": rounded
            products, which give the bits of transformers' modules, off by up to 0.03 at 2^20 positions.

    Returns:
        cos and sin, (P, W) or (*positions.shape, W) each, contiguous.

    Raises:
        InvalidInput: an argument is not one of the above.
    """
    return _cos_sin("cos_sin", positions, inv_freq, attention_factor, width, interleaved, dtype, angles)


def _cos_sin(
    name: str, positions: int | Tensor, inv_freq: Tensor, attention_factor: float, width: str, interleaved: bool,
    dtype: torch.dtype, angles: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    attention_factor = arguments.number(name, "attention_factor", attention_factor)
    arguments.word(name, "angles", angles, ("fp64", "fp32"))
    positions = _positions(name, positions, inv_freq)
    (cos, each_cos), (sin, each_sin) = (_empty(name, positions, inv_freq, width, interleaved, dtype) for _ in range(2))
    for block, angle in _blocks(positions, inv_freq, angles):
        each_cos[block] = angle.cos().mul_(attention_factor)[:, None]
        each_sin[block] = angle.sin().mul_(attention_factor)[:, None]
    return cos, sin


def cos_sin_cache(
    positions: int | Tensor,
    inv_freq: Tensor,
    *,
    attention_factor: float = 1.0,
    dtype: torch.dtype = torch.float32,
    angles: str = "fp64",
) -> Tensor:
    """R / 2 cosines and then R / 2 sines a row, (P, R) or (*positions.shape, R): `cos_sin_cache` of vLLM and SGLang.

    Arguments and errors are those of `cos_sin`. It serves both pairings (their is_neox_style).
    """
    tables = _cos_sin("cos_sin_cache", positions, inv_freq, attention_factor, "half", False, dtype, angles)
    return torch.cat(tables, dim=-1)


def freqs(positions: int | Tensor, inv_freq: Tensor, *, width: str = "half", interleaved: bool = False) -> Tensor:
    """Angles for `apply_rope(freqs=...)`, fp32, from -pi to pi.

    Whole turns are taken off in fp64, before rounding, so that an angle is within 1.5e-7 of the exact
    one (modulo 2 pi) at any position below 2^29, where fp32 has no digits left for all of it. One
    below pi has the bits of the fp32 product. attention_factor is `apply_rope`'s `mscale`.

    Arguments and errors are those of `cos_sin`; the table is (P, W) or (*positions.shape, W).
    """
    positions = _positions("freqs", positions, inv_freq)
    table, each = _empty("freqs", positions, inv_freq, width, interleaved, torch.float32)
    for block, angle in _blocks(positions, inv_freq, "fp64"):
        turns = (angle / (2 * math.pi)).round_()
        each[block] = angle.sub_(turns, alpha=2 * math.pi)[:, None]
    return table


def _positions(name: str, positions: int | Tensor, inv_freq: Tensor) -> Tensor:
    inv_freq = arguments.tensor(name, "inv_freq", inv_freq, (torch.float32,), 1)
    if isinstance(positions, Tensor):
        if positions.dtype not in INTEGERS or positions.device != inv_freq.device:
            got = f"{positions.dtype} on {positions.device}"
            raise InvalidInput(f"{name}: positions is {got}; it is int32 or int64 on inv_freq's {inv_freq.device}")
        return positions
    return torch.arange(arguments.whole(name, "positions", positions, 0), device=inv_freq.device)


def _empty(
    name: str, positions: Tensor, inv_freq: Tensor, width: str, interleaved: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """An empty table (*positions.shape, W), and a view of it (rows, times that an angle occurs, R / 2)."""
    arguments.word(name, "width", width, ("half", "full"))
    interleaved = arguments.flag(name, "interleaved", interleaved)
    if not isinstance(dtype, torch.dtype) or dtype not in (torch.float32, torch.float16, torch.bfloat16):
        arguments.refuse(name, "dtype", dtype, "torch.float32, torch.float16 or torch.bfloat16")
    times, pairs, rows = (2 if width == "full" else 1), len(inv_freq), positions.numel()
    table = torch.empty((*positions.shape, times * pairs), dtype=dtype, device=inv_freq.device)
    return table, table.view(rows, pairs, times).mT if interleaved else table.view(rows, times, pairs)


def _blocks(positions: Tensor, inv_freq: Tensor, angles: str) -> Iterator[tuple[slice, Tensor]]:
    """Angles (a block of rows, R / 2): at no time there are more of them than BLOCK_ANGLES in fp64."""
    dtype = torch.float64 if angles == "fp64" else torch.float32
    rows, frequencies = positions.reshape(-1, 1), inv_freq.detach().to(dtype)
    step = max(1, BLOCK_ANGLES // max(1, len(inv_freq)))
    for start in range(0, len(rows), step):
        block = slice(start, start + step)
        yield block, rows[block].to(dtype) * frequencies
