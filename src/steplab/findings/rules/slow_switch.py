"""A switch for debugging is on.

What it sees: anomaly mode, launches that block, deterministic algorithms and the like, as the Run
recorded them while the step ran; and dispatch modes that take every operator, as a counter of FLOPs
does; tracemalloc and profilers of Python; and what keeps torch.compile from compiling.
Why it costs: anomaly mode keeps a Python stack per operator and reads every gradient; a launch that
blocks leaves the device idle while the host prepares the next; a mode runs Python for each; code
that was to be compiled runs op by op.
Remedy: turn it off where nothing is debugged.
When it is wrong: bit-exact results are wanted; deterministic algorithms are a note then.
"""

from __future__ import annotations

import numpy as np

from steplab.core import Finding, units
from steplab.core.run import FORCE_EAGER, MEMORY_BUDGET, MODE, PYTHON_PROFILER, TRACEMALLOC
from steplab.findings.case import ANOMALY, Case
from steplab.findings.claims import Claim
from steplab.trace.analysis import UNATTRIBUTED
from steplab.trace.compiled import FUSED, FUSIBLE
from steplab.trace.windows import step_at

BLOCKING = ("CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL")
HOW = {
    ANOMALY: "no torch.autograd.set_detect_anomaly(True) or detect_anomaly() around the step",
    "deterministic algorithms": "no torch.use_deterministic_algorithms(True) in training",
    "cudnn.deterministic": "torch.backends.cudnn.deterministic = False",
    "cudnn disabled": "torch.backends.cudnn.enabled = True",
    "float64 by default": "torch.set_default_dtype(torch.float32)",
    TRACEMALLOC: "no tracemalloc.start() around the step: it notes every object that Python makes",
    PYTHON_PROFILER: "no cProfile and no sys.setprofile around the step",
    FORCE_EAGER: 'no torch.compiler.set_stance("force_eager") around the training step',
}
# The least share of Python's time that is lost: a step of 50 tiny layers on one core takes 1.38
# times as long under tracemalloc, which may keep more than one frame, and 1.11 under cProfile.
OF_PYTHON = {TRACEMALLOC: 0.28, PYTHON_PROFILER: 0.10}
# What keeps all from being compiled.
NOT_COMPILED = (FORCE_EAGER, "TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
LAUNCH_NS = 5_000
CHECKS = ("aten::isnan", "aten::_is_any_true", "aten::item", "aten::is_nonzero")


def check(case: Case) -> tuple[Finding, ...]:
    """Tell what each switch costs, where the trace shows it."""
    # A budget of memory may be meant: repeated_work tells what it costs.
    found = (_finding(case, one) for one in case.switches if not one.startswith(MEMORY_BUDGET))
    return tuple(one for one in found if one is not None)


def _finding(case: Case, switch: str) -> Finding | None:
    name, _, _ = switch.partition("=")
    if name in NOT_COMPILED:
        return _not_compiled(case, name)
    lost = _lost_ms(case, name)
    remedy = HOW.get(name) or (f"unset {name}" if name.isupper() else f"turn it on again ({name})")
    if name.startswith(MODE):
        remedy = "no such mode around the training step: count or check once, before it"
    return Finding(
        rule="slow_switch",
        claim=f"{switch} is on" + (f": {units.milliseconds(lost)} a step" if lost else ""),
        evidence=(
            "recorded while the step ran",
            *(f"set at {line}" for line in case.setup_lines(name)),
        ),
        remedy=remedy,
        # Others cost only where an operator is slower for them; the trace cannot tell.
        stake_ms=lost,
        why="it is for debugging: each operator does more, or waits for the one before",
        gain_ms=lost,
    )


def _not_compiled(case: Case, name: str) -> Finding | None:
    """Judge what keeps torch.compile from compiling, where the user's files ask for it."""
    asked, rows = case.setup_lines("torch.compile"), case.rows
    if not asked or rows is None:
        return None
    mask = rows.category(*FUSIBLE)
    mask &= rows.labeled("phase", lambda label: label in ("forward", "backward", UNATTRIBUTED))
    spent = case.cost_ms(mask)
    return Claim(
        rule="slow_switch",
        claim=f"{name} keeps torch.compile from compiling: {units.milliseconds(spent)} a step in "
        "operators that would fuse",
        evidence=(
            *(f"set at {line}" for line in case.setup_lines(name)),
            *(f"to be compiled at {line}" for line in asked),
            *rows.hot_lines(mask),
        ),
        remedy=HOW.get(name) or f"unset {name}",
        stake_ms=spent,
        why="it is for debugging: compiled code runs as it is written, op by op",
        gain_ms=FUSED * spent,
        work=mask,
        is_cause=True,
    )


def _lost_ms(case: Case, name: str) -> float:
    """Return what a switch costs by the trace; 0 where that is unknown."""
    rows = case.rows
    if rows is None:
        return 0.0
    busy = case.busy_ms
    if name in BLOCKING and case.on_device:
        # Without the waits the slower of host and device sets the pace.
        return max(0.0, min(case.step_ms - busy, _waits_in_launches_ms(case)))
    if name in OF_PYTHON:
        return OF_PYTHON[name] * (max(0.0, case.launch_wait_ms) + case.silent_ms("python"))
    if name.startswith(MODE):
        # Its Python is the operators' own time on a CPU, and late launches of a device.
        own = 0.0 if case.on_device else rows.ms(rows.category("other"))
        return own + max(0.0, case.launch_wait_ms)
    if name != ANOMALY:
        return 0.0
    backward = rows.labeled("phase", lambda label: label == "backward")
    checking = rows.within(lambda call: call.name in CHECKS) & backward
    if case.on_device:
        # All that is not the work itself: stacks are taken in the forward, and backward waits.
        return max(0.0, case.step_ms - (busy - rows.ms(checking)))
    # A stack is taken inside the operator that it is for: views, which do nothing else, show it.
    stacks = rows.category("other") & ~backward
    return rows.ms(checking | stacks) + max(0.0, case.launch_wait_ms) / 2


def _waits_in_launches_ms(case: Case) -> float:
    """Return the ms per step that launch calls take beyond what a launch takes."""
    assert case.analysis is not None
    trace, steps = case.analysis.trace, case.analysis.windows
    launching = np.isin(trace.calls.correlation, trace.device.correlation)
    excess = np.maximum(trace.calls.duration[launching] - LAUNCH_NS, 0)
    inside = step_at(steps, trace.calls.start[launching]) >= 0
    return float(excess[inside].sum()) / 1e6 / max(len(steps), 1)


RULE = check
