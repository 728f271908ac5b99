"""Silences: what the host did where it launched nothing for long and the device had run dry.

A device that waits for launches which keep coming waits many times and briefly. Where the host
launches nothing for LONG, it does something else: it fetches a batch, runs Python or an operator
of the CPU, or compiles. The Python stack names the line: that of the trace, or of the detailed step
at the same place between two launches. Without a device, operators take the place of launches, and
LONG_ON_CPU that of LONG. A launch call that takes LONG itself and is the first of its kernel is a
silence, too: the driver loads the kernel's module.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from steplab.trace.analysis import UNATTRIBUTED, Labels, Silences, Syncs, Window
from steplab.trace.attribution import Attribution
from steplab.trace.events import KERNEL, Codes, Ints, Trace, at_rows
from steplab.trace.host_calls import find_launches
from steplab.trace.lines import NEXT, is_code, is_framework, is_loader
from steplab.trace.phases import AUTOGRAD_NODE, phase_of_call
from steplab.trace.spans import Intervals, nest, union
from steplab.trace.windows import STEP_RANGE, borders

# Launches of an eager step come every 5 to 60 us under the profiler.
LONG = 300_000  # ns
# Without a device, operators follow one another within some 10 us, whatever they compute.
LONG_ON_CPU = 100_000  # ns
# Torch is that slow too, as before an update of hundreds of tensors. Where no stack tells torch's
# lines from the user's, only a longer silence is surely not torch's.
SURELY = 2_000_000  # ns
TORCHS = ('range "backward"', 'range "clip"', 'range "optimizer"')  # nor what lies in these
LEAST = 50_000  # ns of idle time that make a silence worth a look
BRIEF = 20_000  # ns: a view, or what an operator without work takes
SAMPLES = 64  # instants at which a silence is looked at
MOST = 2_000  # silences of a trace, the longest
MOST_THREADS = 8  # of autograd: one per device
COMPILING = ("entire_frame_compile", "entire_backward_compile")
CAPTURE_BEGIN, CAPTURE_END = "StreamBeginCapture", "GraphInstantiate"
_NO_WORK = re.compile(
    r"aten::(_?(empty|new_empty|view|slice|select|narrow|expand|permute|transpose|as_strided|split"
    r"|squeeze|unsqueeze|detach|alias|unbind|chunk|reshape|resize|local_scalar_dense|copy_from)\w*"
    r"|t|to|set_|item|lift_fresh|_to_copy|result_type)"
)
FRAMEWORK = "framework"  # no cause of its own: torch is slow to launch

Cause = tuple[str, str]  # one of CAUSES or FRAMEWORK, and the line


class HostView:
    """One trace's host: its launches, and what its threads did at any instant."""

    def __init__(self, host: Attribution) -> None:
        self.host = host
        self.trace = trace = host.trace
        self.acts = _acts(trace)
        python = trace.python
        self.has_stacks = len(python) > 0
        self._code = nest(python, trace.named(python, is_code))
        self._loading = nest(python, trace.named(python, _loads) & ~_enters(trace))
        self._threads = _threads(trace)
        self._compiling = _spans_of(trace, COMPILING)
        self._capturing = captures(trace)
        self._calls = union(trace.calls.start, trace.calls.end)

    def operators(self, start: int, end: int) -> list[str]:
        """Return what ran at instants of [start, end): an operator, a cause, or "" for neither.

        An operator that launches something is not meant: it is torch, slow to launch. Nor is a
        brief one, such as a view.
        """
        time = _instants(start, end)
        found = [""] * len(time)
        for thread in self._threads:
            rows = self.host.ops.innermost(np.full(len(time), thread), time)
            begin, finish = (at_rows(c, rows) for c in (self.trace.ops.start, self.trace.ops.end))
            launched = np.diff(np.searchsorted(self.acts.start, (begin, finish)), axis=0)[0]
            works = (rows >= 0) & (launched == 0) & (finish - begin > BRIEF)
            names = [self.trace.text(code) for code in at_rows(self.trace.ops.name, rows)]
            found = [
                old or (new if yes and computes(new) else "")
                for old, new, yes in zip(found, names, works, strict=True)
            ]
        for name, spans in (("compiling", self._compiling), ("capturing", self._capturing)):
            inside = spans.within(time, time + 1) > 0
            found = [name if yes else old for yes, old in zip(inside, found, strict=True)]
        return found

    def lines(self, start: int, end: int, in_operator: bool, labels: Labels) -> list[Cause]:
        """Return cause and line at those instants of [start, end) that are in operators or not.

        Instants inside a call of the driver are left out: they are waits or launches.
        """
        time = _instants(start, end)
        operating = np.array([bool(name) for name in self.operators(start, end)])
        time = time[(operating == in_operator) & (self._calls.within(time, time + 1) == 0)]
        cause = "operator" if in_operator else "python"
        found: list[Cause | None] = [None] * len(time)
        for thread in self._threads:
            on_thread = np.full(len(time), thread)
            code = at_rows(self.trace.python.name, self._code.innermost(on_thread, time))
            loads = self._loading.innermost(on_thread, time) >= 0
            lines = self.host.at(on_thread, time).line
            known = labels.texts()
            for i, name in enumerate(self.trace.text(number) for number in code.tolist()):
                line = known[lines[i]]
                if found[i] is not None and line == UNATTRIBUTED:
                    continue
                if loads[i]:
                    found[i] = ("data", line)
                elif name and is_framework(name) and not in_operator:
                    found[i] = found[i] or (FRAMEWORK, line)
                elif name:
                    found[i] = (cause, line)
        return [one for one in found if one is not None]

    def range_at(self, time: int, labels: Labels) -> str:
        """Return the phase or range that the step's thread was in."""
        phase = self.host.at(np.array([self._threads[-1]]), np.array([time])).phase[0]
        name = labels.texts()[phase]
        return name if name == UNATTRIBUTED else f'range "{name}"'


