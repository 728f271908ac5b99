"""The host does something else, and the step stands still meanwhile.

What it sees: stretches in which the host launches nothing for more than 0.3 ms while the device
has run dry; without a device, in which it is in no operator. The Python stack names the line.
Why it costs: once the launched work is done, the device idles until the host comes back.
Remedy: do it every N steps, in a thread or another process, or with tensors on the device.
When it is wrong: the stretch is torch's own and the trace has no stacks to tell. Batches that are
fetched there are a data_stall, compilations a recompile, kernels that are loaded at their first
launch are warmup_counted, and Python's garbage collector has a rule.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.trace.analysis import UNATTRIBUTED

SHARE = 0.01  # a busy machine holds the host up now and then
SHOWN = 3
PAUSES, PAUSES_AMONG_LAUNCHES, LAUNCHES = 0.07, 0.10, 0.25  # of the step


def check(case: Case) -> Finding | None:
    """Take the silences of the host that are neither data nor compilation."""
    if case.host_is_watched:
        return None
    hidden = case.unexplained_wait_ms
    places = case.silent_lines("python", "operator")
    # A line that is silent in every step, and no more than all are in one.
    lost = min(sum(ms for _, ms in places), case.silent_ms("python", "operator")) + hidden
    lost -= case.collector_median_ms
    if not lost > SHARE * case.step_ms:
        return None
    known = [(line, ms) for line, ms in places if line != UNATTRIBUTED]
    evidence = [f"{line}: {units.milliseconds(ms)} a step" for line, ms in known[:SHOWN]]
    evidence[:1] = [f"{first}{case.called_at(known[0][0])}" for first in evidence[:1]]
    if hidden > SHARE * case.step_ms:
        evidence.append(f"{units.milliseconds(hidden)} more than the few launches of a step take")
    # The line that takes the most, unless what no stack tells takes more.
    unknown = hidden + sum(ms for line, ms in places if line == UNATTRIBUTED)
    where = known[0][0] if known and known[0][1] > unknown else ""
    who = "the device idles" if case.on_device else "no operator runs"
    doing = f"the host is at {where}" if where else "the host launches nothing"
    return Finding(
        rule="host_stall",
        claim=f"{who} {units.milliseconds(lost)} of a step while {doing}",
        evidence=tuple(evidence) or ("there is no stack and no range that tells the line",),
        remedy=_remedy(case, where),
        stake_ms=lost,
        why="the host launches nothing there, and what it had launched before is done"
        if case.on_device
        else "no operator runs meanwhile",
        gain_ms=lost,
        ordinary=_is_one_of_many(case, lost),
    )


def _is_one_of_many(case: Case, lost: float) -> bool:
    """Whether a pause is what clean eager steps have: up to 6.5 % of them, and 9 % of launch-bound.

    Torch prepares an update of hundreds of tensors, and a busy machine takes the host away. On a
    CPU clean steps have up to 4 %.
    """
    launches = case.launch_wait_ms > LAUNCHES * case.step_ms
    return lost < (PAUSES_AMONG_LAUNCHES if launches else PAUSES) * case.step_ms


def _remedy(case: Case, where: str) -> str:
    if not where or where.startswith("range "):
        if case.has_stacks:
            return "see what the host does in the longest gaps of the trace: no line explains them"
        return "record with stacks (steplab profile, or with_stack=True): they name the line"
    if where.startswith("aten::"):
        op = where.partition(" at ")[0]
        return f"let {op} run on the device, compute it once, or move it out of the step"
    elsewhere = "with tensors on the device or in compiled code"
    return (
        "do it once or every N steps, in a thread or process of its own, "
        f"{elsewhere if case.on_device else 'or in compiled code'}"
    )


RULE = check
