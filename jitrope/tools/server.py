"""The kernels that vLLM and SGLang will ask for with the drop-ins, found from a model's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..base.arguments import items, whole, word
from ..base.errors import InvalidInput
from ..base.spec import DTYPES, Spec
from ..plan.problem import DTYPE_NAMES
from ..plan.spec import RopeSpec
from .models import configurations, files, heads_of, layers_of, modeling, read, specs_of_model
from .prewarm import specs_of_each

IDS = ("int64", "int32")  # dtypes of positions and slots

_PAGES: tuple[dict[str, Any], ...] = ({}, *[{"page_size": rows} for rows in (16, 32, 64)])  # {}: slots, or whole pages


def specs_of_server(path: Path, dtype: str | None = None, ranks: int = 1, ids: Sequence[str] = IDS[:1]) -> list[Spec]:
    """The kernels that vLLM and SGLang ask for with the drop-ins, for both launches, of a language model.

    They are those of rope in place, with the model's RMSNorm of each head of q and k and without, alone and with the
    write to a cache in the model's dtype or e4m3, of slots and of pages of 16, 32 and 64 rows; for tables in fp32 and
    in the model's dtype; and of rope along several axes. Of multi-head latent attention (DeepSeek-V2 and V3), which is
    read from the file alone, they are those of q_pe and k_pe, in both pairings if the file does not name one, with and
    without the latent's cache, and of DeepSeek-V3.2's indexer in both. A rank of tensor parallelism has its part of the
    heads. ids: the dtypes of positions and slots, of `IDS`, in all pairs. With `configure(batch_invariant=True)` the
    kernels are those of that setting. The errors are those of `specs_of_model`.
    """
    name, file = "specs_of_server", files(path)[0]
    found = read(file)
    if "_class_name" in found:
        known = "--serve is for transformers models; leave it out, or record a run of that server"
        raise InvalidInput(f"{path} has a {found['_class_name']} of diffusers: {known}")
    text_config = found.get("text_config")
    config = {**found, **(text_config if isinstance(text_config, dict) else {})}
    ranks = whole(name, "ranks", ranks, 1)
    latent = bool(config.get("kv_lora_rank") and config.get("qk_rope_head_dim"))
    ids = [word(name, "ids", x, IDS) for x in items(name, "ids", ids, f"a list of {' and '.join(IDS)}")]
    if latent:
        sizes = ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "index_n_heads", "index_head_dim")
        config |= {label: whole(name, f"{path}'s {label}", config[label], 0) for label in sizes if config.get(label)}
        of_q = config.get("num_attention_heads", 0)
        heads, _ = _shared(path, of_q, of_q, ranks)
        some = _served_latent(config, _served_dtype(path, config, dtype), heads, ids)
    else:
        models = [spec for spec in specs_of_model(path, dtype) if isinstance(spec, RopeSpec) and not spec.inverse]
        text = configurations(file, found)[1]
        counts = {_shared(path, *heads_of(text)[:2], ranks)}
        layers = [x for x in layers_of(modeling(text)[1], text, torch.bfloat16) if "Indexer" not in type(x).__name__]
        counts |= {_shared(path, *heads_of(text, layer)[:2], ranks) for layer in layers}
        rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
        axes = {label: rope[label] for label in ("mrope_section", "mrope_interleaved") if rope.get(label)}
        some = [call for spec in models for n in sorted(counts) for call in _served_calls(spec, [*n], ids, axes)]
    calls = {repr(call): call for call in some}
    return list(dict.fromkeys(spec for call in calls.values() for spec in specs_of_each(call)))


def _shared(path: Path, heads: int, of_k: int, ranks: int) -> tuple[int, int]:
    """A rank's heads of q and of k."""
    if not heads or heads % ranks or (of_k % ranks and ranks % of_k):
        raise InvalidInput(f"{path} names {heads} heads of q and {of_k} of k, which {ranks} ranks cannot share")
    return heads // ranks, max(1, of_k // ranks)


def _served_dtype(path: Path, config: dict[str, Any], dtype: str | None) -> str:
    if dtype is not None:
        return word("specs_of_server", "dtype", dtype, DTYPES)
    named = {str(x).removeprefix("torch."): name for x, name in DTYPE_NAMES.items()}
    found = named.get(str(config.get("dtype") or config.get("torch_dtype")))
    if found is None:
        raise InvalidInput(f"{path} names no dtype: pass one, as --dtype bf16")
    return found


