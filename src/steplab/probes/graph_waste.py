"""What compiled graphs compute for nothing, told from the same code run op by op.

A compiler drops what nothing reads inside a graph, and computes what leaves it: outputs, gradients,
and what these are made of.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from steplab.core.dataflow import (
    MASKED,
    PARTLY_USED,
    READ_ONLY,
    ROWS_OF_ZEROS,
    TIMES_ZERO,
    UNREAD_OUTPUT,
    UNUSED,
    ZEROS,
    GraphWaste,
)
from steplab.probes.compiled_calls import OUTSIDE, CompiledCalls, GraphOutput
from steplab.probes.value_graph import WatchedOp, behind

# Shares of an operator's work that are for nothing, by verdict. Zeros and cuts count in products
# only: what is elementwise, a compiler fuses with what cuts it.
WHOLE = (UNUSED, READ_ONLY, TIMES_ZERO)
OF_PRODUCTS = {
    ZEROS: 1.0,
    **{letter: int(letter) / 10 for letter in ROWS_OF_ZEROS},
    **{letter: tenths / 10 for tenths, letter in enumerate(PARTLY_USED, 5)},
    **{letter: tenths / 10 for tenths, letter in enumerate(MASKED, 7)},
}
LEAST = 0.01  # of all FLOPs or bytes
# Passes over an output whose gradient is asked for: written, its gradient filled with zeros and
# read. Without one it is only written.
PASSES = 3


@dataclass
class Borders:
    """What passes in and out of compiled graphs, by storage."""

    entered: dict[int, int] = field(default_factory=dict)  # bytes that a graph read
    read: set[int] = field(default_factory=set)  # by others than the graph that made it
    makers: dict[int, int] = field(default_factory=dict)  # the operators that made outputs


def graph_waste(
    ops: list[WatchedOp], verdicts: Sequence[str], calls: CompiledCalls, borders: Borders
) -> tuple[GraphWaste, ...]:
    """Return what is for nothing, by verdict, the most first."""
    inside = [i for i, op in enumerate(ops) if op.call != OUTSIDE]
    flops, moved = sum(ops[i].flops for i in inside), sum(ops[i].bytes for i in inside)
    returned = behind(ops, borders.makers.values())
    lost_flops: Counter[str] = Counter()
    lost_bytes: Counter[str] = Counter()
    lines: dict[str, Counter[str]] = defaultdict(Counter)
    for index in inside:
        op = ops[index]
        letter = _verdict(ops, verdicts, index)
        if letter in WHOLE:
            dropped = letter == UNUSED and op.forward is None and index not in returned
            share = 0.0 if dropped else 1.0
        else:
            share = OF_PRODUCTS.get(letter, 0.0) if op.flops else 0.0
        if share:
            lost_flops[letter] += int(share * op.flops)
            lost_bytes[letter] += op.bytes if letter in WHOLE else 0
            lines[letter][op.line] += op.bytes + op.flops
    found = [
        GraphWaste(
            letter,
            max(lines[letter], key=lines[letter].__getitem__),
            lost_flops[letter] / max(flops, 1),
            lost_bytes[letter] / max(moved, 1),
        )
        for letter in lines
    ]
    found += _unread_outputs(calls, borders)
    large = [one for one in found if max(one.flops, one.bytes) >= LEAST]
    return tuple(sorted(large, key=lambda one: -max(one.flops, one.bytes)))


def _verdict(ops: list[WatchedOp], verdicts: Sequence[str], index: int) -> str:
    """Return the verdict about an operator; the gradient of what counts for nothing does too."""
    forward = ops[index].forward
    zero = forward is not None and verdicts[forward] == TIMES_ZERO
    return TIMES_ZERO if zero else verdicts[index]


def _unread_outputs(calls: CompiledCalls, borders: Borders) -> list[GraphWaste]:
    """Return the share that outputs without a reader have in what graphs read and write."""
    outputs = {one.storage: one for one in calls.outputs if one.storage in borders.makers}
    unread = [one for key, one in outputs.items() if key not in borders.read]
    if not unread:
        return []
    largest = max(unread, key=lambda one: one.bytes)
    lost = sum(map(_moved, unread))
    needed = sum(one.bytes for key, one in outputs.items() if key in borders.read)
    whole = lost + needed + sum(borders.entered.values())
    return [GraphWaste(UNREAD_OUTPUT, calls.lines[largest.call], 0.0, lost / max(whole, 1))]


def _moved(output: GraphOutput) -> int:
    return output.bytes * (PASSES if output.has_gradient else 1)
