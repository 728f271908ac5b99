"""A norm, an activation or a loss is written out op by op.

What it sees: a function without matrix products, or a line of one, that calls five or more
memory-bound operators over tensors of one large size, and their backward: above 10 % of the step;
or the logarithm of a softmax.
Why it costs: every operator reads and writes the whole tensor, often in fp32, where one kernel
would do so once.
Remedy: the operator that torch has for it (`F.rms_norm`, `F.layer_norm`, `F.gelu`, `F.softmax`,
`F.cross_entropy`), or `torch.compile` of that function.
When it is wrong: nothing fused computes the same, and the function does not compile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from steplab.core import Finding, units
from steplab.costs.op_call import OpCall
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.rows import Mask, Rows
from steplab.trace.analysis import UNATTRIBUTED
from steplab.trace.events import Codes

SHARE = 0.10
LOG_SHARE = 0.05
OPERATORS = 5  # over tensors of one size, in one call
LARGE, LARGE_ON_CPU = 2**20, 2**14  # elements
FUSED = 3  # kernels of one call that remain: one forward, two backward
MOVES = ("elementwise", "reduction", "copy")
NO_FORWARD = ("backward", "optimizer", "clip", "data")


def check(case: Case) -> Finding | None:
    """Find the place with the costliest chain, else a softmax of which the logarithm is taken."""
    rows = case.rows
    if rows is None:
        return None
    return _costliest(case, rows) or _log_of_softmax(case, rows)


def _log_of_softmax(case: Case, rows: Rows) -> Finding | None:
    """Judge logarithms of tensors as large as those of a softmax, with what is beside them."""
    least = LARGE if case.on_device else LARGE_ON_CPU
    sizes = {_size(call) for call in rows.calls if call.name == "aten::_softmax"}
    sizes = {size for size in sizes if size >= least}
    logs = rows.called(lambda call: call.name == "aten::log" and _size(call) in sizes)
    forward = rows.labeled("phase", lambda label: label not in NO_FORWARD)
    functions = np.unique(rows.work.function[logs & forward])
    beside = rows.called(lambda call: call.name in ("aten::add", "aten::clamp", "aten::mul"))
    beside &= rows.called(lambda call: _size(call) in sizes)
    mask = rows.with_gradients((logs | beside) & forward & np.isin(rows.work.function, functions))
    spent = case.cost_ms(mask)
    if not spent > LOG_SHARE * case.step_ms:
        return None
    return Claim(
        rule="unfused_chain",
        claim=f"the logarithm of a softmax is a pass of its own: {units.milliseconds(spent)} a "
        "step",
        evidence=rows.hot_lines(mask),
        remedy="F.log_softmax(x, -1), or F.cross_entropy of the logits: in one pass, and exact "
        "where a probability rounds to zero",
        stake_ms=spent,
        why="softmax writes all probabilities, and the logarithm and its gradient go through them",
        gain_ms=spent,
        work=mask,
    )


def _size(call: OpCall) -> int:
    return max(call.numels, default=0)


def _costliest(case: Case, rows: Rows) -> Finding | None:
    """Find the place with the costliest chain."""
    moves = rows.category(*MOVES)
    moves &= rows.labeled("phase", lambda label: label not in NO_FORWARD[1:])
    large = LARGE if case.on_device else LARGE_ON_CPU
    found = [
        (case.cost_ms(chain.work), label, chain)
        for label, place in _places(rows, moves, SHARE * case.step_ms)
        if (chain := _chain(rows, moves & place, large)) is not None
    ]
    spent, label, chain = max(found, key=lambda one: one[0], default=(0.0, "", None))
    if chain is None or not spent > SHARE * case.step_ms:
        return None
    count = rows.count(chain.work)
    kept = min(1.0, FUSED * chain.calls / max(count, 1))
    return Claim(
        rule="unfused_chain",
        claim=f"{label} is written out op by op: {units.milliseconds(spent)} a step",
        evidence=(
            f"{count / chain.calls:.0f} kernels of each call: {', '.join(chain.ops)}",
            *rows.hot_lines(chain.work),
        ),
        remedy="the operator that torch has for it (F.rms_norm, F.layer_norm, F.gelu, "
        "F.softmax, F.cross_entropy), or torch.compile of that function",
        stake_ms=spent,
        why="every operator reads and writes the whole tensor, one kernel would do so once",
        gain_ms=spent * (1 - kept),
        work=chain.work,
    )


def _places(rows: Rows, moves: Mask, least: float) -> Iterator[tuple[str, Mask]]:
    """Yield functions without products, and lines without products of other functions."""
    products = rows.labeled("category", lambda label: label.startswith(("matmul", "attention")))
    function, line = rows.work.function, rows.work.line
    multiplies = np.unique(function[products])
    alone = ~np.isin(function, multiplies)
    yield from _large(rows, function, moves & alone, least)
    single = ~np.isin(line, np.unique(line[products]))
    yield from _large(rows, line, moves & ~alone & single, least)


def _large(rows: Rows, codes: Codes, mask: Mask, least: float) -> Iterator[tuple[str, Mask]]:
    """Yield the labels with most of the time, those above `least`."""
    for code in np.unique(codes[mask]).tolist():
        chosen = mask & (codes == code)
        label = rows.work.labels[code]
        if label != UNATTRIBUTED and rows.ms(chosen) > least:
            yield label, chosen


class _Chain(NamedTuple):
    """Operators over tensors of one size."""

    ops: list[str]
    calls: float  # how often all of them are called
    work: Mask  # what the place does with tensors of that size or less, backward included


def _chain(rows: Rows, mask: Mask, large: int) -> _Chain | None:
    """Return the operators called over tensors of the commonest size."""
    forward = mask & rows.labeled("phase", lambda label: label not in NO_FORWARD)
    numbers = np.unique(rows.call[forward]).tolist()
    sizes = {number: max(rows.calls[number].numels, default=0) for number in numbers}
    chains = []
    for size in {size for size in sizes.values() if size >= large}:
        same = rows.of_calls(number for number in numbers if sizes[number] == size)
        called = rows.asked_calls(forward & same)
        if any("norm" in name for name in called):
            continue  # torch's own is in use
        if len(called) > 2 and called.total() >= OPERATORS * min(called.values()):
            chains.append((called.total(), sorted(called), min(called.values()), size))
    if not chains:
        return None
    _, names, calls, size = max(chains)
    # Not what else the function does with more: messages along the edges of a graph, say.
    work = mask & rows.called(lambda call: _size(call) <= size)
    return _Chain(names, float(calls), work)


RULE = check
