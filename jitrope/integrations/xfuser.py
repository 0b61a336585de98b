"""xDiT: rope of the processors of xfuser, which call functions of diffusers.

>>> from jitrope.integrations import xfuser as jitrope_xfuser
>>> report = jitrope_xfuser.enable()
>>> jitrope_xfuser.disable()

xfuser 0.7.0 has its own attention processors, so `jitrope.integrations.diffusers` leaves them alone.
"""

from __future__ import annotations

from . import _host
from .diffusers import ropes

_FUNCTIONS: dict[str, _host.Function] = {
    "diffusers.models.embeddings:apply_rotary_emb": ropes.shared,
    "diffusers.models.transformers.transformer_qwenimage:apply_rotary_emb_qwen": ropes.qwen,
}


def enable() -> _host.Report:
    """Replace the rope of FLUX, FLUX.2, Qwen-Image, HunyuanVideo, Krea 2, Lumina 2 and CogVideoX in xDiT.

    They are replaced in models of diffusers too, and keep diffusers' bits, and calls that jitrope refuses. Raises
    ImportError without xfuser, and JitropeError if diffusers lacks a function.
    """
    _host.load("xfuser", "xfuser")
    return _host.enable("xfuser", _FUNCTIONS)


disable = _host.disabler(__name__)
