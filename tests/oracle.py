"""The formulas in fp64 and plain torch, written from the docstrings. Nothing of jitrope is imported.

Nothing is written here. Lazy bits are resolved first, comparisons have tolerances for roundings, and gradients are
torch's own, through these lines.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# The axes of batch, sequence, heads and elements in each layout.
AXES = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}
Result = tuple[tuple[Tensor | None, ...], dict[str, Tensor]]


def exact(x: Any) -> Any:
    """A tensor or number as an fp64 (or complex128) tensor without lazy bits."""
    if x is None or not isinstance(x, Tensor):
        return None if x is None else torch.tensor(float(x), dtype=torch.float64)
    x = x.resolve_conj().resolve_neg()
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def heads(x: Tensor, layout: str) -> Tensor:
    """(B, S, H, D) from any layout, and back: its own inverse."""
    if layout == "thd":
        return x[None] if x.dim() == 3 else x[0]
    return x.permute(AXES[layout])


# ---- positions and tables --------------------------------------------------------------------------


def chunked(first: int, end: int, cp_size: int, cp_rank: int) -> Iterator[int]:
    """A rank's positions, in order, of a sequence with the tokens [first, end) of the batch."""
    chunks = 2 * cp_size
    sizes = Counter(token % chunks for token in range(first, end))
    begins = [0, *itertools.accumulate(sizes[chunk] for chunk in range(chunks))]
    for chunk in (cp_rank, chunks - 1 - cp_rank):
        yield from range(begins[chunk], begins[chunk + 1])


def rows_of(tokens: int, device: Any, o: dict[str, Any]) -> tuple[Tensor, int]:
    """(the table's row for each token, (axes, B or 1, S); the number of tokens that belong to a sequence)."""
    ids, starts, cu = o.get("position_ids"), o.get("start_positions"), o.get("cu_seqlens")
    size, rank = o.get("cp_size", 1), o.get("cp_rank", 0)
    if ids is not None:
        ids = ids.long() if o.get("mrope_section") or o.get("axis_of_pair") else ids.long()[None]
        return (ids if ids.dim() == 3 else ids[:, None]), tokens
    if cu is None:
        whole = tokens * size
        rows = torch.tensor(list(chunked(0, whole, size, rank))[:tokens], dtype=torch.long, device=device)
        return (rows[None] if starts is None else rows + starts.long()[:, None])[None], tokens
    rows = []
    for n, (first, end) in enumerate(itertools.pairwise(cu.tolist())):
        shift = (0 if starts is None else int(starts[n])) + (first if o.get("packed_table") else 0)
        rows += [position + shift for position in chunked(first, end, size, rank)]
    owned = len(rows[:tokens])
    rows = rows[:tokens] + [0] * (tokens - owned)
    return torch.tensor(rows, dtype=torch.long, device=device)[None, None], owned


