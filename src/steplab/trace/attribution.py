"""Attribution: phase, module, line and operator of any instant on a thread of the host.

A kernel is looked up by the call that launched it, wherever the device is by then. An operator
of the backward is traced to the one of the forward that made its autograd node: both carry the
same sequence number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steplab.trace.analysis import Labels
from steplab.trace.events import Codes, Ints, Ops, Spans, Trace
from steplab.trace.lines import MODULE, user_line
from steplab.trace.nesting import Nesting, nest
from steplab.trace.phases import AUTOGRAD_NODE, may_be_phase, phase_of_call, phase_of_range


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


MODULE_RANGE = "module:"


@dataclass(frozen=True)
class Origins:
    """Where each of n instants belongs; codes of the Labels that were given."""

    phase: Codes
    module: Codes
    line: Codes
    op: Codes
    op_row: Ints  # in Trace.ops, -1: none


class Attribution:
    """The spans of a trace, made ready for questions."""

    def __init__(self, trace: Trace, labels: Labels) -> None:
        self.trace = trace
        self.ops = nest(trace.ops)
        self._labels = labels
        is_node = spans_named(trace, trace.ops, lambda name: name.startswith(AUTOGRAD_NODE))
        self._nodes = nest(trace.ops, is_node | (trace.ops.forward_thread > 0))
        self._autograd_threads = np.unique(trace.ops.thread[is_node])
        self._made_by = forward_ops(trace.ops)
        self._lines = _Marks(trace, trace.python, labels, user_line)
        self._modules = _module_marks(trace, labels)
        self._phases = _Marks(trace, trace.ranges, labels, phase_of_range)
        self._called_phases = _Marks(trace, trace.python, labels, phase_of_call)
        self._other_ranges = _outermost_ranges(trace)
        backward = spans_named(trace, trace.ranges, lambda n: phase_of_range(n) == "backward")
        self._backward = nest(trace.ranges, backward, across_threads=True)

    def at(self, thread: Ints, time: Ints) -> Origins:
        """Return the places of instants (ns) on host threads; a thread of -1 is nowhere."""
        op_row = self.ops.innermost(thread, time)
        node = self._nodes.innermost(thread, time)
        return Origins(
            self._phase(thread, time, node),
            self._through_forward(self._modules, thread, time, node),
            self._through_forward(self._lines, thread, time, node),
            self._labels.translated(self.trace, _at(self.trace.ops.name, op_row)),
            op_row,
        )

    def _through_forward(self, marks: _Marks, thread: Ints, time: Ints, node: Ints) -> Codes:
        """The mark around each instant; inside an autograd node that of the forward operator.

        A mark that began inside the node is its own: a recomputed module, a backward in Python.
        """
        ops = self.trace.ops
        row = marks.around(thread, time)
        outside = (node >= 0) & (_at(marks.start, row) < _at(ops.start, node))
        maker = np.where(outside, _at(self._made_by, node), -1)
        there = marks.around(_at(ops.thread, maker), _at(ops.start, maker))
        return marks.labels(np.where(outside & (there >= 0), there, row))

    def _phase(self, thread: Ints, time: Ints, node: Ints) -> Codes:
        backward, forward = self._labels.code("backward"), self._labels.code("forward")
        row = self._phases.around(thread, time)
        phase = self._phases.labels(row)
        # A forward inside a node is a recomputation; an optimizer there is one run by a hook.
        inside = _at(self._phases.start, row) >= _at(self.trace.ops.start, node)
        own = inside & (row >= 0) & (phase != forward)
        phase = np.where((node >= 0) & ~own, backward, phase)
        called = self._called_phases.labels(self._called_phases.around(thread, time))
        phase = np.where(phase == 0, called, phase)
        engine = np.isin(thread, self._autograd_threads)
        engine &= self._backward.innermost(np.zeros_like(thread), time) >= 0
        phase = np.where((phase == 0) & engine, backward, phase)
        other = _at(self.trace.ranges.name, self._other_ranges.innermost(thread, time))
        phase = np.where(phase == 0, self._labels.translated(self.trace, other), phase)
        return phase.astype(np.int32)


class _Marks:
    """Those spans of a table that a function of their names gives a label."""

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
        """Row of the innermost mark around each instant, -1: none."""
        return self._nest.innermost(thread, time)

    def labels(self, row: Ints) -> Codes:
        """Label of each row; 0 for -1."""
        code = _at(self._name, row)
        return np.where(code >= 0, _at(self._labels, code), 0).astype(np.int32)


def spans_named(trace: Trace, spans: Spans, wanted: Callable[[str], bool]) -> NDArray[np.bool_]:
    """Tell for every span whether its name is wanted; each name is asked for once."""
    used = np.bincount(spans.name, minlength=len(trace.texts)) > 0
    chosen = [bool(u) and wanted(text) for u, text in zip(used, trace.texts, strict=True)]
    return np.array(chosen, np.bool_)[spans.name] if len(spans) else np.zeros(0, np.bool_)


def _module_marks(trace: Trace, labels: Labels) -> _Marks:
    """Our own ranges tell a module's path; the profiler's Python calls only its class."""
    ranges = _Marks(trace, trace.ranges, labels, _path_of_range)
    return ranges if ranges.some else _Marks(trace, trace.python, labels, _class_of_call)


def _path_of_range(name: str) -> str | None:
    return name.removeprefix(MODULE_RANGE) if name.startswith(MODULE_RANGE) else None


def _class_of_call(name: str) -> str | None:
    """A compiled graph is a module to torch, but none of the user's."""
    is_module = name.startswith(MODULE) and not name.startswith(f"{MODULE}GraphModule")
    return name.removeprefix(MODULE) if is_module else None


def _outermost_ranges(trace: Trace) -> Nesting:
    chosen = spans_named(trace, trace.ranges, may_be_phase)
    return nest(trace.ranges, chosen & (nest(trace.ranges, chosen).parents() < 0))


def _at(values: NDArray[Any], row: Ints) -> Ints:
    """Values at rows; -1 for row -1."""
    if not len(values):
        return np.full(len(row), -1, np.int64)
    return np.where(row >= 0, values[row], -1)
