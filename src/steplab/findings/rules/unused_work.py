"""The step computes what its update does not need.

What it sees: operators that no weight, no optimizer state and no buffer depends on, as the Run
recorded the flow of values: gradients of weights that no optimizer has, or that are dropped before
the update; metrics and norms for a log, a validation in the step, a loss of weight 0; gradients of
inputs that nobody reads, which an operator of backward computes beside those of its weights; and
updates of tensors that they leave as they were, as an average of weights that are frozen.
Why it costs: they run in every step, and what only the host reads makes it wait besides.
Remedy: `requires_grad_(False)` for what is not trained, none at all for a batch; metrics every N
steps.
When it is wrong: the loop keeps a result in Python and uses it in a later step.
"""

from __future__ import annotations

import numpy as np

from steplab.core import Finding, units
from steplab.core.run import IDLE_GRADIENT, READ_ONLY, TIMES_ZERO, UNMOVED, UNUSED
from steplab.findings.case import ANOMALY, Case
from steplab.findings.claims import Claim
from steplab.findings.rows import Mask, Rows

SHARE = 0.005
METRICS = 0.10  # of the step: a loop may look at itself, and checks of arguments are torch's own
# A convolution's gradient of the input is a product as large as that of its weights. One of 3
# channels, 7 x 7 to 32, took 24 of 41 ms on one core: narrow results are slow.
OF_INPUT = 0.5


def check(case: Case) -> tuple[Finding, ...]:
    """Look for work without effect, and for operators of which a part has none."""
    rows = case.rows
    if rows is None or ANOMALY in case.switches:
        return ()
    found = (_without_effect(case, rows), _idle_gradient(case, rows), _unmoved(case, rows))
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


def _without_effect(case: Case, rows: Rows) -> Finding | None:
    """Add up the work without effect, by whether anybody looks at it."""
    unused, read = case.verdict(UNUSED), case.verdict(READ_ONLY)
    times_zero = rows.with_gradients(case.verdict(TIMES_ZERO))  # zeros, all of them
    mask = unused | read | times_zero
    if not case.cost_ms(mask) > SHARE * case.step_ms:
        return None
    backward = rows.labeled("phase", lambda label: label == "backward")
    gradients = rows.ms(unused & backward) > rows.ms(mask) / 2
    spent, gain = rows.ms(mask), case.cost_ms(mask)
    dropped = gradients and _learns_too(rows, unused & backward, backward & ~unused)
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
            *_counts(rows, unused, read, times_zero),
            *(_going_back(rows, unused & backward) if dropped else ()),
            *rows.hot_lines(mask),
            *(_optimizers(case) if gradients and not dropped else ()),
        ),
        remedy="run forward and backward once for each update: no zero_grad() between a backward "
        "and its step(), no closure that has been called before step(closure), and "
        "torch.autograd.grad only for those weights whose gradients are read"
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
        work=mask,
    )


def _going_back(rows: Rows, gradients: Mask) -> list[str]:
    """Return the lines from which these gradients are asked for."""
    op = rows.work.op_row[gradients & (rows.work.op_row >= 0)]
    return [f"backward is called at {line}" for line in rows.lines_at(rows.source.ops.start[op])]


def _learns_too(rows: Rows, unused: Mask, used: Mask) -> bool:
    """Whether most of these gradients are of lines that also have gradients which are used."""
    lines = np.unique(rows.work.line[used])
    return rows.ms(unused & np.isin(rows.work.line, lines)) > rows.ms(unused) / 2


def _optimizers(case: Case) -> list[str]:
    """Return where optimizers are made: what is not in them gets gradients for nothing."""
    shapes = case.run.profile.optimizers if case.run and case.run.profile else ()
    names = dict.fromkeys(shape.name for shape in shapes)
    return [f"{name} is made at {line}" for name in names for line in case.setup_lines(name)]


def _counts(rows: Rows, unused: Mask, read: Mask, times_zero: Mask) -> list[str]:
    parts = (
        (unused, "for nothing"),
        (read, "for values that are only read or kept"),
        (times_zero, "for values that are multiplied by zero, and their gradients"),
    )
    return [
        f"{rows.count(mask):.0f} kernels a step {what}: {units.milliseconds(rows.ms(mask))}"
        if rows.analysis.budget.on_device
        else f"{rows.count(mask):.0f} operators a step {what}: {units.milliseconds(rows.ms(mask))}"
        for mask, what in parts
        if mask.any()
    ]


RULE = check
