"""Many small collectives instead of a few large ones.

What it sees: in the traces of all ranks, 16 or more collectives of one kind in a step, of less than
1 MiB each, part of whose time nothing hides.
Why it costs: every collective costs its latency, however little it carries.
Remedy: put gradients together in buckets of some MiB, parameters of several layers in one gather.
When it is wrong: messages that depend on each other cannot be put together.
"""

from __future__ import annotations

import math

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.trace.ranks.kinds import Kind

MANY = 16  # a step
SMALL = 1 << 20  # bytes: NVLink carries that in 5 us, which is a collective's latency
BUCKET = 25 << 20  # bytes, DDP's
KINDS = ("all-reduce", "reduce-scatter", "all-gather", "broadcast")


def check(case: Case) -> Finding | None:
    """Count collectives by kind, and what their latency adds up to."""
    small = [kind for kind in case.ranks.kinds if _is_small(kind)] if case.ranks else []
    saved = saved_ms(case)
    if case.ranks is None or not saved:
        return None
    if case.ranks.late is None:  # ranks that meet so often wait for each other in turns
        saved += sum(_share(kind) * _waiting_ms(kind) for kind in small)
    worst = max(small, key=lambda kind: kind.count)
    return Finding(
        rule="small_buckets",
        claim=f"{worst.count:.0f} times a step, {_article(worst.kind)} {worst.kind} carries "
        f"{units.bytes_(worst.bytes)} only",
        evidence=tuple(
            f"{kind.kind}: {kind.count:.0f} a step, {units.bytes_(kind.bytes)} each, "
            f"{units.milliseconds(kind.transfer_ms)} of transfer, "
            f"{units.milliseconds(kind.least_ms)} each at least"
            for kind in small
        ),
        remedy="put them together: parallel=bucket for gradients, the setting `together` of "
        "parallel=fsdp for blocks that are gathered, bucket_cap_mb of DDP",
        stake_ms=max(saved, sum(kind.exposed_ms for kind in small)),
        why="a collective costs its latency, however little it carries",
        gain_ms=saved,
    )


def saved_ms(case: Case) -> float:
    """Return the exposed latency per step that fewer collectives would not pay."""
    kinds = case.ranks.kinds if case.ranks else ()
    return sum(_share(kind) * kind.exposed_ms for kind in kinds if _is_small(kind))


def _share(kind: Kind) -> float:
    """Return the share of the calls that would not be there: all cost about the same."""
    fewer = math.ceil(kind.count * (kind.bytes or 0.0) / BUCKET)
    return 1 - fewer / kind.count


def _waiting_ms(kind: Kind) -> float:
    """Return the waiting of all ranks per step that nothing hides."""
    whole = kind.transfer_ms + (kind.waiting_ms or 0.0)
    return max(0.0, kind.exposed * whole - kind.exposed_ms)


def _article(kind: str) -> str:
    return "an" if kind.startswith("a") else "a"


def _is_small(kind: Kind) -> bool:
    known = kind.bytes is not None and kind.bytes < SMALL
    return kind.kind in KINDS and kind.count >= MANY and known


RULE = check
