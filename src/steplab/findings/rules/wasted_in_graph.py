"""Compiled graphs compute what nobody needs.

What it sees: the code of compiled graphs, run once more as it is written, with the flow of values:
a loss of weight zero, gradients that no optimizer uses, products with zeros or of which most is
dropped or masked, and outputs that nobody reads.
Why it costs: a compiler drops what nothing reads inside a graph, and has to compute what leaves it:
its outputs and its gradients. An output is written to memory, where it could have stayed in a
register, and its gradient, all zeros, is filled and read.
Remedy: leave it out of the code that is compiled; return what is read.
When it is wrong: the host uses an output every N steps. Milliseconds are shares of the time of all
graphs, by FLOPs and bytes.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.core.dataflow import (
    MASKED,
    PARTLY_USED,
    READ_ONLY,
    ROWS_OF_ZEROS,
    TIMES_ZERO,
    UNREAD_OUTPUT,
    UNUSED,
    ZEROS,
    GraphWaste,
)
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.rows import Mask, Rows
from steplab.trace.compiled import COMPILED

SHARE = 0.02
METRICS = 0.10  # of the step: a loop may look at itself
PRODUCTS = ("matmul", "attention")
SAID = {  # what, and what to do about it, by verdict
    UNUSED: (
        "compute gradients or outputs that nothing uses",
        "requires_grad_(False) for weights that are not trained; do not return what is not read",
    ),
    READ_ONLY: (
        "compute values that are only read or kept",
        "compute metrics and logs every N steps",
    ),
    TIMES_ZERO: (
        "compute what is multiplied by zero, and its gradients",
        "leave the term out while its weight is zero: if weight: loss = loss + weight * term",
    ),
    UNREAD_OUTPUT: (
        "write outputs that nobody reads",
        "return only what is read: the rest then stays inside the fused kernels",
    ),
    **dict.fromkeys(
        (ZEROS, *ROWS_OF_ZEROS),
        ("multiply zeros", "pick rows by index, or take those that count before the product"),
    ),
    **dict.fromkeys(
        PARTLY_USED,
        ("compute results that are dropped", "take the part that is used before the product"),
    ),
    **dict.fromkeys(
        MASKED,
        ("compute scores that a mask leaves out", "attention in blocks, which skips them"),
    ),
}


def check(case: Case) -> tuple[Finding, ...]:
    """Turn shares of FLOPs and bytes into milliseconds of the graphs."""
    rows = case.rows
    dataflow = case.dataflow
    if rows is None or dataflow is None or not dataflow.graphs:
        return ()
    graphs = rows.with_gradients(rows.within(lambda call: call.name.startswith(COMPILED)))
    products = graphs & rows.labeled("category", lambda label: label.startswith(PRODUCTS))
    found = [_judged(case, one, products, _rest(rows, graphs, one)) for one in dataflow.graphs]
    return tuple(finding for finding in found if finding is not None)


def _rest(rows: Rows, graphs: Mask, one: GraphWaste) -> Mask:
    """Return what graphs do beside products; gradients of unread outputs are filled outside."""
    rest = graphs & ~rows.labeled("category", lambda label: label.startswith(PRODUCTS))
    backward = rows.labeled("phase", lambda label: label == "backward")
    return rest | (rows.category("memset") & backward if one.verdict == UNREAD_OUTPUT else rest)


def _judged(case: Case, one: GraphWaste, products: Mask, rest: Mask) -> Finding | None:
    gain = one.flops * case.cost_ms(products) + one.bytes * case.cost_ms(rest)
    if not gain > SHARE * case.step_ms:
        return None
    what, remedy = SAID[one.verdict]
    shares = [
        f"{units.percent(share)} of the {of} of compiled graphs"
        for share, of in ((one.flops, "FLOPs"), (one.bytes, "bytes"))
        if share
    ]
    return Claim(
        rule="wasted_in_graph",
        claim=f"compiled graphs {what}: {units.milliseconds(gain)} a step",
        evidence=(*([f"at {one.line}"] if one.line else []), *shares),
        remedy=remedy,
        stake_ms=gain,
        why="what leaves a graph is computed, whoever reads it",
        gain_ms=gain,
        ordinary=one.verdict == READ_ONLY and gain < METRICS * case.step_ms,
        work=(products if one.flops else rest) | (rest if one.bytes else products),
    )


RULE = check
