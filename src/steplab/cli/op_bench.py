"""What the commands that measure one op share: flags, the sweep, the tables and the chart."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from steplab.bench.op_bench import Dtype, Objective, OpBench, shape_text, variant_text
from steplab.bench.op_chart import chart_of, check_plot, write_chart
from steplab.bench.op_isolate import CellIsolation
from steplab.bench.op_results import cell_result
from steplab.bench.op_tables import best_table, cell_table
from steplab.bench.sweep import sweep
from steplab.cli.flags import add_device_flag, add_out_flag, add_store_flag, resolve_device
from steplab.cli.progress import ProgressBar
from steplab.core import Run, RunSpec, units
from steplab.core.codec import read_word
from steplab.core.errors import MeasurementError, UserError
from steplab.report.export import write_table
from steplab.report.terminal import print_table
from steplab.store import Store

Planner = Callable[[argparse.Namespace, RunSpec], list[RunSpec]]


def add_op_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that every bench of an op has."""
    add = parser.add_argument
    dtype = partial(read_word, Dtype, where="--dtype")
    add("--dtype", nargs="+", type=dtype, default=None, metavar="DTYPE",
        help="fp32, tf32, bf16, fp16; none: bf16 on a GPU, fp32 on a CPU")  # fmt: skip
    objective = partial(read_word, Objective, where="--objective")
    add("--objective", type=objective, default="both", help="forward, backward, both or memory")
    add("--repeats", type=int, default=30, help="samples per number, at most")
    add("--seconds", type=float, default=1.0, help="no further repeats of a cell after so long")
    add("--warmup", type=int, default=3, help="untimed repeats before them")
    add("--seed", type=int, default=42, help="of the inputs")
    add_device_flag(parser)
    add("--timeout", type=float, default=120.0, help="seconds a cell may take")
    add_store_flag(parser)
    add_out_flag(parser)
    add("--plot", type=Path, default=None, metavar="FILE", help="draw a chart: .svg or .png")


def run_bench(args: argparse.Namespace, op: OpBench, planner: Planner) -> int:
    """Measure, show and write a study of an op; `planner` makes the cells for a device."""
    if args.plot:
        check_plot(args.plot)
    if args.repeats < 1:
        raise UserError(f"--repeats must be at least 1, not {args.repeats}.")
    if not args.timeout > 0 or not args.seconds >= 0:
        raise UserError("--timeout must be more than 0 seconds, --seconds not negative.")
    _plan(args, op, planner, "cpu")  # a slip of the pen is told before a worker is started
    store = Store(args.store)
    store.check_writable()
    with CellIsolation(args.timeout) as isolation:
        environment = isolation.environment()
        specs = _plan(args, op, planner, resolve_device(args.device, environment))
        runs: list[Run] = []
        with OpProgress(op, len(specs)) as progress:
            show = (progress.stage, progress.say)
            try:
                for run in sweep(specs, store, isolation, environment, sys.argv, False, *show):
                    runs.append(run)
                    progress.done(run)
            except KeyboardInterrupt:
                told = f"{len(runs)} of {len(specs)} cells are in {store.root}"
                progress.say(f"{told}; the same command goes on from there.")
                raise
    _show(args, op, runs)
    print(f"{units.counted(len(runs), 'Run')} in {store.root}; list them with: steplab runs")
    if all(run.status != "ok" for run in runs):
        measured = any(cell_result(run).both_ms for run in runs)
        ended = "No cell is right" if measured else "No cell could be measured"
        raise MeasurementError(f"{ended}; the first: {runs[0].reason.rstrip('.')}.")
    return 0


def _plan(args: argparse.Namespace, op: OpBench, planner: Planner, device: str) -> list[RunSpec]:
    options = {"mode": "forward+backward", "device": device, "seed": args.seed}
    return planner(args, RunSpec(op.name, steps=args.repeats, warmup=args.warmup, **options))


def _show(args: argparse.Namespace, op: OpBench, runs: list[Run]) -> None:
    best = best_table(op, runs, args.objective)
    for path in args.out:
        write_table(cell_table(op, runs, args.objective, whole=True), path)
        write_table(best, path.with_suffix(f".best{path.suffix}"))
    if args.plot:
        write_chart(chart_of(op, runs, args.objective), args.plot)
    print_table(cell_table(op, runs, args.objective, whole=False))
    print_table(best)


class OpProgress(ProgressBar):
    """Progress over the cells of an op, on stderr so that stdout stays clean."""

    def __init__(self, op: OpBench, cells: int) -> None:
        what = TextColumn("{task.description}", markup=False)
        columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), what)
        super().__init__(sys.stderr, cells, *columns)
        self.op, self.cells, self.count = op, cells, 0

    def stage(self, spec: RunSpec, text: str) -> None:
        """Show what the current cell is doing."""
        if self.live:
            self.bar.update(self.task, description=f"{self._name(spec)}: {text}")

    def done(self, run: Run) -> None:
        """Count a finished cell; where nothing is drawn, say how it ended."""
        self.count += 1
        if self.live:
            self.bar.advance(self.task)
            return
        found = cell_result(run)
        times = (found.forward_ms, found.backward_ms, found.both_ms)
        shown = " / ".join(units.milliseconds(ms) for ms in times) if found.both_ms else run.reason
        self.say(f"[{self.count}/{self.cells}] {self._name(run.spec)}: {found.status}, {shown}")

    def _name(self, spec: RunSpec) -> str:
        return f"{variant_text(self.op, spec.config)}, {shape_text(self.op, spec.config)}"
