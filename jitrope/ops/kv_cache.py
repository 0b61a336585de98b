"""A cache of k and v: the value, and its checks. `pages` has what depends on where tokens go."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..base.arguments import refuse, tensor, word
from ..plan.options import SCALE_FMTS, Options
from ..plan.views import BLOCK_SCALES, FORMATS, FP8, FP8S, GROUPS, PER_ITEM, SCALES, Tensors, block_format
from ..sinks.cache import slots_of
from .fit import MAX_TOKENS, OWN_MEMORY, Fail, named, require_no_overlap, sizes_of
from .pages import Pages
from .values import Value, divisors, flags, scales

_SCALE_DTYPES = [*SCALES.values()]  # Dynamo of torch 2.6 cannot search in the values


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

    whole_heads: bool  # storing needs all elements of a head

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
        self.whole_heads = k_block_scale is not None or v_block_scale is not None
        given: Any = {"k_cache": k_cache, **({} if v_cache is None else {"v_cache": v_cache})}
        given.update(pages.tensors if pages else {"slot_mapping": slot_mapping})
        if self.whole_heads:
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


def check_caches(heads_of: Tensors, tensors: Tensors, options: Options, fail: Fail) -> None:
    """Refuse caches that do not fit k and v, by name, and each other. tensors: the call's."""
    k, blocks = heads_of["k"], BLOCK_SCALES[0] in tensors
    allowed = [form.dtype for form in FORMATS.values()] if blocks else [k.dtype, *FP8S]
    for letter, x in heads_of.items():
        label, cache = f"{letter}_cache", tensors[f"{letter}_cache"]
        _, _, heads, head_dim = sizes_of(x, options.layout)
        known, per_item = cache.dtype in allowed, PER_ITEM.get(cache.dtype, 1) if blocks else 1
        fits = cache.dim() in (3, 4) and tuple(cache.shape[-2:]) == (heads, head_dim // per_item)
        if not fits and (known or not blocks):
            width = "D" if per_item == 1 else f"D / {per_item}"
            had = f"{letter} is {named(x, options.layout)} but {label} has shape {tuple(cache.shape)}"
            fail(f"{had}; it must be (slots, H, {width}) or (pages, rows, H, {width})")
        if cache.device != k.device:
            fail(f"{label} is on {cache.device} but k is on {k.device}")
        if not known:
            *most, last = [f"k's {x}" if x == k.dtype else str(x) for x in allowed]
            must = f"{'with block scales it must be' if blocks else 'allowed are'} {', '.join(most)}"
            fail(f"{label} is {cache.dtype}; {must} {'or' if blocks else 'and'} {last}")
        require_no_overlap(label, cache, fail, OWN_MEMORY)
        if per_item > 1 and cache.stride(-1) != 1:
            fail(f"{label} has strides {tuple(cache.stride())}; the last must be 1")
        if blocks:
            _check_block_scale(f"{letter}_block_scale", tensors, cache, head_dim, fail)
    if "v" in heads_of:
        _check_pair({name: tensors[name] for name in ("k_cache", "v_cache")}, slice(-2), fail)
        if blocks:
            _check_pair({name: tensors[name] for name in BLOCK_SCALES}, slice(-1, None), fail)
        both = [tensors[name] for name in ("k_cache", "v_cache")]
        apart = [x.dim() == 4 and x.stride(0) != x.shape[1] * x.stride(1) for x in both]
        if apart[0] != apart[1] and not blocks:
            fail("k_cache and v_cache have their pages in different orders; give both the same strides")
    if (slots := slots_of(tensors["k_cache"])) > MAX_TOKENS:
        fail(f"the caches have {slots} slots; at most {MAX_TOKENS} are possible")


def _check_pair(pair: Tensors, axes: slice, fail: Fail) -> None:
    """Refuse tensors of k and v that differ in their dtype or in these axes."""
    k, v = pair.values()
    if k.shape[axes] != v.shape[axes] or k.dtype != v.dtype:
        had = " but ".join([f"{label} is {tuple(x.shape)} {x.dtype}" for label, x in pair.items()])
        fail(f"{had}; they must match")


def _check_block_scale(label: str, tensors: Tensors, cache: Tensor, head_dim: int, fail: Fail) -> None:
    scale, (*places, heads, _) = tensors[label], cache.shape
    if scale.dtype not in _SCALE_DTYPES or scale.device != cache.device:
        allowed = " or ".join(map(str, _SCALE_DTYPES))
        fail(f"{label} is {scale.dtype} on {scale.device}; it must be {allowed} on {cache.device}")
    if scale.dtype == FP8 and cache.dtype != FORMATS["fp4"].dtype:
        fail(f"{label} is {scale.dtype}, but {label[0]}_cache is {cache.dtype}; only fp4 has scales in {FP8}")
    sizes = {head_dim // group: group for group in (head_dim, *GROUPS) if head_dim % group == 0}
    groups = scale.shape[-1] if scale.dim() else 0
    shapes: list[tuple[Any, ...]] = [(*places, heads)]
    if len(places) == 2 and places[1] % 4 == 0:
        shapes.append((places[0], places[1] // 4, 4, heads))
    if tuple(scale.shape[:-1]) not in shapes or groups not in sizes:
        shown = " or ".join([f"({', '.join(map(str, shape))}, G)" for shape in shapes])
        counts = ", ".join([f"{count} for groups of {group}" for count, group in sorted(sizes.items())])
        fail(f"{label} has shape {tuple(scale.shape)}; with D={head_dim} it must be {shown}, where G is {counts}")
    require_no_overlap(label, scale, fail, OWN_MEMORY)


def check_one_format(tensors: Tensors, options: Options, fail: Fail) -> None:
    """Refuse computed scales of q of another kind than those beside a cache, because one kernel computes both."""
    dim = tensors["q"].shape[-1]
    own, found = (options.out_dtype, options.group or dim, options.scale_out), block_format(tensors, dim, options)
    if own != tuple(found):
        one, other = (f"{form} with a scale of {scale} for {group} elements" for form, group, scale in (own, found))
        text = f"quantize makes q {one}, but k_cache and k_block_scale are {other}; they must match"
        fail(text.replace("e8m0_fp32", "ue8m0 in fp32"))  # as the caller says it
