"""Tables on a terminal."""

from __future__ import annotations

import io
import re
import sys
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from steplab.core import Table
from steplab.core.printable import printable, raw_stream
from steplab.core.table import cell_text, is_number

# A file or pipe has no width of its own; this keeps the widest of our tables on one line.
PLAIN_WIDTH = 200
MIN_PICTURE = 80  # characters


def console(file: TextIO | None = None) -> Console:
    """Return a console for stdout or `file`; wide where there is no terminal.

    What is printed on it must be printable: a console writes colors, so nothing is filtered.
    """
    target = raw_stream(file or sys.stdout)
    width = None if target.isatty() else PLAIN_WIDTH
    return Console(file=target, width=width, highlight=False, soft_wrap=False)


def print_table(table: Table, file: TextIO | None = None) -> None:
    """Print a table with its title above and its note below.

    Every text goes in as `Text`: in a plain string rich would read "[ms]" as markup.
    """
    out = console(file)
    _draw(table, out)


def table_svg(table: Table) -> str:
    """Return the table as a picture of a terminal, with no reference to anything outside.

    As wide as its columns: a long note is wrapped, or all would be drawn too small to read.
    """
    wide = Console(file=io.StringIO(), record=True, width=1000, highlight=False)
    width = max(wide.measure(_rich(table)).maximum, len(table.title), MIN_PICTURE)
    recorder = Console(file=io.StringIO(), record=True, width=width, highlight=False)
    _draw(table, recorder)
    svg = recorder.export_svg(title="steplab")
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)


def _draw(table: Table, out: Console) -> None:
    out.print(Text(printable(f"\n{table.title}"), style="bold"))
    out.print(_rich(table))
    if table.note:
        out.print(Text(printable(table.note), style="dim"))


def _rich(table: Table) -> RichTable:
    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(table.columns):
        numeric = any(is_number(row[index]) for row in table.rows)
        longest = max((len(str(row[index])) for row in table.rows), default=0)
        drawn.add_column(
            Text(printable(column.title)),
            justify="right" if numeric else "left",
            min_width=longest if column.whole else None,
        )
    for row in table.rows:
        pairs = zip(row, table.columns, strict=True)
        drawn.add_row(*(Text(printable(cell_text(cell, column.digits))) for cell, column in pairs))
    return drawn
