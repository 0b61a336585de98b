"""A cache of k and v, and the pages of each sequence in it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..base.arguments import refuse, tensor, word
from ..base.views import BLOCK_SCALES, FP8
from ..sinks.pages import lengths_of
from ..stages.convert import SCALE_FMTS
from .asked import Value
from .values import divisors, flags, scales


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

    def _arguments(self) -> dict[str, Any]:
        return {lengths_of(self.tensors) if name == "lengths" else name: x for name, x in super()._arguments().items()}


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
