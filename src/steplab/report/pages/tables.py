"""A Table as HTML that sorts by a click on a heading."""

from __future__ import annotations

import math

from steplab.record.table import Cell, Column, Table
from steplab.report.cells import cell_text, is_number
from steplab.report.pages.markup import NOTHING, Html, element, join

DIFFERENCE = "difference"  # a column of this name is drawn as bars to the left and right of zero
LONGEST_NAME = 120  # characters; beyond two lines the rest is shown on hovering
NAMES = ("kernel", "operator", "Name", "name", "module", "field")  # set in fixed-width letters


def table_html(table: Table, last_is_sum: bool = False) -> Html:
    """Return the table without its title; its note stands below.

    `last_is_sum`: the last row is the sum of the others and stays last.
    """
    numeric = [any(is_number(row[i]) for row in table.rows) for i in range(len(table.columns))]
    largest = _largest_difference(table, last_is_sum)
    rows = []
    for number, row in enumerate(table.rows):
        cells = [
            _cell(cell, column, is_numeric, largest)
            for cell, column, is_numeric in zip(row, table.columns, numeric, strict=True)
        ]
        is_sum = last_is_sum and number == len(table.rows) - 1
        rows.append(element("tr", *cells, class_="sum" if is_sum else None))
    pairs = zip(table.columns, numeric, strict=True)
    headings = element("tr", *(_heading(column, right) for column, right in pairs))
    drawn = element("table", element("thead", headings), element("tbody", *rows))
    note = element("p", table.note, class_="note") if table.note else NOTHING
    return join([element("div", drawn, class_="scroll"), note])


def _heading(column: Column, right: bool) -> Html:
    button = element("button", column.title, type="button")
    heading = element("th", button, class_="number" if right else None)
    bars = element("th") if column.name == DIFFERENCE else NOTHING
    return join([heading, bars])


def _cell(cell: Cell, column: Column, numeric: bool, largest: float) -> Html:
    text = cell_text(cell, column.digits)
    if not numeric:
        long = len(text) > LONGEST_NAME
        shown = element("div", text, class_="clamp", data_tip=text) if long else text
        return element("td", shown, class_="name" if column.name in NAMES else None)
    known = isinstance(cell, (int, float)) and math.isfinite(cell)
    value = float(cell) if known and cell is not None else -math.inf
    drawn = element("td", text, class_="number", data_v="-Infinity" if not known else repr(value))
    if column.name != DIFFERENCE:
        return drawn
    share = abs(value) / largest * 50 if known and largest else 0.0
    side = "more" if value > 0 else "less"
    bar = element("i", class_=side, style=f"width:{min(share, 50.0):.2f}%")
    return join([drawn, element("td", element("span", bar, class_="delta"), class_="bars")])


def _largest_difference(table: Table, last_is_sum: bool) -> float:
    index = next((i for i, c in enumerate(table.columns) if c.name == DIFFERENCE), None)
    if index is None:
        return 0.0
    rows = table.rows[:-1] if last_is_sum else table.rows
    cells = [row[index] for row in rows]
    return max((abs(cell) for cell in cells if isinstance(cell, (int, float))), default=0.0)
