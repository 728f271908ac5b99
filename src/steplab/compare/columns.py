"""Which columns of a table are worth their room."""

from __future__ import annotations

from dataclasses import replace

from steplab.record import Table


def without_unknown_columns(table: Table) -> Table:
    """Leave out the columns in which no row knows anything (a CPU has no SM clock)."""
    kept = [i for i in range(len(table.columns)) if any(row[i] is not None for row in table.rows)]
    rows = tuple(tuple(row[i] for i in kept) for row in table.rows)
    return replace(table, columns=tuple(table.columns[i] for i in kept), rows=rows)
