"""Calls of modules in a trace: whole models, the lines that call them, and loops around them."""

from __future__ import annotations

import numpy as np

from steplab.findings.rows import Mask
from steplab.trace.analysis import UNATTRIBUTED, Labels
from steplab.trace.attribution import MODULE_RANGE, Attribution, forward_ops
from steplab.trace.events import Ints, Spans, Trace
from steplab.trace.lines import MODULE
from steplab.trace.phases import AUTOGRAD_NODE
from steplab.trace.spans import nest


def module_calls(trace: Trace) -> tuple[Spans, Mask]:
    """Return a table of spans, and which of them are calls of modules: by path, else by class."""
    ranges = trace.named(trace.ranges, lambda name: name.startswith(MODULE_RANGE))
    if ranges.any():
        return trace.ranges, ranges
    return trace.python, trace.named(trace.python, lambda name: name.startswith(MODULE))


def outermost_calls(trace: Trace) -> tuple[Spans, Ints, Mask]:
    """Return the calls of whole models, the name of each, and whether it has no backward."""
    table, chosen = module_calls(trace)
    is_node = trace.named(trace.ops, lambda name: name.startswith(AUTOGRAD_NODE))
    nodes = nest(trace.ops, is_node)
    outer = chosen & (nest(table, chosen).parents() < 0)
    rows = np.flatnonzero(outer)
    recomputed = nodes.innermost(table.thread[rows], table.start[rows]) >= 0
    rows = rows[~recomputed]
    spans = Spans(table.start[rows], table.duration[rows], table.name[rows], table.thread[rows])
    makers = forward_ops(trace.ops)
    makers = np.unique(makers[makers >= 0])
    inside = nest(spans).innermost(trace.ops.thread[makers], trace.ops.start[makers])
    unused = np.ones(len(rows), np.bool_)
    unused[inside[inside >= 0]] = False
    return spans, spans.name.astype(np.int64), unused


def callers(trace: Trace, spans: Spans, chosen: Ints) -> list[str]:
    """Return the lines that make the chosen calls, three at most."""
    labels = Labels()
    host = Attribution(trace, labels)
    lines = host.at(spans.thread[chosen].astype(np.int64), spans.start[chosen] - 1).line
    found = dict.fromkeys(labels.texts()[code] for code in lines)
    return [line for line in found if line != UNATTRIBUTED][:3]


def turning_lines(trace: Trace, thread: int, first: int, last: int) -> list[str]:
    """Return the line that calls what runs at one time (ns) and has returned by a later one.

    Of two turns of a loop, that is the line of the loop, however deep below it the work is.
    """
    table = trace.python if len(trace.python) else trace.ranges
    around = (table.thread == thread) & (table.start <= first) & (first < table.end)
    turns = np.flatnonzero(around & (table.end <= last))
    return callers(trace, table, turns[np.argsort(table.start[turns], kind="stable")][:1])
