"""The step computes what its update does not need.

What it sees: operators that no weight, no optimizer state and no buffer depends on, as the Run
recorded the flow of values: gradients of weights that no optimizer has, or that are dropped before
the update; metrics and norms for a log, a validation in the step, a loss of weight 0; gradients of
inputs that nobody reads, which an operator of backward computes beside those of its weights, and
those of weights that are dropped, which a convolution computes beside that of its input;
updates of tensors that they leave as they were, as an average of weights that are frozen; and
layers of whose result a torch.where takes nothing.
Why it costs: they run in every step, and what only the host reads makes it wait besides.
Remedy: `requires_grad_(False)` for what is not trained, none at all for a batch; metrics every N
steps.
When it is wrong: the loop keeps a result in Python and uses it in a later step. What torch computes
for an input that asks for no gradient, as the second one of `torch.cdist`, nobody can leave out.
"""

from __future__ import annotations

import re

import numpy as np

from steplab.core import Finding, units
from steplab.core.dataflow import (
    IDLE_GRADIENT,
    IDLE_WEIGHT,
    NOT_TAKEN,
    READ_ONLY,
    TIMES_ZERO,
    UNMOVED,
    UNUSED,
    IdleGradients,
)
from steplab.findings.case import ANOMALY, Case
from steplab.findings.claims import Claim
from steplab.findings.rows import Mask, Rows

SHARE = 0.005
METRICS = 0.10  # of the step: a loop may look at itself, and checks of arguments are torch's own
CONVOLVED = "aten::convolution_backward"
# Nodes whose formulas compute the gradients of both inputs, whichever asks for one.
FOR_BOTH = re.compile(r"EuclideanDistBackward\d")
# A convolution's gradient of the input is a product as large as that of its weights. One of 3
# channels, 7 x 7 to 32, took 24 of 41 ms on one core: narrow results are slow. On an H200, 18 of
# weights, 256 to 256 channels, took 3.9 of 7.3 ms.
OF_INPUT = 0.5
PRODUCTS = ("matmul", "attention", "convolution")
SHOWN = 3


def check(case: Case) -> tuple[Finding, ...]:
    """Look for work without effect, and for operators of which a part has none."""
    rows = case.rows
    if rows is None or ANOMALY in case.switches:
        return ()
    found = (
        _without_effect(case, rows),
        _idle_gradient(case, rows),
        _unmoved(case, rows),
        _not_taken(case, rows),
    )
    return tuple(finding for finding in found if finding is not None)


def _idle_gradient(case: Case, rows: Rows) -> Finding | None:
    mask = case.verdict(IDLE_GRADIENT)
    spent = case.cost_ms(mask)
    if not OF_INPUT * spent > SHARE * case.step_ms:
        return None
    asked = case.setup_lines("requires_grad")
    return Claim(
        rule="unused_work",
        claim="backward computes the gradient of an input that nobody reads: about half of "
        f"{units.milliseconds(spent)} a step",
        evidence=(*(f"asked for at {line}" for line in asked), *rows.hot_lines(mask)),
        remedy="no requires_grad_() on the batch, or detach() before the layer: only weights need "
        "gradients here",
        stake_ms=spent,
        why="the operator computes it beside the gradients of its weights, because its input "
        "requires one",
        gain_ms=OF_INPUT * spent,
        work=mask,
    )


def _unmoved(case: Case, rows: Rows) -> Finding | None:
    masks = {place / 10: case.verdict(letter) for place, letter in enumerate(UNMOVED, 5)}
    lost = sum(share * case.cost_ms(mask) for share, mask in masks.items())
    if not lost > SHARE * case.step_ms:
        return None
    mask = np.logical_or.reduce(list(masks.values()))
    spent = case.cost_ms(mask)
    return Claim(
        rule="unused_work",
        claim=f"updates that leave what they update as it was take {units.milliseconds(lost)} a "
        "step",
        evidence=(
            f"{units.percent(lost / spent)} of what these operators write does not change",
            *rows.hot_lines(mask),
        ),
        remedy="leave out what does not change: average and update only weights that are trained",
        stake_ms=spent,
        why="a tensor is read and written whole, whether its numbers change or not",
        gain_ms=lost,
        work=mask,
    )


def _not_taken(case: Case, rows: Rows) -> Finding | None:
    """Judge layers of whose result a torch.where takes nothing.

    Not elementwise work: of two formulas, one for rare values, neither can be left out.
    """
    mask = rows.with_gradients(case.verdict(NOT_TAKEN))
    spent = case.cost_ms(mask)
    products = rows.labeled("category", lambda label: label.startswith(PRODUCTS))
    if not spent > METRICS * case.step_ms or not (mask & products).any():
        return None
    return Claim(
        rule="unused_work",
        claim=f"a torch.where takes nothing of what {units.milliseconds(spent)} of a step compute",
        evidence=("its condition is the same for all elements", *rows.hot_lines(mask)),
        remedy="ask before, in Python, whether any of it is wanted: `if ratio > 0:`",
        stake_ms=spent,
        why="torch.where needs both of its inputs whole",
        gain_ms=spent,
        work=mask,
    )


