"""The loss adds up the weights, and autograd goes back through all of them.

What it sees: elementwise operators on trained weights alone whose sums are numbers of the loss, as
the Run recorded the flow of values, and their gradients.
Why it costs: squares, sums and gradients of every weight are passes over all of them, and a few
small operators for each. The update reads every weight anyway, and its weight decay is one more
multiplication there.
Remedy: `weight_decay=` of the optimizer. The gradient of f * w^2 is 2 f w: `weight_decay=2 * f` in
SGD and Adam; that of AdamW does not go through the moments.
When it is wrong: the penalty is none of squares, or compares the weights with others.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.core.dataflow import PENALTY
from steplab.findings.case import Case
from steplab.findings.claims import Claim

SHARE = 0.03


def check(case: Case) -> Finding | None:
    """Add up the penalty and its gradients."""
    rows = case.rows
    if rows is None:
        return None
    mask = rows.with_gradients(case.verdict(PENALTY))
    spent = case.cost_ms(mask)
    if not spent > SHARE * case.step_ms:
        return None
    return Claim(
        rule="weight_penalty",
        claim=f"the loss adds up the weights: {units.milliseconds(spent)} a step for a penalty",
        evidence=(
            f"{rows.count(mask):.0f} operators work on trained weights and nothing else",
            *rows.hot_lines(mask),
        ),
        remedy="weight_decay= of the optimizer, 2 * factor for a penalty of factor * w ** 2 in SGD "
        "and Adam (AdamW's does not go through its moments)",
        stake_ms=spent,
        why="every weight is read for it forward and backward, and the update reads it anyway",
        gain_ms=spent,
        work=mask,
    )


RULE = check
