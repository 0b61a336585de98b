"""ComfyUI: rope, and RMSNorm with rope, as a backend in the registry of comfy-kitchen.

>>> from jitrope.integrations import comfy_kitchen as jitrope_comfy_kitchen
>>> report = jitrope_comfy_kitchen.enable()
>>> jitrope_comfy_kitchen.disable()

The signatures are those of comfy_kitchen.backends.eager.rope (0.2.40). Each function here stands for four of them:
interleaved pairs or halves (`apply_rope_split_half`), returned or in place (`apply_rope_`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from ..api import prepare_qkv
from ..base.errors import InvalidInput, JitropeError
from ..stages.norm import Norm
from . import _host

HOST, BACKEND = "comfy_kitchen", "jitrope"


def apply_rope(
    xq: Tensor, xk: Tensor, freqs_cis: Tensor, *, split_half: bool = False, inplace: bool = False
) -> tuple[Tensor, ...]:
    """Rotate q and k by a table of 2 x 2 rotations, in one launch.

    >>> q, k, angles = torch.randn(1, 8, 16, 64), torch.randn(1, 2, 16, 64), torch.randn(16, 32)
    >>> cos, sin = angles.cos(), angles.sin()
    >>> table = torch.stack((cos, -sin, sin, cos), -1).view(1, 1, 16, 32, 2, 2)
    >>> q, k = jitrope_comfy_kitchen.apply_rope(q, k, table)

    Args:
        xq, xk: (B, H, S, D) or (B, S, H, D), or without the first axes; each with its own number of heads.
        freqs_cis: [[cos, -sin], [sin, cos]] of each pair, in fp32, fp16 or bf16, read as a view. The second columns are
            not read. The shape is (1 or B, 1 or H, S, D / 2, 2, 2), for (B, S, H, D) (1 or B, S, 1, D / 2, 2, 2), or
            one without the first axes. The host's longer tables are cut, as there.
        split_half: the pairs are (i, i + D / 2), not neighbours.
        inplace: overwrite xq and xk. Then no tensor may require a gradient.

    Returns:
        (xq, xk) rotated, in fp32 arithmetic rounded once. The errors are those of `jitrope.apply_rope`.
    """
    return _call([xq, xk], freqs_cis, split_half, inplace)


def apply_rope1(x: Tensor, freqs_cis: Tensor, *, split_half: bool = False, inplace: bool = False) -> Tensor:
    """`apply_rope` of one tensor, (B, H, S, D) or (B, S, H, D), with its errors.

    >>> table = torch.eye(2).expand(1, 1, 16, 32, 2, 2)  # no rotation
    >>> x = jitrope_comfy_kitchen.apply_rope1(torch.randn(1, 8, 16, 64), table)
    """
    return _call([x], freqs_cis, split_half, inplace)[0]


def rms_rope(
    q: Tensor, k: Tensor, freqs_cis: Tensor, q_scale: Tensor, k_scale: Tensor | None = None, epsilon: float = 1e-6,
    rot_dim: int = 0, *, split_half: bool = False, inplace: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """RMSNorm of each head of q and k, rounded as torch.nn.RMSNorm, and rope in one launch; errors as in `apply_rope`.

    >>> q, k, table = torch.randn(1, 8, 16, 64), torch.randn(1, 2, 16, 64), torch.eye(2).expand(1, 1, 16, 32, 2, 2)
    >>> q, k = jitrope_comfy_kitchen.rms_rope(q, k, table, torch.ones(64), torch.ones(64))

    Args:
        q, k, freqs_cis: as in `apply_rope`, and so are split_half and inplace.
        q_scale, k_scale: (D), the weights; k's is by default q's.
        epsilon: added to the mean of the squares.
        rot_dim: the number of first elements of a head that are rotated; 0: all. The table has half as many pairs. The
            host takes it only with halves.

    Returns:
        (q, k) normalised and rotated.
    """
    norm = Norm(q_scale, q_scale if k_scale is None else k_scale, eps=epsilon, rounding="once")
    return _call([q, k], freqs_cis, split_half, inplace, norm, rot_dim)


def rms_rope1(
    x: Tensor, freqs_cis: Tensor, scale: Tensor, epsilon: float = 1e-6, *, split_half: bool = False,
    inplace: bool = False,
) -> Tensor:  # fmt: skip
    """`rms_rope` of one tensor, (B, H, S, D) or (B, S, H, D), with its errors; scale is (D).

    >>> table = torch.eye(2).expand(1, 1, 16, 32, 2, 2)
    >>> x = jitrope_comfy_kitchen.rms_rope1(torch.randn(1, 8, 16, 64), table, torch.ones(64))
    """
    return _call([x], freqs_cis, split_half, inplace, Norm(scale, eps=epsilon, rounding="once"))[0]


_OURS: tuple[Any, ...] = apply_rope, apply_rope1, rms_rope, rms_rope1
FUNCTIONS: Mapping[str, _host.Function] = {
    ours.__name__.replace("rope", "rope" + "_split_half" * half) + "_" * inplace: partial(
        ours, split_half=half, inplace=inplace
    )
    for ours, half, inplace in product(_OURS, (False, True), (False, True))
}
"""The functions of the registry."""


def _call(
    given: list[Tensor], freqs_cis: Tensor, split_half: bool, inplace: bool, norm: Norm | None = None, rot_dim: int = 0
) -> tuple[Tensor, ...]:
    """q and k, or q alone, rotated, and before it normalised if there is a norm."""
    if inplace and any(x.requires_grad for x in (*given, freqs_cis, *(norm.tensors.values() if norm else ()))):
        raise InvalidInput("in place there is no gradient; no tensor may require one")
    q, *more = (_host.padded(x) for x in given)
    width = rot_dim or q.shape[-1]
    layout, cos, sin = _tables(q, freqs_cis, width, cut=not split_half)
    words: Any = {"layout": layout, "interleaved": not split_half, "rotary_dim": width, "inplace": inplace}
    out = prepare_qkv(q, more[0] if more else None, None, cos, sin, norm=norm, rounding="addcmul", **words)
    return tuple(x.view(y.shape) for x, y in zip(out, given))


def _tables(x: Tensor, freqs_cis: Tensor, width: int, cut: bool) -> tuple[str, Tensor, Tensor]:
    """(layout of x, cos, sin), the tables as views with a row for each token. cut: they may be longer than x."""
    table = _host.padded(freqs_cis, 6)
    layout = "bshd" if table.shape[2] == 1 < table.shape[1] else "bhsd"
    if layout == "bhsd":
        table = table.transpose(1, 2)
    tokens = x.shape[layout.index("s")]
    if cut and layout == "bhsd" and tokens > 1:
        table = table[:, :tokens]
    rows = table.shape[1]
    if rows not in (1, tokens) or table.shape[3:] != (width // 2, 2, 2):
        raise InvalidInput(f"freqs_cis has shape {tuple(freqs_cis.shape)} for {width} elements of {tuple(x.shape)}")
    table = table.expand(-1, tokens, *table.shape[2:])  # one row may stand for all tokens
    return layout, table[..., 0, 0], table[..., 1, 0]


def enable() -> _host.Report:
    """Register jitrope as the first backend for rope. Calls that it refuses go to the registry's next one.

    Raises:
        ImportError: comfy_kitchen cannot be imported.
        JitropeError: this version of it has no rope functions.
    """
    host, report, calls = _host.load(HOST, HOST), _host.Report(HOST), {}
    registry = host.registry
    for name, ours in FUNCTIONS.items():
        if theirs := getattr(host, name, None):
            calls[name] = partial(_host.take, HOST, _host.in_words_of(theirs, ours), partial(_next, registry, name))
            report.replaced[f"{HOST}.{name}"] = "jitrope"
        else:
            report.left[f"{HOST}.{name}"] = "this version has none"
    if not calls:
        raise JitropeError(f"this version of {HOST} has no rope function that jitrope knows")
    if not registry.is_available(BACKEND):
        registry.register(BACKEND, SimpleNamespace(**calls), dict.fromkeys(calls))
        registry.enable(BACKEND)
        registry.set_priority([BACKEND, *_others(registry)])
        report.place(undo := partial(_undo, registry), min(report.replaced), undo)
    return report


disable = _host.disabler(__name__)


def _undo(registry: Any) -> None:
    registry.disable(BACKEND)
    registry.set_priority(_others(registry))


def _next(registry: Any, name: str, **arguments: Any) -> Any:
    """The call of the registry's next backend after jitrope."""
    able = [x for x in _others(registry) if registry.validate_backend_for_call(x, name, arguments).success]
    return registry.get_implementation(name, able[0] if able else "eager", arguments)(**arguments)


def _others(registry: Any) -> list[str]:
    """The other backends in order; the registry has no public function that tells."""
    return [name for name in registry._priority if name != BACKEND]
