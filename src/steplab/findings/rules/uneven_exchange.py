"""An all-to-all in which some ranks send or receive much more than others.

What it sees: in the traces of all ranks, all-to-alls whose largest message is 1.25 times the mean
or more.
Why it costs: the exchange lasts as long as its largest part, and the rank that receives most
computes longest afterwards.
Remedy: balance what is sent: the router's balancing loss, a capacity, or experts placed by load.
When it is wrong: an exchange that is uneven now and then evens out over steps.
"""

from __future__ import annotations

import numpy as np

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.trace.collectives import KIND_NAMES
from steplab.trace.ranks.analysis import RanksAnalysis
from steplab.trace.ranks.kinds import Kind

UNEVEN = 1.25  # largest over mean


def check(case: Case) -> Finding | None:
    """Compare the messages of every all-to-all over the ranks."""
    exposed = uneven_ms(case)
    if case.ranks is None or not exposed:
        return None
    sizes_NR = _sizes(case.ranks)
    mean, most = sizes_NR.mean(), sizes_NR.max(axis=1).mean()
    fullest = case.ranks.rows[int(sizes_NR.sum(axis=0).argmax())].rank
    whole = sum(kind.transfer_ms for kind in _exchanges(case.ranks))
    gain = min(exposed, whole * (1 - mean / most))  # what is shorter is hidden better, too
    return Finding(
        rule="uneven_exchange",
        claim=f"the largest part of an all-to-all is {units.ratio(most / mean)} the mean; rank "
        f"{fullest} has most",
        evidence=tuple(
            f"rank {row.rank}: {units.bytes_(size)} a time"
            for row, size in zip(case.ranks.rows, sizes_NR.mean(axis=0), strict=True)
        ),
        remedy="balance what is sent: a balancing loss, a capacity, experts placed by their load",
        stake_ms=exposed,
        why="the exchange lasts as long as its largest part",
        gain_ms=gain,
    )


def uneven_ms(case: Case) -> float:
    """Return the transfer of uneven all-to-alls that nothing hides, per step."""
    if case.ranks is None:
        return 0.0
    sizes_NR = _sizes(case.ranks)
    if not len(sizes_NR) or not sizes_NR.max(axis=1).mean() > UNEVEN * sizes_NR.mean():
        return 0.0
    return sum(kind.exposed_ms for kind in _exchanges(case.ranks))


def _exchanges(ranks: RanksAnalysis) -> list[Kind]:
    return [kind for kind in ranks.kinds if kind.kind == "all-to-all"]


def _sizes(ranks: RanksAnalysis) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return (exchanges, ranks): bytes of each rank's part, where all ranks tell it."""
    matches = ranks.matches
    rows = matches.row[matches.kind == KIND_NAMES.index("all-to-all")]
    whole = rows[(rows >= 0).all(axis=1)]
    parts = [rank.collectives.bytes[whole[:, i]] for i, rank in enumerate(ranks.ranks)]
    sizes = np.stack(parts, axis=1) if parts else np.zeros((0, 0))
    return sizes[np.isfinite(sizes).all(axis=1)]


RULE = check
