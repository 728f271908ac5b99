"""Tables on a terminal."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Sequence
from typing import TextIO

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from steplab.core import Cell, Column, Table
from steplab.core.printable import printable, raw_stream
from steplab.core.table import cell_text, is_number

# A file or pipe has no width of its own; this keeps the widest of our tables on one line.
PLAIN_WIDTH = 200
MIN_PICTURE = 80  # characters
GAP = 3  # between two columns
FOLDED = 14  # characters of a line of text that is folded, at least
# Where a text may be cut in two, the best places first: between words, techniques of a recipe, and
# parts of a name or path. A digit may not follow: "0.5" and "1,024" stay whole.
BREAKS = (r"(?<=\s)", r"(?<=,)(?=[^\W\d])", r"(?<=[.=/:])(?=[^\W\d])", r"(?<=.)")


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
    columns = _drawn_width([_natural_width(table, i) for i in range(len(table.columns))])
    width = max(columns, len(table.title), MIN_PICTURE)
    recorder = Console(file=io.StringIO(), record=True, width=width, highlight=False)
    _draw(table, recorder)
    svg = recorder.export_svg(title="steplab")
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)


def _draw(table: Table, out: Console) -> None:
    shown = fitted(table, out.width)
    out.print(Text(printable(f"\n{table.title}"), style="bold"))
    room = out.width
    # Where even the least is too wide, lines run on: rich would cut numbers in two.
    out.width = max(room, _drawn_width(_column_widths(shown, room)))
    out.print(_rich(shown, room))
    out.width = room
    indices = range(len(table.columns))
    missing = [_left_out(table, i) for i in indices if table.columns[i] not in shown.columns]
    note = [f"no room for: {', '.join(missing)}"] if missing else []
    if table.note or note:
        out.print(Text(printable("\n".join(filter(None, [table.note, *note]))), style="dim"))


def fitted(table: Table, width: int) -> Table:
    """Return the table without the columns that a terminal of `width` has no room for.

    Dispensable columns go, never results: those stand whole, and texts are folded. The first to go
    are those that tell no row from another.
    """
    kept = list(range(len(table.columns)))
    optional = {i for i in kept if table.columns[i].dispensable}
    while _drawn_width([_least_width(table, i) for i in kept]) > width and optional:
        last = max(optional, key=lambda i: (_is_alike(table, i), table.columns[i].dispensable))
        optional.remove(last)
        kept.remove(last)
    return table.only(kept)


def _left_out(table: Table, index: int) -> str:
    """Return a column's name, with its value where all rows have the same."""
    column = table.columns[index]
    if not _is_alike(table, index) or table.rows[0][index] == "":
        return column.name
    value = cell_text(table.rows[0][index], column.digits)
    return f"{column.name} ({value}{f' {column.unit}' if column.unit else ''})"


def _is_alike(table: Table, index: int) -> bool:
    return len({row[index] for row in table.rows}) == 1


def _rich(table: Table, width: int) -> RichTable:
    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    widths: list[int] = []
    for index, (column, chars) in enumerate(
        zip(table.columns, _column_widths(table, width), strict=True)
    ):
        drawn.add_column(
            Text(printable(column.title)),
            justify="right" if _is_numeric(table, index) else "left",
            width=chars,
            overflow="fold",  # never an ellipsis
        )
        widths.append(chars)
    for row in table.rows:
        cells = zip(row, table.columns, widths, strict=True)
        drawn.add_row(*(Text(_folded(cell, column, chars)) for cell, column, chars in cells))
    return drawn


def _folded(cell: Cell, column: Column, width: int) -> str:
    """Return a cell on lines of at most `width` characters; nothing of it is left out."""
    lines = printable(cell_text(cell, column.digits)).splitlines()
    return "\n".join(part.rstrip() for line in lines for part in _fold(line, width, BREAKS))


def _fold(text: str, width: int, breaks: Sequence[str]) -> list[str]:
    lines = [""]
    for piece in re.split(breaks[0], text):
        if cell_len((lines[-1] + piece).rstrip()) <= width:
            lines[-1] += piece
        elif cell_len(piece.rstrip()) <= width or not breaks[1:]:
            lines.append(piece)
        else:
            lines += _fold(piece, width, breaks[1:])
    return lines if lines[0] else lines[1:]


def _column_widths(table: Table, room: int) -> list[int]:
    """Return the characters of each column.

    Headings are folded first, then the widest texts, at the best places that make room. Not by
    rich, which cuts numbers of a table that is too wide by one character.
    """
    indices = range(len(table.columns))
    widths = [_natural_width(table, i) for i in indices]
    whole_cells = [max(_heading_width(table, i), *_cell_widths(table, i)) for i in indices]
    least_widths = [_least_width(table, i) for i in indices]
    pieces = [
        [max(least_widths[i], _piece_width(table, i, "|".join(BREAKS[:end]))) for i in indices]
        for end in range(1, len(BREAKS))
    ]
    for least in (whole_cells, *pieces, least_widths):
        while _drawn_width(widths) > room:
            foldable = [i for i in indices if widths[i] > least[i]]
            if not foldable:
                break
            widths[max(foldable, key=lambda i: widths[i])] -= 1
    return widths


def _drawn_width(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _natural_width(table: Table, index: int) -> int:
    """Return the characters of a column in which nothing is folded."""
    return max(cell_len(table.columns[index].title), *_cell_widths(table, index), 1)


def _least_width(table: Table, index: int) -> int:
    """Return the characters that a column needs: a number in one piece, text on several lines."""
    longest = max(_cell_widths(table, index))
    whole = table.columns[index].whole or _is_numeric(table, index)
    return max(_heading_width(table, index), longest if whole else min(longest, FOLDED))


def _heading_width(table: Table, index: int) -> int:
    """Return the characters of the longest word of a heading, which is folded between words."""
    return max(map(cell_len, table.columns[index].title.split()), default=1)


def _piece_width(table: Table, index: int, breaks: str) -> int:
    """Return the characters of the longest piece of a column's cells when cut at `breaks`."""
    digits = table.columns[index].digits
    texts = (printable(cell_text(row[index], digits)) for row in table.rows)
    pieces = (piece.rstrip() for text in texts for piece in re.split(breaks, text))
    return max(map(cell_len, pieces), default=1)


def _cell_widths(table: Table, index: int) -> list[int]:
    digits = table.columns[index].digits
    texts = (printable(cell_text(row[index], digits)) for row in table.rows)
    return [0, *(cell_len(line) for text in texts for line in text.splitlines())]


def _is_numeric(table: Table, index: int) -> bool:
    return any(is_number(row[index]) for row in table.rows)
