"""Tensors are copied without being changed.

What it sees: copies inside the device (`contiguous`, `clone`, `reshape` of a transposed tensor)
and copies between host and device that nothing hides.
Why it costs: a copy reads and writes the whole tensor and computes nothing.
Remedy: order dimensions so that no copy is needed, use views; pin memory for host copies.
When it is wrong: the copy makes the products after it faster than they would be without it.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.costs.op_call import OpCall
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.matmuls import FACTORS
from steplab.findings.rows import Mask, Rows, is_cast

# Eager attention and its backward copy transposed heads: 2 to 4 % of a decoder's step.
SHARE = 0.05


def check(case: Case) -> Finding | None:
    """Add up the time of work that only moves tensors."""
    rows = case.rows
    if rows is None:
        return None
    # Copies by the copy engine count only where nothing hides them: a term of the budget.
    engine = rows.labeled("name", lambda label: label.startswith("Memcpy"))
    # On a CPU a product copies its bias into the result: that is part of the product.
    own = rows.within(lambda call: call.name in FACTORS)
    # Contiguous copies in backward are autograd's own: gradients of a square, the first of a sum.
    backward = rows.labeled("phase", lambda label: label == "backward")
    own |= backward & ~rows.called(_reorders)
    moved = rows.category("copy") & ~rows.called(is_cast) & ~own & ~engine
    within, alone = rows.ms(moved), case.term_ms("copies")
    if not within + alone > SHARE * case.step_ms:
        return None
    groups = rows.totals("name", engine, 2) if alone > within else []
    evidence = [f"{g.label}: {g.count:.3g} a step, {units.milliseconds(g.ms)}" for g in groups]
    evidence += [*rows.hot_lines(engine if alone > within else moved), *_layouts(rows, moved)]
    return Claim(
        rule="copies",
        claim=f"copies take {units.milliseconds(within + alone)} a step",
        evidence=tuple(evidence),
        remedy="use views and an order of dimensions that needs no copy; pin memory for the host",
        stake_ms=within + alone,
        why="a copy reads and writes a whole tensor and computes nothing",
        gain_ms=within + alone,
        work=moved,
    )


def _layouts(rows: Rows, moved: Mask) -> list[str]:
    """Return a line about the copies of transposed tensors, if there are any."""
    strided = moved & rows.called(_reorders)
    if not strided.any():
        return []
    count, ms = rows.count(strided), units.milliseconds(rows.ms(strided))
    return [f"{count:.3g} of them a step bring a transposed tensor into order, {ms}"]


def _reorders(call: OpCall) -> bool:
    """Whether a call copies from a tensor whose dimensions are not in memory order."""
    source = call.tensor(1) if call.name == "aten::copy_" else call.tensor(0)
    if source is None or not source.strides:
        return False
    steps = [step for size, step in zip(source.dims, source.strides, strict=False) if size > 1]
    return 0 not in steps and steps != sorted(steps, reverse=True)


RULE = check
