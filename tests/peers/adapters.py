"""By the name of a peer: the function that puts jitrope where the peer's tests import the peer from.

A missing peer gets modules for the names that its tests import, and rope in plain torch.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from functools import wraps
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import jitrope


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


# ---- hosts of a drop-in: `enable` for each model, as soon as it is made ----------------------------


def diffusers(checkout: Path) -> None:
    import diffusers as host

    models = re.compile("^(?!.*Pipeline).*(Transformer|ControlNet|DiT)")
    for cls in [getattr(host, name) for name in dir(host) if models.match(name)]:
        if isinstance(cls, type) and issubclass(cls, host.ModelMixin):
            enabled("diffusers", cls, False)


def transformers(checkout: Path) -> None:
    enabled("transformers", import_module("transformers").PreTrainedModel, True)


def enabled(host: str, cls: Any, subclasses: bool) -> None:
    original, ours = cls.__init__, import_module(f"jitrope.integrations.{host}")

    @wraps(original)
    def init(self: Any, *arguments: Any, **words: Any) -> None:
        original(self, *arguments, **words)
        if subclasses or type(self) is cls:
            with suppress(jitrope.JitropeError):  # nothing of it may be recognised
                ours.enable(self)

    cls.__init__ = init


def megatron(checkout: Path) -> None:
    """Megatron-core, installed or in the checkout."""
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29512}
    for name, value in alone.items():
        os.environ.setdefault(name, str(value))
    import_module("megatron.core.transformer.attention")  # before the stand-in of TransformerEngine
    import_module("jitrope.integrations.megatron").enable()
    fused = import_module("jitrope.integrations.transformer_engine").apply_fused_qkv_rotary_pos_emb
    module("transformer_engine.pytorch.attention.rope", apply_fused_qkv_rotary_pos_emb=fused)


# ---- flash-attention: in the place of its Triton kernel, under its own autograd functions ----------


def flash_attn(checkout: Path) -> None:
    import_module("torch._inductor.compile_fx")  # else it would take the stand-in for the real Triton
    module("triton")
    module("flash_attn", checkout / "flash_attn")
    module("flash_attn.ops.triton.rotary", apply_rotary=apply_rotary)


def apply_rotary(
    x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor = 0, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, interleaved: bool = False, inplace: bool = False, conjugate: bool = False,
) -> Tensor:  # fmt: skip
    starts = seqlen_offsets if isinstance(seqlen_offsets, Tensor) else None
    if starts is None:
        cos, sin = cos[seqlen_offsets:], sin[seqlen_offsets:]
    positions = jitrope.Starts(starts)
    if cu_seqlens is not None:
        positions = jitrope.Packed(cu_seqlens, max_seqlen, start_positions=starts)
    with torch.no_grad():
        return jitrope.apply_rope(
            x, None, cos, sin, positions=positions, interleaved=interleaved, rotary_dim=2 * cos.shape[-1],
            inverse=conjugate, inplace=inplace,
        )[0]  # fmt: skip


# ---- Liger: the functions that it puts into models, and the autograd functions below them ----------


def liger(checkout: Path) -> None:
    sys.path.insert(0, str(checkout))  # its tests import `test.utils`, and Python has a package `test` too
    module("liger_kernel", checkout / "src" / "liger_kernel")
    functions = {"LigerRopeFunction": rope, "LigerQwen2VLMRopeFunction": mrope, "LigerLlama4RopeFunction": llama4}
    module("liger_kernel.ops", **{name: SimpleNamespace(apply=function) for name, function in functions.items()})
    module("liger_kernel.transformers.functional", liger_rope=rope, liger_qwen2vl_mrope=mrope)
    module("liger_kernel.transformers.rope", liger_rotary_pos_emb=rope)
    gpt_oss = {"liger_rotary_pos_emb_gpt_oss": lambda q, k, *tables: rope(q, k, *tables, rotary_dim=q.shape[-1])}
    module("liger_kernel.transformers.rope", **gpt_oss)
    module("liger_kernel.transformers.qwen2vl_mrope", liger_multimodal_rotary_pos_emb=mrope)
    module("liger_kernel.transformers.llama4_rope", liger_llama4_text_rotary_pos_emb=llama4)


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> Any:  # fmt: skip
    cos, sin = (x if x.dim() == 3 else x[None] for x in (cos, sin))
    return jitrope.apply_rope(q, k, cos, sin, layout="bhsd", rotary_dim=rotary_dim or cos.shape[-1])


def mrope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: list[int], unsqueeze_dim: int = 1) -> Any:
    parts = [table.split(mrope_section * 2, -1) for table in (cos, sin)]
    cos, sin = (torch.cat([part[i % 3] for i, part in enumerate(each)], -1) for each in parts)
    return rope(q, k, cos, sin)


def llama4(xq: Tensor, xk: Tensor, freqs_cis: Tensor, *_: Any) -> Any:
    return jitrope.apply_rope(xq, xk, freqs_cis=freqs_cis, interleaved=True)


# ---- TransformerEngine: `fused=True` is jitrope, `fused=False` its own code, or plain torch --------

_ROPE = "transformer_engine.pytorch.attention.rope"
_BEFORE = ("transformer_engine.pytorch.attention", "transformer_engine.pytorch.dot_product_attention.rope")


def transformer_engine(checkout: Path) -> None:
    ours = import_module("jitrope.integrations.transformer_engine")
    host = getattr(module(_ROPE), "apply_rotary_pos_emb", plain)

    def apply_rotary_pos_emb(*arguments: Any, fused: bool = False, **words: Any) -> Tensor:
        return (ours.apply_rotary_pos_emb if fused else host)(*arguments, **words)

    names = {"RotaryPositionEmbedding": Embedding, "apply_rotary_pos_emb": apply_rotary_pos_emb}
    names["apply_fused_qkv_rotary_pos_emb"] = ours.apply_fused_qkv_rotary_pos_emb
    for name in (_ROPE, *_BEFORE):
        module(name, **names)


class Embedding(torch.nn.Module):
    """The angles of each position, as TransformerEngine documents them."""

    def __init__(self, dim: int, rotary_percent: float = 1.0, interleaved: bool = False, **_: Any) -> None:
        super().__init__()
        self.dim, self.interleaved = int(dim * rotary_percent), interleaved

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        inverse = 10000 ** (-torch.arange(0, self.dim, 2, device=device) / self.dim)
        angles = (torch.arange(max_seq_len, device=device) + offset)[:, None] * inverse
        angles = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat((angles, angles), -1)
        return angles[:, None, None]


def plain(
    t: Tensor, freqs: Tensor, tensor_format: str = "sbhd", start_positions: Tensor | None = None, interleaved: bool =
    False, cu_seqlens: Tensor | None = None, cp_size: int = 1, cp_rank: int = 0,
) -> Tensor:  # fmt: skip
    """The rotation that TransformerEngine documents, one sequence after another."""
    if tensor_format == "thd":
        assert cu_seqlens is not None
        sequences = t.split((cu_seqlens.diff() // cp_size).tolist())
        starts = [None] * len(sequences) if start_positions is None else start_positions.split(1)
        parts = [
            plain(x.unsqueeze(1), freqs, "sbhd", start, interleaved, None, cp_size, cp_rank).squeeze(1)
            for x, start in zip(sequences, starts)
        ]
        return torch.cat(parts)
    axis = ("sbhd", "bshd").index(tensor_format)
    half = t.shape[axis] // 2
    rows = torch.arange(t.shape[axis], device=t.device)
    if cp_size > 1:
        rows = torch.cat((rows[:half] + cp_rank * half, rows[:half] + (2 * cp_size - 1 - cp_rank) * half))
    rows = rows[None] if start_positions is None else rows + start_positions[:, None]
    angles = freqs[:, 0, 0][rows].unsqueeze(2)  # (1 or B, S, 1, R)
    angles = angles if tensor_format == "bshd" else angles.transpose(0, 1)
    angles = angles[..., ::2] if interleaved else angles[..., : freqs.shape[-1] // 2]
    return rotated(t, angles.cos(), angles.sin(), interleaved)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate x (..., D) in fp32 by tables of half width (..., R / 2) that broadcast; x's dtype is kept."""
    turned, rest = x[..., : 2 * cos.shape[-1]].float(), x[..., 2 * cos.shape[-1] :]
    cos, sin = cos.float(), sin.float()
    x0, x1 = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pairs = (x0 * cos - x1 * sin, x1 * cos + x0 * sin)
    out = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat((out.to(x.dtype), rest), -1)
