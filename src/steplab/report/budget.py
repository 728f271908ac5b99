"""The time budget on a terminal: one table that adds up, and what it was measured under."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TextIO

from rich import box
from rich.bar import Bar
from rich.table import Table as RichTable
from rich.text import Text

from steplab.core import Budget, Category, Column, StepBudget, Table, units
from steplab.core.printable import printable
from steplab.report.terminal import console

SMALL = 0.01  # categories below this share of the step are shown as one
NOTHING: Mapping[str, float] = {}
Split = Mapping[int, Mapping[str, float]]  # step -> ms of each part of its communication
BAR_WIDTH = 24
TABLE_WIDTH = 88  # without the bar

_MEANING = {
    "communication": "exposed, not overlapped",
    "copies": "copies and fills alone",
    "data wait": "host fetched a batch",
    "synchronization": "host waited for the device",
    "launch": "host was late",
    "dispatch": "launched, not begun",
    "host": "Python and framework",
    "residual": "no event covers it",
}
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
    """One row of the table."""

    name: str
    ms: float
    begin: float = 0.0  # ms of the step that the rows above account for
    term: str = ""  # of TERMS; "" for residual and step
    is_category: bool = False
    kernels: Category | None = None  # launches, ideal and lost time, where there are kernels

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
    rows = []
    for line in _lines(budget, step, small=0.0):
        names = (budget.term_name(line.term), line.name) if line.is_category else (line.name, "")
        kernels = line.kernels
        counts = (kernels.launches, kernels.ideal_ms, kernels.lost_ms) if kernels else ("", "", "")
        rows.append((*names, line.ms, _percent(line, step), *counts))
    return Table(_title(budget, step), columns, tuple(rows), "\n".join(_remarks(budget, step)))


def print_budget(budget: Budget, file: TextIO | None = None, split: Split | None = None) -> None:
    """Print the typical step: terms, categories with ideal and lost time, residual, conditions.

    `split` has the parts of `communication` in every step, where several ranks tell them.
    """
    step, out = budget.typical, console(file)
    parts = split[step.number] if split else {}
    lines = [
        line
        for line in _lines(budget, step, small=SMALL, communication=parts)
        if line.ms or line.is_always_shown
    ]
    has_bar = out.width >= TABLE_WIDTH + BAR_WIDTH and not out.options.ascii_only
    has_ideal = any(line.kernels and line.kernels.ideal_ms is not None for line in lines)
    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    drawn.add_column("")
    count = "launches" if budget.on_device else "calls"
    has_count = any(line.kernels for line in lines)  # the mean of several ranks has none
    titles = ["ms", "%", *([count] if has_count else [])]
    for title in (*titles, *(("ideal ms", "lost ms") if has_ideal else ())):
        drawn.add_column(title, justify="right")
    if has_bar:
        drawn.add_column("", width=BAR_WIDTH)
    for line in lines:
        numbers = _number_cells(line, step, has_count, has_ideal)
        drawn.add_row(_name_cell(line), *numbers, *([_bar(line, step)] if has_bar else []))
    out.print(Text(printable(f"\n{_title(budget, step)}"), style="bold"))
    out.print(drawn)
    for remark in _remarks(budget, step):
        out.print(Text(printable(remark), style="dim"))


def _name_cell(line: _Line) -> Text:
    if line.is_category:
        return Text(printable(f"  {line.name}"))
    name = Text(printable(line.name), style=f"bold {line.color}")
    meaning = _MEANING.get(line.name)
    return name.append(f"  {meaning}", style="not bold dim") if meaning else name


def _number_cells(line: _Line, step: StepBudget, has_count: bool, has_ideal: bool) -> list[Text]:
    decimals = step.decimals

    def text(ms: float | None) -> str:
        if ms is None:
            return "-" if line.is_category else ""
        return f"{round(ms, decimals) + 0.0:,.{decimals}f}"  # + 0.0: no "-0.000"

    kernels = line.kernels
    cells = [text(line.ms), f"{_percent(line, step):.1f}"]
    if has_count:
        cells.append(f"{kernels.launches:,}" if kernels else "")
    if has_ideal:
        cells += [text(kernels.ideal_ms), text(kernels.lost_ms)] if kernels else ["", ""]
    return [Text(cell, style="" if line.is_category else "bold") for cell in cells]


def _percent(line: _Line, step: StepBudget) -> float:
    """Share of the step; rounded so that the dust of a sum of floats is 0 and not -0."""
    return round(100 * line.ms / step.wall_ms, 9) + 0.0 if step.wall_ms else 0.0


def _bar(line: _Line, step: StepBudget) -> Bar:
    end = line.begin + line.ms
    return Bar(step.wall_ms, line.begin, end, width=BAR_WIDTH, color=line.color)


def _remarks(budget: Budget, step: StepBudget) -> Iterator[str]:
    """Yield what the numbers were measured under, a line each."""
    if not budget.marked:
        yield "Nothing marks steps: what is said of a step is of the whole recording."
    if step in budget.open_steps:
        share = units.percent(step.residual_ms / step.wall_ms)
        yield f"The budget does not close: no event explains {share} of the step."
    elif budget.open_steps:
        worst = max(budget.open_steps, key=lambda s: abs(s.residual_ms) / s.wall_ms)
        share = units.percent(worst.residual_ms / worst.wall_ms)
        where = f"{len(budget.open_steps)} of {len(budget.steps)} steps"
        what = f"no event explains {share} of step {worst.number}"
        yield f"The budget does not close in {where}: {what}."
    ratio = budget.profiled_ratio
    if ratio is not None:
        yield (
            f"profiled {units.milliseconds(step.wall_ms)}, "
            f"unprofiled {units.milliseconds(budget.unprofiled_ms)}: {units.ratio(ratio)}"
        )
    kernels, ms = Category.total("", step.categories), step.terms["kernels"]
    if kernels.ideal_ms is not None:
        share = units.percent(kernels.modeled_ms / ms if ms else None)
        yield (
            f"ideal: the longer of FLOPs / peak and least bytes / bandwidth, where shapes tell it "
            f"({share} of the {budget.term_name('kernels')}); lost: time beyond it"
        )
    yield from (f"  {name}: {source}" for name, source in budget.peaks.items())
    yield from budget.notes


def _title(budget: Budget, step: StepBudget) -> str:
    many = len(budget.steps)
    which = "one profiled step" if budget.marked else "a recording in which nothing marks steps"
    if many > 1:
        which = f"step {step.number}, the median of {many} profiled"
    return f"Time budget: {units.milliseconds(step.wall_ms)} ({which})"


def _lines(
    budget: Budget, step: StepBudget, small: float, communication: Mapping[str, float] = NOTHING
) -> Iterator[_Line]:
    """Yield the rows in the order of priority, each beginning where the one above ended."""
    begin = 0.0
    for term, ms in step.terms.items():
        name = budget.term_name(term)
        if term == "kernels":
            own = Category.total(name, step.categories) if step.categories else None
            yield _Line(name, ms, begin, term, kernels=own)
            yield from _categories(budget, step, small * step.wall_ms)
        else:
            yield _Line(name, ms, begin, term)
        if term == "communication":
            yield from _parts(communication, begin)
        begin += ms
    yield _Line("residual", step.residual_ms, begin)
    yield _Line("step" if budget.marked else "recording", step.wall_ms)


def _parts(communication: Mapping[str, float], begin: float) -> Iterator[_Line]:
    """Yield a row per part of the communication."""
    for name, ms in communication.items():
        yield _Line(name, ms, begin, "communication", True)
        begin += ms


def _categories(budget: Budget, step: StepBudget, small_ms: float) -> Iterator[_Line]:
    """Yield a row per category; several that are small share the last one."""
    shown = [category for category in step.categories if category.ms >= small_ms]
    rest = step.categories[len(shown) :]
    if len(rest) > 1:
        rest = (Category.total(f"{len(rest)} smaller", rest),)
    begin = 0.0
    for category in (*shown, *rest):
        name = budget.term_name(category.name)
        yield _Line(name, category.ms, begin, "kernels", True, category)
        begin += category.ms
