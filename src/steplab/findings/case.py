"""Case: what the rules look at: a Run, a trace, or both."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steplab.core import Dataflow, MemoryTimeline, Recipe, Run, RunSpec
from steplab.core.run import PYTHON_PROFILER, TRACEMALLOC
from steplab.findings.rows import Mask, Rows
from steplab.findings.verdicts import letters_of_work
from steplab.hardware.catalog import Card, find_card
from steplab.store import Store, store_of
from steplab.trace.analysis import CAUSES, Analysis, Floats
from steplab.trace.analyze import analyze, analyze_run
from steplab.trace.budget import idle_before, launch_calls
from steplab.trace.events import Gpu, Ints
from steplab.trace.host_calls import takes_driver_memory
from steplab.trace.host_gaps import time_with_gaps
from steplab.trace.load import load_trace
from steplab.trace.ranks.analysis import RanksAnalysis
from steplab.trace.ranks.folder import analyze_folder, analyze_run_ranks
from steplab.trace.silences import captures
from steplab.trace.spans import union
from steplab.trace.windows import borders

# An eager operator takes the host 10 to 60 us with its Python; on a slow one, twice that.
SLOWEST_LAUNCH_MS = 0.1
LOADING = 0.02  # of the step
# While it is on, the host stalls and reads everywhere: those findings would be this one again.
OPTIMIZER_STEP = "Optimizer.step#"  # how torch names the range of an optimizer's step
ANOMALY = "anomaly mode"


@dataclass(frozen=True)
class Case:
    """Any part may be missing; a rule that needs it then finds nothing."""

    run: Run | None = None
    analysis: Analysis | None = None
    others: tuple[Run, ...] = ()  # the same step on the same machine, with another recipe
    ranks: RanksAnalysis | None = None  # of a step that several ranks share; `analysis` is of one

    @cached_property
    def step_ms(self) -> float:
        """Median of the timed steps, else of the profiled ones; NaN if unknown or without length.

        Every comparison with NaN is False: a rule that asks for a share of the step finds nothing.
        """
        if self.run is not None and self.run.clock is not None and self.run.clock.step.values:
            return self.run.clock.step.median or math.nan
        if self.analysis is not None and self.analysis.budget.steps:
            return self.analysis.budget.typical.wall_ms or math.nan
        return math.nan

    @property
    def on_device(self) -> bool:
        """Whether the trace has the work of a GPU."""
        return self.analysis is not None and self.analysis.budget.on_device

    @cached_property
    def rows(self) -> Rows | None:
        """The work of the trace; None without a trace.

        On a CPU the profiler slows every operator, so times are scaled to the timed step; kernels
        of a GPU are not slowed. By the fastest profiled step: of few, one that waits for a core
        would make everything seem small.
        """
        if self.analysis is None or not self.analysis.budget.steps:
            return None
        profiled = min((step.wall_ms for step in self.analysis.budget.worked), default=0.0)
        scale = 1.0 if self.on_device or not profiled else min(1.0, self.step_ms / profiled)
        return Rows(self.analysis, scale, self.contended and not self.on_device)

    def term_ms(self, term: str) -> float:
        """Milliseconds of a term of the budget, median of the profiled steps; 0 without a trace.

        The lower of two, as for the step itself: no term may be longer than the step.
        """
        steps = self.analysis.budget.worked if self.analysis is not None else ()
        return statistics.median_low([step.terms.get(term, 0.0) for step in steps] or [0.0])

    def silent_ms(self, *causes: str) -> float:
        """Milliseconds per step that the device waits in silences of the host for these causes.

        The median of the profiled steps. Without a device the step itself waits.
        """
        if self.analysis is None or self.rows is None:
            return 0.0
        silences, labels = self.analysis.silences, self.analysis.work.labels
        chosen = np.isin(silences.cause, [labels.index(c) for c in causes if c in labels])
        steps = [step.number for step in self.analysis.budget.worked]
        each = [float(silences.idle[chosen & (silences.step == step)].sum()) for step in steps]
        return statistics.median_low(each) / 1e6 * self.rows.scale

    @cached_property
    def driver_memory_ms(self) -> float:
        """Milliseconds per step in calls that take memory from the driver or give it back."""
        if self.analysis is None or not self.on_device:
            return 0.0
        trace, steps = self.analysis.trace, self.analysis.windows
        calls = trace.calls
        chosen = trace.named(calls, takes_driver_memory)
        spent = union(calls.start[chosen], calls.end[chosen])
        return float(np.median(spent.within(*borders(steps)))) / 1e6

    @property
    def loading_ms(self) -> float:
        """Milliseconds per step in which kernels that were not loaded yet are launched, and loaded.

        0 where it is little: a busy machine holds one launch up, too.
        """
        ms = self.silent_ms("loading")
        return ms if ms > LOADING * self.step_ms else 0.0

    @property
    def still_compiles(self) -> bool:
        """Whether graphs were compiled while the clock ran."""
        compilation = self.run.compilation if self.run is not None else None
        return compilation is not None and compilation.graphs_in_window > 0

    @property
    def collector_ms(self) -> float:
        """Milliseconds per step in Python's garbage collector; 0 where nobody counted.

        Where the steps compile, it collects what the compiler left: that is compiling, too. The
        slowest step is left out: one full collection, of 0.3 s, does not tell how often they come.
        """
        clock = self.run.clock if self.run is not None else None
        if clock is None or clock.collector_ms is None or self.still_compiles:
            return 0.0
        steps = clock.step.values
        longest = max(steps) - clock.step.median if len(steps) > 1 else 0.0
        return max(0.0, clock.collector_ms - longest / max(len(steps), 1))

    @property
    def collector_median_ms(self) -> float:
        """Milliseconds of the median step in the collector, as in the profiled ones.

        One that comes every few steps is in the mean, and in no median.
        """
        clock = self.run.clock if self.run is not None else None
        known = clock.collector_median_ms if clock is not None else None
        return self.collector_ms if known is None else min(known, self.collector_ms)

    @property
    def contended(self) -> bool:
        """Whether others used the machine so much that the host's times show it."""
        clock = self.run.clock if self.run is not None else None
        return clock is not None and bool(clock.contention)

    @property
    def switches(self) -> tuple[str, ...]:
        """The switches for debugging that were on while the step ran."""
        return self.run.profile.switches if self.run is not None and self.run.profile else ()

    @property
    def of_own_loop(self) -> bool:
        """Whether a loop of somebody's own is seen: recorded by steplab, or a trace of any origin.

        No recipe reaches it.
        """
        return self.run is None or self.run.of_own_loop

    def dispatches(self, op: str) -> bool:
        """Whether the model has modules of which `impl` chooses how an op is computed."""
        ran = self.run.ran if self.run is not None else None
        return ran is not None and op in ran.impls

    @property
    def dataflow(self) -> Dataflow | None:
        """What the operators of a step are for, as the Run recorded it."""
        return self.run.profile.dataflow if self.run is not None and self.run.profile else None

    @property
    def has_stacks(self) -> bool:
        """Whether calls of Python were recorded, in the trace or in the detailed step."""
        known = (self.analysis.trace, self.analysis.detail) if self.analysis is not None else ()
        return any(trace is not None and len(trace.python) > 0 for trace in known)

    @property
    def host_is_watched(self) -> bool:
        """Whether something makes all of Python slow: then no single line of it is to blame."""
        return bool({ANOMALY, TRACEMALLOC, PYTHON_PROFILER} & set(self.switches))

    @property
    def busy_ms(self) -> float:
        """Milliseconds per step in which the device, or without one an operator, worked."""
        return self.term_ms("kernels") + self.term_ms("copies")

    def verdict(self, letters: str) -> Mask:
        """Rows of work whose operators have one of these verdicts; none where it is unknown."""
        return np.isin(self._letters, list(letters))

    @cached_property
    def _letters(self) -> NDArray[np.str_]:
        """The verdict about each row of work, found once: aligning two steps takes a while."""
        assert self.rows is not None
        if self.dataflow is None:
            return np.zeros(len(self.rows.work), "<U1")
        return letters_of_work(self.rows, self.dataflow)

    def cost_ms(self, mask: Mask) -> float:
        """Milliseconds per step that go if this work goes: its own, and of the host's way to it.

        On a device also of the waits of the host in the lines that this work is from.
        """
        assert self.rows is not None
        if not self.on_device:
            # Where only nodes of autograd are meant, they have no operators that lead to more.
            return max(self.rows.ms(mask), self.rows.ms(mask, self._with_gaps))
        return self.launched_ms(mask) + self._synchronized_ms(mask)

    def launched_ms(self, mask: Mask) -> float:
        """Milliseconds per step of this work on a device, and of its wait for its launches.

        What the host was late is shared out as the trace shows it; what the device took to begin
        what was launched is each one's own.
        """
        assert self.rows is not None
        idle = self._idle_before
        late = idle["launch"]
        share = late[mask].sum() / late.sum() if late.any() else 0.0
        begun = self.rows.ms(mask, idle["dispatch"].astype(np.int64))
        return self.rows.ms(mask) + begun + max(0.0, self.launch_wait_ms) * float(share)

    def _synchronized_ms(self, mask: Mask) -> float:
        """Milliseconds per step for which the device ran dry by waits in the lines of this work.

        Of a line that has other work as well, the share of time that this work has there.
        """
        assert self.rows is not None
        rows, found = self.rows, 0.0
        for line, ms in self._dry_ms.items():
            there = rows.inside & (rows.work.line == line)
            whole = rows.ms(there)
            found += ms * rows.ms(there & mask) / whole if whole else 0.0
        return found

    @cached_property
    def _dry_ms(self) -> dict[int, float]:
        """Milliseconds per step for which the device ran dry by waits in each line, by its code."""
        assert self.rows is not None and self.analysis is not None
        syncs = self.analysis.syncs
        found: defaultdict[int, float] = defaultdict(float)
        for row in np.flatnonzero((syncs.step >= 0) & (syncs.idle > 0) & (syncs.line > 0)).tolist():
            found[int(syncs.line[row])] += float(syncs.idle[row]) / 1e6 / self.rows.steps
        return found

    @cached_property
    def _with_gaps(self) -> Ints:
        """Ns of each operator with what the host took before it, where operators are the work."""
        assert self.analysis is not None
        one = self.analysis
        return time_with_gaps(one.trace, one.windows, one.work, one.syncs, one.silences)

    @cached_property
    def _idle_before(self) -> Mapping[str, Floats]:
        """Idle ns that each row of work ended by starting, by what the device waited for."""
        assert self.rows is not None and self.analysis is not None
        trace, windows = self.analysis.trace, self.analysis.windows
        idle = idle_before(trace, windows, self.analysis.work, self.analysis.syncs, windows)
        return {term: ns[:-1] for term, ns in idle.items()}

    def silent_lines(self, *causes: str) -> list[tuple[str, float]]:
        """Lines that ran in those silences, with the ms per step of each, most first.

        The median of the profiled steps: a busy machine takes the host away at another line in
        every step, and what the code does comes again.
        """
        if self.analysis is None or self.rows is None:
            return []
        silences, labels = self.analysis.silences, self.analysis.work.labels
        spent: dict[str, Counter[int]] = defaultdict(Counter)
        for row in np.flatnonzero(silences.idle):
            if labels[silences.cause[row]] in causes:
                line = labels[silences.line[row]]
                spent[line][int(silences.step[row])] += int(silences.idle[row])
        steps = [step.number for step in self.analysis.budget.worked]
        lines = [
            (line, statistics.median_low([each[step] for step in steps]) / 1e6 * self.rows.scale)
            for line, each in spent.items()
        ]
        return sorted(((line, ms) for line, ms in lines if ms), key=lambda one: -one[1])

    def called_at(self, line: str, told: Sequence[str] = ()) -> str:
        """Return ", called at ..., from ..." for a line, or "" where nobody is known to call it.

        Of an operator's place, "aten::sort at loop.py:9 (step)", its line is meant. Callers that
        have been `told` are left out.
        """
        lines = self.rows.calling(line.rpartition(" at ")[2]) if self.rows is not None else []
        lines = [one for one in lines if one not in told]
        return f", called at {', from '.join(lines)}" if lines else ""

    @property
    def optimizer_python_ms(self) -> float:
        """Milliseconds per step that optimizers take on a CPU beside their operators."""
        if self.rows is None or self.on_device:
            return 0.0
        rows, lengths = self.rows, self._update_lengths
        called = float(lengths.sum()) / 1e6 / rows.steps * rows.scale
        phase = rows.labeled("phase", lambda label: label == "optimizer")
        return max(0.0, called - rows.ms(phase)) if len(lengths) else 0.0

    @property
    def updates(self) -> float:
        """How often a step calls an optimizer; 0 where the trace does not tell."""
        return len(self._update_lengths) / self.rows.steps if self.rows is not None else 0.0

    @property
    def _update_lengths(self) -> Ints:
        """How long (ns) each call of an optimizer takes."""
        assert self.rows is not None
        trace = self.rows.analysis.trace
        chosen = trace.named(trace.ranges, lambda name: name.startswith(OPTIMIZER_STEP))
        lengths: Ints = trace.ranges.duration[chosen]
        return lengths

    @property
    def launch_wait_ms(self) -> float:
        """Milliseconds per step in which the device waits for launches that keep coming.

        What its launches can take: the rest is the host's, whatever it does.
        """
        if not self.on_device or self.analysis is None:
            return self._host_wait_ms
        calls = launch_calls(self.analysis.trace, self.analysis.windows)
        return min(self._host_wait_ms, SLOWEST_LAUNCH_MS * float(np.median(calls)))

    @property
    def unexplained_wait_ms(self) -> float:
        """Milliseconds per step in which the device waits for the host, nothing shows what for."""
        return max(0.0, self._host_wait_ms - self.launch_wait_ms)

    @cached_property
    def _host_wait_ms(self) -> float:
        """Milliseconds per step in which the device waits for the host, silences left out.

        The budget's term, less the cost of profiling and what synchronization caused. On a CPU the
        profiler slows operators and what is between them alike.
        """
        if self.analysis is None or self.rows is None:
            return 0.0
        steps, syncs = self.analysis.windows, self.analysis.syncs
        slowed = self.analysis.budget.typical.wall_ms - self.step_ms
        after_syncs = float(syncs.idle[syncs.step >= 0].sum()) / 1e6 / max(len(steps), 1)
        caused = max(0.0, after_syncs - self.term_ms("synchronization"))
        silent = self.silent_ms(*CAUSES)
        idle = self.term_ms("launch")
        if not self.on_device:  # Python that a foreign trace has no event for
            idle += statistics.median(step.residual_ms for step in self.analysis.budget.worked)
            return idle * self.rows.scale - caused - silent
        return idle - max(0.0, slowed) - caused - silent

    @cached_property
    def capture_ms(self) -> tuple[float, ...]:
        """Host time of every CUDA graph capture in the profiled steps, up to its instantiation."""
        if self.analysis is None or not self.on_device:
            return ()
        spans = captures(self.analysis.trace)
        return tuple(float(ns) / 1e6 for ns in spans.end - spans.start)

    @cached_property
    def card(self) -> Card | None:
        """The GPU that did the work, if the catalog knows it."""
        if self.run is not None and self.run.spec.device == "cuda":
            return find_card(self.run.environment.device_name)
        return find_card(self._gpu.name) if self._gpu else None

    @property
    def capacity_bytes(self) -> int | None:
        """Memory of the device that the step ran on."""
        if self.run is None:
            return self._gpu.memory_bytes if self._gpu else None
        if self.run.spec.device == "cuda":
            return self.run.memory.total if self.run.memory else None
        return self.run.environment.memory_bytes

    @property
    def timeline(self) -> MemoryTimeline | None:
        """What held how much memory over one step."""
        return self.run.profile.memory if self.run is not None and self.run.profile else None

    def setup_lines(self, *made: str) -> tuple[str, ...]:
        """Lines that set or made one of these before the step ran, as the Run recorded them."""
        known = self.run.profile.setup_lines if self.run is not None and self.run.profile else {}
        return tuple(line for name in made for line in known.get(name, ()))

    @property
    def expert_loads(self) -> tuple[tuple[float, ...], ...]:
        """(layers, experts), as the step reported it: each expert's share of the assignments.

        Known whatever kernel ran, with or without a trace.
        """
        reported = self.run.metrics.get("load_LE") if self.run else None
        rows = reported if isinstance(reported, tuple) else ()
        return tuple(row for row in rows if isinstance(row, tuple) and sum(row) > 0)

    @property
    def dropped_share(self) -> float | None:
        """Share of the assignments to experts that were dropped; None if the step reported none."""
        reported = self.run.metrics.get("dropped") if self.run else None
        return reported if isinstance(reported, float) else None

    @property
    def _gpu(self) -> Gpu | None:
        """The first GPU that the trace lists."""
        return self.analysis.trace.gpus[0] if self.analysis and self.analysis.trace.gpus else None


