"""Ranks of one group call collectives in another order, or other ones.

What it sees: in the traces of all ranks, the first collective of a step that not all of them call.
Why it costs: NCCL pairs collectives by their order. Two of one size exchange wrong numbers without
an error; all others wait for each other until the time is up.
Remedy: let every rank call the same collectives in the same order, whatever its data is.
When it is wrong: ranks of several groups that the trace does not name, as gloo's, may rightly call
other collectives; only another order of the same ones is told there.
"""

from __future__ import annotations

from steplab.core import Finding
from steplab.findings.case import Case

SHOWN = 3


def check(case: Case) -> Finding | None:
    """Take the steps in which the ranks disagree."""
    found = case.ranks.disorder if case.ranks else ()
    if not found:
        return None
    steps = "one step" if len(found) == 1 else f"{len(found)} steps"
    return Finding(
        rule="desync",
        claim=f"the ranks do not call the same collectives in the same order, in {steps}",
        evidence=tuple(one.sentence for one in found[:SHOWN]),
        remedy="look for a branch, a loop or a set whose order depends on the rank or on its data",
        stake_ms=case.step_ms,  # all of it: the step hangs, or its numbers are wrong
        why="collectives are paired by their order: unequal ones wait for each other forever",
    )


RULE = check
