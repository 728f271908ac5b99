"""A loop computes the beginning of a sequence again in every turn, to add a little at its end.

What it sees: one line that multiplies or attends four times or more, each time over longer inputs
than before, by the same number of rows: a decoder that is given all tokens so far for each new one.
Why it costs: of a turn over 512 tokens, 511 are those of the turn before. Over a whole answer that
grows with the square of its length.
Remedy: keep the keys and values of earlier positions, and compute the new one alone; where
gradients are needed, one pass over all positions with a causal mask.
When it is wrong: earlier positions see later ones, so that nothing of them stays the same; or
batches come in the order of their lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from steplab.core import Finding, units
from steplab.costs.op_call import OpCall
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.matmuls import FACTORS
from steplab.findings.rows import Mask, Rows
from steplab.trace.analysis import UNATTRIBUTED
from steplab.trace.categories import ATTENTION
from steplab.trace.events import Ints

SHARE = 0.05
LEAST_TURNS = 4  # that are longer than the one before, each by as much
LEAST_TRAINED = 8  # turns with gradients: a few batches in the order of their lengths may look so
CALL_MS = 0.003  # of an operator on a CPU, however little it does
LEAST_KNOWN = 0.75  # of a turn that the one before had; of chunks of a document it has less
KV_CACHE = (
    "keep the keys and values of earlier positions (a KV cache; use_cache=True in transformers) "
    "and give the model the new position alone"
)
ONE_PASS = "one pass over all positions with a causal mask, in place of a loop over prefixes"


class Turn(NamedTuple):
    """Calls of one size, from one place to another in the calls of a line."""

    size: int  # rows of their input
    first: int
    end: int


def check(case: Case) -> Finding | None:
    """Add up what turns compute that the turn before them had."""
    rows = case.rows
    if rows is None:
        return None
    mask, known = np.zeros(len(rows.work), np.bool_), np.zeros(len(rows.work))
    shortest: list[Turn] = []  # positions, where other lines count the rows of all samples
    for group in _groups(rows):
        for run in _runs([_length(rows.calls[number]) for number in rows.call[group].tolist()]):
            # A pass over all positions, as for training, may follow the last turn.
            calls = min(turn.end - turn.first for turn in run)
            for before, turn in pairwise(run):
                mask[group[turn.first : turn.first + calls]] = True
                known[group[turn.first : turn.first + calls]] = before.size / turn.size
            shortest = min(shortest or run, run)
    if not mask.any():
        return None
    part = float(np.average(known[mask], weights=rows.work.duration[mask]))
    first, second, *_, last = (f"{turn.size:,}" for turn in shortest)
    trained = rows.ms(rows.differentiated(mask)) > rows.ms(mask) / 2
    if trained and len(shortest) < LEAST_TRAINED:
        return None
    around = rows.with_gradients(_around(rows, mask))
    spent = case.cost_ms(around)
    # As many operators are called for one position. On a device, only kernels get shorter.
    left = CALL_MS * rows.count(around)
    gain = part * (rows.ms(around) if case.on_device else max(0.0, spent - left))
    if not gain > SHARE * case.step_ms:
        return None
    return Claim(
        rule="prefix_recomputed",
        claim=f"each of {len(shortest)} turns computes all earlier positions again: "
        f"{units.milliseconds(spent)} a step",
        evidence=(
            f"inputs of {first}, {second}, ... {last} rows, one after the other",
            *rows.hot_lines(mask),
        ),
        remedy=ONE_PASS if trained else KV_CACHE,
        stake_ms=spent,
        why="what a causal model computes for a position does not change with those behind it",
        gain_ms=gain,
        work=around,
        is_cause=True,  # of what its operators are called for
    )


def _groups(rows: Rows) -> list[Ints]:
    """Return the forward products and attentions of each line and module, in order of time."""
    heavy = rows.labeled("category", lambda name: name.startswith(ATTENTION))
    heavy |= rows.called(lambda call: call.name in FACTORS)
    heavy &= rows.labeled("phase", lambda name: name not in ("backward", "optimizer"))
    heavy &= rows.labeled("line", lambda name: name != UNATTRIBUTED)
    chosen = np.flatnonzero(heavy)
    chosen = chosen[np.argsort(rows.work.start[chosen], kind="stable")]
    key = np.stack([rows.work.line[chosen], rows.work.module[chosen], rows.work.op[chosen]])
    _, which = np.unique(key, axis=1, return_inverse=True)
    order = np.argsort(which.ravel(), kind="stable")
    groups = np.split(chosen[order], np.flatnonzero(np.diff(which.ravel()[order])) + 1)
    return [group for group in groups if len(group) > LEAST_TURNS]


def _length(call: OpCall) -> int:
    """Return the rows of what is multiplied, or the positions that attend."""
    tensor = call.tensor(FACTORS.get(call.name, 0))
    return tensor.dims[-2] if tensor is not None and len(tensor.dims) > 1 else 0


def _runs(sizes: Sequence[int]) -> list[list[Turn]]:
    """Return the runs of turns of which each is as much longer than the one before."""
    borders = [i for i in range(1, len(sizes)) if sizes[i] != sizes[i - 1]]
    turns = [Turn(sizes[i], i, j) for i, j in pairwise([0, *borders, len(sizes)])]
    found, run = [], turns[:1]
    for turn in turns[1:]:
        step = turn.size - run[-1].size
        if step > 0 and (len(run) < 2 or step == run[-1].size - run[-2].size):
            run.append(turn)
        else:
            found.append(run)
            run = [run[-1], turn] if step > 0 else [turn]
    return [run for run in (*found, run) if len(run) > LEAST_TURNS and _mostly_known(run)]


def _mostly_known(run: list[Turn]) -> bool:
    return run[-2].size >= LEAST_KNOWN * run[-1].size


def _around(rows: Rows, mask: Mask) -> Mask:
    """Return what runs meanwhile in the modules, or else the functions, of the turns' work."""
    named = rows.labeled("module", lambda label: label != UNATTRIBUTED)
    modules = np.isin(rows.work.module, np.unique(rows.work.module[mask & named])) & named
    functions = np.isin(rows.work.function, np.unique(rows.work.function[mask & ~named]))
    start, first, last = rows.work.start, mask.argmax(), len(mask) - 1 - mask[::-1].argmax()
    meanwhile = rows.inside & (start >= start[first]) & (start <= start[last])
    forward = rows.labeled("phase", lambda name: name not in ("backward", "optimizer"))
    return mask | (meanwhile & forward & (modules | functions))


RULE = check
