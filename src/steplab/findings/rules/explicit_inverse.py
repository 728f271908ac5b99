"""A matrix is inverted, and only its product with a few columns is read.

What it sees: `linalg.inv` of n x n matrices, where a product in the step multiplies n x n by fewer
than n / 2 columns, or that many rows by n x n.
Why it costs: the inverse solves for n columns where one is asked for, and its gradient takes two
more products of n x n. Beside it, `solve` took 0.25 of the time forward and 0.15 to 0.31 with the
gradient (n of 32 to 768, one core).
Remedy: `torch.linalg.solve(a, y)`; for a symmetric positive definite matrix one factor for both
solution and determinant: `cholesky`, then `solve_triangular` and the logarithm of its diagonal.
When it is wrong: the inverse multiplies something else too, or is itself what is wanted.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.matmuls import matmuls
from steplab.findings.rows import Rows

SHARE = 0.05
LEFT = 0.28  # of the inverse and its gradient, where it is solved for one column
FEW = 0.5  # of the columns of the matrix
SMALL = 16  # a solution of 8 x 8 matrices still took 0.6
INVERSES = ("aten::linalg_inv", "aten::linalg_inv_ex", "aten::inverse")


def check(case: Case) -> Finding | None:
    """Find inverses whose sizes are those of a product with few columns."""
    rows = case.rows
    if rows is None:
        return None
    sizes = _inverted(rows)
    used = {size for size in sizes if _multiplies_few(rows, size)}
    inverted = rows.asked_for(INVERSES.__contains__)
    spent = case.cost_ms(inverted)
    gain = (1 - LEFT) * spent
    if not used or not gain > SHARE * case.step_ms:
        return None
    largest = max(used)
    return Claim(
        rule="explicit_inverse",
        claim=f"a matrix is inverted to be multiplied by few columns: {units.milliseconds(spent)}",
        evidence=(f"of {largest} x {largest}, with its gradient", *rows.hot_lines(inverted)),
        remedy="torch.linalg.solve(a, y) instead of torch.linalg.inv(a) @ y; where a is symmetric "
        "and positive definite, one torch.linalg.cholesky(a) for the solution (solve_triangular) "
        "and the determinant (its diagonal)",
        stake_ms=spent,
        why="the inverse is the solution for every column of the identity",
        gain_ms=gain,
        work=inverted,
    )


def _inverted(rows: Rows) -> set[int]:
    """Return the sizes n of the n x n matrices that are inverted."""
    matrices = (call.tensor(0) for call in rows.calls if call.name in INVERSES)
    return {m.dims[-1] for m in matrices if m and len(m.dims) >= 2 and m.dims[-1] >= SMALL}


def _multiplies_few(rows: Rows, size: int) -> bool:
    """Whether a product in the step has an n x n factor and few columns, or few rows."""
    vectors = (call.tensor(0) for call in rows.calls if call.name == "aten::mv")
    if any(matrix is not None and matrix.dims == (size, size) for matrix in vectors):
        return True
    return any(
        (one.k == one.m == size and one.n < FEW * size)
        or (one.k == one.n == size and one.m < FEW * size)
        for one in matmuls(rows).values()
    )


RULE = check
