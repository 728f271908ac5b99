"""Elementwise work is torn into several compiled graphs.

What it sees: two or more compiled graphs without a matrix product that are called one after the
other, with no other work between them.
Why it costs: nothing is fused across graphs: each reads and writes whole tensors, forward and
backward, and each call checks its guards and prepares its arguments.
Remedy: `torch.compile` of the function or module that calls them; where one function was cut in
two, what breaks its graph.
When it is wrong: their caller cannot be compiled. Blocks of a model, compiled one by one, have
products and are not meant.
"""

from __future__ import annotations

import numpy as np

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.module_calls import callers
from steplab.findings.rows import Rows
from steplab.trace.categories import op_category
from steplab.trace.compiled import REGION
from steplab.trace.events import Ints, Spans
from steplab.trace.spans import nest

SHARE = 0.03
PRODUCTS = ("matmul", "attention")
# Of the time of all pieces but one. A GPU waits for memory, of which one graph needs one pass. A
# CPU computes: compiled as one, blocks of 7 pieces (25.0 ms of a step) took 9.5 ms less.
SAVED_BY_GPU, SAVED_BY_CPU = 1.0, 0.5


def check(case: Case) -> Finding | None:
    """Add up the pieces, and the share of them that one graph would save."""
    rows = case.rows
    if rows is None:
        return None
    regions, runs = _pieces(rows)
    if not runs:
        return None
    pieces = np.concatenate(runs)
    mask = rows.with_gradients(np.isin(_region_of(rows, regions), pieces))
    spent = case.cost_ms(mask)
    saved = SAVED_BY_GPU if case.on_device else SAVED_BY_CPU
    gain = saved * spent * (1 - len(runs) / len(pieces))  # of a run one piece remains
    if not gain > SHARE * case.step_ms:
        return None
    longest = max(runs, key=len)
    return Claim(
        rule="torn_graphs",
        claim=f"elementwise work is torn into {len(pieces)} compiled graphs: "
        f"{units.milliseconds(spent)} a step",
        evidence=(
            f"up to {len(longest)} follow each other, with no other work between them",
            *(f"called at {line}" for line in callers(rows.source, regions, longest)),
        ),
        remedy="torch.compile of the function or module that calls them, instead of each of them",
        stake_ms=spent,
        why="nothing is fused across graphs: each reads and writes whole tensors",
        gain_ms=gain,
        work=mask,
    )


def _pieces(rows: Rows) -> tuple[Spans, list[Ints]]:
    """Return the outermost compiled regions, and runs of those that follow each other as pieces."""
    trace, ops = rows.source, rows.source.ops
    is_region = trace.named(ops, lambda name: name.startswith(REGION))
    outer = np.flatnonzero(is_region & (nest(ops, is_region).parents() < 0))
    regions = Spans(ops.start[outer], ops.duration[outer], ops.name[outer], ops.thread[outer])
    products = rows.labeled("category", lambda label: label.startswith(PRODUCTS))
    heavy = np.isin(np.arange(len(outer)), _region_of(rows, regions)[products])
    works = np.flatnonzero(trace.named(ops, lambda name: op_category(name) != "other"))
    alone = works[nest(regions).innermost(ops.thread[works], ops.start[works]) < 0]
    marks = [(start, -1) for start in ops.start[alone].tolist()]
    marks += [(t, -1 if heavy[n] else n) for n, t in enumerate(regions.start.tolist())]
    runs: list[list[int]] = [[]]
    for _, number in sorted(marks):
        if number < 0:
            runs.append([])
        else:
            runs[-1].append(number)
    return regions, [np.array(run, np.int64) for run in runs if len(run) > 1]


def _region_of(rows: Rows, regions: Spans) -> Ints:
    """Return the number of the region around each row of work, -1: none."""
    found = np.full(len(rows.work), -1, np.int64)
    has_op = (rows.work.op_row >= 0) & rows.inside
    ops, op = rows.source.ops, rows.work.op_row[has_op]
    found[has_op] = nest(regions).innermost(ops.thread[op], ops.start[op])
    return found


RULE = check
