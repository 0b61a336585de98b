"""`install` puts jitrope where a peer's tests import the peer from.

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

from ..hosts import freqs_of


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


_ROPE = "transformer_engine.pytorch.attention.rope"
_BEFORE = ("transformer_engine.pytorch.attention", "transformer_engine.pytorch.dot_product_attention.rope")
_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}


def install(peer: str, checkout: Path) -> None:
    match peer:
        case "diffusers" | "transformers":  # `enable` for each model, as soon as it is made
            host, ours = import_module(peer), import_module(f"jitrope.integrations.{peer}")
            classes, kinds = [getattr(host, "PreTrainedModel", None)], "^(?!.*Pipeline).*(Transformer|ControlNet|DiT)"
            if peer == "diffusers":
                found = [getattr(host, name) for name in dir(host) if re.match(kinds, name)]
                classes = [cls for cls in found if isinstance(cls, type) and issubclass(cls, host.ModelMixin)]
            for cls in classes:

                @wraps(cls.__init__)
                def init(self: Any, *given: Any, _cls: Any = cls, _init: Any = cls.__init__, **words: Any) -> None:
                    _init(self, *given, **words)
                    if peer == "transformers" or type(self) is _cls:
                        with suppress(jitrope.JitropeError):  # nothing of it may be recognised
                            ours.enable(self)

                cls.__init__ = init
        case "megatron":  # installed, or in the checkout
            os.environ.update({name: value for name, value in _ALONE.items() if name not in os.environ})
            import_module("megatron.core.transformer.attention")  # before the stand-in of TransformerEngine
            import_module("jitrope.integrations.megatron").enable()
            fused = import_module("jitrope.integrations.transformer_engine").apply_fused_qkv_rotary_pos_emb
            module(_ROPE, apply_fused_qkv_rotary_pos_emb=fused)
        case "flash_attn":  # in the place of its Triton kernel, under its own autograd functions
            import_module("torch._inductor.compile_fx")  # else it would take the stand-in for the real Triton
            module("triton")
            module("flash_attn", checkout / "flash_attn")
            module("flash_attn.ops.triton.rotary", apply_rotary=apply_rotary)
        case "liger":  # the functions that it puts into models, and the autograd functions below them
            sys.path.insert(0, str(checkout))  # its tests import `test.utils`, and Python has a package `test` too
            module("liger_kernel", checkout / "src" / "liger_kernel")
            llama4 = lambda xq, xk, freqs_cis, *_: jitrope.apply_rope(xq, xk, freqs_cis=freqs_cis, interleaved=True)  # noqa: E731
            below = {"LigerRopeFunction": rope, "LigerQwen2VLMRopeFunction": mrope, "LigerLlama4RopeFunction": llama4}
            module("liger_kernel.ops", **{name: SimpleNamespace(apply=function) for name, function in below.items()})
            module("liger_kernel.transformers.functional", liger_rope=rope, liger_qwen2vl_mrope=mrope)
            gpt_oss = lambda q, k, *tables: rope(q, k, *tables, rotary_dim=q.shape[-1])  # noqa: E731
            names = {"liger_rotary_pos_emb": rope, "liger_rotary_pos_emb_gpt_oss": gpt_oss}
            module("liger_kernel.transformers.rope", **names)
            module("liger_kernel.transformers.qwen2vl_mrope", liger_multimodal_rotary_pos_emb=mrope)
            module("liger_kernel.transformers.llama4_rope", liger_llama4_text_rotary_pos_emb=llama4)
        case "transformer_engine":  # `fused=True` is jitrope, `fused=False` its own code, or plain torch
            ours = import_module("jitrope.integrations.transformer_engine")
            host = getattr(module(_ROPE), "apply_rotary_pos_emb", plain)
            device = "cuda" if torch.cuda.is_available() else "cpu"
            names = {
                "apply_rotary_pos_emb": lambda *arguments, fused=False, **words: (
                    ours.apply_rotary_pos_emb if fused else host
                )(*arguments, **words),
                "apply_fused_qkv_rotary_pos_emb": ours.apply_fused_qkv_rotary_pos_emb,
                # The angles of each position, as TransformerEngine documents them.
                "RotaryPositionEmbedding": lambda dim, rotary_percent=1.0, interleaved=False, **_: (
                    lambda rows, offset=0: freqs_of(rows + offset, int(dim * rotary_percent), interleaved, base=10000)[
                        offset:
                    ].to(device)
                ),
            }
            for name in (_ROPE, *_BEFORE):
                module(name, **names)


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
    x, rest = t[..., : freqs.shape[-1]].float(), t[..., freqs.shape[-1] :]
    x0, x1 = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    pairs = (x0 * angles.cos() - x1 * angles.sin(), x1 * angles.cos() + x0 * angles.sin())
    out = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat((out.to(t.dtype), rest), -1)
