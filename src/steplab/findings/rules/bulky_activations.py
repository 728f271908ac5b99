"""What is kept for the backward holds the same numbers many times, or in too many bytes.

What it sees: tensors at the peak, kept for the backward, that `repeat` has made, and masks of zeros
and ones in 8 bytes each, as `one_hot` makes them; four or more tensors that are stacked and summed
up along the same dimension again, where the stack, or its product with weights, is at the peak.
Why it costs: they live from the forward to their backward, at the peak of the step.
Remedy: broadcasting, which needs no copies; masks as `torch.bool`; a running sum, which holds one
tensor more than the list.
When it is wrong: the copies are changed afterward, or the integers are an index; something else
needs the stack as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from steplab.core import Allocation, Finding, MemoryTimeline, units
from steplab.costs.op_call import Dims, OpCall
from steplab.findings.case import Case
from steplab.findings.rows import Rows

SHARE = 0.10  # of the peak
SHOWN = 3
REPEATS = ("aten::repeat", "aten::repeat_interleave", "aten::tile")
FILLED = ("aten::zeros", "aten::zeros_like", "aten::new_zeros", "aten::one_hot")
WIDE = "int64"
IN_A_BYTE = 7 / 8  # is saved
STACK = "aten::stack"
SUMS = ("aten::sum", "aten::mean")
MANY = 4  # tensors: a sum of two or three written out needs no loop


def check(case: Case) -> tuple[Finding, ...]:
    """Add up copies and wide masks among the activations at the peak."""
    if case.timeline is None:
        return ()
    kept = [one for one in case.timeline.at_peak if one.kind == "activations"]
    copies = [one for one in kept if one.op in REPEATS]
    masks = [one for one in kept if one.dtype == WIDE and one.op in FILLED]
    found = (
        _finding(
            case,
            copies,
            1.0,
            f"copies that {_names(copies)} makes",
            "let it broadcast: x[..., None] * scale needs no repeat, and expand() copies nothing",
            "a dimension of size 1 is read again and again, where a repeated one is stored",
        ),
        _finding(
            case,
            masks,
            IN_A_BYTE,
            "zeros and ones of 8 bytes",
            "a mask of torch.bool: labels[..., None] == torch.arange(classes), or one_hot(...) "
            ".bool() at once",
            "F.one_hot returns int64, and what is multiplied by it is kept with it",
        ),
    )
    stacked = _stacked(case, case.rows) if case.rows is not None else None
    return tuple(one for one in (*found, stacked) if one is not None)


def _stacked(case: Case, rows: Rows) -> Finding | None:
    """Add up stacks at the peak, and what is as large on their lines, that a sum takes apart."""
    timeline = case.timeline
    assert timeline is not None
    forward = rows.labeled("phase", lambda label: label != "backward")
    summed = {
        (call.tensors[0].dims, dim % max(len(call.tensors[0].dims), 1))
        for call in rows.calls
        if call.name in SUMS and call.tensors and call.tensors[0] is not None
        for dim in call.integers(1) or ()
    }
    stacks = [call for call in rows.calls if _stack(call) in summed]
    sizes = {math.prod(_stack(call)[0]) for call in stacks}
    work = forward & rows.within(lambda call: _stack(call) in summed)
    lines = {rows.work.labels[code] for code in np.unique(rows.work.line[work]).tolist() if code}
    held = [one for one in timeline.at_peak if one.line in lines and _is_of(one, sizes)]
    saved = _above_the_rest(timeline, held)
    if not held or saved < SHARE * timeline.peak_bytes:
        return None
    count = max(_stack(call)[0][_stack(call)[1]] for call in stacks)
    return Finding(
        rule="bulky_activations",
        claim=f"{count} tensors are stacked to be summed up: "
        f"{units.bytes_(sum(one.bytes for one in held))} at the peak beside the tensors themselves",
        evidence=(
            f"without them the peak is {units.bytes_(saved)} lower",
            *(f"{one.line}: {units.bytes_(one.bytes)}" for one in held[:SHOWN]),
        ),
        remedy="add each of them, times its weight, to a running sum: total = total + w * x in a "
        "loop over the list",
        stake_bytes=saved,
        of_bytes=timeline.peak_bytes,
        why="a stack copies all of them, its product with weights once more, and only the sum is "
        "read",
    )


def _stack(call: OpCall) -> tuple[Dims, int]:
    """Return the form of a stack of many tensors and its new dimension; ((), 0): it is none."""
    parts, dim = (call.lists[0] if call.lists else ()), call.integer(1)
    if call.name != STACK or len(parts) < MANY or dim is None:
        return (), 0
    dim %= len(parts[0]) + 1
    return (*parts[0][:dim], len(parts), *parts[0][dim:]), dim


def _is_of(block: Allocation, numels: set[int]) -> bool:
    """Whether a block may hold one of so many numbers, of 1 to 8 bytes each."""
    return any(block.bytes in (size, 2 * size, 4 * size, 8 * size) for size in numels)


def _above_the_rest(timeline: MemoryTimeline, held: Sequence[Allocation]) -> int:
    """Return by how much the peak is lower without these blocks, the last of their size to come.

    What was held at once before the first of them came stays.
    """
    total = sum(one.bytes for one in held)
    levels = np.sum([list(kind) for kind in timeline.bytes_by_kind.values()] or [[0]], axis=0)
    rise = np.diff(levels[: int(np.argmax(levels)) + 1])
    least = min((one.bytes for one in held), default=0)
    came = np.flatnonzero(rise >= least)[-len(held) :] if held else rise[:0]
    if not held or len(came) < len(held):
        return total
    return min(total, timeline.peak_bytes - int(levels[: int(came[0]) + 1].max()))


def _finding(
    case: Case, held: Sequence[Allocation], saved: float, what: str, remedy: str, why: str
) -> Finding | None:
    assert case.timeline is not None
    total, peak = int(saved * sum(one.bytes for one in held)), case.timeline.peak_bytes
    if not held or total < SHARE * peak:
        return None
    lines = {one.line: 0 for one in held}
    for one in held:
        lines[one.line] += one.bytes
    most = sorted(lines.items(), key=lambda item: -item[1])[:SHOWN]
    return Finding(
        rule="bulky_activations",
        claim=f"{what} hold {units.bytes_(total)} until the backward",
        evidence=(
            f"{units.percent(total / peak)} of the peak",
            *(f"{line}: {units.bytes_(size)}" for line, size in most if line),
        ),
        remedy=remedy,
        stake_bytes=total,
        of_bytes=peak,
        why=why,
    )


def _names(copies: Sequence[Allocation]) -> str:
    return " and ".join(sorted({one.op.removeprefix("aten::") for one in copies}))


RULE = check
