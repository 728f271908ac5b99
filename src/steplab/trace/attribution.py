"""Attribution: phase, module, line and operator of any instant on a thread of the host.

A kernel is looked up by the call that launched it, however late the device ran it. A backward
operator is traced to the forward operator that made its autograd node: both have the same sequence
number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from steplab.trace.analysis import Labels
from steplab.trace.events import Codes, Ints, Ops, Spans, Trace, at_rows
from steplab.trace.lines import LINE_RANGE, MODULE, user_line
from steplab.trace.phases import AUTOGRAD_NODE, may_be_phase, phase_of_call, phase_of_range
from steplab.trace.spans import Nesting, nest

MODULE_RANGE = "module:"
MOST_THREADS = 64  # that may run forwards; a process has one, DataParallel one per GPU


@dataclass(frozen=True)
class Origins:
    """What the code was doing at each of n instants; codes of the Labels that were given."""

    phase: Codes
    module: Codes
    line: Codes
    function: Codes
    op: Codes
    op_row: Ints  # in Trace.ops, -1: none


class Attribution:
    """The spans of a trace, indexed for lookups by thread and time."""

    def __init__(self, trace: Trace, labels: Labels) -> None:
        self.trace = trace
        self.ops = nest(trace.ops)
        self._labels = labels
        is_node = trace.named(trace.ops, lambda name: name.startswith(AUTOGRAD_NODE))
        self._nodes = nest(trace.ops, is_node | (trace.ops.forward_thread > 0))
        self._autograd_threads = np.unique(trace.ops.thread[is_node])
        self._made_by = forward_ops(trace.ops)
        self._functions = _LabeledSpans(trace, trace.python, labels, user_line)
        self._lines = _line_spans(trace, labels)
        self._modules = _module_spans(trace, labels)
        self._phases = _LabeledSpans(trace, trace.ranges, labels, phase_of_range)
        self._called_phases = _LabeledSpans(trace, trace.python, labels, phase_of_call)
        self._other_ranges = _outermost_ranges(trace)
        backward = trace.named(trace.ranges, lambda n: phase_of_range(n) == "backward")
        self._backward = nest(trace.ranges, backward, across_threads=True)

    def at(self, thread: Ints, time: Ints) -> Origins:
        """Return the origins of instants (ns) on host threads; thread -1 has none."""
        op_row = self.ops.innermost(thread, time)
        node = self._nodes.innermost(thread, time)
        return Origins(
            self._phase(thread, time, node),
            self._through_forward(self._modules, thread, time, node),
            self._through_forward(self._lines, thread, time, node),
            self._through_forward(self._functions, thread, time, node),
            self._labels.translate(self.trace, at_rows(self.trace.ops.name, op_row)),
            op_row,
        )

    def _through_forward(self, spans: _LabeledSpans, thread: Ints, time: Ints, node: Ints) -> Codes:
        """Return the label around each instant, or around the forward op of its autograd node.

        A span that began inside the node keeps its label: a recomputed module, a Python backward.
        """
        ops = self.trace.ops
        row = spans.around(thread, time)
        outside = (node >= 0) & (at_rows(spans.start, row) < at_rows(ops.start, node))
        maker = np.where(outside, at_rows(self._made_by, node), -1)
        there = spans.around(at_rows(ops.thread, maker), at_rows(ops.start, maker))
        return spans.labels(np.where(outside & (there >= 0), there, row))

    def _phase(self, thread: Ints, time: Ints, node: Ints) -> Codes:
        backward, forward = self._labels.code("backward"), self._labels.code("forward")
        row = self._phases.around(thread, time)
        phase = self._phases.labels(row)
        # A forward inside a node is a recomputation; an optimizer there was run by a hook.
        inside = at_rows(self._phases.start, row) >= at_rows(self.trace.ops.start, node)
        own = inside & (row >= 0) & (phase != forward)
        phase = np.where((node >= 0) & ~own, backward, phase)
        called = self._called_phases.labels(self._called_phases.around(thread, time))
        phase = np.where(phase == 0, called, phase)
        engine = np.isin(thread, self._autograd_threads)
        engine &= self._backward.innermost(np.zeros_like(thread), time) >= 0
        phase = np.where((phase == 0) & engine, backward, phase)
        other = at_rows(self.trace.ranges.name, self._other_ranges.innermost(thread, time))
        phase = np.where(phase == 0, self._labels.translate(self.trace, other), phase)
        return phase.astype(np.int32)


class _LabeledSpans:
    """Those spans of a table that have a label, by a function of their names."""

    def __init__(
        self, trace: Trace, spans: Spans, labels: Labels, name: Callable[[str], str | None]
    ) -> None:
        self.start = spans.start
        self._name = spans.name
        self._labels = np.zeros(len(trace.texts), np.int32)
        for code in np.flatnonzero(np.bincount(spans.name, minlength=len(trace.texts))).tolist():
            label = name(trace.texts[code])
            if label is not None:
                self._labels[code] = labels.code(label)
        marked = self._labels[spans.name] > 0
        self.some = bool(marked.any())
        self._nest = nest(spans, marked)

    def around(self, thread: Ints, time: Ints) -> Ints:
        """Return the row of the innermost labeled span around each instant, -1: none."""
        return self._nest.innermost(thread, time)

    def labels(self, row: Ints) -> Codes:
        """Return the label of each row; 0 for -1."""
        code = at_rows(self._name, row)
        return np.where(code >= 0, at_rows(self._labels, code), 0).astype(np.int32)


def _module_spans(trace: Trace, labels: Labels) -> _LabeledSpans:
    """Return the spans of modules: by path where our own ranges are there, else by class."""
    ranges = _LabeledSpans(trace, trace.ranges, labels, _path_of_range)
    return ranges if ranges.some else _LabeledSpans(trace, trace.python, labels, _class_of_call)


def _line_spans(trace: Trace, labels: Labels) -> _LabeledSpans:
    """Return the running lines, and the functions of threads that have none."""
    python, lines = trace.python, trace.lines
    other = ~np.isin(python.thread, np.unique(lines.thread))
    both = (
        np.concatenate((getattr(lines, column), getattr(python, column)[other]))
        for column in ("start", "duration", "name", "thread")
    )
    start, duration, name, thread = both
    order = np.lexsort((-duration, start))
    spans = Spans(start[order], duration[order], name[order], thread[order])
    return _LabeledSpans(trace, spans, labels, _line_of_span)


def _line_of_span(name: str) -> str | None:
    return name.removeprefix(LINE_RANGE) if name.startswith(LINE_RANGE) else user_line(name)


def _path_of_range(name: str) -> str | None:
    return name.removeprefix(MODULE_RANGE) if name.startswith(MODULE_RANGE) else None


def _class_of_call(name: str) -> str | None:
    """Return the class of a module; a compiled graph is a module to torch, but not the user's."""
    is_module = name.startswith(MODULE) and not name.startswith(f"{MODULE}GraphModule")
    return name.removeprefix(MODULE) if is_module else None


