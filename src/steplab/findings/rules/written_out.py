"""Copies of one thing are written out where a view would do.

What it sees: in the forward pass, copies out of an expanded tensor (`repeat`, `repeat_interleave`,
`expand` and then `contiguous` or `reshape`), whose result an attention or an elementwise operator
takes: a mask for every head, keys and values for every query head, a position for every sample.
Why it costs: each copy is held as long as the backward needs it, and is written and read.
Remedy: `expand`, or nothing at all: these operators broadcast; `enable_gqa=True` for shared heads.
When it is wrong: the copies are changed one by one afterwards.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.costs.op_call import Dims, OpCall, TensorArg
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.rows import Mask, Rows

TIME_SHARE = 0.05  # of the step
MEMORY_SHARE = 0.10  # of the peak
ASKED = frozenset(
    f"aten::{name}"
    for name in "repeat repeat_interleave tile contiguous clone reshape flatten".split()
)  # others copy for themselves, as a product its bias
BROADCASTS = frozenset(f"aten::{name}" for name in "add sub mul div where masked_fill".split())


def check(case: Case) -> Finding | None:
    """Weigh the memory of the largest of them, else the time of all."""
    rows = case.rows
    if rows is None:
        return None
    taken = _broadcast_dims(rows)
    mask = rows.called(lambda call: _written(call, taken) > 0)
    mask &= rows.asked_for(ASKED.__contains__)
    mask &= rows.labeled("phase", lambda label: label != "backward")
    copies = {_written(rows.calls[number], taken) for number in rows.call[mask].tolist()}
    largest = max(copies, default=0)
    memory = case.run.memory if case.run is not None else None
    if memory is not None and largest > MEMORY_SHARE * memory.peak:
        return _finding(rows, mask, largest, stake_bytes=largest, of_bytes=memory.peak)
    spent = case.cost_ms(mask)
    if spent > TIME_SHARE * case.step_ms:
        return _finding(rows, mask, largest, stake_ms=spent, gain_ms=spent)
    return None


def _finding(rows: Rows, mask: Mask, largest: int, **stake: float) -> Finding:
    return Claim(
        rule="written_out",
        claim=f"copies of one thing are written out where a view would do: "
        f"{units.bytes_(largest)} at a time",
        evidence=rows.hot_lines(mask),
        remedy="expand instead of repeat, and no contiguous() behind it: attention and elementwise "
        "operators broadcast; enable_gqa=True where heads share keys and values",
        why="what an expanded tensor shows many times is in memory once",
        work=mask,
        **stake,  # type: ignore[arg-type]
    )


def _written(call: OpCall, taken: set[Dims]) -> int:
    """Return the bytes that a copy out of an expanded tensor writes for those that broadcast."""
    target, source = call.tensor(0), call.tensor(1)
    if call.name != "aten::copy_" or target is None or source is None or not _is_expanded(source):
        return 0
    return target.bytes if tuple(sorted(d for d in target.dims if d > 1)) in taken else 0


def _is_expanded(tensor: TensorArg) -> bool:
    """Whether a tensor shows something many times; one number that is shown often is a fill."""
    strides = tensor.strides or ()
    shown = [stride for size, stride in zip(tensor.dims, strides, strict=False) if size > 1]
    return 0 in shown and any(shown)


def _broadcast_dims(rows: Rows) -> set[Dims]:
    """Return the sizes of what operators take that would have taken a view.

    Sorted: a copy may be made in another order of dimensions than it is read.
    """
    takes = [c for c in rows.calls if "scaled_dot_product" in c.name or c.name in BROADCASTS]
    return {tuple(sorted(d for d in t.dims if d > 1)) for c in takes for t in c.tensors if t}


RULE = check
