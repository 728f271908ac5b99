"""The step deep-copies a model's or an optimizer's state.

What it sees: stretches of `copy.deepcopy` over 24 tensors or more in a step, by the storages that
it hands out (`aten::set_`); from their first operator to their last, with Python between them, or
on a GPU the copies and the waits for them.
Why it costs: each tensor is copied into new memory by Python, one after the other.
Remedy: every N steps, and into tensors that are kept: `torch._foreach_copy_`.
When it is wrong: something else gives many tensors new storages, as a sharded model may.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.loops import deep_copied, stretches_of_copying

SHARE = 0.03


def check(case: Case) -> Finding | None:
    """Add up the stretches."""
    rows = case.rows
    if rows is None or case.analysis is None:
        return None
    begin, end = stretches_of_copying(case.analysis.trace)
    if not len(begin):
        return None
    within, _ = stretches_of_copying(rows.source)
    copies = deep_copied(rows)
    taken = float((end - begin).sum()) / 1e6 / rows.steps * rows.scale
    spent = case.cost_ms(copies) if case.on_device else max(taken, rows.ms(copies))
    if not spent > SHARE * case.step_ms:
        return None
    return Claim(
        rule="deep_copies",
        claim=f"the step deep-copies tensors for {units.milliseconds(spent)}",
        evidence=(
            *(f"called at {line}" for line in rows.lines_at(within, 1)),
            f"{rows.count(copies & rows.asked_for('aten::copy_'.__eq__)):.0f} copies a step, each "
            "into new memory",
        ),
        remedy="do it every N steps, or only where something has become better; into tensors that "
        "are kept: torch._foreach_copy_(kept, list(model.state_dict().values()))",
        stake_ms=spent,
        why="Python copies one tensor after the other, each into memory that is new",
        gain_ms=spent,
        work=copies,
    )


RULE = check
