"""Tables as files: CSV and JSON with full precision, Markdown and SVG as on a terminal."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path

from steplab.core import Table
from steplab.core.codec import encode
from steplab.core.errors import UserError
from steplab.core.output_file import write_output
from steplab.core.table import cell_text, is_number


def to_csv(table: Table) -> str:
    """One header line, one line per row; unknown is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.title for column in table.columns])
    writer.writerows([["" if cell is None else cell for cell in row] for row in table.rows])
    return out.getvalue()


def to_markdown(table: Table) -> str:
    """A GitHub table with its title and note."""

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    aligned = [
        "---:" if any(is_number(row[i]) for row in table.rows) else "---"
        for i in range(len(table.columns))
    ]
    lines = [f"**{table.title}**", "", line([c.title for c in table.columns]), line(aligned)]
    for row in table.rows:
        pairs = zip(row, table.columns, strict=True)
        lines.append(line([cell_text(cell, column.digits) for cell, column in pairs]))
    if table.note:
        lines += ["", *table.note.splitlines()]
    return "\n".join(lines) + "\n"


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
