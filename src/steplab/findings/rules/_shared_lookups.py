"""Lookups of the same rows for every sample, and the products that take what they return.

A part of repeated_work, and no rule by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from steplab.costs.op_call import Dims, OpCall
from steplab.findings.matmuls import as_matmul
from steplab.findings.rows import Mask, Rows
from steplab.trace.events import Ints

LOOKUP = "aten::embedding"
# Between a lookup and the product of its result: a cast, or another order in memory.
COPIES = frozenset(f"aten::{name}" for name in ("copy_", "clone", "contiguous", "to", "_to_copy"))


@dataclass(frozen=True)
class SharedLookups:
    """What looks up the same rows for all samples, and what multiplies the copies."""

    times: int  # that each row is looked up, at most
    lookups: Mask  # with their gradients
    products: Mask  # the same


def shared_lookups(rows: Rows) -> SharedLookups | None:
    """Return lookups by an index that is expanded: it holds the rows of one sample; None: none."""
    copies = {times for call in rows.calls if (times := _copies(call)) > 1}
    if not copies:
        return None
    forward = rows.labeled("phase", lambda label: label != "backward")
    lookups = forward & rows.within(lambda call: _copies(call) > 1)
    results = {dims for call in rows.calls if _copies(call) > 1 for dims in _results(call)}
    takers = rows.roots(forward & ~lookups & rows.called(lambda call: _takes(call, results)))
    start = rows.source.ops.start
    products: Mask = np.zeros_like(lookups)
    for lookup in rows.roots(lookups).tolist():
        after = takers[start[takers] > start[lookup]]
        products |= rows.of_roots(_multiplied_next(rows, after, results)) & forward
    return SharedLookups(max(copies), rows.with_gradients(lookups), rows.with_gradients(products))


def _copies(call: OpCall) -> int:
    """Return how often a lookup takes each row of its index; 1: once, or it is no lookup."""
    index = call.tensor(1)
    if call.name != LOOKUP or index is None or not index.strides:
        return 1
    return math.prod(
        size for size, stride in zip(index.dims, index.strides, strict=False) if stride == 0
    )


def _results(call: OpCall) -> tuple[Dims, ...]:
    """Return the form of what a lookup returns, and of its transpose."""
    table, index = call.tensor(0), call.tensor(1)
    if table is None or index is None or len(index.dims) != 2:
        return ()
    samples, picked, width = *index.dims, table.dims[-1]
    return (samples, picked, width), (samples, width, picked)


def _takes(call: OpCall, results: set[Dims]) -> bool:
    return any(tensor is not None and tensor.dims in results for tensor in call.tensors)


def _multiplied_next(rows: Rows, takers: Ints, results: set[Dims]) -> list[int]:
    """Return the first operators that take a result: a product, with copies before it; else none.

    Anything else makes something of its own for every sample from it.
    """
    found = []
    for root in takers.tolist():
        numbers = np.unique(rows.call[rows.of_roots([root])]).tolist()
        takes = [rows.calls[n] for n in numbers if _takes(rows.calls[n], results)]
        found.append(root)
        if any(as_matmul(call) is not None for call in takes):
            return found
        if not all(call.name in COPIES for call in takes):
            return []
    return []
