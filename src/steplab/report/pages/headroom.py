"""What a step could still gain: its budget against the roofline and against waiting for nobody."""

from __future__ import annotations

from steplab import units
from steplab.record import Column, Table
from steplab.record.budget import Budget
from steplab.record.table import Cell
from steplab.report.pages.markup import NOTHING, Html, element, join
from steplab.report.pages.tables import table_html

WAITING = ("copies", "data wait", "synchronisation", "launch", "dispatch")


def headroom_html(budget: Budget | None) -> Html:
    """Return a sentence and a table of what could go, the most first; nothing without a budget."""
    if budget is None or not budget.steps:
        return NOTHING
    step = budget.typical
    rows: list[tuple[str, float, float | None]] = [
        (c.name, c.ms, c.lost_ms if c.lost_ms is None else max(c.lost_ms, 0.0))
        for c in step.categories
    ]
    host = {} if budget.on_device else {"launch": "host: Python and framework"}
    terms = {name: step.terms.get(name, 0.0) for name in WAITING}
    rows += [(host.get(name, name), ms, ms) for name, ms in terms.items() if ms > 0]
    rows.sort(key=lambda row: -(row[2] or 0.0))
    could = sum(row[2] or 0.0 for row in rows)
    unknown = sum(row[1] for row in rows if row[2] is None)
    share = could / step.wall_ms if step.wall_ms else 0.0
    words = f"Of {units.milliseconds(step.wall_ms)}, {units.milliseconds(could)} "
    words += f"({units.percent(share)}) lie above the roofline or are spent waiting"
    if unknown:
        words += f"; {units.milliseconds(unknown)} is work whose ideal time is not known"
    columns = (Column("part"), Column("time", "ms"), Column("could go", "ms"))
    shown: tuple[tuple[Cell, ...], ...] = tuple(rows)
    return join([element("p", f"{words}."), table_html(Table("headroom", columns, shown))])
