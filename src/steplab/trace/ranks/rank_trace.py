"""RankTrace: what is kept of one rank's trace, so that hundreds of ranks fit into memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from steplab.core import Budget
from steplab.trace.analysis import Analysis, Window
from steplab.trace.analyze import analyze, match_rows
from steplab.trace.budget import communicates, device_terms, host_terms
from steplab.trace.collectives import Called, Collectives, find_calls, find_collectives
from steplab.trace.events import KERNEL, Place, Trace
from steplab.trace.load import load_trace
from steplab.trace.roofline import trace_card
from steplab.trace.spans import Intervals, union
from steplab.trace.windows import step_windows


@dataclass(frozen=True)
class Total:
    """All kernels or operators of one name in the recorded steps."""

    count: int
    ns: int


@dataclass(frozen=True)
class RankTrace:
    """One rank: its steps, its collectives, when it computed and when it only communicated."""

    file: str
    place: Place
    card: str  # name in the catalog, "": unknown, or no device
    windows: tuple[Window, ...]
    budget: Budget
    collectives: Collectives
    called: Called
    computing: Intervals
    exposed: Intervals  # communication with nothing to hide behind
    overlap: float | None  # share of the communication of the steps that computing hides
    work: Mapping[str, Total]  # kernels, or operators by their own time, by name
    silent_ns: Mapping[str, int]  # idle time for which a line of the host was the cause
    omissions: tuple[str, ...]  # what of the file cannot be used


def read_rank(path: Path, detail: Path | None = None) -> RankTrace:
    """Read one rank's trace and keep what the ranks' analysis needs.

    `detail` is a trace of one more step, which knows the sizes of the messages.
    """
    trace = load_trace(path)
    card = trace_card(trace, "")
    analysis = analyze(trace)
    on_device = analysis.budget.on_device
    terms = (
        device_terms(trace, analysis.windows, analysis.work, analysis.syncs)
        if on_device
        else host_terms(trace, analysis.syncs)
    )
    collectives = find_collectives(trace, analysis.windows)
    if detail is not None:
        collectives = _with_sizes(collectives, load_trace(detail))
    return RankTrace(
        file=path.name,
        place=trace.place,
        card=card.name if card else "",
        windows=analysis.windows,
        budget=analysis.budget,
        collectives=collectives,
        called=find_calls(trace, analysis.windows, collectives),
        computing=terms["kernels"],
        exposed=terms["communication"],
        overlap=_overlap(analysis, collectives),
        work=_work(analysis),
        silent_ns=_silences(analysis),
        omissions=trace.omissions,
    )


def _with_sizes(lean: Collectives, detail: Trace) -> Collectives:
    """Return collectives with the sizes of the same ones in the last step of a detailed trace."""
    windows = step_windows(detail)
    lending = find_collectives(detail, windows)
    rows = np.flatnonzero(lending.step == windows[-1].number)
    partner = match_rows(
        lean.kind.astype(np.int64),
        lean.step,
        (lean.start,),
        lending.kind[rows].astype(np.int64),
        (lending.start[rows],),
    )
    if not len(rows):
        return lean
    known = partner >= 0
    sent, received = (
        np.where(known, theirs[rows[partner]], own)
        for own, theirs in ((lean.sent, lending.sent), (lean.received, lending.received))
    )
    return replace(lean, sent=sent, received=received)


def _overlap(analysis: Analysis, collectives: Collectives) -> float | None:
    """Return the hidden share of the communication that the recorded steps called.

    Of a device both are the kernels that were launched in a step, whenever they ran.
    """
    trace, work = analysis.trace, analysis.work
    if len(trace.device):
        rows = (work.step >= 0) & (trace.device.kind == KERNEL)
        exchange = communicates(work)
        communicating, computing = (
            union(work.start[chosen], work.start[chosen] + work.duration[chosen])
            for chosen in (rows & exchange, rows & ~exchange)
        )
    else:
        rows = collectives.step >= 0
        communicating = union(collectives.start[rows], collectives.end[rows])
        computing = host_terms(trace, analysis.syncs)["kernels"]
    whole = communicating.total
    return (communicating & computing).total / whole if whole else None


def _work(analysis: Analysis) -> dict[str, Total]:
    """Sum the work inside steps by name, without what waits for other ranks."""
    work = analysis.work
    rows = (work.step >= 0) & ~communicates(work)
    counts = np.bincount(work.name[rows], minlength=len(work.labels))
    spent = np.bincount(work.name[rows], work.duration[rows], len(work.labels))
    return {
        work.labels[code]: Total(int(counts[code]), int(spent[code]))
        for code in np.flatnonzero(counts).tolist()
    }


def _silences(analysis: Analysis) -> dict[str, int]:
    silences, labels = analysis.silences, analysis.work.labels
    spent: dict[str, int] = {}
    for line, idle in zip(silences.line.tolist(), silences.idle.tolist(), strict=True):
        spent[labels[line]] = spent.get(labels[line], 0) + idle
    return spent
