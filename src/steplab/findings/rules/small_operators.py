"""The step is spent on calling operators, not in them.

What it sees: on a CPU, more than a fifth of the step is Python and framework between operators, in
short pieces; or calling the operators of a loop in Python, in the forward pass or around the
clipping of gradients, takes more than 15 % of it. On a GPU, such a loop whose kernels and the waits
for their launches take more than a tenth of the step.
On both, eight products in a row that each take the same input to a few columns, such as heads.
Why it costs: a call from Python takes 5 to 10 us, whatever the operator does.
Remedy: one operator over all turns of a loop (`torch._foreach_*` over many tensors), one clipping
of all weights, larger batches and micro-batches, or `compile=blocks`. Where each turn needs the one
before there may be no such operator: compiled around the loop, 32 turns of a normed GRU took 5.8 ms
of a CPU's step instead of 10.5 (the cell alone 13.9).
When it is wrong: the model is as small as it should be. On a GPU without a loop this is
launch_bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.loops import PythonLoop, deep_copied, narrow_products, python_loops
from steplab.findings.matmuls import attainable_rate, matmuls
from steplab.findings.rows import Mask, Rows

MIN_PASSES = 4  # of gradient accumulation
# Of what the calls of a loop take: what replaces it calls operators, too. In ten steps of which
# authors replaced one the median was 0.74.
REPLACED = 0.75
SHARE = 0.20
ORDINARY = 0.35  # of the step without a loop: a small model, and no fault
LOOP_SHARE = 0.10
LOOP_CALLS = 0.15  # of the step on a CPU; 200 us of a product beside 30 views have 14 %
AROUND = 1.5  # times the products' time at their best, with what is around them
# Of a call's time in the operator itself that is no work: an add of ten elements takes this.
OVERHEAD_MS = 0.003
ONE_CLIP = (
    "one clip_grad_norm_ for the list of all weights, with one limit for the norm of all; for one "
    "of each, torch._foreach_norm and torch._foreach_mul_ over the list"
)

FEWER_PASSES = (
    "larger micro-batches, so that a step has fewer passes: the gradients of their sum are the same"
)
ONE_OPERATOR = (
    "one operator over the whole sequence instead of a loop in Python; where each turn needs the "
    "one before, torch.compile of the function around the loop (compile=whole); or larger batches"
)


def check(case: Case) -> Finding | None:
    """Compare the time between operators, and that of the calls of loops, with the step."""
    rows = case.rows
    if rows is None or not rows.inside.any():
        return None
    copied = deep_copied(rows)  # by a loop of copy.deepcopy, which deep_copies tells
    narrow = _narrow(case, rows)
    loops = [one for one in python_loops(rows) if not (one.whole & copied).any()]
    if narrow is not None or case.on_device:
        return narrow or _on_device(case, rows, loops)
    # What optimizers do between operators is for split_optimizer.
    between = max(0.0, case.launch_wait_ms - case.optimizer_python_ms)
    called = _called_ms(rows, loops)
    lost = between + called
    if not lost > SHARE * case.step_ms:
        between *= _share_of_calls(rows, loops)
        lost = between + called
        if not (loops and lost > LOOP_CALLS * case.step_ms):
            return None
    passes = _backward_passes(case, rows)
    if passes is not None:
        where = f" ({passes.count} micro-batches, each with a backward pass at {passes.line})"
    else:
        where = f" (the loop at {loops[0].line})" if loops else ""
    return Finding(
        rule="small_operators",
        claim=f"calling operators takes {units.milliseconds(lost)} of the step{where}",
        evidence=_evidence(rows, loops, between),
        remedy=FEWER_PASSES if passes is not None else _remedy(rows, loops),
        stake_ms=lost,
        why="a call from Python costs microseconds, however little the operator does",
        gain_ms=REPLACED * lost if loops else lost,
        # Where others use the machine, the time between operators is theirs.
        # Micro-batches may be as small as they are for want of memory.
        ordinary=(not loops or passes is not None)
        and (lost < ORDINARY * case.step_ms or case.contended),
    )


@dataclass(frozen=True)
class Passes:
    """Backward passes that one line calls in turn."""

    line: str
    count: int  # in a step


def _backward_passes(case: Case, rows: Rows) -> Passes | None:
    """Return the passes of gradient accumulation; None where an update has fewer than four."""
    backward = rows.labeled("phase", "backward".__eq__) & (rows.work.op_row >= 0)
    times = rows.source.ops.start[rows.work.op_row[backward]]
    lines = rows.lines_at(times, 1)
    count = rows.times_run(lines[0], times) if lines else 0
    return Passes(lines[0], count) if count >= MIN_PASSES * max(case.updates, 1) else None


def _evidence(rows: Rows, loops: list[PythonLoop], between_ms: float) -> tuple[str, ...]:
    apart = f", {units.milliseconds(between_ms)} between them" if between_ms else ""
    found = [f"{rows.count(rows.inside):,.0f} operators a step{apart}"]
    for loop in loops:
        others = [t.label for t in rows.totals("line", loop.whole, 4) if t.label != loop.line]
        beside = f"; its other lines: {', '.join(others)}" if others else ""
        found.append(f"{loop.line}: {loop.op} {loop.turns} times in a row{beside}")
    called = rows.calling(loops[0].line) if loops else []
    if called:
        found.append(f"called at {', from '.join(called)}")
    return tuple(found)


def _remedy(rows: Rows, loops: list[PythonLoop]) -> str:
    if not loops:
        return "larger batches, or compile=blocks"
    return ONE_CLIP if (loops[0].whole & _clips(rows)).any() else ONE_OPERATOR


def _narrow(case: Case, rows: Rows) -> Finding | None:
    """Judge products of one input with many narrow weights."""
    found = narrow_products(rows)
    if found is None:
        return None
    spent = case.cost_ms(found.whole)
    best = attainable_rate(case, rows.of_calls(matmuls(rows)))
    flops = float(np.nansum(rows.work.flops[found.whole])) / rows.steps
    gain = spent - AROUND * (flops / best if best else 0.0)
    if not gain > LOOP_SHARE * case.step_ms:
        return None
    return Claim(
        rule="small_operators",
        claim=f"narrow products of {found.name} run one after the other: "
        f"{units.milliseconds(spent)} a step with what is around them",
        evidence=(
            f"{found.products} in a row, each from {found.inputs} columns to {found.width}",
            *(f"called in turn at {line}" for line in found.lines),
            *rows.hot_lines(found.whole),
        ),
        remedy="one product with the weights of all of them side by side, and one call for all "
        "(heads as a dimension)",
        stake_ms=spent,
        why="each reads the whole input again, and its kernels are too small to fill the device",
        gain_ms=gain,
        work=found.whole,
    )


def _on_device(case: Case, rows: Rows, loops: list[PythonLoop]) -> Finding | None:
    """Judge the loop whose launches cost most: waits for them, and kernels that do little."""
    costs = [(case.launched_ms(loop.whole) - rows.ms(loop.whole), loop) for loop in loops]
    waited, loop = max(costs, key=lambda pair: pair[0], default=(0.0, None))
    if loop is None or not waited > LOOP_SHARE * case.step_ms:
        return None
    # One operator over all turns reads and writes as much, in kernels that fill the device.
    known = loop.whole & np.isfinite(rows.work.ideal)
    best = float(rows.work.ideal[known].sum()) / 1e6 / rows.steps
    small = max(0.0, rows.ms(known) - AROUND * best)
    lost = waited + small
    # Values that a turn reads on the host are for synchronization.
    read = rows.labeled("name", lambda name: name.startswith("Memcpy"))
    return Claim(
        rule="small_operators",
        claim=f"a loop in Python at {loop.line} costs {units.milliseconds(lost)} of the step",
        evidence=(
            f"{loop.op} {loop.turns} times in a row",
            f"{rows.count(loop.whole):.0f} kernels a step: {units.milliseconds(waited)} of waits "
            f"for them, {units.milliseconds(small)} because they are small",
            *(f"called at {', from '.join(at)}" for at in [rows.calling(loop.line)] if at),
        ),
        remedy=ONE_CLIP
        if (loop.whole & _clips(rows)).any()
        else "one operator over all turns of the loop (torch._foreach_* over many tensors), or "
        "compile it",
        stake_ms=lost,
        why="the host launches kernel after kernel, and the device waits for each",
        gain_ms=lost * (1 - 1 / loop.turns),
        work=loop.whole & ~read,
    )


def _called_ms(rows: Rows, loops: list[PythonLoop]) -> float:
    """Return what the operators of loops take beyond their work, at most all of their time.

    One by one: a view takes a tenth of that, and a long product beside it does not make up for it.
    """
    short = rows.work.duration / 1e6 * rows.scale < OVERHEAD_MS
    return sum(
        rows.ms(loop.whole & short) + OVERHEAD_MS * rows.count(loop.whole & ~short)
        for loop in loops
    )


def _clips(rows: Rows) -> Mask:
    return rows.labeled("phase", lambda label: label == "clip")


def _share_of_calls(rows: Rows, loops: list[PythonLoop]) -> float:
    """Return the part of all calls that loops make: what lies between calls is alike for all."""
    in_loops = np.logical_or.reduce([loop.whole for loop in loops]) if loops else rows.inside
    return rows.count(in_loops & rows.inside) / max(rows.count(rows.inside), 1)


RULE = check
