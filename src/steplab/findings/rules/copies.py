"""Tensors are copied without being changed.

What it sees: copies inside the device (`contiguous`, `clone`, `reshape` of a transposed tensor)
and copies between host and device that nothing hides; lookups of rows in a table that lies column
by column.
Why it costs: a copy reads and writes the whole tensor and computes nothing.
Remedy: order dimensions so that no copy is needed, use views; `channels_last` where convolutions
reorder their inputs themselves; a list that is joined once where a tensor grows in a loop; for
copies from the host, pinned memory and a stream of their own.
When it is wrong: the copy makes the products after it faster than they would be without it. Copies
that operators make for themselves, and those of transposed heads, are the price of running op by
op: up to 9 % of a clean decoder's step and 24 % of a convolutional one's. A fault is what the code
asks for above 10 % of the step, or a copy between host and device that nothing hides.
"""

from __future__ import annotations

import re

import numpy as np

from steplab.core import Finding, units
from steplab.costs.op_call import OpCall
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.matmuls import FACTORS
from steplab.findings.rows import Mask, Rows, changes_dtype
from steplab.trace.analysis import UNATTRIBUTED

# Eager attention and its backward copy transposed heads: 2 to 4 % of a decoder's step.
SHARE = 0.05
ASKED_SHARE = 0.10
LARGE_TABLE = 2**20  # elements: less stays in a cache
IN_PIECES = 0.9  # saved: 8,192 of 200,000 rows of 128 take 0.56 instead of 5.27 ms on one core
GROWN = 8  # sizes of what one line joins in a step
ASKED = frozenset(
    f"aten::{name}"
    for name in "contiguous clone copy_ reshape repeat repeat_interleave tile cat stack roll flip "
    "to constant_pad_nd pad hstack vstack concat".split()
)
# What cuDNN and MIOpen launch around a convolution whose input lies in the other order.
CONVOLUTION_LAYOUT = re.compile(r"nchwToNhwc|nhwcToNchw|batched_transpose_\d|tensorTransform")


def check(case: Case) -> tuple[Finding, ...]:
    """Look for work that only moves tensors, and for rows that are gathered from far apart."""
    if case.rows is None:
        return ()
    found = (_copied(case, case.rows), _gathered(case, case.rows))
    return tuple(finding for finding in found if finding is not None)


def _gathered(case: Case, rows: Rows) -> Finding | None:
    """Judge lookups in tables whose rows are not in one piece."""
    mask = rows.called(_takes_columns)
    spent = case.cost_ms(mask)
    if not spent > ASKED_SHARE * case.step_ms:
        return None
    return Claim(
        rule="copies",
        claim=f"rows are gathered from a table that lies column by column: "
        f"{units.milliseconds(spent)} a step",
        evidence=rows.hot_lines(mask),
        remedy="make the table contiguous once, before the loop: np.ascontiguousarray, "
        ".contiguous()",
        stake_ms=spent,
        why="every number of a row is in another line of the cache",
        gain_ms=IN_PIECES * spent,
        work=mask,
    )


def _takes_columns(call: OpCall) -> bool:
    """Whether a call looks up rows of a large table that is in the other order."""
    table = call.tensor(0)
    if call.name not in ("aten::index", "aten::index_select") or table is None:
        return False
    if not table.strides or len(table.dims) != 2 or table.numel < LARGE_TABLE:
        return False
    return table.strides[1] > table.strides[0] and table.dims[1] > 1


def _copied(case: Case, rows: Rows) -> Finding | None:
    """Add up the time of work that only moves tensors."""
    # Copies by the copy engine count only where nothing hides them: a term of the budget.
    engine = rows.labeled("name", lambda label: label.startswith("Memcpy"))
    # On a CPU a product copies its bias into the result: that is part of the product.
    own = rows.within(lambda call: call.name in FACTORS)
    # Contiguous copies in backward are autograd's own: gradients of a square, the first of a sum.
    backward = rows.labeled("phase", lambda label: label == "backward")
    own |= backward & ~rows.called(_reorders)
    moved = rows.category("copy") & ~rows.called(changes_dtype) & ~own & ~engine & _known(rows)
    within, alone = rows.ms(moved), case.term_ms("copies")
    if not within + alone > SHARE * case.step_ms:
        return None
    asked = rows.ms(moved & rows.asked_for(lambda name: name in ASKED))
    groups = rows.totals("name", engine, 2) if alone > within else []
    evidence = [f"{g.label}: {g.count:.3g} a step, {units.milliseconds(g.ms)}" for g in groups]
    evidence += [*rows.hot_lines(engine if alone > within else moved), *_layouts(rows, moved)]
    return Claim(
        rule="copies",
        claim=f"copies take {units.milliseconds(within + alone)} a step",
        evidence=tuple(evidence),
        remedy=_remedy(rows, moved, engine if alone > within else moved & False),
        stake_ms=within + alone,
        why="a copy reads and writes a whole tensor and computes nothing",
        gain_ms=within + alone,
        work=moved,
        ordinary=asked < ASKED_SHARE * case.step_ms and alone < SHARE * case.step_ms,
    )


def _known(rows: Rows) -> Mask:
    """Return the work whose operator is known: in a replay, a cast looks like a copy."""
    return rows.labeled("op", lambda label: label != UNATTRIBUTED)


def _remedy(rows: Rows, moved: Mask, sent: Mask) -> str:
    """Return what avoids most of the time; `sent` are copies of the copy engine, if they count."""
    names = [total.label for total in rows.totals("name", sent, 1)]
    if any("Pageable" in name for name in names):
        return "pin the memory of the host (pin_memory=True) and copy with non_blocking=True"
    if any("HtoD" in name for name in names):
        return "copy the next batch on a stream of its own while this one computes"
    if any("DtoH" in name for name in names):
        return "keep it on the device, or copy it every N steps"
    if 2 * rows.ms(moved & _growing(rows)) > rows.ms(moved):
        return (
            "append to a list and call torch.cat once, behind the loop: what grows is copied whole"
        )
    if 2 * rows.ms(moved & rows.called(lambda call: call.name == "aten::cat")) > rows.ms(moved):
        return (
            "give the parts to what follows one by one (a @ w[:n] + b @ w[n:], a sum of their "
            "sums), or write them into one tensor as they are made"
        )
    inside = rows.labeled("name", lambda name: CONVOLUTION_LAYOUT.search(name) is not None)
    if 2 * rows.ms(moved & inside) > rows.ms(moved):
        return "keep model and inputs in the order of the convolutions: torch.channels_last"
    return "use views and an order of dimensions that needs no copy"


def _growing(rows: Rows) -> Mask:
    """Return the work of lines that join tensors again and again, each time to another size."""
    joins = rows.called(lambda call: call.name == "aten::cat")
    lines = np.unique(np.stack([rows.work.line[joins], rows.call[joins]]), axis=1)[0]
    found, sizes = np.unique(lines, return_counts=True)
    grown: Mask = joins & np.isin(rows.work.line, found[sizes >= GROWN])
    return grown


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
