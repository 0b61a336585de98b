"""Rows of numbers as a table."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def table(rows: list[dict[str, Any]]) -> Table:
    """A table with the rows' keys as its head."""
    result = Table(*(rows[0] if rows else ()), box=None, pad_edge=False)
    for row in rows:
        result.add_row(*(_text(value) for value in row.values()))
    return result


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if value < 10 else f"{value:.1f}"
    return str(value)
