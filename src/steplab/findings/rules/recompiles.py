"""torch.compile compiles the same function again and again.

What it sees: recompilations with the guard that failed, and the time they take per step.
Why it costs: every new shape or value that fails a guard costs seconds; after 8 of them the
function runs uncompiled.
Remedy: pad to few sizes, mark the dimension dynamic, turn changing numbers into tensors.
When it is wrong: recompilations that end during warm-up cost only start-up time; then it is a note.
"""

from __future__ import annotations

from collections import Counter

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.trace.silences import COMPILING


def check(case: Case) -> Finding | None:
    """Count the recompilations by guard, and their time in the steps."""
    compilation = case.run.compilation if case.run else None
    recompiles = compilation.recompiles if compilation else ()
    spent = _traced_ms(case) or _timed_ms(case)
    if not recompiles and not spent:
        return None
    guards = Counter((recompile.function, recompile.reason) for recompile in recompiles)
    evidence = [f"{name}: {reason} (x {n})" for (name, reason), n in guards.most_common(3)]
    if spent:
        evidence.append(f"compiling takes {units.milliseconds(spent)} of a step")
    again = f"the same code was compiled {len(recompiles)} times more"
    claim = again if recompiles else "the steps still compile"
    return Finding(
        rule="recompiles",
        claim=claim,
        evidence=tuple(evidence),
        remedy="pad to few sizes, or mark the changing dimension with torch._dynamo.mark_dynamic",
        stake_ms=spent,
        why="each failed guard compiles the function anew, which takes seconds",
        gain_ms=spent,
    )


def _traced_ms(case: Case) -> float:
    """Return the ms of compilation per profiled step."""
    if case.rows is None or case.analysis is None:
        return 0.0
    trace = case.analysis.trace
    spans = trace.ops.duration[trace.named(trace.ops, COMPILING.__contains__)]
    return float(spans.sum()) / 1e6 / case.rows.steps * case.rows.scale


def _timed_ms(case: Case) -> float:
    """Return by how much the mean step exceeds the fast ones, if graphs were compiled meanwhile."""
    run = case.run
    if run is None or run.clock is None or run.compilation is None:
        return 0.0
    if not run.compilation.graphs_in_window:
        return 0.0
    return max(0.0, run.clock.step.mean - run.clock.step.percentile(10))


RULE = check
