"""A switch for debugging is on.

What it sees: anomaly mode, launches that block, deterministic algorithms and the like, as the Run
recorded them while the step ran.
Why it costs: anomaly mode keeps a Python stack per operator and reads every gradient; a launch that
blocks leaves the device idle while the host prepares the next.
Remedy: turn it off where nothing is debugged.
When it is wrong: bit-exact results are wanted; deterministic algorithms are a note then.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.findings.case import ANOMALY, Case

BLOCKING = ("CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL")
HOW = {
    ANOMALY: "no torch.autograd.set_detect_anomaly(True) or detect_anomaly() around the step",
    "deterministic algorithms": "no torch.use_deterministic_algorithms(True) in training",
    "cudnn.deterministic": "torch.backends.cudnn.deterministic = False",
    "cudnn disabled": "torch.backends.cudnn.enabled = True",
    "float64 by default": "torch.set_default_dtype(torch.float32)",
}
CHECKS = ("aten::isnan", "aten::_is_any_true", "aten::item", "aten::is_nonzero")


def check(case: Case) -> tuple[Finding, ...]:
    """Tell what each switch costs, where the trace shows it."""
    return tuple(_finding(case, switch) for switch in case.switches)


def _finding(case: Case, switch: str) -> Finding:
    name, _, _ = switch.partition("=")
    lost = _lost_ms(case, name)
    remedy = HOW.get(name) or (f"unset {name}" if name.isupper() else f"turn it on again ({name})")
    return Finding(
        rule="slow_switch",
        claim=f"{switch} is on" + (f": {units.milliseconds(lost)} a step" if lost else ""),
        evidence=("recorded while the step ran",),
        remedy=remedy,
        # Others cost only where an operator is slower for them; the trace cannot tell.
        stake_ms=lost,
        why="it is for debugging: each operator does more, or waits for the one before",
        gain_ms=lost,
    )


def _lost_ms(case: Case, name: str) -> float:
    """Return what a switch costs by the trace; 0 where that is unknown."""
    rows = case.rows
    if rows is None:
        return 0.0
    busy = case.busy_ms
    if name in BLOCKING and case.on_device:
        # Host and device take turns. Without that, the slower of the two sets the pace.
        return max(0.0, case.step_ms - max(busy, case.step_ms - busy))
    if name != ANOMALY:
        return 0.0
    checking = rows.labeled("op", lambda label: label in CHECKS)
    checking &= rows.labeled("phase", lambda label: label == "backward")
    if case.on_device:
        # All that is not the work itself: stacks are taken in the forward, and backward waits.
        return max(0.0, case.step_ms - (busy - rows.ms(checking)))
    return rows.ms(checking) + max(0.0, case.launch_wait_ms) / 2


RULE = check