def _served_caches(dtype: str, ids: Sequence[str], forms: Sequence[dict[str, Any]] = _PAGES) -> list[dict[str, Any]]:
    """The caches of k and v, beside which k is rotated in place."""
    stored: dict[str, Any] = {dtype: {}, "fp8": {"k_scale": 1.0, "v_scale": 1.0}}
    return [
        {"slot_mapping": x, "rotate_k": True, "k_cache": form, "v_cache": form, **scales, **pages}
        for x in ids
        for form, scales in stored.items()
        for pages in forms
    ]


def _served_tables(dtype: str, ids: Sequence[str]) -> dict[str, Any]:
    words: dict[str, Any] = {"layout": "thd", "positions": [*ids], "function": "prepare_qkv", "dtype": dtype}
    return {**words, "table": "cos_sin_cache", "table_dtype": list(dict.fromkeys(("fp32", dtype)))}


def _served_calls(model: RopeSpec, heads: list[int], ids: Sequence[str], axes: dict[str, Any]) -> list[dict[str, Any]]:
    """A server's calls for a kernel of the model's forward, in the words of `specs_of`; a list is several calls.

    axes: the words of positions along several axes, if the model has them.
    """
    words = {"heads": heads, **_served_tables(model.dtype, ids)}
    words |= {name: getattr(model, name) for name in ("head_dim", "rotary_dim", "interleaved")}
    caches, rope = _served_caches(model.dtype, ids), {**words, "inplace": True}
    found = [{**rope, "function": "apply_rope"}, {**rope, "cache": caches}]
    if axes:  # SGLang's call, and vLLM's with its own rows of gathered tables
        found.append({**found[0], "positions": [{"position_ids": x, **axes} for x in ids]})
        found.append({**found[0], "positions": {"position_ids": IDS[0], **axes}, "table": "cos_sin"})
    if model.norm_kind == "rms_norm" and not (model.across_heads or model.after_rope):
        norm = dict.fromkeys(("q_weight", "k_weight"), model.weight_dtype) if model.weight_dtype else {}
        once = {**norm, "rounding": "once", "zero_centered": model.zero_centered}
        none = [{**norm, "zero_centered": x} for x in dict.fromkeys((False, model.zero_centered))]
        found += [{**rope, "norm": [*none, once]}, {**words, "norm": once}, {**words, "norm": once, "cache": caches}]
        if axes:
            found.append({**found[-2], "positions": [{"position_ids": x, **axes} for x in ids]})
        found.append({**rope, "norm": none[0], "table": "freqs", "table_dtype": "fp32", "positions": None})
    return found


def _served_latent(config: dict[str, Any], dtype: str, heads: int, ids: Sequence[str]) -> list[dict[str, Any]]:
    """A server's calls for multi-head latent attention: k_pe is one head, and the latent v in heads of its size."""
    size, pieces = config["qk_rope_head_dim"], config["kv_lora_rank"] // config["qk_rope_head_dim"]
    words = {**_served_tables(dtype, ids), "rotary_dim": size}
    rope = {**words, "heads": [heads, 1], "head_dim": size, "inplace": True}
    rope["interleaved"] = bool(config["rope_interleave"]) if "rope_interleave" in config else [True, False]
    found = [{**rope, "function": "apply_rope"}]
    if config["kv_lora_rank"] % size == 0:
        found.append({**rope, "v_heads": pieces, "cache": _served_caches(dtype, ids, _PAGES[:1])})
    if config.get("index_n_heads") and config.get("index_head_dim"):
        words["head_dim"] = config["index_head_dim"]
        scaled, pairs = {"heads": config["index_n_heads"], **words}, [True, False]
        found.append({**scaled, "quantize": {"dtype": "fp8", "scale_fmt": "ue8m0"}, "interleaved": pairs})  # vLLM's
        for count in (1, config["index_n_heads"]):  # its k, and q and k of an indexer without the fused kernel
            found.append({**rope, "function": "apply_rope", "heads": [count, 1], "interleaved": pairs})
        found.append({**scaled, "quantize": {"dtype": "fp8"}, "interleaved": True})
        norms = [{"kind": "layer_norm", "q_weight": x, "q_bias": x} for x in dict.fromkeys(("fp32", dtype))]
        found.append({"heads": 1, **words, "interleaved": True, "norm": norms})
    return found
