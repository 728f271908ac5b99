"""Compare a Run or trace with another: faster or slower, and what changed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from steplab.cli.command import Command
from steplab.cli.flags import add_store_flag, file_to_write
from steplab.cli.progress import CellProgress
from steplab.compare.bootstrap import signed, slower_than
from steplab.compare.inputs import Side, check_side, open_side
from steplab.compare.runs import check_same_work, compare_rounds, compare_stored
from steplab.compare.versus import rounds_table
from steplab.core import Cell, RunSpec, Table, units
from steplab.core.comparison import Comparison
from steplab.core.errors import UserError, no_gpu
from steplab.core.input_file import shorten
from steplab.core.output_file import keep_inputs
from steplab.core.printable import printable
from steplab.core.run import new_run
from steplab.report.export import check_suffixes, write_table
from steplab.report.pages import write_compare_page
from steplab.report.terminal import console, print_table
from steplab.store import Store
from steplab.store.predictions import prediction_of
from steplab.trace.kernel_table import short_kernel_name
from steplab.workers.alternate import alternate_specs
from steplab.workers.trials import TrialRunner
from steplab.workloads.recorded import is_same_code, not_named
from steplab.workloads.user_model import load_user_model
from steplab.workloads.workload import WorkloadEntry, find_workload, is_user_model

DEFAULT_ROUNDS = 8
MAX_NAME = 70  # characters of a kernel's name on the terminal; files keep all of it
FAILED = 1  # exit code of --fail-if-slower


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add = parser.add_argument
    about = "a Run's id, part of it, `last`, a trace file, or a folder of traces, one per rank"
    add("a", metavar="A", help=f"the baseline: {about}")
    add("b", metavar="B", help=f"what is compared with it: {about}")
    add("--rerun", nargs="?", type=int, const=DEFAULT_ROUNDS, default=None, metavar="ROUNDS",
        help=f"measure both again, alternating for ROUNDS rounds [{DEFAULT_ROUNDS}]")  # fmt: skip
    add("--model", nargs="+", default=[], metavar="FILE:FACTORY",
        help="the files of your own models, for --rerun; each Run takes the one with the hash "
        "that it holds")  # fmt: skip
    add("--fail-if-slower", type=read_share, default=None, metavar="PERCENT",
        help="exit with code 1 when B surely takes this much more time, as in 3%%")  # fmt: skip
    add("--timeout", type=float, default=600.0, metavar="SECONDS",
        help="seconds a round of --rerun may take")  # fmt: skip
    add_store_flag(parser)
    add("--out", nargs="+", type=file_to_write("--out"), default=[], metavar="FILE",
        help="also write .csv, .md, .json, .svg or .html")  # fmt: skip


def read_share(word: str) -> float:
    """Read `3%` as 0.03. The sign is required: 0.03 might mean 3 % or 0.03 %."""
    try:
        value = float(word.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not word.endswith("%") or not 0 <= value < math.inf:
        raise UserError(f"--fail-if-slower needs a percentage, not {word!r}.", "Write 3%.")
    return value / 100


def _run(args: argparse.Namespace) -> int:
    check_suffixes([path for path in args.out if path.suffix != ".html"])
    if (args.rerun is not None and args.rerun < 1) or not args.timeout > 0:
        raise UserError("--rerun and --timeout must be more than 0.")
    if args.model and not args.rerun:
        raise UserError("--model is for --rerun.", "Stored Runs are compared without their code.")
    keep_inputs((args.a, args.b), args.out)
    store = Store(args.store)
    a, b = open_side(args.a, store), open_side(args.b, store)
    if a.name == b.name and not args.rerun:
        raise UserError("A and B are the same.", "To see the noise, measure it twice: --rerun")
    if args.fail_if_slower is not None:
        check_same_work(a, b)
    saved = None
    if args.rerun:
        comparison, saved = _rerun(args, a, b, store)
    else:
        comparison = compare_stored(a, b)
    written = _write(args.out, comparison)
    _print(comparison)
    for side in (a, b):
        _print_prediction(side, store)
    for path in written:
        print(f"written {path}")
    if saved is not None:
        print(f"saved {saved}")
    return _check_limit(args.fail_if_slower, comparison)


def _rerun(args: argparse.Namespace, a: Side, b: Side, store: Store) -> tuple[Comparison, Path]:
    """Alternate between both specs on this machine; store the rounds as a Run, and say where."""
    check_same_work(a, b)
    own = [load_user_model(word) for word in args.model]
    first, second = (_spec(side, own) for side in (a, b))
    for model in own:
        if model.name not in (first.workload, second.workload):
            raise UserError(f"{model.name} is the model of neither Run.", "Leave it out.")
    store.check_writable()
    with TrialRunner(args.timeout) as trials:
        environment = trials.environment()
    if "cuda" in (first.device, second.device) and not environment.accelerators:
        raise no_gpu()
    with CellProgress(1) as progress:
        one, other = alternate_specs(
            first, second, args.rerun, args.timeout, lambda text: progress.stage(first, text)
        )
    conditions = environment.conditions_on(first.device)
    comparison = compare_rounds(a, one, b, other, conditions)
    tables = {**comparison.tables, "rounds": rounds_table(one, other)}
    run = replace(new_run(first, environment), against=second, tables=tables)
    return comparison, store.save(run)


def _spec(side: Side, own: Sequence[WorkloadEntry]) -> RunSpec:
    """Return what to measure again; a file that has changed since would be another workload."""
    if side.run is None:
        raise UserError(f"{side.name} is a trace: it cannot be measured again.", "Name a Run.")
    if side.run.of_own_loop:
        raise UserError(
            f"The Run {side.name} shows a loop of your own, which --rerun cannot run.",
            "Leave --rerun out, or let both loops take turns in one script.",
        )
    check_side(side)
    spec = side.run.spec
    if not is_user_model(spec.workload):
        find_workload(spec.workload)
        return spec
    if not own:
        raise not_named(f"The Run {side.name}", spec.workload)
    same = [one for one in own if is_same_code(one, spec.workload, spec.source)]
    if not same:
        hashes = ", ".join(f"{one.name} {one.source}" for one in own)
        raise UserError(
            f"{shorten(spec.workload)} has changed since the Run {side.name} (hash "
            f"{shorten(spec.source) or 'unknown'}; given: {hashes}): it cannot be measured again.",
            "Keep both versions in files of their own, and bench each.",
        )
    return replace(spec, workload=same[0].name)


def _write(paths: Sequence[Path], comparison: Comparison) -> list[Path]:
    """Write a page, or the table of A and B with the others beside it; return the files."""
    written = []
    for path in paths:
        if path.suffix == ".html":
            write_compare_page(comparison, path)
            written.append(path)
            continue
        for name, table in comparison.tables.items():
            suffix = path.suffix if name == "sides" else f".{name}{path.suffix}"
            write_table(table, path.with_suffix(suffix))
            written.append(path.with_suffix(suffix))
    return written


def _print(comparison: Comparison) -> None:
    """Print the verdict, what it rests on, what differs and what changed."""
    print(f"{comparison.headline}: {comparison.reason}")
    if comparison.change is not None:
        change = comparison.change
        speed = f"speed-up {units.ratio(1 / (1 + change.value))}"
        seen = f"least change that would be seen: {units.percent(change.detectable)}"
        print(f"change in time {signed(change.value)}, {speed}; {seen}")
    print(comparison.method)
    for name, table in comparison.tables.items():
        if name == "sides":
            _print_sides(table)
        else:
            print_table(_shortened(table) if name == "kernels" else table)
    console().print(printable("\n".join(comparison.conditions)), style="dim", markup=False)


def _print_prediction(side: Side, store: Store) -> None:
    """Print how far off the estimate of a Run's step was, where there is one."""
    prediction = prediction_of(store, side.run) if side.run is not None else None
    errors = prediction.error(side.run) if prediction and side.run else None
    if prediction is None or errors is None:
        return
    time, memory = errors
    of_memory = f", memory {signed(memory)}" if memory is not None else ""
    interval = f"{prediction.low_ms:.4g} to {prediction.high_ms:.4g} ms"
    print(
        f"{side.name} was estimated at {prediction.step_ms:.4g} ms ({interval}): "
        f"off by {signed(time)} in time{of_memory}"
    )


