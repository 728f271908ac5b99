"""Tables on a terminal."""

from __future__ import annotations

import sys
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

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
    """Print a table with its title above and its note below.

    Every text goes in as `Text`: in a plain string rich would read "[ms]" as markup.
    """
    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(table.columns):
        numeric = any(is_number(row[index]) for row in table.rows)
        drawn.add_column(Text(column.title), justify="right" if numeric else "left")
    for row in table.rows:
        pairs = zip(row, table.columns, strict=True)
        drawn.add_row(*(Text(cell_text(cell, column.digits)) for cell, column in pairs))
    out = console(file)
    out.print(Text(f"\n{table.title}", style="bold"))
    out.print(drawn)
    if table.note:
        out.print(Text(table.note, style="dim"))
