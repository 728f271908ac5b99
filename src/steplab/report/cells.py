"""One cell of a table as text."""

from __future__ import annotations

import math

from steplab.record.table import Cell
from steplab.units import UNKNOWN


def is_number(cell: Cell) -> bool:
    """Whether a cell holds a number (a bool is not one)."""
    return isinstance(cell, (int, float)) and not isinstance(cell, bool)


def cell_text(cell: Cell, digits: int = 4) -> str:
    """Format a cell: thousands separated, `digits` significant ones, `unknown` for None."""
    if cell is None:
        return UNKNOWN
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, float):
        return _float_text(cell, digits)
    return cell


def _float_text(value: float, digits: int) -> str:
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if abs(value) < 1e-4:
        return f"{value:.2e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"
