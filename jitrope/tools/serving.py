"""The kernels that a server's calls will ask for, found from a model's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..base.arguments import items, whole, word
from ..base.errors import InvalidInput
from ..base.spec import DTYPES, Spec
from ..plan.problem import DTYPE_NAMES
from ..plan.spec import RopeSpec
from .models import read, specs_of_model
from .prewarm import specs_of_each

IDS = ("int64", "int32")
"""Dtypes of positions and slots."""

_PAGES: tuple[dict[str, Any], ...] = ({}, *[{"page_size": rows} for rows in (16, 32, 64)])  # {}: slots, or whole pages


def specs_of_server(path: Path, dtype: str | None = None, ranks: int = 1, ids: Sequence[str] = IDS[:1]) -> list[Spec]:
    """The kernels that vLLM and SGLang ask for with the drop-ins, for both launches, of a language model.

    They are those of rope in place, with the model's RMSNorm of each head of q and k and without, alone and with the
    write to a cache in the model's dtype or e4m3, of slots and of pages of 16, 32 and 64 rows; for tables in fp32 and
    in the model's dtype. Of multi-head latent attention (DeepSeek-V2 and V3), which is read from the file alone,
    they are those of q_pe and k_pe, with and without the latent's cache, and of DeepSeek-V3.2's indexer. A rank of
    tensor parallelism has its part of the heads. ids: the dtypes of positions and slots, of `IDS`, in all pairs. With
    `configure(batch_invariant=True)` the kernels are those of that setting. The errors are those of `specs_of_model`.
    """
    name = "specs_of_server"
    found = read(path / "config.json" if path.is_dir() else path)
    config = {**found, **(found.get("text_config") or {})}
    heads, ranks = config.get("num_attention_heads", 0), whole(name, "ranks", ranks, 1)
    of_k = config.get("num_key_value_heads") or heads
    latent = bool(config.get("kv_lora_rank") and config.get("qk_rope_head_dim"))
    if not heads or heads % ranks or (of_k % ranks and ranks % of_k and not latent):
        raise InvalidInput(f"{path} names {heads} heads of q and {of_k} of k, which {ranks} ranks cannot share")
    ids = [word(name, "ids", x, IDS) for x in items(name, "ids", ids, f"a list of {' and '.join(IDS)}")]
    if latent:
        some = _latent(config, _dtype(path, config, dtype), heads // ranks, ids)
    else:
        counts = [heads // ranks, max(1, of_k // ranks)]
        models = [spec for spec in specs_of_model(path, dtype) if isinstance(spec, RopeSpec) and not spec.inverse]
        some = [call for spec in models for call in _calls(spec, counts, ids)]
    calls = {repr(call): call for call in some}
    return list(dict.fromkeys(spec for call in calls.values() for spec in specs_of_each(call)))


def _dtype(path: Path, config: dict[str, Any], dtype: str | None) -> str:
    if dtype is not None:
        return word("specs_of_server", "dtype", dtype, DTYPES)
    named = {str(x).removeprefix("torch."): name for x, name in DTYPE_NAMES.items()}
    found = named.get(str(config.get("dtype") or config.get("torch_dtype")))
    if found is None:
        raise InvalidInput(f"{path} names no dtype: pass one, as --dtype bf16")
    return found


def _caches(dtype: str, ids: Sequence[str], forms: Sequence[dict[str, Any]] = _PAGES) -> list[dict[str, Any]]:
    """The caches of k and v, beside which k is rotated in place."""
    stored: dict[str, Any] = {dtype: {}, "fp8": {"k_scale": 1.0, "v_scale": 1.0}}
    return [
        {"slot_mapping": x, "rotate_k": True, "k_cache": form, "v_cache": form, **scales, **pages}
        for x in ids
        for form, scales in stored.items()
        for pages in forms
    ]


def _tables(dtype: str, ids: Sequence[str]) -> dict[str, Any]:
    words: dict[str, Any] = {"layout": "thd", "positions": [*ids], "function": "prepare_qkv", "dtype": dtype}
    return {**words, "table": "cos_sin_cache", "table_dtype": list(dict.fromkeys(("fp32", dtype)))}


def _calls(model: RopeSpec, heads: list[int], ids: Sequence[str]) -> list[dict[str, Any]]:
    """A server's calls for a kernel of the model's forward, in the words of `specs_of`; a list is several calls."""
    words = {"heads": heads, **_tables(model.dtype, ids)}
    words |= {name: getattr(model, name) for name in ("head_dim", "rotary_dim", "interleaved")}
    if model.mrope_section:
        axes = {"mrope_section": list(model.mrope_section), "mrope_interleaved": model.mrope_interleaved}
        words["positions"] = [{"position_ids": x, **axes} for x in ids]
    caches, rope = _caches(model.dtype, ids), {**words, "inplace": True}
    found = [{**rope, "function": "apply_rope"}, {**rope, "cache": caches}]
    if model.norm_kind == "rms_norm" and not (model.across_heads or model.after_rope):
        norm = dict.fromkeys(("q_weight", "k_weight"), model.weight_dtype) if model.weight_dtype else {}
        once = {**norm, "rounding": "once", "zero_centered": model.zero_centered}
        none = [{**norm, "zero_centered": x} for x in dict.fromkeys((False, model.zero_centered))]
        found += [{**rope, "norm": [*none, once]}, {**words, "norm": once}, {**words, "norm": once, "cache": caches}]
        found.append({**rope, "norm": none[0], "table": "freqs", "table_dtype": "fp32", "positions": None})
    return found


def _latent(config: dict[str, Any], dtype: str, heads: int, ids: Sequence[str]) -> list[dict[str, Any]]:
    """A server's calls for multi-head latent attention: k_pe is one head, and the latent v in heads of its size."""
    size, pieces = config["qk_rope_head_dim"], config["kv_lora_rank"] // config["qk_rope_head_dim"]
    words = {**_tables(dtype, ids), "rotary_dim": size}
    rope = {**words, "heads": [heads, 1], "head_dim": size, "inplace": True}
    rope["interleaved"] = bool(config.get("rope_interleave", True))
    found = [{**rope, "function": "apply_rope"}]
    if config["kv_lora_rank"] % size == 0:
        found.append({**rope, "v_heads": pieces, "cache": _caches(dtype, ids, _PAGES[:1])})
    if config.get("index_n_heads") and config.get("index_head_dim"):
        words["head_dim"] = config["index_head_dim"]
        scaled = {"heads": config["index_n_heads"], **words}
        found.append({**scaled, "quantize": {"dtype": "fp8", "scale_dtype": "e8m0"}})  # vLLM's
        found.append({**scaled, "quantize": {"dtype": "fp8"}, "interleaved": True})
        norms = [{"kind": "layer_norm", "q_weight": x, "q_bias": x} for x in dict.fromkeys(("fp32", dtype))]
        found.append({"heads": 1, **words, "interleaved": True, "norm": norms})
    return found
