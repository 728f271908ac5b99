"""Gradients that nobody uses hold memory.

What it sees: `.grad` of weights above 10 % of the step's peak, as the Run recorded it: no operator
of a step reads or writes it, or the weight requires a gradient and nothing updates it.
Why it costs: a gradient is as large as its weight and lives until it is cleared; the optimizer's
zero_grad clears those of its own weights only.
Remedy: clear the gradients of the whole model when a part of it is frozen, or no longer trained.
When it is wrong: they are read every N steps.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.findings.case import Case

SHARE = 0.10  # of the step's peak
SHOWN = 3


def check(case: Case) -> Finding | None:
    """Compare the bytes of such gradients with the peak."""
    memory = case.run.memory if case.run is not None else None
    idle = case.dataflow.idle_gradients if case.dataflow is not None else ()
    size, count = sum(one.bytes for one in idle), sum(one.weights for one in idle if one.bytes)
    if memory is None or not size > SHARE * memory.peak:
        return None
    asked = sum(one.bytes for one in idle if one.asked) > size / 2
    return Finding(
        rule="idle_gradients",
        claim=f"gradients of {count} weights that no optimizer updates hold {units.bytes_(size)}",
        evidence=(
            "every step adds to them" if asked else "no operator of a step reads or writes them",
            *(f"{one.name}: {units.bytes_(one.bytes)}" for one in idle[:SHOWN] if one.bytes),
            *(f"requires_grad is set at {line}" for line in case.setup_lines("requires_grad")),
        ),
        remedy="requires_grad_(False) for weights that are not trained, and "
        "model.zero_grad(set_to_none=True) once, after freezing them"
        if asked
        else "model.zero_grad(set_to_none=True) once, when weights are frozen or their optimizer "
        "is replaced",
        stake_bytes=size,
        of_bytes=max(memory.peak, size),
        why="zero_grad of an optimizer clears the gradients of its own weights only",
    )


RULE = check
