"""Analysis: a trace whose work is attributed and budgeted; what rules, tables and pages read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from steplab.core import Budget, Run
from steplab.core.budget import true_budget
from steplab.trace.events import Codes, Ints, Trace

Floats = NDArray[np.float64]

UNATTRIBUTED = "unattributed"


@dataclass(frozen=True)
class Window:
    """One step of the trace."""

    number: int  # as in ProfilerStep#<number>; 0 where the trace has no steps
    start: int  # ns
    end: int  # ns


@dataclass(frozen=True)
class WorkTable:
    """One row per kernel, copy or fill; without a GPU, one row per operator with its self time.

    Codes index `labels`; code 0 is always UNATTRIBUTED.
    """

    labels: tuple[str, ...]
    start: Ints  # ns
    duration: Ints  # ns; self time of an operator
    name: Codes
    category: Codes  # steplab.trace.categories
    step: Ints  # Window.number of the step that launched it, -1: none
    phase: Codes  # forward, backward, clip, optimizer, data, or any other outermost range
    module: Codes  # "blocks.3.attention" or "Linear_0"
    line: Codes  # "model.py:12 (forward)", innermost line outside torch; without lines, as function
    function: Codes  # "model.py:9 (forward)": where the innermost function outside torch begins
    op: Codes  # innermost operator around the launch
    op_row: Ints  # its row in Trace.ops (of the detailed trace, where there is one), -1: none
    launched: Ints  # ns: when the host's launch call returned, -1: unknown
    flops: Floats  # nan: unknown
    bytes: Floats  # least traffic by shapes, nan: unknown
    ideal: Floats  # ns by the roofline, nan: unknown
    matmul_dtype: Codes  # fp32, tf32, bf16, fp16, fp8; 0: not a matrix product, or not sure

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class Syncs:
    """Host calls that waited for the device; codes index `WorkTable.labels`."""

    start: Ints  # ns
    duration: Ints  # ns
    call: Codes  # cudaStreamSynchronize, ...
    op: Codes  # aten::item, aten::nonzero, ...
    line: Codes
    step: Ints
    idle: Ints  # ns for which the device then had nothing to do
    dry: Ints  # ns: when that began


@dataclass(frozen=True)
class Silences:
    """Idle time in which the host launched nothing for long; codes index `WorkTable.labels`."""

    start: Ints  # ns: when the silence began; several rows may share one
    end: Ints  # ns
    step: Ints
    idle: Ints  # ns of it for which this was the cause
    cause: Codes  # one of CAUSES
    line: Codes  # "loader.py:12 (read)", "aten::sort at model.py:3 (forward)", 'range "decode"'

    @classmethod
    def none(cls) -> Silences:
        """Return an empty table."""
        times, codes = np.zeros(0, np.int64), np.zeros(0, np.int32)
        return cls(times, times, times, times, codes, codes)


CAUSES = ("data", "python", "operator", "compiling", "capturing", "loading")


@dataclass(frozen=True)
class Analysis:
    """A trace, its steps, its work, its waits, its silences and its budget."""

    trace: Trace  # its times count
    detail: Trace | None  # lent stacks and shapes, if there was one
    windows: tuple[Window, ...]
    work: WorkTable
    syncs: Syncs
    budget: Budget
    silences: Silences = field(default_factory=lambda: Silences.none())


class Labels:
    """Numbers strings in order of first use; number 0 is UNATTRIBUTED."""

    def __init__(self) -> None:
        self._codes = {UNATTRIBUTED: 0}

    def code(self, text: str) -> int:
        """Return the number of `text`, a new one if needed."""
        return self._codes.setdefault(text, len(self._codes))

    def codes(self, texts: Iterable[str]) -> Codes:
        """Return the numbers of several texts."""
        return np.array([self.code(text) for text in texts], np.int32)

    def texts(self) -> tuple[str, ...]:
        """Return all texts so far, in the order of their numbers."""
        return tuple(self._codes)

    def translate(self, trace: Trace, codes: ArrayLike) -> Codes:
        """Turn numbers of `Trace.texts` into labels; -1 becomes 0."""
        distinct, where = np.unique(np.asarray(codes), return_inverse=True)
        labels = [self.code(trace.texts[c]) if c >= 0 else 0 for c in distinct.tolist()]
        return np.array(labels, np.int32)[where.ravel()]


def run_budget(run: Run | None, analysis: Analysis | None) -> Budget | None:
    """Return the budget of a Run, of its first trace or of a trace alone; see `true_budget`."""
    stored = run.profile.budget if run is not None and run.profile is not None else None
    return true_budget(stored, analysis.budget if analysis is not None else None)


def run_step_ms(run: Run | None, analysis: Analysis | None) -> float | None:
    """Return what a step takes: the median of the timed steps, else of the profiled ones."""
    if run is not None and run.clock is not None and run.clock.step.values:
        return run.clock.step.median
    budget = run_budget(run, analysis)
    return budget.typical.wall_ms if budget else None
