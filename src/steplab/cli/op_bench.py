"""The command of an op benchmark, made from its declaration: flags, sweep, tables and chart."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from steplab.bench.op_bench import Objective, OpAxis, OpBench
from steplab.bench.op_results import cell_result
from steplab.bench.op_tables import best_table, cell_table, chart_of, growth_table
from steplab.bench.sweep import sweep
from steplab.cli.command import Command
from steplab.cli.flags import (
    add_device_flag,
    add_out_flag,
    add_store_flag,
    file_to_write,
    given_fields,
    resolve_device,
)
from steplab.cli.progress import CellProgress
from steplab.cli.sweeps import collect_runs, print_count, require_success
from steplab.core import Run, RunSpec, units
from steplab.core.codec import read_word
from steplab.core.errors import UserError
from steplab.report.charts.lines import write_line_chart
from steplab.report.charts.plot import check_plot
from steplab.report.export import write_table
from steplab.report.terminal import print_table
from steplab.store import Store
from steplab.workers.trials import TrialRunner

MEASURE_CELL = "steplab.bench.op_cell:measure_cell"  # what the worker calls
AXIS = "axis"  # prefix of the axes in the namespace


def op_command(bench: OpBench) -> Command:
    """Return the command `steplab bench NAME` of an op benchmark."""

    def flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
        for axis in bench.axes:
            _add_axis(parser, bench, axis)
        _add_common(parser)

    def run(args: argparse.Namespace) -> int:
        return _run(args, bench)

    return Command(flags, run)


def _add_axis(parser: argparse.ArgumentParser, bench: OpBench, axis: OpAxis) -> None:
    """Add the flag of one axis; one that is not given leaves no trace in the namespace."""
    options: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    if axis.kind is not bool:
        reader = partial(read_word, axis.kind, where=axis.flag)
        options = {"nargs": "+", "type": reader, "metavar": axis.name.upper()}
    known = f"{', '.join(bench.impls)}; " if axis.name == "impl" else ""
    about = f"{known}{axis.help}{_default_words(axis)}"
    dest = f"{AXIS}_{axis.name}"
    parser.add_argument(axis.flag, dest=dest, default=argparse.SUPPRESS, help=about, **options)


def _default_words(axis: OpAxis) -> str:
    gpu, cpu = (" ".join(map(str, values)) for values in (axis.gpu, axis.cpu))
    if gpu == cpu:
        return f" (default: {gpu})" if gpu else ""
    return f" (default: {gpu} on a GPU, {cpu} on a CPU)"


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    objective = partial(read_word, Objective, where="--objective")
    add("--objective", type=objective, default="both", metavar="OBJECTIVE",
        help="what is best: forward, backward, both or memory")  # fmt: skip
    add("--repeats", type=int, default=30, help="samples per number, at most")
    add("--seconds", type=float, default=1.0, help="time after which a cell takes no more samples")
    add("--warmup", type=int, default=3, help="untimed repeats before them")
    add("--seed", type=int, default=42, help="seed of the inputs")
    add_device_flag(parser)
    add("--timeout", type=float, default=120.0, help="seconds that a cell may take")
    add_store_flag(parser)
    add_out_flag(parser)
    add("--plot", type=file_to_write("--plot"), default=None, metavar="FILE",
        help="draw a chart: .svg or .png")  # fmt: skip


def _run(args: argparse.Namespace, bench: OpBench) -> int:
    if args.plot:
        check_plot(args.plot)
    if args.repeats < 1:
        raise UserError(f"--repeats must be at least 1, not {args.repeats}.")
    if not args.timeout > 0 or not args.seconds >= 0:
        raise UserError("--timeout must be more than 0 seconds, --seconds not negative.")
    _cells(args, bench, "cpu")  # so that a typo is reported before a worker is started
    store = Store(args.store)
    store.check_writable()
    with TrialRunner(args.timeout, MEASURE_CELL, keep_after=("ok", "unsupported")) as trials:
        environment = trials.environment()
        specs = _cells(args, bench, resolve_device(args.device, environment))
        with CellProgress(len(specs), partial(_cell_name, bench), _cell_words) as progress:
            # One worker for all cells: its start takes seconds on a GPU.
            cells = sweep(specs, store, trials, environment, sys.argv, progress.stage, progress.say)
            runs = collect_runs(cells, len(specs), store, progress.done)
    _show(args, bench, runs)
    print_count(runs, store)
    measured = any(cell_result(run).both_ms for run in runs)
    require_success(runs, "No cell is right" if measured else "No cell could be measured")
    return 0


def _cells(args: argparse.Namespace, bench: OpBench, device: str) -> list[RunSpec]:
    asked = {
        name: values if isinstance(values, list) else [values]
        for name, values in given_fields(args, AXIS).items()
    }
    template = RunSpec(
        bench.name,
        mode="forward+backward",
        device=device,
        warmup=args.warmup,
        steps=args.repeats,
        seed=args.seed,
    )
    return bench.cells(asked, template, args.seconds)


def _show(args: argparse.Namespace, bench: OpBench, runs: list[Run]) -> None:
    best, growth = best_table(bench, runs, args.objective), growth_table(bench, runs)
    for path in args.out:
        write_table(cell_table(bench, runs, args.objective, detailed=True), path)
        write_table(best, path.with_suffix(f".best{path.suffix}"))
        if growth:
            write_table(growth, path.with_suffix(f".growth{path.suffix}"))
    if args.plot:
        write_line_chart(chart_of(bench, runs, args.objective), args.plot)
    for table in (
        cell_table(bench, runs, args.objective, detailed=False),
        best,
        *([growth] if growth else []),
        *bench.more_tables(runs),
    ):
        print_table(table)


def _cell_name(bench: OpBench, spec: RunSpec) -> str:
    return f"{bench.variant_text(spec.config)}, {bench.shape_text(spec.config)}"


def _cell_words(run: Run) -> str:
    """Return how a cell ended: forward / backward / both, or the reason."""
    result = cell_result(run)
    if not result.both_ms:
        return f"{result.status}, {run.reason}"
    times = (result.forward_ms, result.backward_ms, result.both_ms)
    return f"{result.status}, {' / '.join(units.milliseconds(ms) for ms in times)}"
