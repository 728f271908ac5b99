"""Tensors are filled with zeros again and again.

What it sees: fills that take more than 8 % of the step (5 %: a note), with the line behind them; in
backward only those of slices, as other operators need theirs.
Why it costs: a fill writes a whole tensor and computes nothing. The gradient of one slice `x[:, t]`
is a tensor of zeros as large as x, so a loop over slices writes x once for every slice.
Remedy: `x.unbind(1)` or `x.split(...)`, whose gradients are put together once; buffers that are
used again, `torch.empty`, `zero_grad(set_to_none=True)`.
When it is wrong: the zeros are needed and cannot be kept.
"""

from __future__ import annotations

import re

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.rows import Mask, Rows
from steplab.trace.phases import AUTOGRAD_NODE

SHARE = 0.05
FEW = 0.08  # a note: of 5 % by 14 slices of a step that has no loop, split saved nothing
SLICES = re.compile(r"aten::(select|slice|index|narrow|as_strided)_backward")


def check(case: Case) -> Finding | None:
    """Add up the fills."""
    rows = case.rows
    if rows is None:
        return None
    fills = rows.category("memset")
    sliced = fills & rows.within(lambda call: SLICES.fullmatch(call.name) is not None)
    # Other fills of backward are the operators' own: the gradient of a loss or an embedding.
    backward = rows.labeled("phase", lambda label: label == "backward")
    backward |= rows.within(lambda call: call.name.startswith(AUTOGRAD_NODE))
    fills &= sliced | ~backward
    spent = rows.ms(fills)
    if not spent > SHARE * case.step_ms:
        return None
    by_slices = rows.ms(sliced) > spent / 2
    return Claim(
        rule="zero_fills",
        claim=f"{rows.count(fills):.0f} fills a step take {units.milliseconds(spent)}",
        evidence=_evidence(rows, fills, sliced),
        remedy="take slices by x.unbind(dim) or x.split(sizes, dim) instead of x[:, t] in a loop"
        if by_slices
        else "use buffers again, torch.empty for what is overwritten, zero_grad(set_to_none=True)",
        stake_ms=spent,
        why="the gradient of every slice is a tensor of zeros as large as the whole"
        if by_slices
        else "a fill writes a whole tensor and computes nothing",
        gain_ms=spent,
        ordinary=spent < FEW * case.step_ms,
        work=fills,
    )


def _evidence(rows: Rows, fills: Mask, sliced: Mask) -> tuple[str, ...]:
    lines = rows.hot_lines(fills)
    if not sliced.any():
        return lines
    return (f"{rows.count(sliced):.0f} of them are gradients of slices", *lines)


RULE = check
