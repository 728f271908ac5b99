"""Communication runs while nothing computes.

What it sees: communication that runs while nothing computes. Of the traces of several ranks, only
their transfer: waiting for a late rank, small messages, late gathers, uneven exchanges and padding
have rules of their own, and the latency of a few small messages is what every step pays.
Why it costs: the device could compute while the network carries gradients.
Remedy: by what is sent. Gradients: reduce each bucket as soon as it is ready, on its own stream, or
where that is done already, send less. Weights: gather those of the next layer ahead. Rows that are
exchanged: compute one half of the batch while the other travels.
When it is wrong: the last bucket of a backward pass has nothing left to overlap with; and a rank
that is late makes the others wait here, unless the traces of all ranks are there.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.findings.rules.late_allgather import late_gathers, late_ms
from steplab.findings.rules.padded_shards import padded_ms
from steplab.findings.rules.small_buckets import MANY, saved_ms
from steplab.findings.rules.uneven_exchange import uneven_ms
from steplab.trace.ranks.analysis import TRANSFER

EXCHANGES = re.compile(r"SendRecv|all[_-]?to[_-]?all|ep::inter|ep::intra|recv", re.IGNORECASE)
GATHERS = re.compile(r"all[_-]?gather", re.IGNORECASE)
BUCKETED = "DistributedDataParallel."
SHOWN = 3


@dataclass(frozen=True)
class Seen:
    """What is known of the communication of a step, in ms."""

    exposed: float
    whole: float
    evidence: tuple[str, ...]
    sent: str  # names of what is sent most


def check(case: Case) -> Finding | None:
    """Take the term of the budget, and report how much communication there is in all."""
    if case.rows is None:
        return None
    seen = _of_one(case) if case.ranks is None else _of_ranks(case)
    if not seen.exposed > 0:
        return None
    return Finding(
        rule="exposed_communication",
        claim=f"{units.milliseconds(seen.exposed)} of {units.milliseconds(seen.whole)} "
        "communication have nothing to hide behind",
        evidence=seen.evidence,
        remedy=_remedy(case, seen.sent),
        stake_ms=seen.exposed,
        why="the device waits for the network"
        + ("" if case.ranks and case.ranks.tells_waits else ", or for the rank that comes last,")
        + " and does not compute meanwhile",
        gain_ms=seen.exposed,
    )


def _of_one(case: Case) -> Seen:
    """Take the work of one rank's trace."""
    assert case.rows is not None
    exposed = case.term_ms("communication")
    mask = case.rows.category("communication")
    groups = case.rows.totals("name", mask, SHOWN)
    return Seen(
        exposed,
        max(exposed, case.rows.ms(mask)),  # which counts by the step that launched it
        tuple(f"{g.label}: {g.count:.0f}, {units.milliseconds(g.ms)}" for g in groups),
        " ".join(g.label for g in groups[:1] + case.rows.totals("op", mask, 1)),
    )


def _of_ranks(case: Case) -> Seen:
    """Take of all ranks what is transfer in the median step, and no other rule's."""
    assert case.ranks is not None and case.rows is not None
    ranks = case.ranks
    transfer = statistics.median(parts[TRANSFER] for parts in ranks.split.values())
    transfer = min(transfer, sum(kind.exposed_ms for kind in ranks.kinds))  # no calls around them
    others = late_ms(case) + saved_ms(case) + uneven_ms(case) + padded_ms(case)
    exposed = (transfer - others - _latency_ms(case)) * case.rows.scale
    evidence = tuple(
        f"{kind.kind} over {kind.size} ranks: {kind.count:.3g} a step, "
        f"{units.milliseconds(kind.transfer_ms)}, exposed {units.milliseconds(kind.exposed_ms)}"
        for kind in ranks.kinds[:SHOWN]
    )
    most = max(ranks.kinds, key=lambda kind: kind.exposed_ms, default=None)
    whole = max(sum(kind.transfer_ms for kind in ranks.kinds), exposed)
    return Seen(exposed, whole, evidence, most.kind if most else "")


def _latency_ms(case: Case) -> float:
    """Return what few small messages take per step: a loss, a norm, the last gradients.

    They come when their numbers are there and are needed at once, so nothing can hide them.
    """
    assert case.ranks is not None
    late = late_gathers(case)
    return sum(kind.brief_ms for kind in case.ranks.kinds if kind.brief < MANY and kind not in late)


def _remedy(case: Case, sent: str) -> str:
    """Return what would hide or shorten what is sent most; `sent` names kernel and operator."""
    assert case.rows is not None and case.analysis is not None
    if EXCHANGES.search(sent):
        return "compute one half of the batch while the rows of the other are sent"
    if GATHERS.search(sent):
        return "gather the weights of the next layer while this one computes"
    if not case.rows.labeled("phase", lambda label: label in ("backward", "optimizer")).any():
        return "larger batches, fewer ranks to a layer, or another batch that computes meanwhile"
    ranges = case.analysis.trace.ranges
    if case.analysis.trace.named(ranges, lambda name: name.startswith(BUCKETED)).any():
        return (
            "fewer bytes (gradients in bf16, accumulation over several batches): they are sent in "
            "buckets during backward already; if one rank is slower, look there"
        )
    return "reduce gradients bucket by bucket during backward, on a stream of their own"


RULE = check
