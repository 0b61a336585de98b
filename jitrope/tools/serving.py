"""The kernels that a server's calls will ask for, found from a model's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..base.arguments import whole
from ..base.errors import InvalidInput
from ..base.spec import Spec
from ..plan.spec import RopeSpec
from .models import read, specs_of_model
from .prewarm import specs_of_each

_PAGES: tuple[dict[str, Any], ...] = ({}, *[{"page_size": rows} for rows in (16, 32, 64)])  # {}: slots, or whole pages


def specs_of_server(path: Path, dtype: str | None = None, ranks: int = 1) -> list[Spec]:
    """The kernels that vLLM and SGLang ask for with the drop-ins, for both launches, of a language model.

    They are those of rope in place, with the model's RMSNorm of each head of q and k and without, alone and with the
    write to a cache in the model's dtype or e4m3; for int64 positions, tables in fp32 and in the model's dtype, and
    caches of slots and of pages of 16, 32 and 64 rows. A rank of tensor parallelism has its part of the heads. For
    int32 positions, indexers, multi-head latent attention and `configure(batch_invariant=True)` record a run. The
    errors are those of `specs_of_model`.
    """
    found = read(path / "config.json" if path.is_dir() else path)
    config = found.get("text_config") or found
    heads, ranks = config.get("num_attention_heads", 0), whole("specs_of_server", "ranks", ranks, 1)
    of_k = config.get("num_key_value_heads") or heads
    if not heads or heads % ranks or (of_k % ranks and ranks % of_k):
        raise InvalidInput(f"{path} names {heads} heads of q and {of_k} of k, which {ranks} ranks cannot share")
    counts = [heads // ranks, max(1, of_k // ranks)]
    models = [spec for spec in specs_of_model(path, dtype) if isinstance(spec, RopeSpec) and not spec.inverse]
    calls = {repr(call): call for spec in models for call in _calls(spec, counts)}
    return list(dict.fromkeys(spec for call in calls.values() for spec in specs_of_each(call)))


def _calls(model: RopeSpec, heads: list[int]) -> list[dict[str, Any]]:
    """A server's calls for a kernel of the model's forward, in the words of `specs_of`; a list is several calls."""
    words: dict[str, Any] = {"heads": heads, "layout": "thd", "positions": "int64", "function": "prepare_qkv"}
    words |= {name: getattr(model, name) for name in ("dtype", "head_dim", "rotary_dim", "interleaved")}
    words |= {"table": "cos_sin_cache", "table_dtype": list(dict.fromkeys(("fp32", model.dtype)))}
    if model.mrope_section:
        axes = {"mrope_section": list(model.mrope_section), "mrope_interleaved": model.mrope_interleaved}
        words["positions"] = {"position_ids": "int64", **axes}
    stored: dict[str, Any] = {model.dtype: {}, "fp8": {"k_scale": 1.0, "v_scale": 1.0}}
    slots, rope = {"slot_mapping": "int64", "rotate_k": True}, {**words, "inplace": True}
    caches = [{**slots, "k_cache": x, "v_cache": x, **scales, **p} for x, scales in stored.items() for p in _PAGES]
    found = [{**rope, "function": "apply_rope"}, {**rope, "cache": caches}]
    if model.norm_kind == "rms_norm" and not (model.across_heads or model.after_rope):
        norm = dict.fromkeys(("q_weight", "k_weight"), model.weight_dtype) if model.weight_dtype else {}
        found.append({**rope, "norm": {**norm, "rounding": "none"}})
        once = {**words, "norm": {**norm, "rounding": "once", "zero_centered": model.zero_centered}}
        found += [once, {**once, "cache": caches}]
    return found
