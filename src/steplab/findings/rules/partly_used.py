"""Most of what an operator computes is dropped.

What it sees: results of which at least half is never read, as the Run recorded the flow of values:
a convolution of which every second row is taken, a product of all positions for the last one, a
permutation of all samples for one batch, channels of all classes for the one that an index takes,
a sort of which the first few are taken.
Why it costs: the operator and its backward compute the rest all the same.
Remedy: take the part before the operator: `stride=2`, `head(x[:, -1])`, `torch.randint`; topk.
When it is wrong: the part that is used differs from step to step, and cannot be known before.
"""

from __future__ import annotations

import numpy as np

from steplab.core import Finding, units
from steplab.core.dataflow import PARTLY_USED
from steplab.findings.case import Case
from steplab.findings.claims import Claim

SHARE = 0.03
SORTS = ("aten::sort", "aten::argsort", "aten::msort")
TOP_K = "torch.topk(x, k) for the k that are read, in place of a sort of all"
BEFORE = (
    "take the part that is used before the operator: stride=2 instead of [::2], head(x[:, -1]) "
    "instead of head(x)[:, -1], torch.randint instead of randperm(n)[:k]; where an index takes "
    "channels, index the weights: weight[classes]"
)


def check(case: Case) -> Finding | None:
    """Add up the dropped shares of what operators and their gradients take."""
    rows = case.rows
    if rows is None:
        return None
    stacked = rows.within(lambda call: call.name == "aten::stack")
    # What a formula of autograd drops of its own results is nobody's to change.
    backward = rows.labeled("phase", lambda label: label == "backward")
    masks = {}
    for place, letter in enumerate(PARTLY_USED, 5):
        dropped = case.verdict(letter) & ~backward
        # A recurrent layer stacks its states by itself, and needs the early ones for the late.
        own = dropped & stacked & ~rows.whole_calls(dropped)
        masks[place / 10] = dropped | rows.with_gradients(dropped & ~own)
    lost = sum(share * case.cost_ms(mask) for share, mask in masks.items())
    if not lost > SHARE * case.step_ms:
        return None
    mask = np.logical_or.reduce(list(masks.values()))
    spent = case.cost_ms(mask)
    ops = [total.label for total in rows.totals("op", mask, 2)]
    return Claim(
        rule="partly_used",
        claim=f"at least {units.percent(lost / spent)} of what {units.milliseconds(spent)} of work "
        "computes is dropped",
        evidence=(f"most of it in {', '.join(ops)}", *rows.hot_lines(mask)),
        remedy=TOP_K if ops[0] in SORTS else BEFORE,
        stake_ms=spent,
        why="an operator and its backward take as long, whoever reads the result",
        gain_ms=lost,
        work=mask,
    )


RULE = check
