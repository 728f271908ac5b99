"""The time budget on a terminal: one table that adds up, and what it was measured under."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from rich import box
from rich.bar import Bar
from rich.table import Table as RichTable
from rich.text import Text

from steplab.core import Budget, Category, Column, StepBudget, Table, units
from steplab.report.terminal import console

CLOSED = 0.02  # a residual above this share of the step is said aloud
SMALL = 0.01  # categories below this share of the step are shown as one
BAR_WIDTH = 24
TABLE_WIDTH = 88  # without the bar

_MEANING = {
    "communication": "exposed, no kernel beside",
    "copies": "copies and fills alone",
    "data wait": "host fetched a batch",
    "synchronization": "host waited for the device",
    "launch": "host was late",
    "dispatch": "launched, not begun",
    "host": "Python and framework",
    "residual": "no event tells",
}
_ON_HOST = {"kernels": "operators", "launch": "host"}
_COLORS = {
    "kernels": "green",
    "communication": "magenta",
    "copies": "cyan",
    "data wait": "yellow",
    "synchronization": "red",
    "launch": "bright_red",
    "dispatch": "blue",
}


@dataclass(frozen=True)
class _Line:
    """One row; times in ms, None where the column says nothing about it."""

    name: str
    ms: float
    begin: float = 0.0  # ms of the step that the rows above account for
    term: str = ""  # of TERMS; "" for residual and step
    is_category: bool = False
    launches: int | None = None
    ideal_ms: float | None = None
    modeled_ms: float = 0.0

    @property
    def lost_ms(self) -> float | None:
        """Time beyond the ideal, of the part that has one."""
        return None if self.ideal_ms is None else self.modeled_ms - self.ideal_ms

    @property
    def color(self) -> str:
        """Color of its term."""
        return _COLORS.get(self.term, "white")

    @property
    def is_always_shown(self) -> bool:
        """Whether it is in the table even with no time: kernels, residual and step."""
        return self.term in ("", "kernels")


def budget_table(budget: Budget) -> Table:
    """Return the typical step as a table for files: every term, category and the residual."""
    step = budget.typical
    columns = (
        Column("term"),
        Column("category"),
        Column("time", "ms"),
        Column("share", "%", 3),
        Column("launches"),
        Column("ideal", "ms"),
        Column("lost", "ms"),
    )
    rows = tuple(
        (
            _term_name(line.term, budget) if line.is_category else line.name,
            line.name if line.is_category else "",
            line.ms,
            _percent(line, step),
            line.launches if line.launches is not None else "",
            *(("", "") if line.launches is None else (line.ideal_ms, line.lost_ms)),
        )
        for line in _lines(budget, step, small=0.0)
    )
    return Table(_title(budget, step), columns, rows, "\n".join(_remarks(budget, step)))


def print_budget(budget: Budget, file: TextIO | None = None) -> None:
    """Print the typical step: terms, categories with ideal and lost time, residual, conditions."""
    step, out = budget.typical, console(file)
    lines = [line for line in _lines(budget, step, small=SMALL) if line.ms or line.is_always_shown]
    has_bar = out.width >= TABLE_WIDTH + BAR_WIDTH and not out.options.ascii_only
    has_ideal = any(line.ideal_ms is not None for line in lines)
    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    drawn.add_column("")
    count = "launches" if budget.on_device else "calls"
    for title in ("ms", "%", count, *(("ideal ms", "lost ms") if has_ideal else ())):
        drawn.add_column(title, justify="right")
    if has_bar:
        drawn.add_column("", width=BAR_WIDTH)
    for line in lines:
        cells: list[Text | Bar] = [_name_cell(line), *_number_cells(line, step, has_ideal)]
        drawn.add_row(*cells, *([_bar(line, step)] if has_bar else []))
    out.print(Text(f"\n{_title(budget, step)}", style="bold"))
    out.print(drawn)
    for remark in _remarks(budget, step):
        out.print(Text(remark, style="dim"))


def _name_cell(line: _Line) -> Text:
    if line.is_category:
        return Text(f"  {line.name}")
    name = Text(line.name, style=f"bold {line.color}")
    meaning = _MEANING.get(line.name)
    return name.append(f"  {meaning}", style="not bold dim") if meaning else name


def _number_cells(line: _Line, step: StepBudget, has_ideal: bool) -> list[Text]:
    # One more digit than four significant ones of the step, the same in every row: they line up.
    decimals = max(0, 4 - math.floor(math.log10(max(step.wall_ms, 1e-6))))

    def text(ms: float | None) -> str:
        if ms is None:
            return "-" if line.is_category else ""
        return f"{round(ms, decimals) + 0.0:,.{decimals}f}"  # + 0.0: no "-0.000"

    cells = [text(line.ms), f"{_percent(line, step):.1f}"]
    cells.append(f"{line.launches:,}" if line.launches is not None else "")
    cells += [text(line.ideal_ms), text(line.lost_ms)] if has_ideal else []
    return [Text(cell, style="" if line.is_category else "bold") for cell in cells]


def _percent(line: _Line, step: StepBudget) -> float:
    """Share of the step; rounded so that the dust of a sum of floats is 0 and not -0."""
    return round(100 * line.ms / step.wall_ms, 9) + 0.0 if step.wall_ms else 0.0


def _bar(line: _Line, step: StepBudget) -> Bar:
    end = line.begin + line.ms
    return Bar(step.wall_ms, line.begin, end, width=BAR_WIDTH, color=line.color)


def _remarks(budget: Budget, step: StepBudget) -> Iterator[str]:
    """Yield what the numbers were measured under, a line each."""
    kernels = _kernels(step, "")
    if abs(step.residual_ms) > CLOSED * step.wall_ms:
        share = units.percent(step.residual_ms / step.wall_ms)
        yield f"The budget does not close: no event explains {share} of the step."
    ratio = budget.profiled_ratio
    if ratio is not None:
        yield (
            f"profiled {units.milliseconds(step.wall_ms)}, "
            f"unprofiled {units.milliseconds(budget.unprofiled_ms)}: {units.ratio(ratio)}"
        )
    if kernels.ideal_ms is not None:
        share = units.percent(kernels.modeled_ms / kernels.ms if kernels.ms else None)
        yield (
            f"ideal: the longer of FLOPs / peak and least bytes / bandwidth, where shapes tell it "
            f"({share} of the {_term_name('kernels', budget)}); lost: time beyond it"
        )
    yield from (f"  {name}: {source}" for name, source in budget.peaks.items())
    yield from budget.notes


def _title(budget: Budget, step: StepBudget) -> str:
    many = len(budget.steps)
    which = (
        f"step {step.number}, the median of {many} profiled" if many > 1 else "one profiled step"
    )
    return f"Time budget: {units.milliseconds(step.wall_ms)} ({which})"


def _term_name(term: str, budget: Budget) -> str:
    return term if budget.on_device else _ON_HOST.get(term, term)


def _lines(budget: Budget, step: StepBudget, small: float) -> Iterator[_Line]:
    """Yield the rows in the order of priority, each beginning where the one above ended."""
    begin = 0.0
    for term, ms in step.terms.items():
        if term == "kernels":
            yield _kernels(step, _term_name(term, budget))
            yield from _categories(step, small * step.wall_ms)
        else:
            yield _Line(_term_name(term, budget), ms, begin, term)
        begin += ms
    yield _Line("residual", step.residual_ms, begin)
    yield _Line("step", step.wall_ms)


def _kernels(step: StepBudget, name: str) -> _Line:
    return _sum(step.categories, name, step.terms["kernels"], 0.0, is_category=False)


def _categories(step: StepBudget, small_ms: float) -> Iterator[_Line]:
    begin = 0.0
    shown = [category for category in step.categories if category.ms >= small_ms]
    rest = step.categories[len(shown) :]
    for category in shown:
        yield _sum((category,), category.name, category.ms, begin)
        begin += category.ms
    if len(rest) == 1:
        yield _sum(rest, rest[0].name, rest[0].ms, begin)
    elif rest:
        yield _sum(rest, f"{len(rest)} smaller", sum(c.ms for c in rest), begin)


def _sum(
    categories: tuple[Category, ...],
    name: str,
    ms: float,
    begin: float,
    is_category: bool = True,
) -> _Line:
    ideals = [c.ideal_ms for c in categories if c.ideal_ms is not None]
    return _Line(
        name,
        ms,
        begin,
        "kernels",
        is_category,
        sum(c.launches for c in categories),
        sum(ideals) if ideals else None,
        sum(c.modeled_ms for c in categories),
    )
