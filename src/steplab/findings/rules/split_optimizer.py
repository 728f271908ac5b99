"""The optimizer updates few tensors at a time.

What it sees: many fused or foreach updates in a step, each of a few tensors: a parameter group, or
an optimizer, for every weight.
Why it costs: the host prepares and launches every group by itself, in Python.
Remedy: one group for all weights with the same settings.
When it is wrong: all groups have different settings; then make the settings tensors, or compile.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from steplab.core import Finding, OptimizerShape, units
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.rows import Mask, Rows

MOST = 8  # updates a step; groups for decay, rates and kinds of weights make two to six
FEW = 4  # tensors in each
_UPDATE = re.compile(r"aten::_(fused_(adamw?|sgd|adagrad)_|foreach_(addcdiv|lerp)_)")


def check(case: Case) -> Finding | None:
    """Count the updates and their tensors."""
    rows = case.rows
    if rows is None:
        return None
    calls = [call for call in rows.calls if _UPDATE.fullmatch(call.name)]
    sizes = [len(call.lists[0]) for call in calls if call.lists and call.lists[0]]
    updates = _updates(rows)
    if updates <= MOST or (sizes and max(sizes) > FEW and sum(sizes) / len(sizes) > FEW):
        return None
    phase = rows.labeled("phase", lambda label: label == "optimizer")
    if not phase.any():
        return None
    lost = max(0.0, _phase_ms(case, phase) - _least_ms(rows, phase))
    shapes = case.run.profile.optimizers if case.run and case.run.profile else ()
    return Claim(
        rule="split_optimizer",
        claim=f"{updates:.0f} updates of a few tensors each cost {units.milliseconds(lost)} a step",
        evidence=(
            *(f"{one.name}: {one.groups} groups of {one.tensors} tensors" for one in shapes[:2]),
            *(f"{len(shapes)} optimizers, made at {line}" for line in _made(case, shapes)),
            *(f"groups are made at {line}" for line in case.setup_lines("params")),
        ),
        remedy="put all weights with the same learning rate and decay into one parameter group of "
        "one optimizer",
        stake_ms=lost,
        why="every group is prepared in Python and launched by itself",
        gain_ms=lost * (1 - 1 / updates),
        work=phase,
    )


def _made(case: Case, shapes: Sequence[OptimizerShape]) -> list[str]:
    """Return where several optimizers are made."""
    names = dict.fromkeys(shape.name for shape in shapes) if len(shapes) > 1 else ()
    return [line for name in names for line in case.setup_lines(name)]


def _updates(rows: Rows) -> float:
    ops = rows.source.ops
    called = rows.source.named(ops, lambda name: _UPDATE.fullmatch(name) is not None)
    return float(called.sum()) if rows.analysis.detail is not None else called.sum() / rows.steps


def _least_ms(rows: Rows, phase: Mask) -> float:
    """Return what the update takes at the memory's speed; what it takes now if that is unknown."""
    ideal = float(np.nansum(rows.work.ideal[phase])) / 1e6 / rows.steps
    return min(ideal, rows.ms(phase)) or rows.ms(phase)


def _phase_ms(case: Case, phase: Mask) -> float:
    clock = case.run.clock if case.run is not None else None
    if clock is not None and "optimizer" in clock.phases:
        return clock.phases["optimizer"].median
    assert case.rows is not None
    return max(case.cost_ms(phase), case.rows.ms(phase) + case.optimizer_python_ms)


RULE = check
