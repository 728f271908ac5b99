"""The step asks the driver for memory, or gives it back.

What it sees: calls such as `cudaMalloc`, `cudaFree` and `cudaHostAlloc` in the profiled steps.
Why it costs: they take up to milliseconds each, and freeing waits for the device. Torch keeps
memory so that a steady step needs none of them.
Remedy: no `torch.cuda.empty_cache()` and no `pin_memory()` in the step; sizes that do not vary;
less memory where it runs out.
When it is wrong: the profile began before the step was steady. Where kernels were loaded in it,
too, warmup_counted has both.
"""

from __future__ import annotations

from collections import Counter

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.trace.host_calls import takes_driver_memory

SHARE = 0.02


def check(case: Case) -> Finding | None:
    """Compare the time in those calls with the step."""
    if case.rows is None or case.analysis is None or not case.on_device:
        return None
    trace, lost = case.analysis.trace, case.driver_memory_ms
    if case.loading_ms or not lost > SHARE * case.step_ms:
        return None
    chosen = trace.named(trace.calls, takes_driver_memory)
    names = Counter(trace.text(code) for code in trace.calls.name[chosen].tolist())
    evidence = [
        f"{name}: {count / case.rows.steps:.3g} a step" for name, count in names.most_common(3)
    ]
    return Finding(
        rule="allocator_calls",
        claim=f"memory of the driver is taken or given back for {units.milliseconds(lost)} a step",
        evidence=(*evidence, *_places(case)),
        remedy="no torch.cuda.empty_cache() and no pin_memory() in the step; sizes that do not "
        "vary; less memory where it runs out",
        stake_ms=lost,
        why="the driver takes long, and freeing waits for the device; torch would keep the memory",
        gain_ms=max(0.0, min(lost, case.step_ms - case.busy_ms)),  # the work stays
    )


def _places(case: Case) -> list[str]:
    """Return the lines whose calls waited."""
    assert case.analysis is not None
    syncs, labels = case.analysis.syncs, case.analysis.work.labels
    lines = Counter(
        labels[line]
        for call, line in zip(syncs.call.tolist(), syncs.line.tolist(), strict=True)
        if line and takes_driver_memory(labels[call])
    )
    return [f"at {line}" for line, _ in lines.most_common(2)]


RULE = check
