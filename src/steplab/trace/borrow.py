"""Borrowing: a lean trace takes module, line, operator and shapes from a detailed one of the step.

The n-th kernel of a name within a phase of a step is the n-th of that name and phase in the
detailed step. Where the two steps do not have equally many of them, nothing is borrowed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from steplab.trace.analysis import Syncs, WorkTable
from steplab.trace.events import Ints


def borrow_work(lean: WorkTable, detail: WorkTable, step: int) -> tuple[WorkTable, float]:
    """Return `lean` with the attribution of step number `step` of `detail`, and the share found.

    Both use the same labels. The share is of the time of the work inside steps. A phase that the
    lean trace knows stays; `op_row` and the costs are those of the detail.
    """
    row = _same_work(lean, detail, np.flatnonzero(detail.step == step))
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


def borrow_syncs(lean: Syncs, detail: Syncs, step: int) -> Syncs:
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
    """Return rows of `detail` by phase and name; by name alone where the lean trace has no phase.

    All kernels of a replayed CUDA graph have one launch: there the order on the device counts.
    """
    scale = 1 + int(max(lean.name.max(initial=0), detail.name.max(initial=0)))
    orders = (lean.launched, lean.start), (detail.launched[rows], detail.start[rows])

    def partners(with_phase: int) -> Ints:
        key = lean.phase.astype(np.int64) * scale * with_phase + lean.name
        other = (detail.phase.astype(np.int64) * scale * with_phase + detail.name)[rows]
        return match_rows(key, lean.step, orders[0], other, orders[1])

    by_phase = partners(1)
    by_name = np.where(lean.phase == 0, partners(0), -1)
    partner = np.where(by_phase >= 0, by_phase, by_name)
    return np.where(partner >= 0, rows[partner], -1) if len(rows) else partner
