"""A cache of k and v, (slots, heads, dim) or (pages, rows, heads, dim), and the scales of its blocks."""

from __future__ import annotations

from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from ..base.arguments import flags, refuse, refuse_beside, tensor, word
from ..base.fit import Fail, sizes_of
from ..base.layouts import MAX_TOKENS
from ..base.spec import DTYPES, INDEX_DTYPES, OF_NORM
from ..base.views import BLOCK_SCALES, FORMATS, FP8, FP8S, GROUPS, PER_ITEM, SCALES, Tensors
from ..stages import convert
from ..values.asked import Value
from ..values.constants import divisors
from . import pages
from .pages import Pages
from .results import indexed

_BLOCKS = " ".join(BLOCK_SCALES)
TENSORS = ("k_cache", "v_cache", "slot_mapping", *BLOCK_SCALES, "k_pe_cache")
ARGUMENTS = {"block_cache": (f"void* block_scale: {_BLOCKS}", f"Strides block_scale_stride: {_BLOCKS}")}


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
            If v_cache is None, it is a cache of k alone, and v is None too (the index cache of DeepSeek-V3.2).
        slot_mapping: int32 or int64, one entry for each token, (B, S) or flat: the slot of its k and v, page * rows +
            row. Nothing is stored for a negative slot (padding) or a slot past the end, which `check` refuses. If two
            tokens have one slot, either may be stored. Or `Pages`: the pages of each sequence.
        k_scale, v_scale: only for fp8 caches, which hold k / k_scale and v / v_scale; see `Quantize`. For fp4 the unit
            of block scales, by default 1.
        rotate_k: also rotate k itself, in place.
        k_block_scale, v_block_scale: the scales of the cache's elements, which the call computes as `DynamicQuantize`
            does and stores beside them: (slots, Hk, G) or (pages, rows, Hk, G), or with the rows in fours (pages, rows
            / 4, 4, Hk, G); any strides. A head has G scales, each for D / G neighbouring elements: 16, 32, 64, 128 or
            D. The cache is fp8, torch.int8, or fp4: D / 2 wide, torch.float4_e2m1fn_x2 (before torch 2.8 torch.uint8;
            view bytes as this dtype), two elements in a byte. The scales are torch.float32, torch.float8_e8m0fnu, or
            for fp4 torch.float8_e4m3fn, with groups of 16 NVFP4, whose k is values times k_block_scale times k_scale; v
            likewise. The kernels of trtllm-gen read v's scales with tokens innermost (FlashInfer's
            nvfp4_quantize_paged_kv_cache): give it memory (pages, Hk, rows / 4, D / 16, 4) as its permute(0, 2, 4, 1,
            3). In the index cache of DeepSeek-V3.2 the scales of a page follow its values: pass two views of its bytes.
            q stays in its dtype, is fp8 with `Quantize`, or has scales of the same kind with `DynamicQuantize`.
        scale_fmt: as in `DynamicQuantize`, for the scales beside the cache: "ue8m0" rounds them up to powers of two in
            torch.float32 (vLLM's word for the index cache of DeepSeek-V3.2). Scales of q must be of the same kind.
        k_pe_cache: (slots, Hk, R) or (pages, rows, Hk, R), k's dtype; any strides, beside fp4 even ones. The R rotated
            elements of k go there, and k_cache has the D - R others, in any of its formats. The rotated ones must be
            the last of a head, and there is no v: k is the latent of MLA with k_pe behind it, and q is absorbed. Pass
            views of the bytes that your attention reads. DeepSeek-V3.2's (FlashMLA's README; vLLM's fp8_ds_mla) are
            (pages, rows, 656): `k, scales, k_pe = x[:, :, None].split([512, 16, 128], -1)`, viewed as
            torch.float8_e4m3fn, torch.float32 and k's dtype. In DeepSeek V4's a row is 448 + 128 bytes, and behind a
            page's rows 8 bytes for each, whose first 7 are its scales in torch.float8_e8m0fnu. k_pe_cache may also be
            fp8 and hold k_pe / k_scale, beside an fp8 k_cache without block scales and beside NVFP4 (FlashInfer's cache
            of MLA: 256, 32 and 64 bytes).

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
        k_pe_cache: Tensor | None = None,
    ) -> None:
        pages = slot_mapping if isinstance(slot_mapping, Pages) else None
        given: Any = {"k_cache": k_cache, **({} if v_cache is None else {"v_cache": v_cache})}
        given.update(pages.tensors if pages else {"slot_mapping": slot_mapping})
        if k_block_scale is not None or v_block_scale is not None:
            given.update(zip(BLOCK_SCALES[: 1 + (v_cache is not None)], (k_block_scale, v_block_scale)))
        if k_pe_cache is not None:
            given["k_pe_cache"] = k_pe_cache
            refuse_beside("KVCache", ["k_pe_cache"], ["v_cache"] * (v_cache is not None))
        self.tensors = {label: tensor("KVCache", label, x) for label, x in given.items()}
        self.tensors.update(divisors("KVCache", k_scale=k_scale, v_scale=v_scale))
        for label, x in (("v_scale", v_scale), ("v_block_scale", v_block_scale)):
            if v_cache is None and x is not None:
                refuse("KVCache", label, x, "None without v_cache")
        self.words = {**flags("KVCache", rotate_k=rotate_k), **(pages.words if pages else {})}
        if scale_fmt is not None:
            if k_block_scale is None or k_block_scale.dtype == FP8:
                refuse("KVCache", "scale_fmt", scale_fmt, f"None without k_block_scale, and with scales in {FP8}")
            self.words["scale_fmt"] = word("KVCache", "scale_fmt", scale_fmt, convert.SCALE_FMTS[1:])


