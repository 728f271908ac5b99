"""Tables as files: CSV and JSON with full precision, Markdown and SVG as on a terminal."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from steplab.core import Table
from steplab.core.codec import encode
from steplab.core.errors import UserError
from steplab.core.output_file import write_output
from steplab.core.printable import printable
from steplab.core.table import cell_text, is_number

# What a spreadsheet takes for a formula. A sign alone, and a number with its unit, are none.
FORMULA = re.compile(r"[=@]|[+-](?!$|[\d.,]+(e[+-]?\d+)? ?[%a-zA-Z]{0,4}$)")


def csv_line(cells: Iterable[object]) -> str:
    """One line of a CSV file; unknown is empty.

    A text that a spreadsheet would compute gets a quote in front; numbers stay numbers.
    """
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(map(_csv_cell, cells))
    return out.getvalue()


def _csv_cell(cell: object) -> object:
    if cell is None or isinstance(cell, (int, float)):
        return "" if cell is None else cell
    text = printable(str(cell))
    return f"'{text}" if FORMULA.match(text.lstrip()) else text


def to_csv(table: Table) -> str:
    """One header line, one line per row; unknown is empty."""
    return "".join(map(csv_line, [[c.title for c in table.columns], *table.rows]))


def to_markdown(table: Table) -> str:
    """A GitHub table with its title and note."""

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(map(_markdown_text, cells)) + " |"

    aligned = [
        "---:" if any(is_number(row[i]) for row in table.rows) else "---"
        for i in range(len(table.columns))
    ]
    title = f"**{_markdown_text(table.title)}**"
    lines = [title, "", line([c.title for c in table.columns]), line(aligned)]
    for row in table.rows:
        pairs = zip(row, table.columns, strict=True)
        lines.append(line([cell_text(cell, column.digits) for cell, column in pairs]))
    if table.note:
        lines += ["", *map(_markdown_text, table.note.splitlines())]
    return "\n".join(lines) + "\n"


def _markdown_text(text: str) -> str:
    """Return text that stays text: no tag, no link, no picture, no end of the cell."""
    text = printable(" ".join(text.split("\n")))
    for mark, escaped in (("|", "\\|"), ("<", "&lt;"), ("](", "]\\("), ("![", "!\\[")):
        text = text.replace(mark, escaped)
    return text


def to_json(table: Table) -> str:
    """The record itself."""
    return json.dumps(encode(table), indent=1, allow_nan=False) + "\n"


def to_svg(table: Table) -> str:
    """A picture of the table as the terminal shows it."""
    from steplab.report.terminal import table_svg

    return table_svg(table)


WRITERS = {".csv": to_csv, ".md": to_markdown, ".json": to_json, ".svg": to_svg}


def check_suffixes(paths: Sequence[Path]) -> None:
    """Refuse a file whose format is not known, before anything is measured for it."""
    for path in paths:
        if path.suffix not in WRITERS:
            raise UserError(f"Cannot write {path}.", f"Use a suffix of {', '.join(WRITERS)}.")


def write_table(table: Table, path: Path, flag: str = "--out") -> None:
    """Write a table in the format that the file's suffix names; `flag` named the path."""
    check_suffixes([path])
    write_output(path, WRITERS[path.suffix](table).encode(), flag)