def _without_effect(case: Case, rows: Rows) -> Finding | None:
    """Add up the work without effect, by whether anybody looks at it."""
    unused, read = case.verdict(UNUSED), case.verdict(READ_ONLY)
    unused = unused & ~rows.within(lambda call: FOR_BOTH.fullmatch(call.name) is not None)
    times_zero = rows.with_gradients(case.verdict(TIMES_ZERO))  # zeros, all of them
    # Of a convolution's gradients, half are for nothing; its bias has a sum of its own.
    halves = case.verdict(IDLE_WEIGHT)
    unused = unused | (halves & rows.category("reduction"))
    halves = halves & ~unused
    mask = unused | read | times_zero
    spent = rows.ms(mask) + (1 - OF_INPUT) * rows.ms(halves)
    gain = case.cost_ms(mask) + (1 - OF_INPUT) * case.cost_ms(halves)
    if not gain > SHARE * case.step_ms:
        return None
    backward = rows.labeled("phase", lambda label: label == "backward")
    needless = (unused | halves) & backward
    gradients = rows.ms(needless) > rows.ms(mask | halves) / 2
    used = backward & ~unused & ~halves
    if halves.any():  # the way through a network that is not trained has gradients, too
        used &= rows.within(lambda call: call.name == CONVOLVED)
    untrained = [one.name for one in _untrained(case)]
    dropped = gradients and not untrained and _learns_too(rows, needless, used)
    what = (
        "gradients that are dropped before the update take"
        if dropped
        else "gradients that no optimizer uses take"
        if gradients
        else "work that the update does not need takes"
    )
    return Claim(
        rule="unused_work",
        claim=f"{what} {units.milliseconds(gain)} a step",
        evidence=(
            *_counts(rows, unused, read, times_zero, halves),
            *(_going_back(rows, needless) if gradients else ()),
            *rows.hot_lines(mask | halves),
            *(_optimizers(case, untrained) if gradients and not dropped else ()),
        ),
        remedy="run forward and backward once for each update: no zero_grad() between a backward "
        "and its step(), no closure that has been called before step(closure), and "
        "torch.autograd.grad(loss, inputs) where only the gradients of these are read"
        if dropped
        else "requires_grad_(False) for weights that are not trained, torch.no_grad() around "
        "what they compute"
        if gradients
        else "leave it out, or compute metrics and logs every N steps",
        stake_ms=gain,
        why="no weight, no optimizer state and no buffer depends on it",
        gain_ms=max(spent, gain),
        ordinary=not gradients
        and not rows.ms(times_zero) > spent / 2
        and gain < METRICS * case.step_ms,
        work=mask | halves,
    )


def _going_back(rows: Rows, gradients: Mask) -> list[str]:
    """Return the lines from which these gradients are asked for."""
    op = rows.work.op_row[gradients & (rows.work.op_row >= 0)]
    return [f"backward is called at {line}" for line in rows.lines_at(rows.source.ops.start[op])]


def _learns_too(rows: Rows, unused: Mask, used: Mask) -> bool:
    """Whether most of these gradients are of lines that also have gradients which are used."""
    lines = np.unique(rows.work.line[used])
    return rows.ms(unused & np.isin(rows.work.line, lines)) > rows.ms(unused) / 2


def _untrained(case: Case) -> list[IdleGradients]:
    """Return the weights that require gradients though nothing updates them."""
    idle = case.dataflow.idle_gradients if case.dataflow is not None else ()
    return [one for one in idle if one.asked]


def _optimizers(case: Case, untrained: list[str]) -> list[str]:
    """Return where optimizers are made: what is not in them gets gradients for nothing."""
    shapes = case.run.profile.optimizers if case.run and case.run.profile else ()
    names = dict.fromkeys(shape.name for shape in shapes)
    more = f" and {len(untrained) - SHOWN} more" if len(untrained) > SHOWN else ""
    without = [f"no optimizer has {', '.join(untrained[:SHOWN])}{more}"] if untrained else []
    frozen = case.setup_lines("requires_grad") if untrained else ()
    made = [f"{name} is made at {line}" for name in names for line in case.setup_lines(name)]
    return [*without, *(f"requires_grad is set at {line}" for line in frozen), *made]


def _counts(rows: Rows, unused: Mask, read: Mask, times_zero: Mask, halves: Mask) -> list[str]:
    parts = (
        (unused, "for nothing"),
        (read, "for values that are only read or kept"),
        (times_zero, "for values that are multiplied by zero, and their gradients"),
        (halves, "for the gradients of an input and, for nothing, of a weight"),
    )
    return [
        f"{rows.count(mask):.0f} kernels a step {what}: {units.milliseconds(rows.ms(mask))}"
        if rows.analysis.budget.on_device
        else f"{rows.count(mask):.0f} operators a step {what}: {units.milliseconds(rows.ms(mask))}"
        for mask, what in parts
        if mask.any()
    ]


RULE = check
