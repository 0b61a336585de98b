"""LightX2V: a `rope_type` for its models.

>>> from jitrope.integrations import lightx2v as jitrope_lightx2v
>>> report = jitrope_lightx2v.enable()  # and "rope_type": "jitrope_rope" in the configuration
>>> jitrope_lightx2v.disable()

The class in the register has the methods of `lightx2v.common.ops.rope.template.RopeTemplate`, as published in 2026-08.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..api import apply_rope
from ..base.errors import InvalidInput, JitropeError
from . import _host

HOST, NAME = "lightx2v", "jitrope_rope"


def rotate(
    q: Tensor,
    k: Tensor | None,
    freqs: Any,
    *,
    layout: str = "interleaved",
    positions: Tensor | None = None,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k in one launch, by any table that LightX2V has.

    >>> q, k, angles = torch.randn(16, 8, 64), torch.randn(16, 8, 64), torch.randn(16, 32)
    >>> q, k = jitrope_lightx2v.rotate(q, k, torch.polar(torch.ones_like(angles), angles))

    Args:
        q, k: (L, H, D); k may be None.
        freqs: complex (P, R / 2); (cos, sin), (P, R / 2) or (P, R) each; or (P, R), the cosines of all pairs, then the
            sines. They may have an axis of size 1 for the heads.
        layout: "interleaved", the pairs are neighbours, or "split_half".
        positions: int32 or int64, (L): rows of the table; None: token t takes row t.
        rotary_dim: R; None: D.

    Returns:
        (q, k) rotated, in fp32 arithmetic rounded once; complex tables as in torch's complex multiply. The errors are
        those of `jitrope.apply_rope`.
    """
    parts = [freqs] if isinstance(freqs, Tensor) else [*freqs]
    parts = [x.squeeze(-2) if x.dim() == 3 and x.shape[-2] == 1 else x for x in parts]
    if len(parts) == 2:
        words: dict[str, Any] = dict(zip(("cos", "sin"), parts))
    else:
        words = {"freqs_cis" if parts[0].is_complex() else "cos_sin_cache": parts[0]}
    if any(x.dim() != 2 for x in parts) or (positions is None and len(parts[0]) != len(q)):
        raise InvalidInput(f"freqs of shape {tuple(parts[0].shape)} for q of shape {tuple(q.shape)}")
    words["rounding"] = _host.COMPLEX.get(parts[0].dtype, "fp32")
    words.update(positions=positions, rotary_dim=rotary_dim or q.shape[-1], interleaved=layout == "interleaved")
    return apply_rope(q, k, layout="thd", **words)


def _made(template: Any, register: Any) -> Any:
    """The class of the register."""

    class JitropeRope(template):  # type: ignore[misc]
        """RoPE by jitrope; calls that it refuses go to the host's classes in torch."""

        def apply(self, q: Tensor, k: Tensor | None, freqs: Any, **words: Any) -> Any:
            return _host.take(HOST, partial(self._ours, self.layout), self._theirs, q, k, freqs, **words)

        def apply_single(self, x: Tensor, freqs: Any, **words: Any) -> Any:
            return self.apply(x, None, freqs, **words)[0]

        def _ours(self, layout: str, q: Tensor, k: Tensor | None, freqs: Any, **words: Any) -> Any:
            if self.compute_dtype != torch.float32:
                raise InvalidInput(f"compute_dtype is {self.compute_dtype}")
            if words.pop("unsqueeze_dim", -2) != -2:
                raise InvalidInput("unsqueeze_dim is not -2")
            return rotate(q, k, freqs, layout=layout, **words)

        def _theirs(
            self, q: Tensor, k: Tensor | None, freqs: Any, positions: Tensor | None = None, **words: Any
        ) -> Any:
            if positions is not None:  # the host's classes do not know them
                freqs = freqs[positions] if isinstance(freqs, Tensor) else tuple(x[positions] for x in freqs)
            if isinstance(freqs, Tensor) and freqs.is_complex() and self.layout == "interleaved":
                rope = register["torch_complex_rope"](compute_dtype=self.compute_dtype)
            else:
                rope = register["torch_real_rope"](layout=self.layout, compute_dtype=self.compute_dtype)
            return tuple(x if x is None else rope.apply_single(x, freqs, **words) for x in (q, k))

    return JitropeRope


def enable() -> _host.Report:
    """Add "jitrope_rope" to the host's register of rope types, for configurations that name it.

    Raises:
        ImportError: lightx2v cannot be imported.
        JitropeError: this version of it has no register of rope types.
    """
    register = getattr(_host.load(HOST, "lightx2v.utils.registry_factory"), "ROPE_REGISTER", None)
    if register is None:
        raise JitropeError(f"this version of {HOST} has no register of rope types")
    template = _host.load(HOST, "lightx2v.common.ops.rope.template").RopeTemplate
    report = _host.Report(HOST, {f"rope_type {NAME}": "jitrope"}, verb="registered")
    if NAME not in register:
        ours = register[NAME] = _made(template, register)
        report.place(ours, f"rope_type {NAME}", partial(register.pop, NAME, None))
    return report


disable = _host.disabler(__name__)
