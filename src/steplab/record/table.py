"""Table: rows with named columns and units, for studies whose result is not a set of samples."""

from __future__ import annotations

from dataclasses import dataclass

Cell = str | int | float | bool | None


@dataclass(frozen=True)
class Column:
    """A column's name, and the unit of its numbers ("" for text and plain counts)."""

    name: str
    unit: str = ""
    digits: int = 4  # significant ones, for people; files keep full precision

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