def case_of_run(run: Run, store: Store | None = None) -> Case:
    """Return the case of a Run, with its traces if they are in the store.

    Without a store, the one that this process saved it in or loaded it from, else the default.
    """
    store = store or store_of(run)
    folder = store.runs / run.id
    ranks = analyze_run_ranks(run, folder) if run.spec.ranks > 1 else None
    return Case(run, analyze_run(run, folder), _others(run, store), ranks)


def case_of_trace(path: Path) -> Case:
    """Return the case of a trace file of any origin."""
    return Case(analysis=analyze(load_trace(path)))


def case_of_folder(folder: Path) -> Case:
    """Return the case of a folder of traces, one per rank.

    Rules about one rank look at the first that is not late: what makes a rank late is told by the
    comparison with that one.
    """
    ranks = analyze_folder(folder)
    late = ranks.late.rank if ranks.late else None
    file = next((row.file for row in ranks.rows if row.rank != late), ranks.rows[0].file)
    return Case(analysis=analyze(load_trace(folder / file)), ranks=ranks)


def _others(run: Run, store: Store) -> tuple[Run, ...]:
    """Return Runs of the same step on the same machine, measured with another recipe."""
    if not run.spec.recipe.techniques:
        return ()
    asked, device = _without_recipe(run.spec), run.environment.device_name
    return tuple(
        other
        for _, other in store.all()
        if isinstance(other, Run)
        and other.id != run.id
        and other.clock is not None
        and other.environment.device_name == device
        and _without_recipe(other.spec) == asked
    )


def _without_recipe(spec: RunSpec) -> RunSpec:
    """Return the spec without what does not change the work: recipe, number of steps, peak."""
    return replace(spec, recipe=Recipe(), steps=1, warmup=0, peak_tflops=None)
