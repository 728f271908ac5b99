"""Zeros are multiplied and added.

What it sees: large products with a factor of which more than 90 % is zero, as the Run recorded it:
tokens sent to experts by a one-hot matrix, an embedding by a one-hot product, a graph as a dense
matrix, gradients that are zero for all but a few rows; kernels of convolutions that keep channels
apart by zeros; sums and elementwise products of such tensors, as with one-hot targets; and what
else is done with tensors of such a factor's size. Or factors of which 60 % of the rows are zeros:
experts with too much room, logits that few targets pick from; convolutions of samples with zeros
between them. Or products with a triangle of equal
numbers in each row, which make running sums or means.
Why it costs: an operator takes as long with zeros as with any other numbers.
Remedy: pick rows by index (`index_select`, `gather`, `index_add`), or take the rows that count
before the product, and choose those that do without gradients; class numbers as targets; a sparse
matrix; `groups` of a convolution; a transposed convolution; `torch.cumsum`.
When it is wrong: the zeros are learned and move. A layer that only differs from others of its kind
by the zeros in its gradient is left out.
"""

from __future__ import annotations

import numpy as np

from steplab.core import Finding, units
from steplab.core.dataflow import ROWS_OF_ZEROS, RUNNING, ZEROS
from steplab.costs.op_call import OpCall
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.matmuls import as_matmul
from steplab.findings.rows import Mask, Rows
from steplab.trace.analysis import UNATTRIBUTED

BESIDE = ("elementwise", "copy", "memset", "reduction", "sort and index")
SHARE = 0.02
# Of the step. A loss that reads one position of a sequence leaves most of its gradient zero, and
# the last layer multiplies it: 5 % of a step, which is no fault. See `_one_layer`.
ORDINARY = 0.10
ONLY_BACKWARD = 0.9  # of the time: the forward has no such rows
TRANSPOSED = "a transposed convolution (stride=n) instead of one over samples with zeros between"
FEWER_ROWS = (
    "take the rows that count before the product; for experts a smaller capacity, or grouped "
    "products without padding"
)
CHOSEN_AGAIN = (
    "the loss has few of these results: take the rows that count before the product, "
    "head(x[mask]); where all are needed to choose some, choose under torch.no_grad() and compute "
    "the chosen ones again"
)
LEFT = 0.1  # of the time, for picking rows by index instead


def check(case: Case) -> tuple[Finding, ...]:
    """Look for factors that are nearly all zeros, and for those with rows of zeros."""
    rows = case.rows
    if rows is None:
        return ()
    found = (_zeros(case, rows), _empty_rows(case, rows), _running(case, rows))
    return tuple(finding for finding in found if finding is not None)


def _zeros(case: Case, rows: Rows) -> Finding | None:
    """Add up operators on zeros, and the work on tensors as large as what they take."""
    zeros = case.verdict(ZEROS) & ~_one_layer(case, rows)
    if not zeros.any():
        return None
    products = rows.of_calls(n for n, call in enumerate(rows.calls) if as_matmul(call))
    mask = zeros | rows.with_gradients(zeros & ~products) | _beside(rows, zeros)
    spent = case.cost_ms(mask)
    return Claim(
        rule="zero_products",
        claim=f"work on tensors of zeros takes {units.milliseconds(spent)} a step",
        evidence=(
            f"{rows.count(zeros):.0f} operators take something that is more than 90 % zeros, "
            f"{units.milliseconds(rows.ms(zeros))}",
            *rows.hot_lines(mask),
        ),
        remedy="pick rows by index (index_select, gather, index_add) instead of a one-hot matrix "
        "or a sum over zeros, or take the rows that count before the product; class numbers "
        "instead of one-hot targets, a sparse matrix for a graph, groups= for a convolution that "
        "keeps channels apart",
        stake_ms=spent,
        why="zeros are multiplied and added as slowly as any other numbers",
        gain_ms=(1 - LEFT) * spent,
        ordinary=spent < ORDINARY * case.step_ms,
        work=mask,
    )