def _print_sides(table: Table) -> None:
    """Print names on lines of their own: in a table they leave no room for the numbers."""
    names = [i for i, column in enumerate(table.columns) if column.name in ("Run or trace", "what")]
    for row in table.rows:
        print(f"{row[0]}: {', '.join(str(row[i]) for i in names if row[i] is not None)}")
    kept = [i for i in range(len(table.columns)) if i not in names]
    columns = tuple(table.columns[i] for i in kept)
    rows = tuple(tuple(row[i] for i in kept) for row in table.rows)
    print_table(replace(table, columns=columns, rows=rows))


def _shortened(table: Table) -> Table:
    """Cut the names of kernels, which can be a thousand characters long."""
    rows = tuple(tuple(map(_short, row)) for row in table.rows)
    return replace(table, rows=rows)


def _short(cell: Cell) -> Cell:
    return short_kernel_name(cell, MAX_NAME) if isinstance(cell, str) else cell


def _check_limit(limit: float | None, comparison: Comparison) -> int:
    """Return 1 when B is slower than `limit` allows over its whole interval."""
    if limit is None or comparison.change is None:
        return 0
    if slower_than(comparison.change, limit):
        print(f"failed: B is slower by more than {units.percent(limit)}, with certainty")
        return FAILED
    why = "the verdict is `cannot tell`" if comparison.verdict == "cannot tell" else "it is not"
    print(f"passed: that B is slower by more than {units.percent(limit)} is not shown ({why})")
    return 0


COMMAND = Command(_flags, _run)
