"""The model runs forward, and nothing is learned from it.

What it sees: a model that is called several times in a step, where some calls have a backward and
others have none.
Why it costs: a forward is a third of a step.
Remedy: take the metrics from the output that the loss was computed from, or every N steps.
When it is wrong: a target that the same model computes without gradients, as in self-distillation,
in a trace without a record of values.
Recomputation under checkpointing, and a teacher that is a model of its own, are not meant.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from steplab.core import Finding, units
from steplab.core.dataflow import READ_ONLY, UNUSED
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.module_calls import callers, outermost_calls
from steplab.findings.rows import Mask, Rows
from steplab.trace.attribution import MODULE_RANGE
from steplab.trace.events import Ints, Spans
from steplab.trace.lines import MODULE
from steplab.trace.spans import nest

SHARE = 0.02
MOST = 0.5  # of what the calls compute is for nothing


def check(case: Case) -> Finding | None:
    """Add up the work of calls without a backward, of models that have calls with one."""
    rows = case.rows
    if rows is None:
        return None
    spans, names, unused = outermost_calls(rows.source)
    # Only of a model that also learns: one that never does may be a teacher.
    learns = set(names[~unused].tolist())
    wasted = np.flatnonzero(unused & np.isin(names, list(learns)))
    if not len(wasted):
        return None
    whole = _launched_in(rows, spans, wasted)
    mask = whole & ~_needed(case)
    spent = rows.ms(mask)
    # Of answers that a model writes to learn from them, the last token's states are read by nobody.
    if not spent > max(SHARE * case.step_ms, MOST * rows.ms(whole)):
        return None
    name = _name(rows.source.text(Counter(names[wasted].tolist()).most_common(1)[0][0]))
    calls = int(np.isin(names, names[wasted]).sum())
    return Claim(
        rule="forward_unused",
        claim=f"{len(wasted)} of {calls} calls of {name} have no backward: "
        f"{units.milliseconds(spent)} a step",
        evidence=tuple(f"called at {line}" for line in callers(rows.source, spans, wasted)),
        remedy="take metrics from the output that the loss was computed from, or every N steps",
        stake_ms=spent,
        why="a forward pass that no gradient comes from costs a third of a step",
        gain_ms=spent,
        work=mask,
    )


def _needed(case: Case) -> Mask:
    """Return the work that the update needs, where the Run recorded it: a target of a loss."""
    dataflow = case.dataflow
    return case.verdict("".join(set(dataflow.verdicts if dataflow else "") - {UNUSED, READ_ONLY}))


def _launched_in(rows: Rows, spans: Spans, wasted: Ints) -> Mask:
    """Return the work that was launched inside the chosen calls."""
    chosen = np.zeros(len(spans), np.bool_)
    chosen[wasted] = True
    has_op = (rows.work.op_row >= 0) & rows.inside
    ops, op_row = rows.source.ops, rows.work.op_row[has_op]
    mask: Mask = np.zeros(len(rows.work), np.bool_)
    mask[has_op] = nest(spans, chosen).innermost(ops.thread[op_row], ops.start[op_row]) >= 0
    return mask


def _name(text: str) -> str:
    return text.removeprefix(MODULE_RANGE).removeprefix(MODULE)


RULE = check
