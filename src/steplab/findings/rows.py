"""Rows: the work of a trace, selected by name, category, phase, module, line and shape.

Times are ms per step, the median over the profiled steps: on a busy machine a single operator can
be held up for longer than the whole step takes. Where others use most of a core, it is in two steps
of three, and the fastest counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from steplab.core import units
from steplab.costs.op_call import OpCall
from steplab.trace.analysis import UNATTRIBUTED, Analysis, Floats
from steplab.trace.attribution import forward_ops
from steplab.trace.events import Codes, Ints, Trace
from steplab.trace.lines import LINE_RANGE, user_line
from steplab.trace.spans import Nesting, nest

Mask = NDArray[np.bool_]
CallTest = Callable[[OpCall], bool]
FLOATS = ("float", "c10::BFloat16", "c10::Half")


@dataclass(frozen=True)
class LabelTotal:
    """All rows that share a label."""

    label: str
    ms: float  # per step
    count: float  # per step


class Rows:
    """The rows of a WorkTable, with masks that select some and sums over a mask.

    `scale` turns profiled milliseconds into unprofiled ones, where the profiler slows everything.
    `held_up`: whether operators wait for a core, so that the fastest step tells what they take.
    """

    def __init__(self, analysis: Analysis, scale: float = 1.0, held_up: bool = False) -> None:
        self.analysis = analysis
        self.work = analysis.work
        self.scale = scale
        self.held_up = held_up
        self.steps = max(len(analysis.windows), 1)
        self.inside: Mask = analysis.work.step >= 0
        numbers = np.array(sorted(window.number for window in analysis.windows), dtype=np.int64)
        self._step = np.searchsorted(numbers, analysis.work.step)  # 0, 1, ... of rows inside

    def labeled(self, column: str, test: Callable[[str], bool]) -> Mask:
        """Rows inside a step whose text in `column` ("name", "op", "line", ...) passes `test`."""
        passes = np.array([test(label) for label in self.work.labels], dtype=bool)
        mask: Mask = passes[getattr(self.work, column)] & self.inside
        return mask

    def category(self, *names: str) -> Mask:
        """Rows inside a step that are of one of these categories."""
        return self.labeled("category", lambda label: label in names)

    def called(self, test: CallTest) -> Mask:
        """Rows inside a step whose operator call passes `test`."""
        passes = np.array([test(call) for call in self.calls], dtype=bool)
        mask: Mask = passes[self.call] & self.inside
        return mask

    def of_calls(self, numbers: Iterable[int]) -> Mask:
        """Rows inside a step whose call has one of these numbers in `calls`."""
        mask: Mask = np.isin(self.call, list(numbers)) & self.inside
        return mask

    def within(self, test: CallTest) -> Mask:
        """Rows that were launched inside an operator whose call passes `test`."""
        passes = np.array([test(call) for call in self._op_calls[1]], dtype=bool)
        mask: Mask = np.zeros(len(self.work), dtype=bool)
        has_op = (self.work.op_row >= 0) & self.inside
        rows, ops = self.work.op_row[has_op], self.source.ops
        around = nest(ops, passes[self._op_calls[0]])
        mask[has_op] = around.innermost(ops.thread[rows], ops.start[rows]) >= 0
        return mask

    def called_in(self, functions: Callable[[str], bool]) -> Mask:
        """Rows of functions, "net.py:39 (forward)" by where they begin, and of what they call.

        With the gradients of all that. Of traces without Python's stack, only of their own lines.
        """
        python, ops = self.source.python, self.source.ops
        mask = self.labeled("function", functions)
        chosen = self.source.named(python, lambda name: functions(user_line(name) or ""))
        has_op = (self.work.op_row >= 0) & self.inside
        row = self.work.op_row[has_op]
        frames = nest(python, chosen)
        mask[has_op] |= frames.innermost(ops.thread[row], ops.start[row]) >= 0
        return self.with_gradients(mask)

    def asked_for(self, test: Callable[[str], bool]) -> Mask:
        """Rows whose outermost operator passes `test`: what the code called.

        For work of backward, what the code called in the forward. Torch's own casts and copies are
        inside the operators that need them.
        """
        ops = self.source.ops
        passes = self.source.named(ops, test)
        mask: Mask = np.zeros(len(self.work), dtype=bool)
        has_op = (self.work.op_row >= 0) & self.inside
        mask[has_op] = passes[self._roots[self.work.op_row[has_op]]]
        return mask

    def roots(self, mask: Mask) -> Ints:
        """Return the operators that the code called behind the rows in `mask`, in that order.

        Each by its row in the trace. Of backward, those of the forward.
        """
        ops = self.source.ops
        found = np.unique(self._roots[self.work.op_row[mask & (self.work.op_row >= 0)]])
        ordered: Ints = found[np.argsort(ops.start[found], kind="stable")]
        return ordered

    def of_roots(self, roots: Iterable[int]) -> Mask:
        """Rows inside a step of operators that the code called, given as `roots` returns them."""
        mask: Mask = np.zeros(len(self.work), dtype=bool)
        has_op = (self.work.op_row >= 0) & self.inside
        mask[has_op] = np.isin(self._roots[self.work.op_row[has_op]], list(roots))
        return mask

    def asked_calls(self, mask: Mask) -> Counter[str]:
        """How often per profiled step the code called each operator behind the rows in `mask`."""
        ops = self.source.ops
        rows = np.unique(self._roots[self.work.op_row[mask & (self.work.op_row >= 0)]])
        return Counter(self.source.text(code) for code in ops.name[rows].tolist())

    def with_gradients(self, mask: Mask) -> Mask:
        """The rows in `mask`, and those of backward that compute gradients of what they compute."""
        has_op = (self.work.op_row >= 0) & self.inside
        asked = np.unique(self._roots[self.work.op_row[mask & has_op]])
        behind: Mask = np.zeros(len(self.work), dtype=bool)
        behind[has_op] = np.isin(self._roots[self.work.op_row[has_op]], asked)
        return mask | (behind & self.labeled("phase", lambda label: label == "backward"))

    def differentiated(self, mask: Mask) -> Mask:
        """The rows in `mask` of what backward computes gradients for."""
        has_op = (self.work.op_row >= 0) & self.inside
        backward = self.labeled("phase", lambda label: label == "backward") & has_op
        asked = np.unique(self._roots[self.work.op_row[backward]])
        chosen: Mask = np.zeros(len(self.work), dtype=bool)
        chosen[has_op] = np.isin(self._roots[self.work.op_row[has_op]], asked)
        return mask & chosen

    def whole_calls(self, mask: Mask) -> Mask:
        """The rows in `mask` that are most of what the operator does that the code called."""
        known = (self.work.op_row >= 0) & self.inside
        known &= ~self.labeled("phase", lambda label: label == "backward")
        root = self._roots[self.work.op_row[known]]
        spent, there = self.work.duration[known], mask[known]
        all_of_it = np.bincount(root, spent, len(self._roots))
        part = np.bincount(root, spent * there, len(self._roots))
        chosen: Mask = np.zeros(len(self.work), dtype=bool)
        chosen[known] = there & (part > 0.5 * all_of_it)[root]
        return chosen

    @cached_property
    def _roots(self) -> Ints:
        """The outermost operator around each operator; of backward, around the one of forward."""
        trace = self.source
        parents = nest(trace.ops).parents()
        roots = _tops(parents)
        made_by = forward_ops(trace.ops)
        known = np.flatnonzero(made_by >= 0)
        # A node has one forward operator; it counts for all that runs inside the node.
        maker = np.full(len(roots), -1, np.int64)
        maker[roots[known]] = made_by[known]
        through = maker[roots]
        return np.where(through >= 0, roots[through], roots)

    def ms(self, mask: Mask, ns: Ints | None = None) -> float:
        """Milliseconds per step of the rows in `mask`, by other ns of the rows if given."""
        return float(self._ms_by(np.zeros(len(self.work), np.int64), mask, 1, ns)[0])

    def count(self, mask: Mask) -> float:
        """Rows per step in `mask`."""
        return float(mask.sum()) / self.steps

    def totals(self, column: str, mask: Mask, most: int = 3) -> list[LabelTotal]:
        """The labels of `column` with most of the time in `mask`, the longest first."""
        codes: Codes = getattr(self.work, column)
        spent = self._ms_by(codes, mask, len(self.work.labels))
        counts = np.bincount(codes[mask], minlength=len(spent)) / self.steps
        order = np.argsort(-spent, kind="stable")
        found = [LabelTotal(self.work.labels[i], float(spent[i]), float(counts[i])) for i in order]
        return [total for total in found if total.count][:most]

    def hot_lines(
        self, mask: Mask, most: int = 3, *, calling_first: bool = False
    ) -> tuple[str, ...]:
        """Lines of code with most of the time in `mask`, as evidence, and the line that calls them.

        Where no line is known, modules; else operators; else kernels. Where lines that call them
        call other work as well, `calling_first` names those that call the first one.
        """
        for column in ("line", "module", "op", "name"):
            totals = self.totals(column, mask, most + 1)
            known = [total for total in totals if total.label != UNATTRIBUTED][:most]
            if known:
                shown = tuple(
                    f"{t.label}: {_times(t.count)} a step, {units.milliseconds(t.ms)}"
                    for t in known
                )
                called = self._calling_lines(mask, {t.label for t in known})
                if calling_first and column == "line" and not called:
                    called = self.calling(known[0].label)
                return (f"called at {', from '.join(called)}", *shown) if called else shown
        return ()

    def _calling_lines(self, mask: Mask, shown: set[str]) -> list[str]:
        """Return other lines that half of `mask` is called from, and little else, innermost first.

        Three at most: where a function is called, and where the whole begins.
        """
        spans, (lines, parents) = self.source.lines, self._line_nesting
        if not len(spans):
            return []
        known = (self.work.op_row >= 0) & self.inside
        root = self._roots[self.work.op_row[known]]  # in backward, the operator of the forward
        ops, spent = self.source.ops, self.work.duration[known].astype(np.float64)
        chosen = np.where(mask[known], spent, 0.0)
        half = chosen.sum() / 2
        place = lines.innermost(ops.thread[root], ops.start[root])
        size = int(spans.name.max()) + 1
        below, of_mask, height = np.zeros(size), np.zeros(size), np.zeros(size)
        turn = 0
        while len(inside := np.flatnonzero(place >= 0)):
            name, spent, chosen = spans.name[place[inside]], spent[inside], chosen[inside]
            below += np.bincount(name, spent, size)
            of_mask += np.bincount(name, chosen, size)
            turn += 1
            height[name] = turn  # above the operators: of two lines, the calling one is higher
            place = parents[place[inside]]
        calling = np.flatnonzero((of_mask > 0) & (of_mask >= below / 2) & (of_mask >= half))
        order = calling[np.lexsort((height[calling], below[calling]))].tolist()
        found = [self.source.text(code).removeprefix(LINE_RANGE) for code in order]
        others = [line for line in found if line not in shown]
        return others if len(others) <= 3 else [others[0], *others[-2:]]

    def calling(self, line: str) -> list[str]:
        """Return where the function of a line is called, and where the whole begins.

        Three lines at most; [] if unknown.
        """
        spans, (_, parents) = self.source.lines, self._line_nesting
        name = f"{LINE_RANGE}{line}"
        rows = np.flatnonzero(self.source.named(spans, name.__eq__))
        if not len(rows):
            return []
        # Of the lines that call it, the one that it takes most time for in all.
        caller = np.where(parents[rows] >= 0, spans.name[parents[rows]], -1)
        codes, which = np.unique(caller, return_inverse=True)
        most = np.bincount(which.ravel(), spans.duration[rows], len(codes)).argmax()
        rows = rows[which.ravel() == most]
        place = int(rows[np.argmax(spans.duration[rows])])
        found: dict[str, None] = {}
        while (place := int(parents[place])) >= 0:
            found[self.source.text(int(spans.name[place])).removeprefix(LINE_RANGE)] = None
        lines = [one for one in found if one != line]
        return lines if len(lines) <= 3 else [lines[0], *lines[-2:]]

    def lines_at(self, times: Ints, most: int = 2, *, calling: bool = False) -> list[str]:
        """Return the lines in which the step's thread was at most of some times (ns).

        While autograd computes, that is the line that calls backward. With `calling`, the lines
        that called the functions of those.
        """
        spans, (lines, parents) = self.source.lines, self._line_nesting
        if not len(spans):
            return []
        thread = int(np.bincount(spans.thread).argmax())
        place = lines.innermost(np.full(len(times), thread), times)
        place = parents[place[place >= 0]] if calling else place
        names = Counter(spans.name[place[place >= 0]].tolist()).most_common(most)
        # Steps are matched operator by operator: a few may be those of a like call elsewhere.
        often = [code for code, count in names if count >= 0.1 * names[0][1]]
        return [self.source.text(code).removeprefix(LINE_RANGE) for code in often]

    def times_run(self, line: str, times: Ints) -> int:
        """Return how often per step a line runs in which the step's thread is at some of the times.

        A line of a loop runs once for every turn.
        """
        spans, (lines, _) = self.source.lines, self._line_nesting
        if not len(spans):
            return 0
        thread = int(np.bincount(spans.thread).argmax())
        places = np.unique(lines.innermost(np.full(len(times), thread), times))
        texts = (self.source.text(int(code)) for code in spans.name[places[places >= 0]])
        steps = self.steps if self.analysis.detail is None else 1
        return sum(text == f"{LINE_RANGE}{line}" for text in texts) // steps

    @cached_property
    def _line_nesting(self) -> tuple[Nesting, Ints]:
        """The ranges of lines, and the range around each."""
        lines = nest(self.source.lines)
        return lines, lines.parents()

    @property
    def source(self) -> Trace:
        """The trace that `op_row` counts in."""
        return self.analysis.detail or self.analysis.trace

    @cached_property
    def calls(self) -> list[OpCall]:
        """Every distinct call; the last one stands for rows without an operator."""
        return [*self._op_calls[1], OpCall("", (), (), ())]

    @cached_property
    def call(self) -> Ints:
        """Number of each row's call in `calls`."""
        numbers = np.append(self._op_calls[0], len(self._op_calls[1]))
        chosen: Ints = numbers[self.work.op_row]
        return chosen

    @cached_property
    def _op_calls(self) -> tuple[Ints, list[OpCall]]:
        """The number of every operator's call, and the distinct calls."""
        trace = self.source
        number, first = trace.distinct_calls(np.arange(len(trace.ops)))
        unrecorded = (OpCall(trace.text(trace.ops.name[row]), (), (), ()) for row in first)
        calls = [trace.op_call(row) or bare for row, bare in zip(first, unrecorded, strict=True)]
        return number, calls

    def _ms_by(self, codes: Codes | Ints, mask: Mask, size: int, ns: Ints | None = None) -> Floats:
        """Milliseconds per step of each code, 0 to `size`, over the rows in `mask`."""
        ns = self.work.duration if ns is None else ns
        chosen = mask & self.inside
        cells = codes[chosen].astype(np.int64) * self.steps + self._step[chosen]
        # Only steps in which a code occurs are held: codes times steps may be very many.
        cells, cell = np.unique(cells, return_inverse=True)
        spent = np.bincount(cell.ravel(), ns[chosen], len(cells))
        code = cells // self.steps
        ordered = np.append(spent[np.lexsort((spent, code))], 0.0)
        end = np.searchsorted(code, np.arange(size), side="right")
        absent = self.steps - np.diff(end, prepend=0)  # steps in which it takes no time

        def value(place: int | Ints) -> Floats:
            """Return what each code takes in the step at a place, the fastest first."""
            return ordered[np.where(place >= absent, end - self.steps + place, -1)]

        middle = value((self.steps - 1) // 2) + value(self.steps // 2)
        if self.held_up:
            middle = 2 * value(np.minimum(absent, (self.steps - 1) // 2))
        median: Floats = middle / 2 / 1e6 * self.scale
        return median


def _times(count: float) -> str:
    return f"{count:,.0f}" if count >= 100 else f"{count:.3g}"


def _tops(parents: Ints) -> Ints:
    """Return for every span the outermost one around it, itself if there is none."""
    top: Ints = np.arange(len(parents))
    while True:
        above = parents[top] if len(top) else top
        if not (above >= 0).any():
            return top
        top = np.where(above >= 0, above, top)


def is_cast(call: OpCall) -> bool:
    """Whether a call copies from one floating-point dtype to another."""
    return changes_dtype(call) and all(
        t is not None and t.dtype in FLOATS for t in call.tensors[:2]
    )


def changes_dtype(call: OpCall) -> bool:
    """Whether a call copies from one dtype to another: a sum over a mask turns it into numbers."""
    target, source = call.tensor(0), call.tensor(1)
    return call.name == "aten::copy_" and bool(target and source and target.dtype != source.dtype)
