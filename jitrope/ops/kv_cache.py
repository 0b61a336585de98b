"""A cache of k and v, and the pages of each sequence in it: the values, and their checks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base.arguments import refuse, tensor, word
from ..plan.options import SCALE_FMTS, Options
from ..plan.views import BLOCK_SCALES, FORMATS, FP8, FP8S, GROUPS, PER_ITEM, SCALES, Tensors, block_format
from ..sinks.cache import slots_of
from .fit import MAX_TOKENS, Fail, check_contiguous, check_device, check_integers, check_one_axis, named, sizes_of
from .values import Value, divisors, flags, scales


class Pages(Value):
    """The pages of each sequence in a `KVCache`, as FlashInfer (arXiv:2501.01005) and vLLM keep them.

    The new tokens are the last ones of each sequence, whose lengths count them; or the sequence and the position of
    each token are given. The token at position p of its sequence goes to row p % rows of page number p // rows.

    >>> q, (k, v) = torch.randn(2, 8, 64), torch.randn(2, 2, 1, 64)
    >>> k_cache, v_cache = torch.zeros(2, 4, 16, 1, 64)  # 4 pages of 16 rows
    >>> block_table, seq_lens = torch.tensor([[3, 1], [2, 0]]), torch.tensor([18, 16])  # a new token each
    >>> cache = jitrope.KVCache(k_cache, v_cache, jitrope.Pages(block_table, seq_lens=seq_lens))
    >>> table = jitrope.tables.cos_sin_cache(18, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> ids = seq_lens - 1
    >>> q, _, v = jitrope.prepare_qkv(q, k, v, cos_sin_cache=table, positions=ids, cache=cache, layout="thd")
    >>> torch.equal(v_cache[1, 1], v[0]) and torch.equal(v_cache[2, 15], v[1])
    True

    Args:
        page_table: vLLM's block_table, (N or more, max_pages); beside batch_indices and `Packed` exactly N. Or, with
            page_indptr, FlashInfer's page_indices of all sequences, one after the other, (n). All tensors are int32, or
            all int64, on q's device. The host does not read them.
        page_indptr: (N + 1): the pages of sequence i are page_table[page_indptr[i] : page_indptr[i + 1]].
        last_page_len: (N): rows of each sequence's last page that are in use, with the new tokens.
        seq_lens: (N): the length of each sequence, with the new tokens.
        cu_seqlens_q: (N + 1): offsets of the new tokens of each sequence, ascending from 0 (vLLM's query_start_loc,
            FlashInfer's append_indptr). Tokens after the last sequence are padding. None: each sequence has equally
            many new tokens, as in a decode step.
        batch_indices, cache_positions: of each token, (B, S) or flat, in place of lengths and cu_seqlens_q: its
            sequence, and its position there (FlashInfer's batch_indices and positions). A negative sequence is padding.
        clear_page: write zeros to the rest of the last page of each sequence with new tokens too; not with
            batch_indices.
        errors: an int32 tensor of one element. The kernel adds the number of tokens whose page is outside of the cache,
            or whose sequence or position is outside of the table. Nothing is stored for them, nor for those of a
            sequence without a length (padding), which are not counted.

    Raises:
        InvalidInput: an argument has a wrong type, is missing, or does not go with another.
    """

    def __init__(
        self,
        page_table: Tensor,
        page_indptr: Tensor | None = None,
        last_page_len: Tensor | None = None,
        *,
        seq_lens: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        batch_indices: Tensor | None = None,
        cache_positions: Tensor | None = None,
        clear_page: bool = False,
        errors: Tensor | None = None,
    ) -> None:
        placed = batch_indices is not None or cache_positions is not None
        listed = page_indptr is not None or last_page_len is not None
        needed: tuple[str, ...] = ("page_indptr", "last_page_len") if listed else ("seq_lens",)
        needed = ("batch_indices", "cache_positions") if placed else needed
        lengths = {"last_page_len": last_page_len, "seq_lens": seq_lens, "cache_positions": cache_positions}
        given = {"page_table": page_table, "page_indptr": page_indptr, **lengths, "cu_seqlens_q": cu_seqlens_q}
        self.tensors = {}
        for label, x in {**given, "batch_indices": batch_indices, "errors": errors}.items():
            if x is not None and label not in needed and (label in lengths or (placed and label == "cu_seqlens_q")):
                refuse("Pages", label, x, f"None beside {' and '.join(needed)}")
            if x is not None or label in ("page_table", *needed):
                self.tensors["lengths" if label in lengths else label] = tensor("Pages", label, x)
        self.words = flags("Pages", clear_page=clear_page)
        if self.words and placed:
            refuse("Pages", "clear_page", True, "False beside batch_indices")
        self.complete()

    def _arguments(self) -> dict[str, Any]:
        return {_lengths_of(self.tensors) if name == "lengths" else name: x for name, x in super()._arguments().items()}


class KVCache(Value):
    """A cache for the rotated k, and v if there is one, paged like vLLM's (arXiv:2309.06180).

    >>> q, (k, v) = torch.randn(2, 8, 64), torch.randn(2, 2, 1, 64)
    >>> k_cache, v_cache = torch.zeros(2, 4, 16, 1, 64)  # 4 pages of 16 rows
    >>> cache = jitrope.KVCache(k_cache, v_cache, torch.tensor([20, 21]))
    >>> table = jitrope.tables.cos_sin_cache(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> q, _, v = jitrope.prepare_qkv(q, k, v, cos_sin_cache=table, cache=cache, layout="thd")
    >>> torch.equal(v_cache[1, 4:6], v)
    True

    Args:
        k_cache, v_cache: (slots, Hk, D), or (pages, rows, Hk, D); any strides; k's dtype, torch.float8_e4m3fn or
            torch.float8_e5m2, or with block scales their format. Pass a cache with heads before rows as a transposed
            view. v and its cache may have a multiple of Hk heads, such as the latents of MLA in pieces of k_pe's size.
            v_cache None: a cache of k alone, and v is None too (the index cache of DeepSeek-V3.2).
        slot_mapping: int32 or int64, one entry for each token, (B, S) or flat: the slot of its k and v, page * rows +
            row. Nothing is stored for a negative slot (padding) or a slot past the end, which `check` refuses. If two
            tokens have one slot, either may be stored. Or `Pages`: the pages of each sequence.
        k_scale, v_scale: only for fp8 caches, which hold k / k_scale and v / v_scale; see `Quantize`. For fp4 the unit
            of block scales, by default 1.
        rotate_k: also rotate k itself, in place.
        k_block_scale, v_block_scale: the scales of the cache's elements, which the call computes as `DynamicQuantize`
            does and stores beside them: (slots, Hk, G) or (pages, rows, Hk, G), or with the rows in fours
            (pages, rows / 4, 4, Hk, G); any strides. A head has G scales, each for D / G neighbouring elements: 16,
            32, 64, 128 or D. The cache is fp8, torch.int8, or fp4: D / 2 wide, torch.float4_e2m1fn_x2 (before torch
            2.8 torch.uint8; view bytes as this dtype), two elements in a byte. The scales are torch.float32,
            torch.float8_e8m0fnu, or for fp4 torch.float8_e4m3fn, with groups of 16 NVFP4, whose k is values times
            k_block_scale times k_scale; v likewise. trtllm-gen reads v's scales with tokens innermost (FlashInfer's
            nvfp4_quantize_paged_kv_cache): give it memory (pages, Hk, rows / 4, D / 16, 4) as its
            permute(0, 2, 4, 1, 3). In the index cache of DeepSeek-V3.2 the scales of a page follow its values: pass
            two views of its bytes. q stays in its dtype, is fp8 with `Quantize`, or has scales of the same kind with
            `DynamicQuantize`.
        scale_fmt: as in `DynamicQuantize`, for the scales beside the cache: "ue8m0" rounds them up to powers of two in
            torch.float32 (vLLM's word for the index cache of DeepSeek-V3.2). Scales of q must be of the same kind.

    Raises:
        InvalidInput: an argument has a wrong type, or one of two is missing.
    """

    def __init__(
        self,
        k_cache: Tensor,
        v_cache: Tensor | None,
        slot_mapping: Tensor | Pages,
        *,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        rotate_k: bool = False,
        k_block_scale: Tensor | None = None,
        v_block_scale: Tensor | None = None,
        scale_fmt: str | None = None,
    ) -> None:
        pages = slot_mapping if isinstance(slot_mapping, Pages) else None
        given: Any = {"k_cache": k_cache, **({} if v_cache is None else {"v_cache": v_cache})}
        given.update(pages.tensors if pages else {"slot_mapping": slot_mapping})
        if k_block_scale is not None or v_block_scale is not None:
            given.update(zip(BLOCK_SCALES[: 1 + (v_cache is not None)], (k_block_scale, v_block_scale)))
        self.tensors = {label: tensor("KVCache", label, x) for label, x in given.items()}
        self.tensors.update(scales("KVCache", k_cache, **divisors("KVCache", k_scale=k_scale, v_scale=v_scale)))
        for label, x in (("v_scale", v_scale), ("v_block_scale", v_block_scale)):
            if v_cache is None and x is not None:
                refuse("KVCache", label, x, "None without v_cache")
        self.words = {**flags("KVCache", rotate_k=rotate_k), **(pages.words if pages else {})}
        if scale_fmt is not None:
            if k_block_scale is None or k_block_scale.dtype == FP8:
                refuse("KVCache", "scale_fmt", scale_fmt, f"None without k_block_scale, and with scales in {FP8}")
            self.words["scale_fmt"] = word("KVCache", "scale_fmt", scale_fmt, SCALE_FMTS[1:])
        self.complete()


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


def _lengths_of(t: Tensors) -> str:
    """The user's name for the lengths."""
    return "cache_positions" if "batch_indices" in t else "last_page_len" if "page_indptr" in t else "seq_lens"


def check_places(t: Tensors, o: Options, fail: Fail) -> None:
    """Refuse slots, or a page table and its lengths, that do not fit the tokens and the cache."""
    q, shape = t["q"], tuple(t["k_cache"].shape)
    batch, seqlen, *_ = sizes_of(q, o.layout)
    tokens = batch * seqlen
    of_tokens = ("slot_mapping", *(("lengths", "batch_indices") if "batch_indices" in t else ()))
    names = ("slot_mapping", "page_table", "page_indptr", "lengths", "cu_seqlens_q", "batch_indices")
    for name in [name for name in names if name in t]:
        label, x, table = _lengths_of(t) if name == "lengths" else name, t[name], t.get("page_table", t[name])
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
        label, count = _lengths_of(t), sizes["lengths"]
        if "page_indptr" not in sizes and sizes["page_table"] < count:
            had = f"page_table has {sizes['page_table']} rows and seq_lens has {count} entries"
            fail(f"{had}; it must have as many rows")
        wrong = "cu_seqlens_q" not in sizes and tokens and (not count or tokens % count)
        fail.when(wrong, f"{label} has {count} entries for {tokens} tokens; pass cu_seqlens_q")
    for name in [name for name in ("page_indptr", "cu_seqlens_q", "cu_seqlens") if name in sizes]:
        must = f"{name} must have one more"
        fail.when(sizes[name] != count + 1, f"{name} has {sizes[name]} entries and {label} has {count}; {must}")
