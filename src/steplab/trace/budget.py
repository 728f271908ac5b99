"""The time budget: every instant of a step counted once, each term from its own events.

Every instant of a step belongs to the first of TERMS that was going on. While nothing runs on the
device, the launch of the next work decides: until the launch call returned, the host was late, and
its data ranges and sync calls say why; after that, the device was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from steplab.core import Budget, Category, StepBudget
from steplab.core.budget import TERMS
from steplab.trace.analysis import Floats, Syncs, Window, WorkTable
from steplab.trace.categories import is_communication_op
from steplab.trace.category_sums import host_categories, kernel_categories
from steplab.trace.events import KERNEL, Ints, Spans, Trace
from steplab.trace.phases import AUTOGRAD_NODE, phase_of_range
from steplab.trace.roofline import peak_sources, trace_card, trace_device_name
from steplab.trace.spans import EMPTY, Intervals, nest, union
from steplab.trace.windows import STEP_RANGE, are_marked, borders, drop_cut_steps

COMMUNICATION = "communication"  # the category, and the term of the same name
GLOO = "gloo:"  # how the ranges of its threads begin
HOST_TERMS = ("kernels", COMMUNICATION, "data wait", "synchronization", "launch")
IDLE_TERMS = ("data wait", "synchronization", "launch", "dispatch")
MS = 1e-6  # per ns


def time_budget(
    trace: Trace,
    windows: Sequence[Window],
    work: WorkTable,
    syncs: Syncs,
    device_name: str = "",
) -> Budget:
    """Return one StepBudget per window, except for first steps that are cut.

    `work` has the rows of trace.device, or of trace.ops where there is no device; `device_name` is
    the card where the trace does not name it.
    """
    if not len(trace.device):
        steps = _host_steps(trace, windows, work, syncs)
        note = "no device in the trace: operators count as kernels, and the ideal is unknown"
        return Budget(steps, False, notes=(note,), marked=are_marked(windows, trace))
    whole, remarks = drop_cut_steps(windows, work, trace)
    steps = _device_steps(trace, whole, work, syncs)
    card = trace_card(trace, device_name)
    dtypes = [work.labels[code] for code in np.unique(work.matmul_dtype) if code > 0]
    peaks = peak_sources(card, dtypes) if card else {}
    budget = Budget(steps, on_device=True, peaks=peaks, marked=are_marked(windows, trace))
    notes = [_launch_note(trace, work, whole, budget.typical.number), *remarks]
    if card is None:
        name = device_name or trace_device_name(trace)
        missing = f"{name} is not in the catalog" if name else "the trace does not name its device"
        notes.append(f"{missing}: the ideal is unknown")
    return replace(budget, notes=tuple(notes))


def _launch_note(trace: Trace, work: WorkTable, windows: Sequence[Window], number: int) -> str:
    """Say how many calls launched the work of a step, and how much work began in it."""
    window = next(window for window in windows if window.number == number)
    launched = trace.device.correlation[work.step == number]
    calls = int(np.isin(trace.calls.correlation, launched[launched > 0]).sum())
    begun = _count_in(trace.device.start, window)
    return f"{calls:,} launch calls by the host; {begun:,} kernels, copies and fills on the device"


def launch_calls(trace: Trace, windows: Sequence[Window]) -> list[int]:
    """Return how many calls of the host launched device work in each step."""
    return [_count_in(_launch_calls(trace), window) for window in windows]


def _launch_calls(trace: Trace) -> Ints:
    """Return the start (ns) of each host call that launched device work; a graph replay is one."""
    return trace.calls.start[np.isin(trace.calls.correlation, trace.device.correlation)]


def _count_in(times: Ints, window: Window) -> int:
    """Return how many of the sorted times lie in a window."""
    return int(np.diff(np.searchsorted(times, (window.start, window.end)))[0])


def _device_steps(
    trace: Trace, windows: Sequence[Window], work: WorkTable, syncs: Syncs
) -> tuple[StepBudget, ...]:
    rows = np.flatnonzero((trace.device.kind == KERNEL) & ~communicates(work))
    sets = device_terms(trace, windows, work, syncs)
    return _steps(windows, sets, kernel_categories(windows, work, rows))


def device_terms(
    trace: Trace, windows: Sequence[Window], work: WorkTable, syncs: Syncs
) -> Mapping[str, Intervals]:
    """Return the instants of every term; `work` has the rows of trace.device."""
    is_kernel, is_exchange = trace.device.kind == KERNEL, communicates(work)

    def covered(rows: NDArray[np.bool_]) -> Intervals:
        return union(work.start[rows], work.start[rows] + work.duration[rows])

    kernels = covered(is_kernel & ~is_exchange)
    communication = covered(is_kernel & is_exchange) - kernels
    copies = covered(~is_kernel) - kernels - communication
    busy = {"kernels": kernels, "communication": communication, "copies": copies}
    return {**busy, **idle_terms(trace, windows, work, syncs)}


def communicates(work: WorkTable) -> NDArray[np.bool_]:
    """Which rows exchange data with other ranks."""
    return np.array([label == COMMUNICATION for label in work.labels])[work.category]


def _host_steps(
    trace: Trace, windows: Sequence[Window], work: WorkTable, syncs: Syncs
) -> tuple[StepBudget, ...]:
    sets = host_terms(trace, syncs)
    # The time of an operator that waits for other ranks is in the term, not in a category.
    work = replace(work, duration=np.where(communicates(work), 0, work.duration))
    return _steps(windows, sets, host_categories(windows, work, sets["kernels"]))


def host_terms(trace: Trace, syncs: Syncs) -> Mapping[str, Intervals]:
    """Without a device: operators, then other ranks, data fetching, and whatever was recorded.

    A recording without the device's work may have calls that waited for it.
    """
    communication = host_communication(trace)
    ops = operators(trace) - communication
    data = data_ranges(trace) - ops - communication
    sync = union(syncs.start, syncs.start + syncs.duration) - ops - communication - data
    host = host_events(trace) - ops - communication - data - sync
    terms = (ops, communication, data, sync, host)
    return dict(zip(HOST_TERMS, terms, strict=True))


def host_communication(trace: Trace) -> Intervals:
    """Return when a collective of the CPU was under way while no operator computed.

    Gloo works in threads of its own, in ranges. Whoever waits for it may stand in an operator that
    does nothing else: a collective, or a node of autograd written in Python.
    """
    ranges, ops = trace.ranges, trace.ops
    working = trace.named(ranges, lambda name: name.startswith(GLOO))
    waiting = trace.named(ops, is_communication_op)
    under_way = union(ranges.start[working], ranges.end[working])
    under_way |= union(ops.start[waiting], ops.end[waiting])
    if not len(under_way):
        return EMPTY
    computing = trace.named(ops, _computes)
    inside = computing & (nest(ops, waiting).innermost(ops.thread, ops.start) >= 0)
    outside = union(ops.start[computing], ops.end[computing])
    outside -= union(ops.start[waiting], ops.end[waiting])
    return under_way - outside - union(ops.start[inside], ops.end[inside])


def _computes(name: str) -> bool:
    """Whether an operator does work of its own: a node of autograd only calls others."""
    return "::" in name and AUTOGRAD_NODE not in name and not is_communication_op(name)


def _steps(
    windows: Sequence[Window],
    sets: Mapping[str, Intervals],
    categories: Sequence[tuple[Category, ...]],
) -> tuple[StepBudget, ...]:
    start, end = borders(windows)
    ns = {name: sets.get(name, EMPTY).within(start, end).tolist() for name in TERMS}
    return tuple(
        StepBudget(
            number=window.number,
            wall_ms=(window.end - window.start) * MS,
            terms={name: ns[name][i] * MS for name in TERMS},
            categories=categories[i],
        )
        for i, window in enumerate(windows)
    )


# Idle time of the device.


def idle_terms(
    trace: Trace, windows: Sequence[Window], work: WorkTable, syncs: Syncs
) -> Mapping[str, Intervals]:
    """Return the idle instants of the device by term; `work` holds the rows of trace.device.

    A gap before work with an unknown launch is explained by what the host was recorded doing.
    """
    start, end, row = _bounds(windows, work)
    launched = _launch_times(trace, work, start, row)
    known = launched >= 0
    until = np.clip(launched, start, end)
    late = union(start[known], until[known])
    unclear = union(start[~known], end[~known])
    open_ = late | unclear
    data = data_ranges(trace) & open_
    sync = (union(syncs.start, syncs.start + syncs.duration) & open_) - data
    launch = (late | (unclear & host_events(trace))) - data - sync
    dispatch = union(until[known], end[known])
    return dict(zip(IDLE_TERMS, (data, sync, launch, dispatch), strict=True))


def waits_for_host(
    trace: Trace, windows: Sequence[Window], work: WorkTable, syncs: Syncs
) -> Intervals:
    """Return when nothing ran because the host launched nothing, neither fetching nor waiting.

    Recorded or not: the terms `launch` and residual. Without a device: when no operator ran.
    """
    steps = union(*borders(windows))
    if not len(trace.device):
        waited = union(syncs.start, syncs.start + syncs.duration)
        return steps - operators(trace) - host_communication(trace) - data_ranges(trace) - waited
    idle = idle_terms(trace, windows, work, syncs)
    busy = union(work.start, work.start + work.duration)
    return steps - busy - idle["data wait"] - idle["synchronization"] - idle["dispatch"]


def idle_before(
    trace: Trace,
    windows: Sequence[Window],
    work: WorkTable,
    syncs: Syncs,
    within: Sequence[Window],
) -> Mapping[str, Floats]:
    """Return by term the idle ns in some of the windows that each row of `work` ended by starting.

    There is one entry more than rows: the last holds idle time that no work ended. The entries of a
    term sum to its time in the budget of these windows.
    """
    start, end, row = _bounds(windows, work)
    ended_by = np.where(row >= 0, row, len(work))
    chosen = union(*borders(within))

    def by_row(instants: Intervals) -> Floats:
        ns = (instants & chosen).within(start, end)
        return np.bincount(ended_by, ns, len(work) + 1).astype(np.float64)

    terms = idle_terms(trace, windows, work, syncs)
    return {name: by_row(instants) for name, instants in terms.items()}


def data_ranges(trace: Trace) -> Intervals:
    """Return when the thread that runs the steps fetched a batch; other threads may fetch ahead."""
    ranges = trace.ranges
    is_data = trace.named(ranges, lambda name: phase_of_range(name) == "data")
    is_step = trace.named(ranges, _is_step)
    if is_step.any():
        is_data &= np.isin(ranges.thread, ranges.thread[is_step])
    return union(ranges.start[is_data], ranges.end[is_data])


def host_events(trace: Trace) -> Intervals:
    """Return when the host was in anything recorded; the range of a step explains nothing."""
    calls, python = (union(spans.start, spans.end) for spans in (trace.calls, trace.python))
    return _all_but_steps(trace, trace.ranges) | operators(trace) | calls | python


def operators(trace: Trace) -> Intervals:
    """Return when the host was in an operator; old traces have steps among the operators."""
    return _all_but_steps(trace, trace.ops)


def _is_step(name: str) -> bool:
    return name.startswith(STEP_RANGE)


def _all_but_steps(trace: Trace, spans: Spans) -> Intervals:
    rows = ~trace.named(spans, _is_step)
    return union(spans.start[rows], spans.end[rows])


def _bounds(windows: Sequence[Window], work: WorkTable) -> tuple[Ints, Ints, Ints]:
    """Return start, end and the row of work that ends it (-1: none) for every gap of the device."""
    busy = union(work.start, work.start + work.duration)
    low = min([window.start for window in windows] + busy.start[:1].tolist())
    high = max([window.end for window in windows] + busy.end[-1:].tolist())
    start = np.concatenate(([low], busy.end))
    end = np.concatenate((busy.start, [high]))
    row = np.concatenate((np.searchsorted(work.start, busy.start, "left"), [-1]))
    some = start < end
    return start[some], end[some], row[some]


def _launch_times(trace: Trace, work: WorkTable, start: Ints, row: Ints) -> Ints:
    """Return when the launch call of the work after each gap returned; -1 where that is unknown.

    Work of a replayed graph that is already running needs no further launch.
    """
    launched = np.where(row >= 0, work.launched[row], -1)
    correlation = trace.device.correlation
    before = np.maximum(row, 1) - 1
    same_call = (row > 0) & (correlation[row] == correlation[before]) & (launched >= 0)
    return np.where(same_call, start, launched)