class Words(pages.Words, convert.Words):
    rotate_k: bool = False  # rotate k in place too, beside its copy in a cache


class Fields(pages.Fields):
    """Constants of a kernel. With slots or a page table k goes to a cache, and v with copy_v."""

    slot_mapping_dtype: str | None = field(metadata={"words": INDEX_DTYPES})
    block_cache: bool = field(metadata=OF_NORM | {"given": "k_block_scale"})  # k and v have scales, beside their cache
    rotate_k: bool  # k is also rotated in place
    pe_dtype: str | None = field(metadata={"words": (*DTYPES, *FORMATS)})  # of a cache of k's rotated elements alone

    @property
    def cached(self) -> bool:
        """Whether k and v go to a cache."""
        return self.paged or self.slot_mapping_dtype is not None


def slots_of(cache: Tensor) -> int:
    """The number of slots of a cache."""
    return cache.shape[0] * (cache.shape[1] if cache.dim() == 4 else 1)


def takes_scale(t: Tensors) -> bool:
    """Whether a call's cache of k takes a k_scale."""
    return t["k_cache"].dtype in FP8S if BLOCK_SCALES[0] not in t else t[BLOCK_SCALES[0]].dtype == FP8


def check(heads_of: Tensors, t: Tensors, o: Words, fail: Fail) -> None:
    """Refuse caches that do not fit k and v, by name, and each other. t: the call's tensors."""
    k, blocks, lead, groups = heads_of["k"], BLOCK_SCALES[0] in t, None, None
    dtypes: tuple[torch.dtype, ...] = tuple([form.dtype for form in FORMATS.values()]) if blocks else (k.dtype, *FP8S)
    for letter, x in heads_of.items():
        label, cache, (_, _, heads, dim) = f"{letter}_cache", t[f"{letter}_cache"], sizes_of(x, o.layout)
        whole, dim = dim, fail.before_last("k_pe_cache", dim, o) if "k_pe_cache" in t else dim
        per_item = PER_ITEM.get(cache.dtype, 1) if blocks else 1
        leads = [("slots",), ("pages", "rows")] if lead is None else [lead]
        of = fail if letter == "k" else fail._replace(owner="k_cache and v", heads=x)
        of.unlike(label, cache, k.device, dtypes, *[(*own, heads, dim // per_item) for own in leads])
        had = f"{label} has strides {tuple(cache.stride())}"
        fail.when(per_item > 1 and cache.stride(-1) != 1, f"{had}; the last must be 1")
        lead, dtypes = tuple(cache.shape[:-2]), (cache.dtype,)  # v's are those of k
        if "k_pe_cache" in t:
            of_pe = (k.dtype, *(FP8S if takes_scale(t) else ()))
            fail.unlike("k_pe_cache", t["k_pe_cache"], k.device, of_pe, (*lead, heads, whole - dim))
        if blocks:
            scale, label, dim = t[f"{letter}_block_scale"], f"{letter}_block_scale", int(dim)  # a symbol has no hash
            known = [x for x in SCALES.values() if x != FP8 or cache.dtype == FORMATS["fp4"].dtype]
            by = [*dict.fromkeys([group for group in (dim, *GROUPS[::-1]) if dim % group == 0])]
            sizes, hint = tuple([dim // x for x in by]), f"; a scale is for {' or '.join(map(str, by))} elements"
            fours = [(lead[0], lead[1] // 4, 4)] if len(lead) == 2 and lead[1] % 4 == 0 else []
            shapes = [(*own, heads, groups or sizes) for own in (lead, *fours)]
            known = known if groups is None else [t[BLOCK_SCALES[0]].dtype]  # v's are those of k
            fail.unlike(label, scale, k.device, known, *shapes, hint=hint)
            groups = (scale.shape[-1],)
    if "v" in heads_of and not blocks and _is_apart(t["k_cache"]) != _is_apart(t["v_cache"]):
        fail("k_cache and v_cache have their pages in different orders; give both the same strides")
    slots = slots_of(t["k_cache"])
    fail.when(slots > MAX_TOKENS, f"the caches have {slots} slots; at most {MAX_TOKENS} are possible")


def _is_apart(cache: Tensor) -> bool:
    """Whether the pages of a cache have other memory between them. Those of an expanded cache are refused later."""
    return cache.dim() == 4 and cache.stride(0) != 0 and cache.stride(0) != cache.shape[1] * cache.stride(1)


def check_format(t: Tensors, o: Words, fail: Fail) -> None:
    """Refuse computed scales of q of another kind than those beside a cache, because one kernel computes both."""
    own, found = (o.out_dtype, o.group or t["q"].shape[-1], o.scale_out), convert.block_format(t, o)
    if own != tuple(found):
        one, other = (f"{form} with a scale of {scale} for {group} elements" for form, group, scale in (own, found))
        text = f"quantize makes q {one}, but k_cache and k_block_scale are {other}; they must match"
        fail(text.replace("e8m0_fp32", "ue8m0 in fp32"))  # as the caller says it


def slots(t: Tensors, o: Words, tokens: int, spare: Tensor | None) -> tuple[Tensor, Tensor]:
    """(a mask of the tokens that are stored, their slots). It counts errors of pages.

    If asked, it clears the rest of the last page of each sequence with new tokens. spare: tokens that are not stored.
    """
    if "page_table" in t:
        count, rows = t["k_cache"].shape[:2]
        found, wrong, last = pages.slots_of_pages(t, tokens, count, rows)
        if "errors" in t:
            t["errors"] += wrong.sum().to(torch.int32)
    else:
        found = t["slot_mapping"].flatten().long()
    kept = (found >= 0) & (found < slots_of(t["k_cache"]))
    kept = kept if spare is None else kept & ~spare
    if o.clear_page:
        ends = found[last & kept][:, None]
        rest = ends + torch.arange(1, rows, device=found.device)
        rest = rest[rest // rows == ends // rows]
        for name in [name for name in ("k_cache", "v_cache", *BLOCK_SCALES, "k_pe_cache") if name in t]:
            _put(t[name], rest, rows, 0)
    return kept, found[kept]


def store(letter: str, x: Tensor, t: Tensors, o: Words, kept: Tensor, slot: Tensor) -> None:
    """Write heads (batch, seq, heads, dim), and the scales of their blocks if the cache has some."""
    if (pe := t.get("k_pe_cache")) is not None:
        x, last = x.tensor_split([-pe.shape[-1]], -1)
        own = {name: y for name, y in t.items() if name not in BLOCK_SCALES}
        turned, _ = convert.cached(letter, last, {**own, "k_cache": pe}, o)
        _put(pe, slot, t["k_cache"].shape[1], indexed(turned).flatten(0, 1)[kept])
    for label, y in zip((f"{letter}_cache", f"{letter}_block_scale"), convert.cached(letter, x, t, o)):
        if y is not None:
            _put(t[label], slot, t["k_cache"].shape[1], indexed(y).flatten(0, 1)[kept])


def _put(x: Tensor, slot: Tensor, rows: int, value: Any) -> None:
    """Write to slots of a cache, or of its block scales, (slots, ...), or in pages of rows, which may be in fours."""
    place: tuple[Tensor, ...] = (slot,)
    if x.dim() > 3:
        row = slot % rows
        place = (slot // rows, row) if x.dim() == 4 else (slot // rows, row // 4, row % 4)
    indexed(x)[place] = value
