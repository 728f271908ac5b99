"""The device waits for the host to launch its next work.

What it sees: the device idles more than 10 % of the step between launches that keep coming. Up to
80 % that is the price of running op by op, which every eager step pays on a fast device, and a note
for `tune`; beyond, the device works less than a fifth of the time, and nothing else matters. A step
that is replayed should not wait at all.
Why it costs: a launch takes the host a few microseconds; shorter kernels finish before the next.
Remedy: a CUDA graph of the whole step, fewer and larger kernels (`compile`), larger batches.
When it is wrong: another process takes the host's time. What the host does in long stretches
without a launch is a host_stall, a data_stall or a recompile; while graphs are still being
captured, many_graph_sizes reports the launches.
"""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np

from steplab.core import Finding, units
from steplab.core.units import fold_layer_numbers
from steplab.findings.case import SLOWEST_LAUNCH_MS, Case
from steplab.findings.loops import python_loops
from steplab.findings.rows import Rows
from steplab.trace.analysis import UNATTRIBUTED

SHARE = 0.10
ORDINARY = 0.80
SHORT_NS = 10_000
FEWER = "compile=blocks for fewer kernels, or larger batches"
COMPILED = re.compile(r"Torch-Compiled Region|CompiledFunction|## Call CompiledFxGraph")
MIN_SHORT = 8  # short kernels that make a module worth naming


def check(case: Case) -> Finding | None:
    """Compare the time in which the device waits for launches with the step."""
    idle = case.launch_wait_ms if case.on_device else _idle_ms(case)
    if not idle > SHARE * case.step_ms or case.capture_ms:
        return None
    if case.on_device and case.rows is not None and not case.rows.inside.any():
        return None  # nothing was launched that could be waited for
    share = units.percent(idle / case.step_ms)
    return Finding(
        rule="launch_bound",
        claim=f"the device idles {units.milliseconds(idle)}, {share} of the step, for launches",
        evidence=_evidence(case),
        remedy=_remedy(case),
        stake_ms=idle,
        why="the host launches kernels more slowly than the device finishes them",
        gain_ms=idle,
        ordinary=_is_broken(case) or (idle < ORDINARY * case.step_ms and not _is_replayed(case)),
    )


def _is_broken(case: Case) -> bool:
    """Whether graph breaks make the launches; they have their rule."""
    compilation = case.run.compilation if case.run is not None else None
    return compilation is not None and bool(compilation.breaks)


def _is_replayed(case: Case) -> bool:
    if case.analysis is not None:
        return bool((case.analysis.trace.device.graph > 0).any())
    return case.run is not None and case.run.ran is not None and bool(case.run.ran.graph_launches)


def _remedy(case: Case) -> str:
    """Return what helps; graphs only where the device is driven by CUDA or HIP.

    Where a part of the step is compiled or replayed already, the rest of it is meant.
    """
    if case.analysis is None or case.rows is None:
        return f"cuda_graph=step, {FEWER}"
    trace = case.analysis.trace
    compiled = case.rows.labeled("op", lambda op: COMPILED.match(op) is not None).any()
    fewer = "larger batches, or compile the eager rest too" if compiled else FEWER
    if not trace.named(trace.calls, lambda name: name.startswith(("cu", "hip"))).any():
        return fewer
    if trace.named(trace.calls, lambda name: "GraphLaunch" in name).any():
        return f"replay the rest of the step from a graph too, {fewer}"
    return f"cuda_graph=step, {fewer}"


def _idle_ms(case: Case) -> float:
    """Return, without a trace, the step less the time of kernels and of waiting for data.

    At most what its launches can take.
    """
    run = case.run
    if run is None or run.clock is None or run.ran is None or run.ran.device_busy_ms is None:
        return 0.0
    idle = case.step_ms - run.ran.device_busy_ms - run.clock.data_wait.median
    return min(idle, SLOWEST_LAUNCH_MS * (run.ran.kernel_launches or 0))


def _evidence(case: Case) -> tuple[str, ...]:
    lines = []
    if case.rows is not None and case.analysis is not None and case.on_device:
        rows = case.rows
        # Of the step that the budget shows: steps differ, and both are read together.
        launches = sum(category.launches for category in case.analysis.budget.typical.categories)
        middle = units.milliseconds(float(np.median(rows.work.duration[rows.inside])) / 1e6)
        lines.append(f"{launches:,} kernels in the median step, half of all under {middle}")
        lines += _modules(rows)
        loops = python_loops(rows)
        lines += [f"{loop.line}: {loop.op} {loop.turns} times in a loop" for loop in loops]
    if case.run is not None and case.run.ran is not None and case.run.ran.kernel_launches:
        lines.append(f"{case.run.ran.kernel_launches} launches by the host")
    return tuple(lines)


def _modules(rows: Rows) -> list[str]:
    """Return the modules that launch most of the short kernels, layers of a kind together."""
    short = rows.inside & (rows.work.duration < SHORT_NS)
    counts: dict[str, float] = defaultdict(float)
    for group in rows.totals("module", short, most=len(rows.work.labels)):
        if group.label != UNATTRIBUTED:
            counts[fold_layer_numbers(group.label)] += group.count
    most = sorted(counts.items(), key=lambda item: -item[1])[:3]
    words = f"kernels a step under {SHORT_NS // 1000} us"
    return [f"{name}: {count:.0f} {words}" for name, count in most if count >= MIN_SHORT]


RULE = check
