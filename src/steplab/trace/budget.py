"""The time budget: every instant of a step counted once, each term from its own events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from steplab.record.budget import TERMS, Budget, Category, StepBudget
from steplab.trace.analysis import Floats, Syncs, Window, Work
from steplab.trace.costs import card_of, device_name_of, peak_sources
from steplab.trace.cut import without_cut
from steplab.trace.events import KERNEL, Ints, Trace
from steplab.trace.gaps import (
    begun_in,
    data_ranges,
    host_events,
    idle_terms,
    launch_calls,
    operators,
)
from steplab.trace.intervals import NOTHING, Intervals, union_of

COMMUNICATION = "communication"  # the category, and the term of the same name
MS = 1e-6  # per ns


def budget_of(
    trace: Trace,
    windows: Sequence[Window],
    work: Work,
    syncs: Syncs,
    device_name: str = "",
) -> Budget:
    """Return one StepBudget per window, but of a first step that is cut.

    `work` has the rows of trace.device, or of trace.ops where there is no device; `device_name`
    tells the card where the trace itself does not.
    """
    if not len(trace.device):
        steps = _host_steps(trace, windows, work)
        note = "no device in the trace: operators count as kernels, and the ideal is unknown"
        return Budget(steps, on_device=False, notes=(note,))
    whole, remarks = without_cut(windows, work)
    steps = _device_steps(trace, whole, work, syncs)
    card = card_of(trace, device_name)
    dtypes = [work.labels[code] for code in np.unique(work.matmul_dtype) if code > 0]
    peaks = peak_sources(card, dtypes) if card else {}
    budget = Budget(steps, on_device=True, peaks=peaks)
    notes = [_launch_note(trace, whole, budget.typical.number), *remarks]
    if card is None:
        name = device_name or device_name_of(trace)
        missing = f"{name} is not in the catalog" if name else "the trace does not name its device"
        notes.append(f"{missing}: the ideal is unknown")
    return replace(budget, notes=tuple(notes))


def _launch_note(trace: Trace, windows: Sequence[Window], number: int) -> str:
    window = next(window for window in windows if window.number == number)
    calls = begun_in(launch_calls(trace), window)
    begun = begun_in(trace.device.start, window)
    return f"{calls:,} launch calls by the host; {begun:,} kernels, copies and fills on the device"


def _device_steps(
    trace: Trace, windows: Sequence[Window], work: Work, syncs: Syncs
) -> tuple[StepBudget, ...]:
    is_kernel = trace.device.kind == KERNEL
    talks = np.array([label == COMMUNICATION for label in work.labels])[work.category]
    end = work.start + work.duration
    kernels = union_of(work.start[is_kernel & ~talks], end[is_kernel & ~talks])
    communication = union_of(work.start[is_kernel & talks], end[is_kernel & talks]) - kernels
    copies = union_of(work.start[~is_kernel], end[~is_kernel]) - kernels - communication
    sets = {
        "kernels": kernels,
        "communication": communication,
        "copies": copies,
        **idle_terms(trace, windows, work, syncs),
    }
    running = _Running.of(work, np.flatnonzero(is_kernel & ~talks))
    return _steps(windows, sets, [running.categories(work, window) for window in windows])


def _host_steps(trace: Trace, windows: Sequence[Window], work: Work) -> tuple[StepBudget, ...]:
    """Without a device: operators, then fetching data, then whatever else was recorded."""
    ops = operators(trace)
    data = data_ranges(trace) - ops
    sets = {"kernels": ops, "data wait": data, "launch": host_events(trace) - ops - data}
    categories = [_host_categories(work, window, ops) for window in windows]
    return _steps(windows, sets, categories)


def _steps(
    windows: Sequence[Window],
    sets: Mapping[str, Intervals],
    categories: Sequence[tuple[Category, ...]],
) -> tuple[StepBudget, ...]:
    start, end = ([getattr(w, border) for w in windows] for border in ("start", "end"))
    ns = {name: sets.get(name, NOTHING).within(start, end).tolist() for name in TERMS}
    return tuple(
        StepBudget(
            number=window.number,
            wall_ms=(window.end - window.start) * MS,
            terms={name: ns[name][i] * MS for name in TERMS},
            categories=categories[i],
        )
        for i, window in enumerate(windows)
    )


@dataclass(frozen=True)
class _Running:
    """Kernels in order of start. Where several run, the one that started first counts."""

    rows: Ints  # of Work
    start: Ints  # ns
    end: Ints
    own: Ints  # from here to its end no earlier kernel runs
    reached: Ints  # latest end so far
    ideal: Floats  # ns

    @staticmethod
    def of(work: Work, rows: Ints) -> _Running:
        start, duration = work.start[rows], work.duration[rows]
        reached = np.maximum.accumulate(start + duration)
        own = np.maximum(start, np.concatenate((start[:1], reached[:-1])))
        ideal = np.minimum(work.ideal[rows], duration)
        return _Running(rows, start, start + duration, own, reached, ideal)

    def categories(self, work: Work, window: Window) -> tuple[Category, ...]:
        """Sum one window by category.

        The ideal of a kernel counts in full even where an earlier one hides it: the device has
        to do the work of both.
        """
        first = np.searchsorted(self.reached, window.start, "right")
        some = slice(first, max(first, np.searchsorted(self.start, window.end, "left")))
        start, end = self.start[some], self.end[some]
        counted = _overlap(self.own[some], end, window).astype(np.float64)
        part = _overlap(start, end, window) / np.maximum(end - start, 1)
        begun = start >= window.start
        return _by_category(work, self.rows[some], counted, begun, self.ideal[some] * part)


def _host_categories(work: Work, window: Window, ops: Intervals) -> tuple[Category, ...]:
    """Self times of the operators, scaled to sum to the time in which any of them ran."""
    rows = np.arange(*np.searchsorted(work.start, (window.start, window.end)))
    self_time = work.duration[rows].astype(np.float64)
    spent = float(ops.within(window.start, window.end))
    counted = self_time * (spent / max(self_time.sum(), 1.0))
    return _by_category(work, rows, counted, np.ones(len(rows), bool), work.ideal[rows])


def _by_category(
    work: Work, rows: Ints, counted: Floats, begun: NDArray[np.bool_], ideal: Floats
) -> tuple[Category, ...]:
    """Sum ns by category; rows without a model have a nan in `ideal`."""
    code = work.category[rows]
    modelled = np.isfinite(ideal) & ((counted > 0) | (ideal > 0))

    def total(values: Floats | NDArray[np.bool_]) -> Floats:
        return np.bincount(code, values, len(work.labels)).astype(np.float64)

    ms, launches = total(counted) * MS, total(begun)
    ideal_ms = total(np.where(modelled, ideal, 0.0)) * MS
    modelled_ms, models = total(np.where(modelled, counted, 0.0)) * MS, total(modelled)
    found = [
        Category(
            name=work.labels[i],
            ms=float(ms[i]),
            launches=int(launches[i]),
            ideal_ms=float(ideal_ms[i]) if models[i] else None,
            modelled_ms=float(modelled_ms[i]),
        )
        for i in np.flatnonzero((ms > 0) | (launches > 0)).tolist()
    ]
    return tuple(sorted(found, key=lambda category: -category.ms))


def _overlap(start: Ints, end: Ints, window: Window) -> Ints:
    """Return the ns of each [start, end) within the window."""
    return np.maximum(np.minimum(end, window.end) - np.maximum(start, window.start), 0)
