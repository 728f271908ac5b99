"""torch.compile compiles the same function again and again.

What it sees: recompilations with the guard that failed and its line, and the time they take per
step; beyond Dynamo's limit, the work of the function that then runs op by op. Where the detailed
step happened to be a compiled one, that is work of the timed steps that it does not have; while
the clock saw them compile, what they took tells nothing of that.
Why it costs: every new shape or value that fails a guard costs seconds; after 8 of them the
function runs uncompiled.
Remedy: pad to few sizes, mark the dimension dynamic, turn changing numbers into tensors, freeze the
same weights in every step.
When it is wrong: recompilations that end during warm-up cost only start-up time; then it is a note.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from steplab.core import Finding, Recompile, units
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.rows import Mask, Rows
from steplab.trace.analysis import UNATTRIBUTED
from steplab.trace.compiled import COMPILED
from steplab.trace.lines import user_line
from steplab.trace.silences import COMPILING

NUMBER = re.compile(r"\d+")
ADVICE = re.compile(r"(?<=\.) Guard failed on a parameter, consider using .*")  # torch's, of sizes
MOVES = ("elementwise", "reduction", "copy")  # what a graph fuses
SIZES = (
    "pad to few sizes, compile with dynamic=True, or mark the changing dimension with "
    "torch._dynamo.mark_dynamic"
)
FASTER = 0.8  # times the timed step; a profiler only makes a step slower
# Of what moves memory op by op once a graph is given up: three steps on a CPU, compiled, took 0.44,
# 0.44 and 0.57 of it less.
SAVED = 0.5
# Inductor's kernels, and phases that no model runs in.
FUSED, NOT_MODEL = ("triton_", "cpp_fused"), ("optimizer", "clip", "data")
FROZEN = "requires_grad mismatch"  # the guard of a weight that was frozen, or no longer is
FREEZING = (
    "freeze the same weights in every step, or compile the layers one by one: each is trained or "
    "frozen, and the whole has every combination"
)
LIMIT = "recompile_limit"  # of torch._dynamo.config
USUAL_LIMIT = 8
NUMBERS = "keep the number that the guard is for as a tensor, which graphs take as an input"


def check(case: Case) -> Finding | None:
    """Count the recompilations by guard, and their time in the steps or what is not compiled."""
    compilation = case.run.compilation if case.run else None
    recompiles = compilation.recompiles if compilation else ()
    given_up = {one.begins for one in recompiles if one.given_up}
    if given_up and case.rows is not None:
        # The process may have compiled for other loops, too.
        others = given_up - _functions(case.rows)
        recompiles = tuple(one for one in recompiles if one.begins not in others)
        if given_up - others:
            return _given_up(case, case.rows, recompiles, given_up - others)
    spent = _traced_ms(case) or _timed_ms(case)
    if not recompiles and not spent:
        return None
    evidence = _guards(case, recompiles)
    if spent:
        evidence.append(f"compiling takes {units.milliseconds(spent)} of a step")
    again = f"the same code was compiled {len(recompiles)} times more"
    return Finding(
        rule="recompiles",
        claim=again if recompiles else "the steps still compile",
        evidence=tuple(evidence),
        remedy=_remedy(recompiles),
        stake_ms=spent,
        why="each failed guard compiles the function anew, which takes seconds",
        gain_ms=spent,
    )


def _given_up(
    case: Case, rows: Rows, recompiles: Sequence[Recompile], functions: Collection[str]
) -> Finding:
    """Take what functions run op by op that were compiled too often; their graphs have callers.

    Values that come in turn may have been compiled ones in all profiled steps.
    """
    eager = rows.called_in(functions.__contains__) | _only_here(rows)
    eager &= ~rows.within(lambda call: call.name.startswith(COMPILED))
    spent = min(case.cost_ms(eager), case.step_ms)
    gain = min(SAVED * case.cost_ms(eager & rows.category(*MOVES)), case.step_ms)
    faster, compiling = _faster_when_profiled(case), 0.0
    if case.still_compiles:
        compiling = faster  # in the median step
    elif faster > gain:
        spent, gain = case.step_ms, faster
    until = f", after {units.milliseconds(_timed_ms(case))} of compiling in the average timed one"
    return Claim(
        rule="recompiles",
        claim=f"compiled {units.counted(len(recompiles), 'time')} more and given up: "
        f"{units.milliseconds(spent)} "
        f"a step run uncompiled{until if case.still_compiles else ''}",
        evidence=(
            *_guards(case, recompiles),
            *(f"the limit is set at {line}" for line in case.setup_lines(LIMIT)),
            *rows.hot_lines(eager),
        ),
        remedy=f"leave torch._dynamo.config.{LIMIT} at {USUAL_LIMIT} or more; {_remedy(recompiles)}"
        if len(recompiles) < USUAL_LIMIT
        else _remedy(recompiles),
        stake_ms=spent + compiling,
        why="beyond Dynamo's limit, what fails all guards runs op by op",
        gain_ms=gain + compiling,
        work=eager,
        is_cause=True,
    )


def _only_here(rows: Rows) -> Mask:
    """Work of passes op by op that the detailed step does not have: it ran a graph instead."""
    unknown = rows.labeled("line", UNATTRIBUTED.__eq__) & (rows.work.op_row < 0)
    unknown &= ~rows.labeled("name", lambda name: name.startswith((*FUSED, *COMPILED)))
    return unknown & ~rows.labeled("phase", NOT_MODEL.__contains__)


def _functions(rows: Rows) -> set[str]:
    """Return the functions that the steps ran, the detailed one too."""
    known = {rows.work.labels[code] for code in np.unique(rows.work.function).tolist()}
    calls = (rows.source.text(code) for code in np.unique(rows.source.python.name).tolist())
    return known | {line for line in map(user_line, calls) if line}


def _faster_when_profiled(case: Case) -> float:
    """Return by how much the profiled steps were faster: they happened to be compiled ones."""
    profiled = case.analysis.budget.typical.wall_ms if case.analysis is not None else case.step_ms
    return case.step_ms - profiled if profiled < FASTER * case.step_ms else 0.0


def _guards(case: Case, recompiles: Sequence[Recompile]) -> list[str]:
    """Return the guards that failed most, those apart in numbers only as one, with their lines."""
    kinds = Counter((one.begins, one.line, _kind(one)) for one in recompiles)
    found = []
    for kind, count in kinds.most_common(3):
        one = next(o for o in recompiles if (o.begins, o.line, _kind(o)) == kind)
        place = f", {one.line or one.begins}" if one.line or one.begins else ""
        found.append(f"{one.function}: {ADVICE.sub('', one.reason)} (x {count}){place}")
    # The size of an input is nobody's line; whether it may change is said where it is compiled.
    of_inputs = any(not one.line for one in recompiles)
    compiled_at = case.setup_lines("torch.compile") if of_inputs else ()
    return [*found, *(f"compiled at {line}" for line in compiled_at)]


def _kind(one: Recompile) -> str:
    return NUMBER.sub("", one.reason)


def _remedy(recompiles: Sequence[Recompile]) -> str:
    """Return the remedy for most of the guards: on sizes, a line's numbers, or frozen weights."""
    if 2 * sum(FROZEN in one.reason for one in recompiles) > len(recompiles):
        return FREEZING
    of_lines = sum(bool(one.line) for one in recompiles)
    return NUMBERS if 2 * of_lines > len(recompiles) else SIZES


def _traced_ms(case: Case) -> float:
    """Return the ms of compilation per profiled step."""
    if case.rows is None or case.analysis is None:
        return 0.0
    trace = case.analysis.trace
    spans = trace.ops.duration[trace.named(trace.ops, COMPILING.__contains__)]
    return float(spans.sum()) / 1e6 / case.rows.steps * case.rows.scale


def _timed_ms(case: Case) -> float:
    """Return by how much the mean step exceeds the fast ones, if graphs were compiled meanwhile."""
    clock = case.run.clock if case.run is not None else None
    if clock is None or not case.still_compiles:
        return 0.0
    return max(0.0, clock.step.mean - clock.step.percentile(10))


RULE = check
