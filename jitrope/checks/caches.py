"""The checks of a cache of k and v, and of the pages of each sequence in it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..plan.options import Options
from ..plan.views import BLOCK_SCALES, FORMATS, FP8, FP8S, GROUPS, PER_ITEM, SCALES, Tensors, block_format
from ..sinks.cache import slots_of
from ..values.kv_cache import lengths_of
from .fit import MAX_TOKENS, Fail, check_contiguous, check_device, check_integers, check_one_axis, named, sizes_of


def check_caches(heads_of: Tensors, t: Tensors, o: Options, fail: Fail) -> None:
    """Refuse caches that do not fit k and v, by name, and each other. t: the call's tensors."""
    k, blocks = heads_of["k"], BLOCK_SCALES[0] in t
    allowed = [form.dtype for form in FORMATS.values()] if blocks else [k.dtype, *FP8S]
    for letter, x in heads_of.items():
        label, cache = f"{letter}_cache", t[f"{letter}_cache"]
        _, _, heads, head_dim = sizes_of(x, o.layout)
        known, per_item = cache.dtype in allowed, PER_ITEM.get(cache.dtype, 1) if blocks else 1
        fits = cache.dim() in (3, 4) and tuple(cache.shape[-2:]) == (heads, head_dim // per_item)
        width = "D" if per_item == 1 else f"D / {per_item}"
        had = f"{letter} is {named(x, o.layout)} but {label} has shape {tuple(cache.shape)}"
        must = f"it must be (slots, H, {width}) or (pages, rows, H, {width})"
        fail.when(not fits and (known or not blocks), f"{had}; {must}")
        check_device(label, cache, "k", k, fail)
        *most, last = [f"k's {x}" if x == k.dtype else str(x) for x in allowed]
        must = f"{'with block scales it must be' if blocks else 'allowed are'} {', '.join(most)}"
        fail.when(not known, f"{label} is {cache.dtype}; {must} {'or' if blocks else 'and'} {last}")
        had = f"{label} has strides {tuple(cache.stride())}"
        fail.when(per_item > 1 and cache.stride(-1) != 1, f"{had}; the last must be 1")
        if blocks:
            _check_block_scale(f"{letter}_block_scale", t, cache, head_dim, fail)
    if "v" in heads_of:
        _check_pair(t, ("k_cache", "v_cache"), slice(-2), fail)
        if blocks:
            _check_pair(t, BLOCK_SCALES, slice(-1, None), fail)
        elif _is_apart(t["k_cache"]) != _is_apart(t["v_cache"]):
            fail("k_cache and v_cache have their pages in different orders; give both the same strides")
    slots = slots_of(t["k_cache"])
    fail.when(slots > MAX_TOKENS, f"the caches have {slots} slots; at most {MAX_TOKENS} are possible")


def _is_apart(cache: Tensor) -> bool:
    """Whether the pages of a cache have other memory between them. Those of an expanded cache are refused later."""
    return cache.dim() == 4 and cache.stride(0) != 0 and cache.stride(0) != cache.shape[1] * cache.stride(1)


def _check_pair(t: Tensors, names: tuple[str, ...], axes: slice, fail: Fail) -> None:
    """Refuse tensors of k and v that differ in their dtype or in these axes."""
    k, v = (t[name] for name in names)
    had = " but ".join([f"{name} is {tuple(t[name].shape)} {t[name].dtype}" for name in names])
    fail.when(k.shape[axes] != v.shape[axes] or k.dtype != v.dtype, f"{had}; they must match")


def _check_block_scale(label: str, t: Tensors, cache: Tensor, head_dim: int, fail: Fail) -> None:
    scale, (*places, heads, _) = t[label], cache.shape
    must = f"it must be {' or '.join(map(str, SCALES.values()))} on {cache.device}"
    wrong = scale.dtype not in SCALES.values() or scale.device != cache.device
    fail.when(wrong, f"{label} is {scale.dtype} on {scale.device}; {must}")
    had = f"{label} is {scale.dtype}, but {label[0]}_cache is {cache.dtype}"
    fail.when(scale.dtype == FP8 and cache.dtype != FORMATS["fp4"].dtype, f"{had}; only fp4 has scales in {FP8}")
    head_dim = int(head_dim)  # a symbol has no hash, nor has one of the groups
    sizes = {head_dim // group: group for group in (head_dim, *GROUPS) if head_dim % group == 0}
    in_fours = len(places) == 2 and places[1] % 4 == 0
    shapes = [(*places, heads), *([(places[0], places[1] // 4, 4, heads)] if in_fours else [])]
    if scale.dim() == 0 or tuple(scale.shape[:-1]) not in shapes or scale.shape[-1] not in [*sizes]:
        shown = " or ".join([f"({', '.join(map(str, shape))}, G)" for shape in shapes])
        counts = ", ".join([f"{count} for groups of {group}" for count, group in sorted(sizes.items())])
        fail(f"{label} has shape {tuple(scale.shape)}; with D={head_dim} it must be {shown}, where G is {counts}")


def check_one_format(t: Tensors, o: Options, fail: Fail) -> None:
    """Refuse computed scales of q of another kind than those beside a cache, because one kernel computes both."""
    dim = t["q"].shape[-1]
    own, found = (o.out_dtype, o.group or dim, o.scale_out), block_format(t, dim, o)
    if own != tuple(found):
        one, other = (f"{form} with a scale of {scale} for {group} elements" for form, group, scale in (own, found))
        text = f"quantize makes q {one}, but k_cache and k_block_scale are {other}; they must match"
        fail(text.replace("e8m0_fp32", "ue8m0 in fp32"))  # as the caller says it


def check_places(t: Tensors, o: Options, fail: Fail) -> None:
    """Refuse slots, or a page table and its lengths, that do not fit the tokens and the cache."""
    q, shape = t["q"], tuple(t["k_cache"].shape)
    batch, seqlen, *_ = sizes_of(q, o.layout)
    tokens = batch * seqlen
    of_tokens = ("slot_mapping", *(("lengths", "batch_indices") if "batch_indices" in t else ()))
    names = ("slot_mapping", "page_table", "page_indptr", "lengths", "cu_seqlens_q", "batch_indices")
    for name in [name for name in names if name in t]:
        label, x, table = lengths_of(t) if name == "lengths" else name, t[name], t.get("page_table", t[name])
        check_integers(label, x, q, fail)
        fail.when(x.dtype != table.dtype, f"{label} is {x.dtype} but page_table is {table.dtype}; they must match")
        if name in of_tokens:
            check_contiguous(label, x, fail)
            fail.when(x.numel() != tokens, f"{label} has shape {tuple(x.shape)} for {tokens} tokens")
            continue
        if name != "page_table" or "page_indptr" in t:
            check_one_axis(label, x, fail)
        elif x.dim() != 2:
            fail(f"page_table has shape {tuple(x.shape)}; it must be (N, max_pages) without page_indptr")
        had = f"{label} has strides {x.stride()}"
        fail.when(x.shape[-1] > 1 and x.stride(-1) != 1, f"{had}; its last axis must be contiguous")
    if "slot_mapping" in t:
        return
    _check_counts(t, tokens, fail)
    fail.when(len(shape) != 4, f"k_cache has shape {shape}; with a page table it must be (pages, rows, H, D)")
    fail.when(shape[1] == 0, "k_cache has pages of 0 rows; a page table needs pages with rows")
    if (e := t.get("errors")) is not None and (e.dtype != torch.int32 or e.numel() != 1 or e.device != q.device):
        fail(f"errors is {tuple(e.shape)} {e.dtype} on {e.device}; it must be one int32 number on q's device")


def _check_counts(t: Tensors, tokens: int, fail: Fail) -> None:
    """Refuse tables, lengths and offsets of different numbers of sequences."""
    sizes = {name: x.shape[0] for name, x in t.items() if x.dim()}  # len would make a symbol a number
    if "batch_indices" in t:
        label, count = "page_table", sizes["page_indptr"] - 1 if "page_indptr" in sizes else sizes["page_table"]
    else:
        label, count = lengths_of(t), sizes["lengths"]
        if "page_indptr" not in sizes and sizes["page_table"] < count:
            had = f"page_table has {sizes['page_table']} rows and seq_lens has {count} entries"
            fail(f"{had}; it must have as many rows")
        wrong = "cu_seqlens_q" not in sizes and tokens and (not count or tokens % count)
        fail.when(wrong, f"{label} has {count} entries for {tokens} tokens; pass cu_seqlens_q")
    for name in [name for name in ("page_indptr", "cu_seqlens_q", "cu_seqlens") if name in sizes]:
        must = f"{name} must have one more"
        fail.when(sizes[name] != count + 1, f"{name} has {sizes[name]} entries and {label} has {count}; {must}")