def tables_of(o: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """cos and sin, (B or 1, P, H or 1, W), from the given table; None without one."""
    cos, sin, cache = exact(o.get("cos")), exact(o.get("sin")), exact(o.get("cos_sin_cache"))
    freqs, cis = exact(o.get("freqs")), exact(o.get("freqs_cis"))
    if cache is not None:
        cos, sin = cache.chunk(2, -1)
    if cis is not None:
        cos, sin = cis.real, cis.imag
    if freqs is not None:
        freqs = freqs.transpose(0, 1) if freqs.dim() == 4 else freqs
        cos, sin = freqs.cos() * o.get("mscale", 1.0), freqs.sin() * o.get("mscale", 1.0)
    if cos is None:
        return None
    views = [t[None, :, None] if t.dim() == 2 else t[:, :, None] if t.dim() == 3 else t for t in (cos, sin)]
    return views[0], views[1]


def looked_up(table: Tensor, rows: Tensor, o: dict[str, Any], rotary: int) -> Tensor:
    """(B or 1, S, H or 1, W): each pair's row on its own axis of positions; NaN outside of the table."""
    inside = ((rows >= 0) & (rows < table.shape[1])).all(0)
    picked = []
    for axis in rows.clamp(0, max(table.shape[1] - 1, 0)):
        batch = torch.arange(axis.shape[0], device=table.device)[:, None] if table.shape[0] > 1 else 0
        picked.append(table[:, axis[0]] if axis.shape[0] == 1 else table[batch, axis])
    out = torch.stack(picked, -1)  # the axes last
    axis_of = axes_of(o, rotary, table.shape[-1])
    out = torch.stack([out[..., n, axis] for n, axis in enumerate(axis_of)], -1)
    return torch.where(inside[..., None, None], out, torch.nan)


def axes_of(o: dict[str, Any], rotary: int, width: int) -> list[int]:
    """The axis of each entry of a table of this width."""
    sections = [int(n) for n in o.get("mrope_section") or ()]
    axis_of = [axis for axis, size in enumerate(sections) for _ in range(size)] or [0] * (rotary // 2)
    if o.get("mrope_interleaved"):
        axis_of = [0] * (rotary // 2)
        for axis, size in list(enumerate(sections))[1:]:
            for n in range(size):
                axis_of[axis + n * len(sections)] = axis
    axis_of = o.get("axis_of_pair") or axis_of
    if width == rotary:  # an entry for each element
        axis_of = [a for a in axis_of for _ in range(2)] if o.get("interleaved") else 2 * axis_of
    return axis_of


# ---- the rotation ----------------------------------------------------------------------------------


def pair(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    return (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)  # type: ignore[return-value]


def rotated(x: Tensor, o: dict[str, Any]) -> Tensor:
    """x (B, S, H, D), rotated; zeros for the tokens after the last sequence."""
    tables = tables_of(o)
    if tables is None:
        return x
    cos, sin = tables
    interleaved, offset, rotary = bool(o.get("interleaved")), int(o.get("rotary_offset") or 0), o.get("rotary_dim")
    if rotary is None:
        once = o.get("cos_sin_cache") is not None or o.get("freqs_cis") is not None
        rotary = 2 * cos.shape[-1] if once else x.shape[-1] - offset
    rotary = int(rotary)
    rows, owned = rows_of(x.shape[1], x.device, o)
    rows = rows - int(o.get("unrotated", 0))
    below = (rows[0] < 0)[..., None, None]
    back = torch.stack([rows[axis] < 0 for axis in axes_of(o, rotary, cos.shape[-1])], -1)[..., None, :]
    unrotated, shifts = bool(o.get("unrotated")), bool(o.get("shifts"))
    rows = rows.abs() if shifts else rows.clamp(min=0) if unrotated else rows
    cos, sin = (looked_up(t, rows, o, rotary) for t in (cos, sin))
    cos = torch.where(below, 1.0, cos) if unrotated else cos
    sin = torch.where(below, 0.0, sin) if unrotated else sin
    full = cos.shape[-1] == rotary
    (cos0, cos1), (sin0, sin1) = (pair(t, interleaved) if full else (t, t) for t in (cos, sin))
    if shifts:
        back = pair(back, interleaved)[0] if full else back
        sin0, sin1 = torch.where(back, -sin1, sin0), torch.where(back, -sin0, sin1)
    if o.get("inverse"):
        sin0, sin1 = -sin1, -sin0
    before, turned, rest = x.split([offset, rotary, x.shape[-1] - offset - rotary], -1)
    x0, x1 = pair(turned, interleaved)
    y0, y1 = x0 * cos0 - x1 * sin0, x1 * cos1 + x0 * sin1
    y = torch.stack((y0, y1), -1).flatten(-2) if interleaved else torch.cat((y0, y1), -1)
    y = torch.cat((before, y, rest), -1)
    return torch.cat((y[:, :owned], torch.zeros_like(y[:, owned:])), 1)


def reordered(x: Tensor, o: dict[str, Any]) -> Tensor:
    """x (B, S, H, D) with the pairs of `interleaved`, stored with those of `interleaved_out`."""
    interleaved, out, first = bool(o.get("interleaved")), o.get("interleaved_out"), int(o.get("rotary_offset") or 0)
    if out is None or out == interleaved:
        return x
    rotary = int(o.get("rotary_dim") or x.shape[-1] - first)
    before, turned, rest = x.split([first, rotary, x.shape[-1] - first - rotary], -1)
    y0, y1 = pair(turned, interleaved)
    return torch.cat((before, torch.stack((y0, y1), -1).flatten(-2) if out else torch.cat((y0, y1), -1), rest), -1)


def normed(x: Tensor, weight: Any, bias: Any, o: dict[str, Any]) -> Tensor:
    """The norm of (B, S, H, D), of each head or across all of a token."""
    rows = x.flatten(-2) if o.get("across_heads") else x
    if o.get("norm_kind") == "layer_norm":
        rows = rows - rows.mean(-1, keepdim=True)
    y = rows / (rows.square().mean(-1, keepdim=True) + float(o.get("eps", 1e-6))).sqrt()
    if weight is not None:
        y = y * (exact(weight) + (1 if o.get("zero_centered") else 0))
    if bias is not None:
        y = y + exact(bias)
    return y.reshape(x.shape)


# ---- the functions ---------------------------------------------------------------------------------


def rope(q: Any, k: Any, cos: Any = None, sin: Any = None, *, norm: bool = False, **o: Any) -> Result:
    """norm: q and k are normalised too, before the rotation or after it."""
    o, layout, found = {**o, "cos": cos, "sin": sin}, o.get("layout", "bshd"), []
    for letter, x in zip("qk", (q, k)):
        if x is not None:
            own = [o.get(f"{letter}_{name}") for name in ("weight", "bias")]
            has_norm = norm and letter in o.get("of", "qk")
            y = heads(exact(x), layout)
            y = normed(y, *own, o) if has_norm and not o.get("after_rope") else y
            y = rotated(y, o)
            y = normed(y, *own, o) if has_norm and o.get("after_rope") else y
            x = heads(reordered(y, o), layout)
        found.append(x)
    return tuple(found), {}


norm_rope = functools.partial(rope, norm=True)


def of_tiles(scale: Tensor, tokens: int, groups: int) -> Tensor:
    """Scales (B, tokens, H, groups) of tiles (B, H, padded tokens, padded groups); the other bytes are zero."""
    t, g = torch.arange(tokens, device=scale.device)[:, None], torch.arange(groups, device=scale.device)
    at = (t // 128 * (scale.shape[-1] // 4) + g // 4) * 512 + t % 32 * 16 + t % 128 // 32 * 4 + g % 4
    flat = scale.view(torch.uint8).flatten(2)
    rest = flat.index_fill(2, at.flatten(), 0)
    assert scale.is_contiguous()
    assert not rest.any()
    return flat[..., at].transpose(1, 2).contiguous().view(scale.dtype)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def as_fp4(x: Tensor) -> Tensor:
    """x (..., D) as bytes (..., D / 2) of the nearest numbers of e2m1; of two at one distance the even one."""
    distance = (x.double().abs().clamp(max=6)[..., None].cpu() - E2M1).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    codes = (nearest * torch.tensor([2, 1] * 4)).argmax(-1) + 8 * x.signbit().cpu()
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(x.device, torch.uint8)


def of_fp4(values: Tensor) -> Tensor:
    """The numbers (..., D) of bytes (..., D / 2)."""
    codes = values.view(torch.uint8).cpu()
    codes = torch.stack((codes % 16, codes // 16), -1).flatten(-2).long()
    return (E2M1[codes % 8] * (1 - 2 * (codes // 8))).float().to(values.device)


def hadamard_matrix(size: int) -> Tensor:
    """Orthogonal, in Sylvester's order."""
    found, two = torch.ones(1, 1, dtype=torch.float64), torch.tensor([[1.0, 1], [1, -1]], dtype=torch.float64) / 2**0.5
    while len(found) < size:
        found = torch.kron(two, found)
    return found
