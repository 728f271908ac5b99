"""The gradient of an index is summed row by row, in sorted order.

What it sees: `x[ids]` in the forward pass, whose backward puts gradients back by `index_put_` with
accumulation, above 5 % of the step.
Why it costs: torch sorts the indices to sum those that are equal; `index_select`, `gather` and
`F.embedding` have kernels of their own that do not.
Remedy: `x.index_select(0, ids)` or `F.embedding(ids, x)` for rows, `x.gather(...)` within rows.
When it is wrong: several dimensions are indexed at once, which those cannot do.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.findings.claims import Claim

SHARE = 0.05
PUTS = ("aten::_index_put_impl_", "aten::index_put_")
LEFT = 0.3  # of the time, for index_add


def check(case: Case) -> Finding | None:
    """Add up the work inside accumulating puts of backward."""
    rows = case.rows
    if rows is None:
        return None
    mask = rows.within(lambda call: call.name in PUTS and call.truth(3) is True)
    mask &= rows.labeled("phase", lambda label: label == "backward")
    mask &= rows.asked_for(lambda name: name == "aten::index")
    spent = case.cost_ms(mask)
    if not spent > SHARE * case.step_ms:
        return None
    return Claim(
        rule="index_gradient",
        claim=f"gradients of x[ids] take {units.milliseconds(spent)} a step",
        evidence=rows.hot_lines(mask),
        remedy="x.index_select(0, ids) or F.embedding(ids, x) for rows, x.gather(...) within rows",
        stake_ms=spent,
        why="equal indices are sorted and summed one after the other",
        gain_ms=(1 - LEFT) * spent,
        work=mask,
    )


RULE = check
