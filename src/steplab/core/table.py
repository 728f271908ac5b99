"""Table: rows with named columns and units, and a cell as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from steplab.core.errors import UserError
from steplab.core.units import UNKNOWN

MOST_DIGITS = 17  # significant digits that a float has
Cell = str | int | float | bool | None


@dataclass(frozen=True)
class Column:
    """A column's name, and the unit of its numbers ("" for text and plain counts)."""

    name: str
    unit: str = ""
    digits: int = 4  # significant digits on screen; files keep full precision
    whole: bool = False  # cells that people copy: a narrow terminal must not cut them
    # Where a terminal is too narrow, columns with the largest number are left out first; 0: never.
    dispensable: int = 0

    @property
    def title(self) -> str:
        """The heading: name and unit."""
        return f"{self.name} [{self.unit}]" if self.unit else self.name


@dataclass(frozen=True)
class Table:
    """Rows of plain values. None prints as `unknown`."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise UserError(
                    f"Row {number} of the table {self.title!r} has {len(row)} cells "
                    f"for {len(self.columns)} columns."
                )

    def without_unknown_columns(self) -> Table:
        """Leave out the columns in which no row knows anything (a CPU has no SM clock)."""
        kept = [i for i in range(len(self.columns)) if any(row[i] is not None for row in self.rows)]
        return self.only(kept)

    def only(self, kept: Sequence[int]) -> Table:
        """Return the table with the columns of these indices."""
        rows = tuple(tuple(row[i] for i in kept) for row in self.rows)
        return replace(self, columns=tuple(self.columns[i] for i in kept), rows=rows)


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
    decimals = max(0, min(digits, MOST_DIGITS) - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"