def _outermost_ranges(trace: Trace) -> Nesting:
    chosen = trace.named(trace.ranges, may_be_phase)
    return nest(trace.ranges, chosen & (nest(trace.ranges, chosen).parents() < 0))


def forward_ops(ops: Ops) -> Ints:
    """Return for every backward operator the row of the forward one that made its node; else -1.

    Sequence numbers are counted per thread. A backward operator names the thread of its forward by
    a number that no other event has; it stands for the thread that explains most such operators.
    """
    made_by = np.full(len(ops), -1, np.int64)
    numbered = ops.sequence >= 0
    forward = np.flatnonzero(numbered & (ops.forward_thread <= 0))
    backward = np.flatnonzero(numbered & (ops.forward_thread > 0))
    _, number = np.unique(ops.forward_thread[backward], return_inverse=True)
    most = np.zeros(number.max(initial=-1) + 1, np.int64)  # operators explained, by number
    for thread in _busiest(ops.thread[forward]):
        makers = _makers(ops.sequence, forward[ops.thread[forward] == thread])
        found = _earlier(ops, backward, *makers)
        explained = np.bincount(number[found >= 0], minlength=len(most))
        better = (explained > most)[number]
        made_by[backward[better]] = found[better]
        most = np.maximum(most, explained)
    return made_by


def _busiest(threads: Codes) -> Codes:
    """Return the threads that occur most, up to MOST_THREADS, in order."""
    distinct, counts = np.unique(threads, return_counts=True)
    return np.sort(distinct[np.argsort(-counts, kind="stable")[:MOST_THREADS]])


def _makers(sequence: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Return distinct sequence numbers, and for each the last operator with it: it made the node.

    Those before it only read the counter.
    """
    latest_first = rows[::-1]
    distinct, first = np.unique(sequence[latest_first], return_index=True)
    return distinct, latest_first[first]


def _earlier(ops: Ops, rows: Ints, sequences: Ints, makers: Ints) -> Ints:
    """Return for each row the maker with its sequence number, if it began earlier; else -1."""
    index = np.minimum(np.searchsorted(sequences, ops.sequence[rows]), len(sequences) - 1)
    maker = makers[index]
    fits = (sequences[index] == ops.sequence[rows]) & (ops.start[maker] <= ops.start[rows])
    return np.where(fits, maker, -1)