def _running(case: Case, rows: Rows) -> Finding | None:
    """Add up the products that make running sums or means."""
    mask = rows.with_gradients(case.verdict(RUNNING))
    spent = case.cost_ms(mask)
    if not spent > SHARE * case.step_ms:
        return None
    return Claim(
        rule="zero_products",
        claim=f"running sums or means as products with a triangle take "
        f"{units.milliseconds(spent)} a step",
        evidence=rows.hot_lines(mask),
        remedy="torch.cumsum(x, 1), for means divided by the numbers 1 to n",
        stake_ms=spent,
        why="half of the triangle's square is zeros, and a sum that goes on needs one addition for "
        "each number instead of n",
        gain_ms=(1 - LEFT) * spent,
        work=mask,
    )


def _empty_rows(case: Case, rows: Rows) -> Finding | None:
    """Add up the shares of products whose rows are zeros, and of convolutions of such samples."""
    convolves = rows.within(lambda call: "convolution" in call.name)
    masks, one_layer = {}, _one_layer(case, rows)
    for tenths in ROWS_OF_ZEROS:
        mask = case.verdict(tenths) & ~one_layer
        masks[int(tenths) / 10] = mask | rows.with_gradients(mask & convolves)
    lost = sum(share * rows.ms(mask) for share, mask in masks.items())
    mask = np.logical_or.reduce(list(masks.values()))
    if not lost > SHARE * case.step_ms:
        return None
    spent = rows.ms(mask)
    backward = rows.labeled("phase", lambda label: label == "backward")
    if rows.ms(mask & convolves) > spent / 2:
        where, remedy = "samples in convolutions of", TRANSPOSED
    elif rows.ms(mask & backward) > ONLY_BACKWARD * spent:
        where, remedy = "rows of the gradients in products of", CHOSEN_AGAIN
    else:
        where, remedy = "rows in products of", FEWER_ROWS
    return Claim(
        rule="zero_products",
        claim=f"{units.percent(lost / spent)} of the {where} {units.milliseconds(spent)} are zeros",
        # With the forward: what calls the products has that, too.
        evidence=rows.hot_lines(rows.of_roots(rows.roots(mask))),
        remedy=remedy,
        stake_ms=spent,
        why="zeros are multiplied as slowly as any other numbers",
        gain_ms=lost,
        ordinary=lost < ORDINARY * case.step_ms,
        work=mask,
    )


def _one_layer(case: Case, rows: Rows) -> Mask:
    """Return the backward of lines that work on zeros in one layer of several of a kind.

    A loss that reads one position of a sequence leaves zeros in the gradient of the last layer up
    to its attention. The code of that layer is the code of the others, whose gradients have none:
    the rows that count cannot be taken there. Of a head, all products of its line have zeros.
    """
    zeros = case.verdict(ZEROS + ROWS_OF_ZEROS)
    backward = rows.labeled("phase", lambda label: label == "backward")
    products = rows.of_calls(n for n, call in enumerate(rows.calls) if as_matmul(call)) & backward
    found: Mask = np.zeros_like(zeros)
    for line in np.unique(rows.work.line[products & zeros]).tolist():
        here = backward & (rows.work.line == line)
        alike = here & rows.of_calls(np.unique(rows.call[here & products & zeros]).tolist())
        if rows.work.labels[line] != UNATTRIBUTED and 2 * (alike & zeros).sum() <= alike.sum():
            found |= here
    return found


def _beside(rows: Rows, products: Mask) -> Mask:
    """Return what the functions with these products do with tensors as large as their factors."""
    sizes = _sizes(rows, products)
    if not sizes:
        return products
    labels = {total.label for total in rows.totals("function", products, 20)} - {UNATTRIBUTED}
    large = rows.called(lambda call: max(call.numels, default=0) >= min(sizes))
    return rows.labeled("function", labels.__contains__) & large & rows.category(*BESIDE)


def _sizes(rows: Rows, products: Mask) -> set[int]:
    """Return the elements of those inputs that only such operators have."""
    numbers = set(rows.call[products].tolist())
    others = set(rows.call[rows.inside & ~products].tolist())
    factors = (_factors(rows.calls[n]) for n in numbers)
    elsewhere = {size for n in others for size in _factors(rows.calls[n])}
    return {size for sizes in factors for size in sizes} - elsewhere


def _factors(call: OpCall) -> set[int]:
    one = as_matmul(call)
    if one is not None:
        return {one.left.numel, one.right.numel}
    return {max(call.numels, default=0)} if call.name in ("aten::sum", "aten::mul") else set()


RULE = check
