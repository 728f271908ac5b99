"""Table: rows with named columns and units, for studies whose result is not a set of samples."""

from __future__ import annotations

from dataclasses import dataclass, replace

Cell = str | int | float | bool | None


@dataclass(frozen=True)
class Column:
    """A column's name, and the unit of its numbers ("" for text and plain counts)."""

    name: str
    unit: str = ""
    digits: int = 4  # significant ones, for people; files keep full precision
    whole: bool = False  # its cells are copied by people: no terminal may cut them

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

    def without_unknown_columns(self) -> Table:
        """Leave out the columns in which no row knows anything (a CPU has no SM clock)."""
        kept = [i for i in range(len(self.columns)) if any(row[i] is not None for row in self.rows)]
        rows = tuple(tuple(row[i] for i in kept) for row in self.rows)
        return replace(self, columns=tuple(self.columns[i] for i in kept), rows=rows)
