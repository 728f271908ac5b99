"""Tables on a terminal."""

from __future__ import annotations

import sys
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from steplab.record import Table
from steplab.report.cells import cell_text, is_number

# A file or pipe has no width of its own; this keeps the widest of our tables on one line.
PLAIN_WIDTH = 200


def console(file: TextIO | None = None) -> Console:
    """Return a console for stdout or `file`; wide where there is no terminal."""
    target = file or sys.stdout
    width = None if target.isatty() else PLAIN_WIDTH
    return Console(file=target, width=width, highlight=False, soft_wrap=False)


def print_table(table: Table, file: TextIO | None = None) -> None:
    """Print a table with its title above and its note below."""
    drawn = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    drawn.title_style = "bold"
    for index, column in enumerate(table.columns):
        numeric = any(is_number(row[index]) for row in table.rows)
        drawn.add_column(column.title, justify="right" if numeric else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(cell_text(cell) for cell in row))
    out = console(file)
    out.print(drawn)
    if table.note:
        out.print(table.note, style="dim", markup=False)
