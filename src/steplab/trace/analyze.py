"""analyze: the work of a trace by step, phase, module and line, and the budget of its time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steplab.core import Run, units
from steplab.core.errors import UserError
from steplab.core.input_file import shorten
from steplab.hardware.catalog import Card
from steplab.trace.analysis import Analysis, Labels, Syncs, Window, WorkTable
from steplab.trace.attribution import Attribution
from steplab.trace.budget import data_ranges, time_budget, waits_for_host
from steplab.trace.categories import PRODUCT_OPS, kernel_category, op_category
from steplab.trace.events import COPY, FILL, Ints, Trace, at_rows
from steplab.trace.host_calls import Launches, find_launches, find_syncs, unclear_launches
from steplab.trace.load import load_trace
from steplab.trace.roofline import MATMUL_DTYPES, add_update_costs, estimate_costs, trace_card
from steplab.trace.silences import HostView, Stacks, find_silences, one_cause_each
from steplab.trace.spans import nest
from steplab.trace.windows import device_windows, step_at, step_windows


def analyze(
    trace: Trace, detail: Trace | None = None, device_name: str = "", weights: int | None = None
) -> Analysis:
    """Attribute the work of `trace` to steps, phases, modules and lines, and budget its time.

    `detail` is a trace of one more step with stacks and shapes, whose last step lends what `trace`
    lacks. `device_name` overrides the device that the trace names; `weights` is the number of
    weights that a step updates, where that is known.
    """
    labels = Labels()
    card = trace_card(trace, device_name)
    windows = step_windows(trace)
    host = Attribution(trace, labels)
    work, syncs = _work_and_syncs(host, windows, labels, card)
    notes = [*trace.omissions, *unclear_launches(trace)]
    marked, (windows, ahead) = windows, device_windows(windows, work)
    if ahead:
        left_out = marked[0].number
        work = replace(work, step=np.where(work.step == left_out, -1, work.step))
        syncs = replace(syncs, step=np.where(syncs.step == left_out, -1, syncs.step))
        notes += ahead
    view = HostView(host)
    stacks = Stacks(view, windows)
    if detail is not None:
        there, lending = step_windows(detail), Attribution(detail, labels)
        lent, lent_syncs = _work_and_syncs(lending, there, labels, card)
        rows = _same_work(work, lent, np.flatnonzero(lent.step == there[-1].number))
        work, share = _borrow_work(work, lent, rows)
        syncs = _borrow_syncs(syncs, lent_syncs, there[-1].number)
        stacks = Stacks(HostView(lending), there, rows)
        notes += [f"the detailed step: {omission}" for omission in detail.omissions]
        notes.append(f"lines and modules are known for {units.percent(share)} of the time")
    waits = waits_for_host(trace, windows, work, syncs)
    silences, syncs = one_cause_each(
        find_silences(view, windows, waits, labels, stacks), syncs, data_ranges(trace), labels
    )
    work = add_update_costs(replace(work, labels=labels.texts()), weights, card)
    budget = time_budget(trace, windows, work, syncs, device_name)
    budget = replace(budget, notes=(*budget.notes, *notes))
    return Analysis(trace, detail, windows, work, syncs, budget, silences)


def _work_and_syncs(
    host: Attribution, windows: Sequence[Window], labels: Labels, card: Card | None
) -> tuple[WorkTable, Syncs]:
    work = work_table(host.trace, windows, host, labels, card)
    return work, find_syncs(host.trace, windows, host, labels)


def analyze_run(run: Run, folder: Path) -> Analysis | None:
    """Analyze the first trace of a profiled Run, whose files are in `folder`.

    None for a Run without a profile, or one that was copied without its traces.
    """
    return next(analyze_cycles(run, folder), None)


def analyze_cycles(run: Run, folder: Path) -> Iterator[Analysis]:
    """Yield the analysis of every trace of a profiled Run, one cycle of its schedule each.

    Nothing is yielded where the first is missing, as in a Run that was copied without its traces.
    """
    profile = run.profile
    if profile is None or not profile.traces:
        return
    paths = [_trace_file(run, folder, name) for name in profile.traces]
    if not paths[0].is_file():
        return
    path = _trace_file(run, folder, profile.detail) if profile.detail else None
    detail = load_trace(path) if path and path.is_file() else None
    for path in paths:
        yield analyze_trace(run, path, detail)


def _trace_file(run: Run, folder: Path, name: str) -> Path:
    """Return a file beside the Run; a record that came from elsewhere may name any other."""
    if Path(name).name != name:
        raise UserError(f"Run {run.id} names a trace outside of its folder: {shorten(name)}.")
    return folder / name


def analyze_trace(run: Run, path: Path, detail: Trace | None) -> Analysis:
    """Analyze one trace of `run`, with the device, weights and unprofiled time of the Run."""
    device = run.environment.device_name if run.spec.device == "cuda" else ""
    weights = run.profile.updated_weights if run.profile else None
    analysis = analyze(load_trace(path), detail, device, weights)
    unprofiled = run.clock.step.median if run.clock else None
    return replace(analysis, budget=replace(analysis.budget, unprofiled_ms=unprofiled))


def work_table(
    trace: Trace,
    windows: Sequence[Window],
    attribution: Attribution,
    labels: Labels,
    card: Card | None,
) -> WorkTable:
    """Return the work of a trace: the rows of Trace.device, or of Trace.ops without a device."""
    on_device = len(trace.device) > 0
    rows = trace.device if on_device else trace.ops
    launches = find_launches(trace) if on_device else _own_calls(trace)
    origins = attribution.at(launches.thread, launches.called)
    # Operators are not looked up: the profiler may round the start of a child to its parent's.
    op_row = origins.op_row if on_device else np.arange(len(rows))
    categories, category = (
        _device_categories(trace, op_row) if on_device else _operator_categories(trace)
    )
    costs = estimate_costs(trace, op_row, card)
    dtypes = labels.codes(MATMUL_DTYPES[1:])
    return WorkTable(
        labels=labels.texts(),
        start=rows.start,
        duration=rows.duration if on_device else attribution.ops.self_time(),
        name=labels.translate(trace, rows.name),
        category=labels.codes(categories)[category],
        step=_steps(windows, launches),
        phase=origins.phase,
        module=origins.module,
        line=origins.line,
        function=origins.function,
        op=origins.op if on_device else labels.translate(trace, rows.name),
        op_row=op_row,
        launched=launches.returned,
        flops=costs.flops,
        bytes=costs.bytes,
        ideal=costs.ideal,
        matmul_dtype=np.concatenate(([0], dtypes)).astype(np.int32)[costs.matmul_dtype],
    )


def _own_calls(trace: Trace) -> Launches:
    """Without a device, every operator is its own launch."""
    ops = trace.ops
    unknown = np.full(len(ops), -1, np.int64)
    return Launches(unknown, ops.thread.astype(np.int64), ops.start, unknown)


def _steps(windows: Sequence[Window], launches: Launches) -> Ints:
    """Return the step of each launch, -1: none; without a recorded host, the only step."""
    unknown = windows[0].number if len(windows) == 1 else -1
    return np.where(launches.called >= 0, step_at(windows, launches.called), unknown)


Categories = tuple[list[str], Ints]  # distinct names, and which of them each row has


def _device_categories(trace: Trace, op_row: Ints) -> Categories:
    device, ops = trace.device, trace.ops
    op, dtypes = at_rows(ops.name, op_row), at_rows(ops.dtypes, op_row)
    triples = np.stack([device.name.astype(np.int64), op, dtypes, device.kind.astype(np.int64)])
    distinct, row = np.unique(triples, axis=1, return_inverse=True)
    names = [
        {COPY: "copy", FILL: "memset"}.get(kind)
        or kernel_category(trace.text(name), trace.text(op), trace.text(dtypes))
        for name, op, dtypes, kind in distinct.T.tolist()
    ]
    return names, row.ravel()


def _operator_categories(trace: Trace) -> Categories:
    """Return categories of operators; one that calls another product is not a product itself."""
    ops = trace.ops
    outer = _calls_product(trace)
    triples = np.stack([ops.name.astype(np.int64), ops.dtypes.astype(np.int64), outer])
    distinct, row = np.unique(triples, axis=1, return_inverse=True)
    names = [
        "other" if outer else op_category(trace.text(name), trace.text(dtypes))
        for name, dtypes, outer in distinct.T.tolist()
    ]
    return names, row.ravel()


def _calls_product(trace: Trace) -> NDArray[np.bool_]:
    """Whether each operator has a product inside that is a product too (linear calls addmm)."""
    products = nest(trace.ops, trace.named(trace.ops, PRODUCT_OPS.__contains__))
    outer = products.parents()
    found = np.zeros(len(trace.ops), np.bool_)
    found[outer[outer >= 0]] = True
    return found


# Borrowing: a lean trace takes module, line, operator and shapes from a detailed trace of the same
# step. The n-th kernel of a name within a phase of a step is the n-th of that name and phase in the
# detailed step. Where the two steps do not have equally many of them, nothing is borrowed.


def _borrow_work(lean: WorkTable, detail: WorkTable, row: Ints) -> tuple[WorkTable, float]:
    """Return `lean` with the attribution of its partners in `detail`, and the share that has one.

    Both use the same labels. The share is of the time of the work inside steps. A phase that the
    lean trace knows stays; `op_row` and the costs are those of the detail.
    """
    found = row >= 0
    kept = {"start", "duration", "name", "step", "launched", "labels", "phase"}
    columns = {}
    for column in lean.__dataclass_fields__.keys() - kept:
        own, lent = getattr(lean, column), getattr(detail, column)
        columns[column] = np.where(found, lent[row], own) if len(lent) else own
    columns["op_row"] = np.where(found, columns["op_row"], -1)
    for column in ("flops", "bytes", "ideal"):
        columns[column] = np.where(found, columns[column], np.nan)
    if len(detail):
        columns["phase"] = np.where(found & (lean.phase == 0), detail.phase[row], lean.phase)
    inside = lean.duration * (lean.step >= 0)
    share = float(inside[found].sum() / inside.sum()) if inside.sum() else 0.0
    return replace(lean, **columns), share


def _borrow_syncs(lean: Syncs, detail: Syncs, step: int) -> Syncs:
    """Return `lean` with the lines of step `step` of `detail`: the n-th call of a name by an op."""
    rows = np.flatnonzero(detail.step == step)
    scale = 1 + int(max(lean.op.max(initial=0), detail.op.max(initial=0)))
    row = match_rows(
        lean.call.astype(np.int64) * scale + lean.op,
        lean.step,
        (lean.start,),
        (detail.call.astype(np.int64) * scale + detail.op)[rows],
        (detail.start[rows],),
    )
    if not len(rows):
        return lean
    return replace(lean, line=np.where(row >= 0, detail.line[rows[row]], lean.line))


def match_rows(
    key: Ints, step: Ints, order: tuple[Ints, ...], other_key: Ints, other_order: tuple[Ints, ...]
) -> Ints:
    """Return for every row the row of its partner, -1 for none.

    Partners have the same key and, sorted by `order` (the first column counts most), the same
    position among the rows of that key in their step; both steps must have equally many of them.
    Rows with step -1 have no partner.
    """
    partner = np.full(len(key), -1, np.int64)
    if not len(key) or not len(other_key):
        return partner
    there = np.lexsort((*other_order[::-1], other_key))
    keys, first, counts = np.unique(other_key[there], return_index=True, return_counts=True)
    here = np.lexsort((*order[::-1], key, step))
    begins = np.flatnonzero(np.diff(key[here], prepend=-1) | np.diff(step[here], prepend=-2))
    sizes = np.diff(begins, append=len(here))
    place = np.minimum(np.searchsorted(keys, key[here[begins]]), len(keys) - 1)
    equal = (keys[place] == key[here[begins]]) & (counts[place] == sizes)
    equal &= step[here[begins]] >= 0
    position = np.arange(len(here)) - np.repeat(begins, sizes)
    fits = np.repeat(equal, sizes)
    partner[here[fits]] = there[(np.repeat(first[place], sizes) + position)[fits]]
    return partner


def _same_work(lean: WorkTable, detail: WorkTable, rows: Ints) -> Ints:
    """Return rows of `detail` by phase and name; by name alone where that finds none.

    Without stacks a lean trace of somebody's own loop takes the first gradient, which is filled
    with ones, for no part of backward: 8 fills there are 7 here, and 1 without a phase. All
    kernels of a replayed CUDA graph have one launch: there the order on the device counts.
    """
    scale = 1 + int(max(lean.name.max(initial=0), detail.name.max(initial=0)))
    orders = (lean.launched, lean.start), (detail.launched[rows], detail.start[rows])

    def partners(with_phase: int) -> Ints:
        key = lean.phase.astype(np.int64) * scale * with_phase + lean.name
        other = (detail.phase.astype(np.int64) * scale * with_phase + detail.name)[rows]
        return match_rows(key, lean.step, orders[0], other, orders[1])

    by_phase = partners(1)
    partner = np.where(by_phase >= 0, by_phase, partners(0))
    return np.where(partner >= 0, rows[partner], -1) if len(rows) else partner