@dataclass(frozen=True)
class _Acts:
    """Launches of the threads that run the steps, sorted; operators where there is no device."""

    start: Ints
    end: Ints
    work: Ints  # row of the first work of each


class Stacks:
    """Where the Python stack of a silence is found: in the trace itself, or in the detailed step.

    `partner` has for each work of the trace the row of the same work in the detailed one.
    """

    def __init__(
        self, view: HostView, windows: Sequence[Window], partner: Ints | None = None
    ) -> None:
        self.view = view
        self._step = windows[-1]
        self._partner = partner

    def place(self, acts: _Acts, window: Window, start: int, end: int) -> tuple[int, int] | None:
        """Return the span here of a silence of the trace; None where it is not found.

        It is the one after the launch that precedes it in its step, else the one before the launch
        that follows it.
        """
        if self._partner is None:
            return start, end
        there = self.view.acts
        before = int(np.searchsorted(acts.end, start, "right")) - 1
        after = int(np.searchsorted(acts.start, end, "left"))
        if before >= 0 and acts.start[before] >= window.start:
            act = self._same_act(acts.work[before])
            if act >= 0:
                following = np.append(there.start, self._step.end)[act + 1]
                return int(there.end[act]), int(min(following, self._step.end))
        if after < len(acts.start) and acts.start[after] < window.end:
            act = self._same_act(acts.work[after])
            if act >= 0:
                preceding = there.end[act - 1] if act else self._step.start
                return int(max(preceding, self._step.start)), int(there.start[act])
        return None

    def _same_act(self, work: int) -> int:
        assert self._partner is not None
        row = self._partner[work] if work < len(self._partner) else -1
        if row < 0:
            return -1
        found = np.flatnonzero(self.view.acts.work == row)
        return int(found[0]) if len(found) else -1


def find_silences(
    view: HostView,
    windows: Sequence[Window],
    idle: Intervals,
    labels: Labels,
    stacks: Stacks,
) -> Silences:
    """Split the `idle` time inside silences by cause and line."""
    rows: list[tuple[int, int, int, int, str, str]] = []
    least = LONG if len(view.trace.device) else LONG_ON_CPU
    for window, start, end in _silent(view.acts, windows, idle, least):
        dry = int(idle.within(start, end))
        for (cause, line), share in _causes(view, stacks, window, start, end, labels).items():
            lost = round(share * dry)
            if cause != FRAMEWORK and lost:
                rows.append((start, end, window.number, lost, cause, line))
    for window, start, end in _loading(view, windows, idle):
        dry = int(idle.within(start, end))
        rows.append((start, end, window.number, dry, "loading", UNATTRIBUTED))
    numbers = np.array([row[:4] for row in rows] or np.zeros((0, 4)), np.int64).T
    causes, lines = (labels.codes(str(row[i]) for row in rows) for i in (4, 5))
    return Silences(numbers[0], numbers[1], numbers[2], numbers[3], causes, lines)


