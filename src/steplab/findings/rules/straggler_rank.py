"""One rank comes late, and all others wait for it.

What it sees: in the traces of all ranks, put on one clock, collectives that wait for the same rank
again and again; its own extra time says why.
Why it costs: a collective moves nothing before its last rank has come, so the slowest rank sets
the pace of all.
Remedy: that of the cause: its data, its extra work, its host, its card.
When it is wrong: a rank that is late in a few steps may have been disturbed from outside. If it is
later by less than three standard errors over the steps, that is a note.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.findings.case import Case

REMEDIES = {
    "kernels": "give every rank the same work, or look at the clocks of that card",
    "operators": "give every rank the same work, or look at what else runs on that machine",
    "copies": "look at what that rank copies and the others do not",
    "data wait": "read its batches ahead (prefetch), and look at the disk and the files it reads",
    "synchronization": "look for a value that only this rank reads back from its device",
    "host": "look at what its host does besides launching: logging, checkpoints, garbage "
    "collection, a busy core",
}


SHARE = 0.05  # of the step: two processes of one busy machine differ by a few percent anyway


def check(case: Case) -> Finding | None:
    """Take the late rank of the traces."""
    if case.ranks is None or case.ranks.late is None:
        return None
    late = case.ranks.late
    if not late.waiting_ms > SHARE * case.step_ms:
        return None
    delay = units.milliseconds(late.delay_ms)
    cause = f" ({late.cause})" if late.cause else ""
    more = units.milliseconds(late.excess_ms)
    seen = [f"{units.percent(late.share)} of all waiting is for rank {late.rank}"]
    if late.cause:
        seen.append(f"it spends {more} more on {late.cause} than the others in such a step")
    return Finding(
        rule="straggler_rank",
        claim=f"the others wait {delay} for rank {late.rank}, {late.when}{cause}",
        evidence=(*seen, *late.evidence),
        remedy=REMEDIES.get(late.cause, "compare that machine with the others"),
        stake_ms=late.waiting_ms,
        why="a collective moves nothing before its last rank has come",
        gain_ms=late.waiting_ms,
        ordinary=not late.steady,
    )


RULE = check
