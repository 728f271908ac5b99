"""analyse: a trace, and what a detailed one of the same step adds, put in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from steplab import units
from steplab.hardware.catalog import Card
from steplab.trace.analysis import Analysis, Syncs, Window, Work
from steplab.trace.attribution import Attribution
from steplab.trace.borrow import borrow_syncs, borrow_work
from steplab.trace.budget import budget_of
from steplab.trace.costs import card_of
from steplab.trace.events import Trace
from steplab.trace.labels import Labels
from steplab.trace.syncs import syncs_of
from steplab.trace.updates import with_updates
from steplab.trace.windows import windows_of
from steplab.trace.work import work_of


def analyse(
    trace: Trace, detail: Trace | None = None, device_name: str = "", weights: int | None = None
) -> Analysis:
    """Attribute the work of `trace` to steps, phases, modules and lines, and budget its time.

    `detail` is a trace of one more step with stacks and shapes, whose last step lends what
    `trace` lacks. `device_name` overrides what the trace says of its device; `weights` are those
    that a step updates, where that is known.
    """
    labels = Labels()
    card = card_of(trace, device_name)
    windows = windows_of(trace)
    work, syncs = _own(trace, windows, labels, card)
    notes: tuple[str, ...] = ()
    if detail is not None:
        there = windows_of(detail)
        lent, lent_syncs = _own(detail, there, labels, card)
        work, share = borrow_work(work, lent, there[-1].number)
        syncs = borrow_syncs(syncs, lent_syncs, there[-1].number)
        notes = (f"{units.percent(share)} of the time matched work of the detailed step",)
    work = with_updates(replace(work, labels=labels.texts()), weights, card)
    budget = budget_of(trace, windows, work, syncs, device_name)
    budget = replace(budget, notes=(*budget.notes, *notes))
    return Analysis(trace, detail, windows, work, syncs, budget)


def _own(
    trace: Trace, windows: Sequence[Window], labels: Labels, card: Card | None
) -> tuple[Work, Syncs]:
    attribution = Attribution(trace, labels)
    work = work_of(trace, windows, attribution, labels, card)
    return work, syncs_of(trace, windows, attribution, labels)
