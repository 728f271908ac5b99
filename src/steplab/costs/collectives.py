"""What a collective has to move, by its kind and the number of ranks."""

from __future__ import annotations


def bus_factor(op: str, world: int) -> float:
    """Return the bytes that must pass the link of every rank, per byte of the message.

    `op` is "all-reduce", "all-gather", "reduce-scatter" or "all-to-all"; the message is the buffer
    of an all-reduce, the output of an all-gather, the input of the others. An all-reduce is a
    reduce-scatter and an all-gather, so it counts twice.
    """
    share = (world - 1) / world
    return 2 * share if op == "all-reduce" else share
