"""The checks of the gate that need only the Run: waits, graphs, memory, clocks. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from steplab.core import Run, units
from steplab.core.ladder import Check
from steplab.techniques.context import format_waits

# The steps may sum to this much less or more than the wall time of their window. Work that is put
# off until the clock has stopped shows here.
CLOCK_TOLERANCE = 0.10


def run_checks(
    run: Run, waits: Sequence[str], allowed: Sequence[str], memory_limit: int | None
) -> tuple[Check, ...]:
    """Return the checks of a measured Run; `allowed` are the waits of the recipe below."""
    return (
        _synchronization(run, waits, allowed),
        _graphs(run),
        _memory(run, memory_limit),
        _clocks(run),
    )


def _synchronization(run: Run, waits: Sequence[str], allowed: Sequence[str]) -> Check:
    name = "no synchronization"
    if run.spec.device != "cuda":
        return Check(name, True, "no device to wait for")
    if not waits:
        return Check(name, True, "none")
    count = f"the host waits {len(waits)} times a step"
    if len(waits) <= len(allowed):
        return Check(name, True, f"no more than before: {count} ({format_waits(waits)})")
    new = list((Counter(waits) - Counter(allowed)).elements())
    return Check(name, False, f"{count}, {len(allowed)} before; new: {format_waits(new)}")


def _graphs(run: Run) -> Check:
    name = "no new graphs after warm-up"
    if run.compilation is None:
        return Check(name, True, "nothing is compiled")
    new, graphs = run.compilation.graphs_in_window, run.compilation.graphs
    reason = run.compilation.recompiles[-1].reason if run.compilation.recompiles else "unknown"
    if new:
        return Check(name, False, f"{new} new graphs while the clock ran: {reason}")
    return Check(name, True, f"{graphs} graphs, none of them new while the clock ran")


def _memory(run: Run, limit: int | None) -> Check:
    name = "memory within the limit"
    if run.memory is None:
        return Check(name, limit is None, "the peak is unknown on this system")
    peak = run.memory.reserved or run.memory.peak
    bound = limit or run.memory.total or run.environment.memory_bytes
    used = f"{units.bytes_(peak)} of {units.bytes_(bound)}"
    return Check(name, bound is None or peak <= bound, used)


def _clocks(run: Run) -> Check:
    assert run.clock is not None
    share = run.clock.agreement
    detail = f"the steps sum to {units.percent(share)} of the wall time"
    return Check("clocks agree", abs(share - 1) <= CLOCK_TOLERANCE, detail)
