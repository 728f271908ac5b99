"""The device begins late what was launched in time.

What it sees: the term `dispatch`: work that the host had launched, while nothing ran, above 30 % of
the step. Short waits before many kernels are the device's own time to start each; long ones are
waits for something that the trace does not show.
Why it costs: a kernel takes 1 to 2 us to start, also in a CUDA graph; kernels shorter than that
leave the device idle half of the time.
Remedy: fewer and larger kernels (`compile=blocks`, fused optimizers), larger batches; for long
waits, look for another process on the card and for events of other streams or ranks.
When it is wrong: host and device clocks of the trace differ, or its launches belong to other work.
Before the first work of a recording the device may still compute what was launched earlier: that
wait is left out.
"""

from __future__ import annotations

import numpy as np

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.trace.budget import idle_before

SHARE = 0.30
SHORT_NS = 20_000  # ten times what starting a kernel takes
CUT_REMEDY = (
    "record again, longer: where a recording begins or was cut, the device may have computed what "
    "is not in it; else look for other processes on the card (nvidia-smi) and for late ranks"
)
LONG_REMEDY = (
    "look for other processes on the card (nvidia-smi), for waits between streams and for ranks "
    "that are late; record again alone"
)
SHORT_REMEDY = "fewer and larger kernels: compile=blocks, a fused optimizer, larger batches"


def check(case: Case) -> Finding | None:
    """Compare the waits for launched work with the step."""
    analysis, lost = case.analysis, case.term_ms("dispatch")
    if analysis is None or not case.on_device or not lost > SHARE * case.step_ms:
        return None
    number = analysis.budget.typical.number
    window = next(window for window in analysis.windows if window.number == number)
    waits = idle_before(analysis.trace, analysis.windows, analysis.work, analysis.syncs, (window,))
    lost -= float(waits["dispatch"][0]) / 1e6  # before the first work of all
    each = waits["dispatch"][1:][waits["dispatch"][1:] > 0]
    if not lost > SHARE * case.step_ms:
        return None
    long = float(each[each > SHORT_NS].sum()) > each.sum() / 2
    middle = units.milliseconds(float(np.median(each)) / 1e6)
    longest = units.milliseconds(float(each.max()) / 1e6)
    return Finding(
        rule="late_start",
        claim=f"launched work waits {units.milliseconds(lost)} of a step for an idle device",
        evidence=(f"{len(each):,} waits, half of them under {middle}, the longest {longest}",),
        remedy=_remedy(long, float(each.max()) > each.sum() / 2),
        stake_ms=lost,
        why="something that is not in the trace holds the device up"
        if long
        else "every kernel takes the device a microsecond or two to start, also in a graph",
    )


def _remedy(long: bool, single: bool) -> str:
    if not long:
        return SHORT_REMEDY
    return CUT_REMEDY if single else LONG_REMEDY


RULE = check
