"""Products are multiplied in an order that takes more work than another.

What it sees: a batched product whose result goes straight into another one, with nothing but copies
in between: (a b) c, where a (b c) would take less than half of the multiplications.
Why it costs: linear attention in the wrong order builds the matrix of queries x keys that it is
there to avoid.
Remedy: put the brackets around the small result: q @ (k.transpose(-2, -1) @ v).
When it is wrong: the values between the products are used by something else.
"""

from __future__ import annotations

import numpy as np

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.matmuls import Matmul, matmuls
from steplab.findings.rows import Mask, Rows

SHARE = 0.03
MUCH = 0.5  # of the multiplications
MOVES = ("elementwise", "copy", "memset", "reduction")
USES = ("elementwise", "reduction", "softmax", "normalization", "sort and index")


def check(case: Case) -> Finding | None:
    """Compare the orders of products that follow each other."""
    rows = case.rows
    if rows is None:
        return None
    known = matmuls(rows)
    forward = rows.labeled("phase", lambda label: label != "backward")
    numbers = set(rows.call[forward].tolist())
    found = [
        (first, second)
        for n, first in known.items()
        for m, second in known.items()
        if n in numbers and m in numbers and _follows(first, second) and _saves(first, second)
    ]
    sizes = {first.batch * first.m * first.n for first, _ in found}
    sizes -= _used(rows, sizes)
    found = [pair for pair in found if pair[0].batch * pair[0].m * pair[0].n in sizes]
    if not found:
        return None
    mask = _around(rows, sizes)
    spent = case.cost_ms(mask)
    first, second = max(found, key=lambda pair: _work(*pair)[0])
    now, then = _work(first, second)
    gain = spent * (1 - then / now)
    if not gain > SHARE * case.step_ms:
        return None
    size = max(sizes)
    return Claim(
        rule="product_order",
        claim=f"products in this order build matrices of {size:,} elements: "
        f"{units.milliseconds(spent)} around them",
        evidence=(
            f"({first.m} x {first.k}) by ({first.k} x {first.n}) by ({second.k} x {second.n})",
            f"in the other order {then / now:.2g} of the multiplications",
            *rows.hot_lines(mask),
        ),
        remedy="change the order: a @ (b @ c) instead of (a @ b) @ c",
        stake_ms=spent,
        why="the result between the products is larger than the factors",
        gain_ms=gain,
        work=mask,
    )


def _follows(first: Matmul, second: Matmul) -> bool:
    """Whether the second can take the result of the first on its left."""
    same = (second.batch, second.m, second.k) == (first.batch, first.m, first.n)
    return same and len(first.left.dims) == 3 and min(first.m, first.n) > max(first.k, second.n)


def _work(first: Matmul, second: Matmul) -> tuple[int, int]:
    """Return the multiplications of (a b) c and of a (b c)."""
    now = first.m * first.n * (first.k + second.n)
    return now, first.k * second.n * (first.n + first.m)


def _saves(first: Matmul, second: Matmul) -> bool:
    now, then = _work(first, second)
    return then < MUCH * now


def _used(rows: Rows, sizes: set[int]) -> set[int]:
    """Return the sizes that something else than products and copies takes in the forward."""
    forward = rows.labeled("phase", lambda label: label != "backward")
    numbers = np.unique(rows.call[forward & rows.category(*USES)]).tolist()
    return {size for number in numbers for size in rows.calls[number].numels} & sizes


def _around(rows: Rows, sizes: set[int]) -> Mask:
    """Return all work on matrices of these sizes, as inputs or results."""
    results = {
        number
        for number, one in matmuls(rows).items()
        if {one.batch * one.m * one.n, one.left.numel, one.right.numel} & sizes
    }
    moved = rows.called(lambda call: bool(sizes & set(call.numels))) & rows.category(*MOVES)
    return rows.of_calls(results) | moved


RULE = check
