"""From an operator of the backward to the one of the forward that it differentiates."""

from __future__ import annotations

import numpy as np

from steplab.trace.events import Ints, Ops


def forward_ops(ops: Ops) -> Ints:
    """For every operator of the backward the row of the forward one that made its node; else -1.

    Sequence numbers are counted per thread. The backward names the forward's thread by a number
    that no other event has; it stands for the host thread that explains most of its operators.
    """
    made_by = np.full(len(ops), -1, np.int64)
    numbered = ops.sequence >= 0
    forward = np.flatnonzero(numbered & (ops.forward_thread <= 0))
    backward = np.flatnonzero(numbered & (ops.forward_thread > 0))
    threads = np.unique(ops.thread[forward])
    makers = [_makers(ops.sequence, forward[ops.thread[forward] == t]) for t in threads]
    for number in np.unique(ops.forward_thread[backward]):
        rows = backward[ops.forward_thread[backward] == number]
        found = [_earlier(ops, rows, *of_thread) for of_thread in makers]
        if found:
            made_by[rows] = max(found, key=lambda maker: int((maker >= 0).sum()))
    return made_by


def _makers(sequence: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Distinct sequence numbers, and of each the operator begun last: it made the node.

    Those before it only looked at the counter.
    """
    latest_first = rows[::-1]
    distinct, first = np.unique(sequence[latest_first], return_index=True)
    return distinct, latest_first[first]


def _earlier(ops: Ops, rows: Ints, sequences: Ints, makers: Ints) -> Ints:
    """Of each row the maker with its sequence number, if that began before it; else -1."""
    place = np.minimum(np.searchsorted(sequences, ops.sequence[rows]), len(sequences) - 1)
    maker = makers[place]
    fits = (sequences[place] == ops.sequence[rows]) & (ops.start[maker] <= ops.start[rows])
    return np.where(fits, maker, -1)