def _silent(
    acts: _Acts, windows: Sequence[Window], idle: Intervals, least: int
) -> Iterator[tuple[Window, int, int]]:
    """Yield the silences of `least` ns with idle time in them, cut at the borders of the steps.

    Where no launch is known, nothing tells when the host was silent.
    """
    if not len(acts.start):
        return
    launching = union(acts.start, acts.end)
    low, high = borders(windows)
    start = np.concatenate(([low[0]], launching.end))
    end = np.concatenate((launching.start, [high[-1]]))
    long = end - start > least
    yield from _in_steps(windows, idle, start[long], end[long])


def _loading(
    view: HostView, windows: Sequence[Window], idle: Intervals
) -> Iterator[tuple[Window, int, int]]:
    """Yield the launch calls of LONG that are the first of their kernel, cut likewise."""
    acts, device = view.acts, view.trace.device
    _, first = np.unique(device.name, return_index=True)
    first = first[device.kind[first] == KERNEL]
    long = (acts.end - acts.start > LONG) & np.isin(acts.work, first)
    yield from _in_steps(windows, idle, acts.start[long], acts.end[long])


def _in_steps(
    windows: Sequence[Window], idle: Intervals, start: Ints, end: Ints
) -> Iterator[tuple[Window, int, int]]:
    """Yield the part in every step of the spans with most idle time, where it has some."""
    low, high = borders(windows)
    most = np.argsort(-idle.within(start, end), kind="stable")[:MOST]
    for begin, finish in zip(start[most].tolist(), end[most].tolist(), strict=True):
        first, last = np.searchsorted(high, begin, "right"), np.searchsorted(low, finish, "left")
        for window in windows[first:last]:
            piece = max(begin, window.start), min(finish, window.end)
            if idle.within(*piece) > LEAST:
                yield window, *piece


