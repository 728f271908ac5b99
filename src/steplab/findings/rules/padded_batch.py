"""Much of the batch is padding.

What it sees: token ids that repeat the last one of their row up to its end, as the Run recorded
them: more than a quarter of the batch.
Why it costs: padding goes through every layer like any other token.
Remedy: pad to the longest of the batch and not to a fixed length, sort by length, or pack several
sequences into one row.
When it is wrong: rows end in a token that is repeated and counts.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.findings.case import Case

SHARE = 0.25
PASSES = ("forward", "backward", "unattributed")


def check(case: Case) -> Finding | None:
    """Take the share of padding of what forward and backward cost."""
    dataflow = case.run.profile.dataflow if case.run and case.run.profile else None
    if dataflow is None or case.rows is None or not dataflow.padding > SHARE:
        return None
    spent = case.cost_ms(case.rows.labeled("phase", lambda label: label != "optimizer"))
    lost = dataflow.padding * spent
    return Finding(
        rule="padded_batch",
        claim=f"{units.percent(dataflow.padding)} of the tokens are padding",
        evidence=(f"forward and backward take {units.milliseconds(spent)}",),
        remedy="pad to the longest of the batch instead of a fixed length, group sequences of one "
        "length, or pack several into a row",
        stake_ms=lost,
        why="padding goes through every layer like any other token",
        gain_ms=lost,
    )


RULE = check
