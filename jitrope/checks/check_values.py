"""The checks of `check=True`. They read tables, positions and slots, so they wait for the device.

Calls are safe without them: a position outside of the table gives NaN, and a wrong table gives wrong angles.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ..base import partition
from ..base.fit import Fail, sizes_of
from ..base.layouts import LAYOUT_AXES
from ..base.views import TABLE_NAMES, Tensors, table_pair
from ..plan.options import Options
from ..sinks.cache import slots_of
from ..sinks.pages import slots_of_pages
from ..stages.positions import RULE, spare, table_rows, turned
from ..stages.rotate import label_of, rows_of


def check_values(name: str, t: Tensors, o: Options) -> None:
    """Refuse positions outside of the table, slots outside of a cache, and tables and layouts that look mistaken."""
    fail, (label, q) = Fail(name), next(iter(t.items()))
    batch, tokens, *_ = sizes_of(q, o.layout)
    whole = {name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in t.items() if name in TABLE_NAMES}
    if "cu_seqlens" in whole:
        offsets = whole["cu_seqlens"].tolist()
        fail.when(offsets[0] != 0, f"cu_seqlens[0] is {offsets[0]}; cu_seqlens must ascend from 0")
        for n, (first, end) in enumerate(itertools.pairwise(offsets), 1):
            fail.when(first > end, f"cu_seqlens[{n}] falls from {first} to {end}; cu_seqlens must ascend from 0")
        own = partition.local_rows(offsets[-1], o.cp_rank, o.cp_size, RULE)
        of_rank = "" if o.cp_size == 1 else f", {own} of them on this rank"
        fail.when(own > tokens, f"cu_seqlens ends at {offsets[-1]}{of_rank}, but {label} has {tokens} tokens")
    count, rows, beyond = rows_of(whole["cos"]), table_rows(tokens, q.device, whole, o), spare(tokens, whole, o)
    rows = turned(rows if beyond is None else rows[..., ~beyond], o)[0]
    lowest, highest = map(int, rows.aminmax()) if rows.numel() else (0, -1)
    fail.when(lowest < 0, f"positions go from {lowest} to {highest}; they must be 0 or above")
    had = f"{'differences of positions have sizes' if o.shifts else 'positions go'} from {lowest} to {highest}"
    fail.when(highest >= count, f"{had}, but the table has rows 0 to {count - 1}; make it longer")
    if "slot_mapping" in t and t["slot_mapping"].numel():
        most, slots = int(t["slot_mapping"].max()), slots_of(t["k_cache"])
        fail.when(most >= slots, f"slot_mapping goes up to {most}, but the caches have slots 0 to {slots - 1}")
    if "page_table" in t:
        lost = int(slots_of_pages(t, batch * tokens, *t["k_cache"].shape[:2])[1].sum())
        fail.when(lost, f"page_table and its lengths lead {lost} tokens out of the caches or of the table")
    if o.table != "freqs" and whole["cos"].numel():
        _check_pairing(*table_pair(whole["cos"], whole.get("sin"), o.table), o, fail)
    other = {"bshd": "bhsd", "bhsd": "bshd"}.get(o.layout)
    alone = o.cp_size == 1 and not whole.keys() - {"cos", "sin"}  # the table has a row for each token
    if alone and other and count == q.shape[LAYOUT_AXES[other][1]] != tokens:
        had = f"{label} has shape {tuple(q.shape)} and the table has {count} rows, as if {label}'s layout"
        fail(f"{had} were {other!r}, not {o.layout!r}; pass layout={other!r}, or a table with another number of rows")


def _check_pairing(cos: Tensor, sin: Tensor, o: Options, fail: Fail) -> None:
    """Refuse exchanged tables, and full-width tables of the other pairing or taken as half width."""
    first_cos, first_sin = (x[(0,) * (x.dim() - 1)] for x in (cos, sin))
    if not first_cos.any() and bool((first_sin == first_sin[0]).all()) and bool(first_sin[0] > 0):
        table = "" if o.table == "cos_sin" else f"in {label_of('cos', o)} "
        fail(f"{table}row 0 of cos is 0 and row 0 of sin is not, as if they were exchanged; pass cos first, then sin")
    width, neighbours = cos.shape[-1], torch.equal(cos[..., ::2], cos[..., 1::2])
    if o.table != "cos_sin" or neighbours == torch.equal(cos[..., : width // 2], cos[..., width // 2 :]):
        return
    had = f"every entry of cos {'is there twice in a row' if neighbours else 'is there again in the second half'}"
    fail.when(width != o.rotary_dim, f"{had}, as in a full-width table, not a half-width one; pass rotary_dim={width}")
    wrong = f"{had}, but interleaved is {o.interleaved}"
    fail.when(neighbours != o.interleaved, f"{wrong}; pass interleaved={neighbours}, or half-width tables")
