"""The frame of every page, and the parts that pages share: tiles, tables, conditions."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from steplab.core import Cell, Column, Run, Table, units
from steplab.core.output_file import write_output
from steplab.core.run import rate_name
from steplab.core.table import cell_text, is_number
from steplab.report.charts.colors import color_css
from steplab.report.markup import NOTHING, Html, element, join

DIFFERENCE = "difference"  # a column of this name is drawn as bars to the left and right of zero
LONGEST_NAME = 120  # characters; beyond two lines the rest is shown on hovering
NAMES = ("kernel", "operator", "Name", "name", "module", "field")  # columns in a monospaced font


@dataclass(frozen=True)
class Section:
    """A heading and its content; `key` is its anchor. Without content it is left out."""

    key: str
    title: str
    content: Html
    note: str = ""


def write_page(
    path: Path,
    title: str,
    head: Html,
    sections: Sequence[Section],
    foot: Html,
    flag: str = "--out",
) -> None:
    """Write a page that needs nothing but itself; `flag` named the path."""
    shown = [section for section in sections if section.content]
    links = [element("a", s.title, href=f"#{s.key}") for s in shown]
    body = join(
        [
            element("header", element("h1", title), head),
            element("nav", *links) if len(links) > 1 else NOTHING,
            element("main", *map(_section, shown)),
            element("footer", foot),
        ]
    )
    # A name may hold half of a surrogate pair, which UTF-8 cannot write.
    data = _document(title, body).encode("utf-8", errors="replace")
    write_output(path, data, flag)


def _section(section: Section) -> Html:
    note = element("p", section.note, class_="note") if section.note else NOTHING
    heading = element("h2", section.title)
    return element("section", heading, note, section.content, id=section.key)


def _document(title: str, body: Html) -> str:
    own = files("steplab.report.pages")
    style = own.joinpath("style.css").read_text(encoding="utf-8") + color_css()
    script = own.joinpath("script.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Tells the browser to load nothing and to run this one script only.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{title} - steplab"),
        element("style", Html(style)),
    )
    tip = element("div", id="tip", hidden="")
    page = element("body", body, tip, element("script", Html(script)))
    return f"<!doctype html>\n{element('html', head, page, lang='en')}\n"


def run_title(run: Run) -> str:
    """What was measured, in one line."""
    return f"{run.spec.title}, {run.spec.recipe.label}"


def tiles(figures: dict[str, str]) -> Html:
    """Return a row of figures with their names: name -> value."""
    drawn = [
        element("div", element("b", value), element("span", name), class_="tile")
        for name, value in figures.items()
    ]
    return element("div", *drawn, class_="tiles")


def run_figures(run: Run) -> dict[str, str]:
    """Return what a reader looks for first; what is not known is left out."""
    figures = {}
    if run.clock is not None and run.clock.step.values:
        step = run.clock.step
        name = f"step, median of {len(step)} (spread {units.percent(step.spread)})"
        figures[name] = units.milliseconds(step.median)
    if run.tokens_per_second:
        figures[rate_name([run]).replace("/s", " per second")] = units.count(run.tokens_per_second)
    if run.figures is not None and run.figures.possible_mfu is not None:
        figures["MFU"] = units.percent(run.figures.possible_mfu)
    if run.memory is not None:
        figures[f"peak memory, {run.memory.source}"] = units.bytes_(run.memory.peak)
    if run.parameters:
        figures["parameters"] = units.count(run.parameters)
    return figures


def run_foot(run: Run) -> Html:
    """Return machine, versions, settings and notes."""
    spec, environment = run.spec, run.environment
    lines = [
        f"Run {run.id}, {run.created or 'time unknown'}, status {run.status}",
        environment.conditions_on(spec.device),
        f"warm-up {spec.warmup}, timed steps {spec.steps}, accumulate {spec.accumulate}, "
        f"clip {spec.clip:g}, seed {spec.seed}",
    ]
    if run.profile is not None:
        wait, warmup, active, repeat = run.profile.schedule
        lines.append(
            f"profiler schedule: wait {wait}, warm-up {warmup}, active {active}, repeat {repeat}"
        )
    if run.figures is not None and run.figures.peak_tflops is not None:
        lines.append(f"peak: {run.figures.peak_tflops:g} TFLOP/s, {run.figures.peak_source}")
    lines += [f"{name}={value}" for name, value in environment.variables.items()]
    lines += list(run.notes)
    return paragraphs(lines)


def paragraphs(lines: list[str]) -> Html:
    """Return each line as a paragraph."""
    return join(element("p", line) for line in lines)


def table_html(table: Table, last_is_sum: bool = False) -> Html:
    """Return the table without its title; its note is below.

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
