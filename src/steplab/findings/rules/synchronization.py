"""The host waits for the device in the middle of a step.

What it sees: calls that wait for the device (`.item()`, `.nonzero()`, copies to the host), and the
time in which the device then had nothing to do.
Why it costs: the host is no longer ahead; the device idles until new work is launched.
Remedy: keep the value on the device, read it every N steps, or copy it without blocking; what comes
from the host does not wait if its memory is pinned.
When it is wrong: the wait is intended, as at the end of a benchmark.
"""

from __future__ import annotations

import re
from collections import defaultdict

from steplab.core import Finding, units
from steplab.findings.case import ANOMALY, Case
from steplab.findings.claims import Claim
from steplab.findings.rows import Rows
from steplab.trace.analysis import UNATTRIBUTED
from steplab.trace.host_calls import takes_driver_memory

SHOWN = 5
DRIVER_MEMORY = 0.02  # of the step
FREES = re.compile(r"(cuda|hip)Free(Async|Host)?|hipHostFree")


def check(case: Case) -> Finding | None:
    """Add up the idle time that each waiting line caused."""
    if case.rows is None or not case.on_device or ANOMALY in case.switches:
        return None
    assert case.analysis is not None
    syncs, labels, steps = case.analysis.syncs, case.rows.work.labels, case.rows.steps
    told = case.driver_memory_ms > DRIVER_MEMORY * case.step_ms  # by allocator_calls
    idle: dict[tuple[str, str], float] = defaultdict(float)
    counts: dict[tuple[str, str], float] = defaultdict(float)
    for row in ((syncs.step >= 0) & (syncs.idle > 0)).nonzero()[0]:
        op, call = labels[syncs.op[row]], labels[syncs.call[row]]
        if told and takes_driver_memory(call):
            continue
        # In compiled code the operator is the name of a graph, which says nothing. Memory is freed
        # by whichever operator comes when there is none left: that one is not to blame.
        reads = "::" in op and FREES.fullmatch(call) is None
        place = (op if reads else call, labels[syncs.line[row]])
        idle[place] += float(syncs.idle[row]) / 1e6 / steps
        counts[place] += 1 / steps
    if not idle:
        return None
    total = sum(idle.values())
    places = sorted(idle, key=lambda place: -idle[place])
    evidence = [
        f"{_where(op, line)}: {counts[op, line]:.3g} a step, "
        f"{units.milliseconds(idle[op, line])} idle"
        for op, line in places[:SHOWN]
    ]
    copied = case.rows.labeled("name", lambda name: name.startswith("Memcpy"))
    copied &= case.rows.labeled("line", {line for _, line in places}.__contains__)
    return Claim(
        rule="synchronization",
        claim=f"{_times(sum(counts.values()))} a step the host waits and the device runs dry",
        evidence=tuple(evidence),
        remedy=_remedy(case.rows, *places[0]),
        stake_ms=total,
        why="after each wait the device idles until the host has launched new work",
        gain_ms=total,
        work=copied,  # what else goes with its line has told the wait
    )


def _times(count: float) -> str:
    return "once" if round(count, 2) == 1 else f"{count:.3g} times"


def _where(op: str, line: str) -> str:
    return op if line == UNATTRIBUTED else f"{op} at {line}"


def _remedy(rows: Rows, op: str, line: str) -> str:
    if FREES.fullmatch(op):
        return (
            f"keep the allocator from giving memory back ({op}): no torch.cuda.empty_cache() in "
            "the step, and less memory, or sizes that do not vary, where it runs out"
        )
    if _comes_from_host(rows, op, line):
        return "pin the memory of the host (pin_memory=True) and copy with non_blocking=True"
    if "::" in op:
        return f"keep the value of {op} on the device, or read it every N steps"
    return f"leave {op} out, or do it every N steps"


def _comes_from_host(rows: Rows, op: str, line: str) -> bool:
    """Whether most of what the operator copies there goes to the device."""
    copied = rows.labeled("name", lambda name: name.startswith("Memcpy"))
    copied &= rows.labeled("op", op.__eq__) & rows.labeled("line", line.__eq__)
    most = rows.totals("name", copied, 1)
    return bool(most) and "HtoD" in most[0].label


RULE = check
