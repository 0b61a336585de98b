"""A stand-in for a missing peer: modules for the names that its tests import, and rope in plain torch."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def module(name: str, folder: Path | None = None, **names: Any) -> ModuleType:
    """Return the module of this name with these names in it. It is made, with its parents, if it cannot be imported.

    Modules below a made one are searched for in `folder`.
    """
    parent, _, child = name.rpartition(".")
    above = module(parent) if parent else None
    try:
        found = import_module(name)
    except Exception:  # an unbuilt peer can raise any error
        for part in [part for part in sys.modules if part == name or part.startswith(f"{name}.")]:
            del sys.modules[part]
        found = sys.modules[name] = ModuleType(name)
        found.__spec__ = ModuleSpec(name, None)  # `find_spec` of a module without one raises
        found.__path__ = [str(folder)] if folder else []
        if above:
            setattr(above, child, found)
    vars(found).update(names)
    return found


def made(found: ModuleType) -> bool:
    """Whether `module` made this one, so the peer is not the real one."""
    return found.__spec__ is None or found.__spec__.loader is None


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate x (..., D) in fp32 by tables of half width (..., R / 2) that broadcast; x's dtype is kept."""
    turned, rest = x[..., : 2 * cos.shape[-1]].float(), x[..., 2 * cos.shape[-1] :]
    cos, sin = cos.float(), sin.float()
    x0, x1 = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pairs = (x0 * cos - x1 * sin, x1 * cos + x0 * sin)
    out = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat((out.to(x.dtype), rest), -1)
