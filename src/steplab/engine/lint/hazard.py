"""Hazard: one line of a step, what it does, why that costs and what to do instead. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from steplab.record import Table
from steplab.record.table import Column

WAIT = "host sync"
BRANCH = "control flow"
VARIES = "varying size"
BREAK = "graph break"
KINDS = (WAIT, BRANCH, VARIES, BREAK)


@dataclass(frozen=True)
class Hazard:
    """`line` is the user's, `op` what is called there."""

    kind: str
    line: str
    op: str
    why: str
    remedy: str
    times: float | None = None  # a step; None where it was not counted


def hazard_table(hazards: list[Hazard], title: str, note: str) -> Table:
    """Return one row per hazard, kinds together, in the order in which they were met."""
    columns = tuple(map(Column, ("kind", "line", "op", "a step", "why", "remedy")))
    ordered = sorted(hazards, key=lambda one: KINDS.index(one.kind))
    rows = tuple((h.kind, h.line, h.op, _count(h.times), h.why, h.remedy) for h in ordered)
    return Table(title, columns, rows, note)


def _count(times: float | None) -> str:
    """Not counted is not "unknown": a break is one place, however often it is passed."""
    return "-" if times is None else f"{times:.3g}"
