"""One cell of HYDRA's tables: a step timed by device events, its kernels, a graph's faithfulness.

Rows are printed the moment they are measured, with the seconds that they took. Called by
hydra_notes.py.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from steplab.core import Cell, Column, RunSpec, Table
from steplab.hardware.mfu import utilization
from steplab.probes.ran import is_kernel
from steplab.report.export import to_markdown, write_table
from steplab.step.assemble import assemble, micro_batches
from steplab.step.step import Step
from steplab.step.trial import clean_up

GIB = 2**30
WARM = 2  # plain steps after the first ones, which compile and capture
BATCHES = 4  # different ones, made beforehand: fetching is no part of these figures
STEP = (
    *(Column("model"), Column("step", "ms"), Column("spread", "%"), Column("tokens/s")),
    *(Column("MFU", "%"), Column("peak", "GiB"), Column("first step", "s")),
    *(Column("replays off by"), Column("status")),
)
Look = Callable[[Step, list[Any]], None]


@dataclass
class Desk:
    """Where results go, and how long there may be new ones."""

    device: str
    steps: int  # timed steps of a cell
    deadline: float  # of time.monotonic
    out: Path | None = None

    def sheet(self, file: str, title: str, columns: tuple[Column, ...], note: str = "") -> Sheet:
        """Print the heading of a table and return it."""
        return Sheet(self, file, Table(title, (*columns, Column("took", "s")), (), note))


class Sheet:
    """A table that grows on the screen, and in its file, row by row."""

    def __init__(self, desk: Desk, file: str, table: Table) -> None:
        self.desk, self.file, self.table = desk, file, table
        print(f"\n{to_markdown(table).rstrip()}", flush=True)

    def row(self, name: str, measure: Callable[[], tuple[Cell, ...]]) -> bool:
        """Add what `measure` returns, all columns but the first; what fails is a row too.

        Return whether it was measured.
        """
        started, blanks = time.monotonic(), [None] * (len(self.table.columns) - 3)
        cells: tuple[Cell, ...]
        done = False
        if started > self.desk.deadline:
            cells = (*blanks, "no time left")
        else:
            try:
                cells, done = measure(), True
            except Exception as error:
                reason = " ".join(str(error).split())[:160]
                cells = (*blanks, f"{type(error).__name__}: {reason}")
        self.add(name, *cells, time.monotonic() - started)
        return done

    def add(self, *cells: Cell) -> None:
        """Add a row as it is."""
        old = self.table
        self.table = Table(old.title, old.columns, (*old.rows, cells), old.note)
        last = Table("", old.columns, (cells,))
        print(to_markdown(last).splitlines()[4], flush=True)
        if self.desk.out:
            write_table(self.table, self.desk.out / f"hydra_{self.file}.md")


def timed(spec: RunSpec, steps: int, check: bool = False, look: Look | None = None) -> Any:
    """Return the columns of STEP but the name.

    `check` compares a captured step with plain ones; `look` is called with the step at the end.
    """
    try:
        return _timed(spec, steps, check, look)
    finally:
        clean_up()


def _timed(spec: RunSpec, steps: int, check: bool, look: Look | None) -> tuple[Cell, ...]:
    on_cuda = spec.device == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    step = assemble(spec)
    feed = micro_batches(step, spec)
    batches = [next(feed) for _ in range(BATCHES)]
    step(batches[0])
    synchronize(step)
    first = time.perf_counter() - started
    for index in range(step.parts.settle_steps + WARM):
        step(batches[index % BATCHES])
    found = times(step, batches, steps)
    ms = statistics.median(found)
    low, _, high = statistics.quantiles(found, n=4)
    ran = {str(m.op): str(m.ran) for m in step.model.modules() if hasattr(m, "op")}
    work = step.workload.work(spec.batch, spec.mode, ran)
    name = torch.cuda.get_device_name() if on_cuda else "cpu"
    mfu = utilization(work, ms, name, step.parts.matmul_dtype).mfu if work else None
    peak = torch.cuda.max_memory_allocated() / GIB if on_cuda else None
    if look is not None:
        look(step, batches[0])
    off = unfaithful(spec) if check and step.graph is not None else None
    paths = " ".join(f"{op}={impl}" for op, impl in sorted(ran.items()) if impl)
    speed = 1e3 * step.workload.tokens(spec.batch) / ms
    share = None if mfu is None else 100 * mfu
    return (ms, 100 * (high - low) / ms, speed, share, peak, first, off, f"ok: {paths}")


def times(step: Step, batches: list[Any], steps: int) -> list[float]:
    """Return ms of each step: between events on a GPU, by the clock on a CPU."""
    if step.parts.device.type != "cuda":
        marks = [time.perf_counter()]
        for index in range(steps):
            step(batches[index % BATCHES])
            marks.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in itertools.pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for index, event in enumerate(events[1:]):
        step(batches[index % BATCHES])
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def kernels(desk: Desk, title: str, file: str, most: int = 15) -> Look:
    """Return what prints the largest kernels of one step, all of them in the last row."""

    def show(step: Step, batch: list[Any]) -> None:
        if step.parts.device.type != "cuda":
            return
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=activities, acc_events=True) as profiler:
            step(batch)
            torch.cuda.synchronize()
        spent: Counter[str] = Counter()
        calls: Counter[str] = Counter()
        for event in profiler.profiler.kineto_results.events():
            if is_kernel(event):
                spent[event.name()] += event.duration_ns()
                calls[event.name()] += 1
        columns = (Column("kernel"), Column("ms"), Column("of all", "%"), Column("calls"))
        total = spent.total()
        largest = spent.most_common(most)
        rows: list[tuple[Cell, ...]] = [
            (name[:110], ns / 1e6, 100 * ns / total, calls[name]) for name, ns in largest
        ]
        rest = total - sum(ns for _, ns in largest)
        left = calls.total() - sum(calls[name] for name, _ in largest)
        rows.append((f"{len(spent) - len(largest)} others", rest / 1e6, 100 * rest / total, left))
        rows.append(("all", total / 1e6, 100.0, calls.total()))
        table = Table(title, columns, tuple(rows))
        print(f"\n{to_markdown(table)}", flush=True)
        if desk.out:
            write_table(table, desk.out / f"hydra_{file}.md")

    return show


def unfaithful(spec: RunSpec, steps: int = 8) -> float:
    """Return how far, relatively, losses of captured steps are from those of plain ones.

    The same first weights and batches; the first steps are plain in both.
    """

    def losses(captured: bool) -> torch.Tensor:
        step = assemble(spec)
        step.graph = step.graph if captured else None
        feed = micro_batches(step, spec)
        return torch.stack([step(next(feed)).loss for _ in range(steps)]).double().cpu()

    replayed, plain = losses(True), losses(False)
    return float(((replayed - plain) / plain).abs().max())


def synchronize(step: Step) -> None:
    """Wait for the device."""
    if step.parts.device.type == "cuda":
        torch.cuda.synchronize()
