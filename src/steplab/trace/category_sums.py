"""Work by category in every step: time, launches and ideal, each piece of work looked at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steplab.core import Category
from steplab.trace.analysis import Floats, Window, WorkTable
from steplab.trace.events import Codes, Ints
from steplab.trace.spans import Intervals
from steplab.trace.windows import borders, step_index

MS = 1e-6  # per ns


@dataclass(frozen=True)
class _Cells:
    """Sums of some work by step and category: tables of one row per step."""

    names: tuple[str, ...]  # of the categories, one column each
    ns: Floats  # time counted to the category
    launches: Ints
    ideal: Floats  # ns, of what has a model
    modeled: Floats  # the part of `ns` that has a model


def kernel_categories(
    windows: Sequence[Window], work: WorkTable, rows: Ints
) -> list[tuple[Category, ...]]:
    """Sum kernels; where several run at once, the first to start counts.

    The ideal of a kernel counts in full even where an earlier one hides it: the device has to do
    the work of both. It is spread over the steps in which the kernel runs.
    """
    start, duration = work.start[rows], work.duration[rows]
    end = start + duration
    reached = np.maximum.accumulate(end)  # the latest end so far
    own = np.maximum(start, np.concatenate((start[:1], reached[:-1])))
    ideal = np.minimum(work.ideal[rows], duration)
    codes, column = np.unique(work.category[rows], return_inverse=True)
    low, high = borders(windows)
    shape = len(windows), len(codes)
    ns, modeled = np.zeros(shape), np.zeros(shape)
    for i in range(len(codes)):
        here = (column == i) & (own < end)
        ns[:, i] = Intervals(own[here], end[here]).within(low, high)
        here &= np.isfinite(ideal)
        modeled[:, i] = Intervals(own[here], end[here]).within(low, high)
    begun = step_index(windows, start)
    launches = _by_cell(begun, column, np.ones(len(rows)), shape).astype(np.int64)
    known = np.isfinite(ideal) & (duration > 0)
    rate = ideal[known] / duration[known]
    spread = _spread(windows, start[known], end[known], rate, column[known], len(codes))
    return _categories(_Cells(_names(work, codes), ns, launches, spread, modeled))


def _spread(
    windows: Sequence[Window], start: Ints, end: Ints, rate: Floats, column: Ints, columns: int
) -> Floats:
    """Return `rate` times the ns of each [start, end) within each step, summed by column.

    A span is looked at where it begins and where it ends; for the steps in between only the sum of
    all rates is carried on, so that spans across all steps do not cost steps times spans.
    """
    low, high = borders(windows)
    first = np.searchsorted(high, start, "right")
    last = np.searchsorted(low, end, "left") - 1
    some = first <= last
    start, end, first, last = start[some], end[some], first[some], last[some]
    rate, column = rate[some], column[some]
    ends = np.repeat(np.arange(len(first)), np.where(first < last, 2, 1))
    step = np.where(np.diff(ends, prepend=-1) > 0, first[ends], last[ends])
    inside = np.minimum(end[ends], high[step]) - np.maximum(start[ends], low[step])
    shape = len(windows), columns
    total = _by_cell(step, column[ends], rate[ends] * inside, shape)
    across = last - first > 1
    if across.any():
        total += (high - low)[:, None] * _carried(
            first[across] + 1, last[across], rate[across], column[across], shape
        )
    return total


def _carried(begin: Ints, stop: Ints, rate: Floats, column: Ints, shape: tuple[int, int]) -> Floats:
    """Return the sum of the rates by row and column, each from row `begin` to before `stop`."""
    changes = (
        _by_cell(begin, column, values, shape) - _by_cell(stop, column, values, shape)
        for values in (rate, np.ones(len(rate)))
    )
    total, count = (np.cumsum(change, axis=0) for change in changes)
    return np.where(count > 0.5, total, 0.0)  # no dust of rates that came and went


def host_categories(
    windows: Sequence[Window], work: WorkTable, ops: Intervals
) -> list[tuple[Category, ...]]:
    """Sum the self times of operators, scaled to the time in which any of them ran."""
    begun = step_index(windows, work.start)
    rows = np.flatnonzero(begun >= 0)
    step, self_time = begun[rows], work.duration[rows].astype(np.float64)
    whole = np.bincount(step, self_time, len(windows))
    scale = ops.within(*borders(windows)) / np.maximum(whole, 1.0)
    counted, ideal = self_time * scale[step], work.ideal[rows]
    known = np.isfinite(ideal)
    codes, column = np.unique(work.category[rows], return_inverse=True)
    shape = len(windows), len(codes)

    def cells(values: Floats) -> Floats:
        return _by_cell(step, column, values, shape)

    launches = cells(np.ones(len(rows))).astype(np.int64)
    sums = (cells(np.where(known, values, 0.0)) for values in (ideal, counted))
    return _categories(_Cells(_names(work, codes), cells(counted), launches, *sums))


def _by_cell(step: Ints, column: Ints, values: Floats, shape: tuple[int, int]) -> Floats:
    """Sum values by step and column; what has no step is left out."""
    inside = step >= 0
    cell = step[inside] * shape[1] + column[inside]
    return np.bincount(cell, values[inside], shape[0] * shape[1]).astype(np.float64).reshape(shape)


def _names(work: WorkTable, codes: Codes) -> tuple[str, ...]:
    return tuple(work.labels[code] for code in codes.tolist())


def _categories(cells: _Cells) -> list[tuple[Category, ...]]:
    """Return the categories of every step, most time first."""
    found: list[list[Category]] = [[] for _ in cells.ns]
    steps, columns = np.nonzero((cells.ns > 0) | (cells.launches > 0))
    sums = [table[steps, columns].tolist() for table in (cells.ns, cells.launches)]
    sums += [table[steps, columns].tolist() for table in (cells.ideal, cells.modeled)]
    for step, column, ns, launches, ideal, modeled in zip(
        steps.tolist(), columns.tolist(), *sums, strict=True
    ):
        known = ideal > 0 or modeled > 0
        found[step].append(
            Category(
                name=cells.names[column],
                ms=ns * MS,
                launches=launches,
                ideal_ms=ideal * MS if known else None,
                modeled_ms=modeled * MS,
            )
        )
    return [tuple(sorted(one, key=lambda category: -category.ms)) for one in found]
