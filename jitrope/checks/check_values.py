"""The checks of `check=True`. They read positions and slots, so they wait for the device.

Calls are safe without them: a position outside of the table gives NaN.
"""

from __future__ import annotations

from ..base import partition
from ..base.arguments import refuse
from ..base.fit import Fail, sizes_of
from ..base.views import TABLE_NAMES, Tensors
from ..plan.options import Options
from ..sinks.cache import slots_of
from ..sinks.pages import slots_of_pages
from ..stages.positions import RULE, rows_read, spare, table_rows
from ..stages.rotate import rows_of


def check_values(name: str, t: Tensors, o: Options) -> None:
    """Refuse offsets that fall, positions outside of the table, and slots outside of a cache."""
    fail, q = Fail(name), next(iter(t.values()))
    batch, tokens, *_ = sizes_of(q, o.layout)
    whole = {label: getattr(x, "full_tensor", lambda x=x: x)() for label, x in t.items() if label in TABLE_NAMES}
    if "cu_seqlens" in whole:
        offsets = whole["cu_seqlens"].tolist()
        if offsets != sorted(offsets) or offsets[0] != 0:
            refuse(name, "cu_seqlens", offsets, "ascending from 0")
        own = partition.local_rows(offsets[-1], o.cp_rank, o.cp_size, RULE)
        of_rank = "" if o.cp_size == 1 else f", {own} of them on this rank"
        fail.when(own > tokens, f"cu_seqlens ends at {offsets[-1]}{of_rank}, but q has {tokens} tokens")
    count, rows, beyond = rows_of(whole["cos"]), table_rows(tokens, q.device, whole, o), spare(tokens, whole, o)
    rows = rows if beyond is None else rows[..., ~beyond]
    rows = rows_read(rows, o)
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
