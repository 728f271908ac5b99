"""The Work of a trace: its device rows, or its operators where there is no device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from steplab.hardware.catalog import Card
from steplab.trace.analysis import Window, Work
from steplab.trace.attribution import Attribution, named_so
from steplab.trace.categories import category_of, operator_category
from steplab.trace.costs import MATMUL_DTYPES, costs_of
from steplab.trace.events import COPY, FILL, Codes, Ints, Trace
from steplab.trace.labels import Labels
from steplab.trace.launches import Launches, launches_of
from steplab.trace.nesting import nest
from steplab.trace.op_categories import PRODUCTS
from steplab.trace.windows import step_at


def work_of(
    trace: Trace,
    windows: Sequence[Window],
    attribution: Attribution,
    labels: Labels,
    card: Card | None,
) -> Work:
    """Return the work of a trace, in the order of Trace.device (or Trace.ops)."""
    on_device = len(trace.device) > 0
    rows = trace.device if on_device else trace.ops
    asked = launches_of(trace) if on_device else _own_calls(trace)
    places = attribution.at(asked.thread, asked.called)
    # An operator is its own place: the profiler may round its child's start to its own.
    op_row = places.op_row if on_device else np.arange(len(rows))
    kinds = _device_categories(trace, op_row) if on_device else _operator_categories(trace)
    costs = costs_of(trace, op_row, card)
    dtypes = labels.codes(MATMUL_DTYPES[1:])
    return Work(
        labels=labels.texts(),
        start=rows.start,
        duration=rows.duration if on_device else attribution.ops.self_time(),
        name=labels.translated(trace, rows.name),
        category=labels.codes(kinds[0])[kinds[1]],
        step=_steps(windows, asked),
        phase=places.phase,
        module=places.module,
        line=places.line,
        op=places.op if on_device else labels.translated(trace, rows.name),
        op_row=op_row,
        launched=asked.returned,
        flops=costs.flops,
        bytes=costs.bytes,
        ideal=costs.ideal,
        matmul_dtype=np.concatenate(([0], dtypes)).astype(np.int32)[costs.matmul_dtype],
    )


def _own_calls(trace: Trace) -> Launches:
    """Without a device every operator is its own launch."""
    ops = trace.ops
    unknown = np.full(len(ops), -1, np.int64)
    return Launches(unknown, ops.thread.astype(np.int64), ops.start, unknown)


def _steps(windows: Sequence[Window], asked: Launches) -> Ints:
    """The step of each launch; where the host is not in the trace, the only one there is."""
    unknown = windows[0].number if len(windows) == 1 else -1
    return np.where(asked.called >= 0, step_at(windows, asked.called), unknown)


Named = tuple[list[str], Ints]  # distinct categories' names, and which of them each row has


def _device_categories(trace: Trace, op_row: Ints) -> Named:
    device, ops = trace.device, trace.ops
    op = _column(ops.name, op_row)
    dtypes = _column(ops.dtypes, op_row)
    triples = np.stack([device.name.astype(np.int64), op, dtypes, device.kind.astype(np.int64)])
    distinct, row = np.unique(triples, axis=1, return_inverse=True)
    names = [
        {COPY: "copy", FILL: "memset"}.get(kind)
        or category_of(trace.text(name), trace.text(op), trace.text(dtypes))
        for name, op, dtypes, kind in distinct.T.tolist()
    ]
    return names, row.ravel()


def _operator_categories(trace: Trace) -> Named:
    """Categories of operators; a product that hands on to another one is no product itself."""
    ops = trace.ops
    hands_on = _around_products(trace)
    triples = np.stack([ops.name.astype(np.int64), ops.dtypes.astype(np.int64), hands_on])
    distinct, row = np.unique(triples, axis=1, return_inverse=True)
    names = [
        "other" if outer else operator_category(trace.text(name), trace.text(dtypes))
        for name, dtypes, outer in distinct.T.tolist()
    ]
    return names, row.ravel()


def _around_products(trace: Trace) -> NDArray[np.bool_]:
    products = nest(trace.ops, named_so(trace, trace.ops, PRODUCTS.__contains__))
    outer = products.parents()
    found = np.zeros(len(trace.ops), np.bool_)
    found[outer[outer >= 0]] = True
    return found


def _column(values: Codes, row: Ints) -> Ints:
    if not len(values):
        return np.full(len(row), -1, np.int64)
    return np.where(row >= 0, values[row], -1).astype(np.int64)