def _causes(
    view: HostView, stacks: Stacks, window: Window, start: int, end: int, labels: Labels
) -> dict[Cause, float]:
    """Return the causes of a silence and their shares of it."""
    ran = view.operators(start, end)
    shares: dict[Cause, float] = defaultdict(float)
    place = stacks.place(view.acts, window, start, end) if stacks.view.has_stacks else None
    names = Counter(ran)
    for cause in ("compiling", "capturing"):
        shares[cause, UNATTRIBUTED] += names.pop(cause, 0) / len(ran)
    outside = names.pop("", 0) / len(ran)
    for in_operator, share in ((True, sum(names.values()) / len(ran)), (False, outside)):
        seen = stacks.view.lines(*place, in_operator, labels) if place and share else []
        if not seen and share:
            cause = "operator" if in_operator else "python"
            where = view.range_at((start + end) // 2, labels)
            torchs = not in_operator and (end - start < SURELY or where in TORCHS)
            seen = [(FRAMEWORK if torchs else cause, where)]
        for cause, line in seen:
            if cause == "operator":
                op = names.most_common(1)[0][0]
                line = op if line == UNATTRIBUTED else f"{op} at {line}"
            shares[cause, line] += share / len(seen)
    return shares


def fetching_lines(trace: Trace, data: Intervals) -> list[str]:
    """Return the lines that ran while batches were fetched, most time first."""
    labels = Labels()
    view = HostView(Attribution(trace, labels))
    seen: Counter[str] = Counter()  # ns by line
    for start, end in zip(data.start[:MOST].tolist(), data.end[:MOST].tolist(), strict=True):
        for inside in (False, True):
            lines = [line for _, line in view.lines(start, end, inside, labels)]
            seen.update({line: lines.count(line) * (end - start) for line in set(lines)})
    return [line for line, _ in seen.most_common() if line != UNATTRIBUTED]


def one_cause_each(
    silences: Silences, syncs: Syncs, data: Intervals, labels: Labels
) -> tuple[Silences, Syncs]:
    """Return both so that no idle time has two causes.

    A batch that is fetched, a compilation, a kernel's module that is loaded and a silence that is
    longer than the waits before it would be there without those waits; a shorter silence would be
    hidden behind the device's work.
    """
    own = labels.codes(("data", "compiling", "capturing", "loading"))
    idle = syncs.idle - data.within(syncs.dry, syncs.dry + syncs.idle)
    kept: NDArray[np.bool_] = np.ones(len(silences.start), np.bool_)
    for start in np.unique(silences.start):
        rows = silences.start == start
        end = int(silences.end[rows][0])
        waits = (syncs.dry >= start - LONG) & (syncs.dry < end) & (idle > 0)
        dry, waited = int(silences.idle[rows].sum()), int(syncs.duration[waits].sum())
        stays = int(silences.idle[rows & np.isin(silences.cause, own)].sum())
        if 2 * stays > dry or dry > waited:
            idle = np.where(waits, 0, idle)
        else:
            kept &= ~rows
    columns = {name: getattr(silences, name)[kept] for name in silences.__dataclass_fields__}
    return Silences(**columns), replace(syncs, idle=idle)


def captures(trace: Trace) -> Intervals:
    """Return when CUDA graphs were captured, up to their instantiation."""
    calls = trace.calls
    starts = calls.start[trace.named(calls, lambda name: CAPTURE_BEGIN in name)]
    ends = calls.end[trace.named(calls, lambda name: CAPTURE_END in name)]
    before = np.searchsorted(starts, ends, "left") - 1
    return union(starts[before[before >= 0]], ends[before >= 0])


def _acts(trace: Trace) -> _Acts:
    threads = _threads(trace)
    if not len(trace.device):
        rows = np.flatnonzero(np.isin(trace.ops.thread, threads))
        rows = rows[~trace.named(trace.ops, lambda name: name.startswith(STEP_RANGE))[rows]]
        return _Acts(trace.ops.start[rows], trace.ops.end[rows], rows)
    calls, first = np.unique(find_launches(trace).call, return_index=True)
    chosen = (calls >= 0) & np.isin(at_rows(trace.calls.thread, calls), threads)
    calls, first = calls[chosen], first[chosen]
    return _Acts(trace.calls.start[calls], trace.calls.end[calls], first)


def _threads(trace: Trace) -> list[int]:
    """Return the threads that launch the work of steps: those of autograd, the step's own last."""
    nodes = trace.named(trace.ops, lambda name: name.startswith(AUTOGRAD_NODE))
    autograd = np.unique(trace.ops.thread[nodes])[:MOST_THREADS].tolist()
    own = _step_thread(trace)
    return [*(thread for thread in autograd if thread != own), own]


def _step_thread(trace: Trace) -> int:
    """Return the thread of the steps' ranges, else the one that launched most."""
    marks = trace.named(trace.ranges, lambda name: name.startswith(STEP_RANGE))
    threads: Codes = trace.ranges.thread[marks]
    if not len(threads):
        threads = trace.calls.thread if len(trace.calls) else trace.ops.thread
    return int(np.bincount(threads).argmax()) if len(threads) else 0


def _spans_of(trace: Trace, names: tuple[str, ...]) -> Intervals:
    chosen = trace.named(trace.ops, names.__contains__)
    return union(trace.ops.start[chosen], trace.ops.end[chosen])


def computes(op: str) -> bool:
    """Whether an operator computes; one that only allocates or views is torch's own time."""
    return op.startswith("aten::") and _NO_WORK.fullmatch(op) is None


def _enters(trace: Trace) -> NDArray[np.bool_]:
    """Return the calls of `next` by which contextlib enters or leaves a `with`."""
    python = trace.python
    found = trace.named(python, NEXT.__eq__)
    frames = nest(python, trace.named(python, lambda name: "contextlib.py(" in name))
    found[found] = frames.innermost(python.thread[found], python.start[found]) >= 0
    return found


def _loads(call: str) -> bool:
    return is_loader(call) or phase_of_call(call) == "data"


def _instants(start: int, end: int) -> Ints:
    step = (end - start) / SAMPLES
    times: Ints = (start + step * (np.arange(SAMPLES) + 0.5)).astype(np.int64)
    return times
