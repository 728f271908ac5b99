"""Record a step: time budget, kernels per phase, memory, traces."""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from steplab.cli.command import Command
from steplab.cli.flags import add_store_flag, add_view_flag, folder_to_write, resolve_device
from steplab.cli.playbook import add_playbook_flags, asks_for_playbook, has_playbook, run_playbook
from steplab.cli.progress import CellProgress
from steplab.cli.step_flags import (
    add_rank_flags,
    add_step_flags,
    add_workload_flags,
    asked_workload,
    assumed_device,
    step_spec,
)
from steplab.core import Run, Table
from steplab.core.atomic import disk_errors
from steplab.core.errors import MeasurementError, Unsupported, UserError
from steplab.profiling.output import (
    PAGE_FILE,
    rank_folders,
    read_traces,
    save_files,
    scratch_folder,
    summary_cells,
    summary_file,
)
from steplab.profiling.plan import AVERAGES_FILE, DEFAULT_SCHEDULE, PROFILE_SPEC, ProfilePlan
from steplab.report.budget import print_budget
from steplab.report.memory import print_memory
from steplab.report.ranks import print_ranks
from steplab.report.terminal import print_table
from steplab.store import DEFAULT_ROOT, Store
from steplab.trace.analysis import UNATTRIBUTED, Analysis
from steplab.trace.kernel_table import kernel_table, modules_below, phases_by_time
from steplab.trace.ranks.folder import analyze_run_ranks
from steplab.trace.work_table import View, work_table
from steplab.workers.trials import TrialRunner

DEFAULT_WORKLOAD = "gpt"
PHASES = ("data", "forward", "backward", "sync", "clip", "optimizer")
MODULE = "module:"  # what the names of module ranges begin with
SMALL_PHASE = 0.01  # share of the time below which a phase gets no table


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    entry = add_workload_flags(parser, words, DEFAULT_WORKLOAD)
    fields = ("warmup", "steps", "accumulate", "clip", "seed", "peak_tflops")
    add_step_flags(parser, fields, batch=4)
    add_rank_flags(parser)
    add = parser.add_argument
    add("--schedule", nargs=4, type=int, default=list(DEFAULT_SCHEDULE),
        metavar=("WAIT", "WARMUP", "ACTIVE", "REPEAT"),
        help="steps of a cycle to skip, to record and discard, to record; and cycles")  # fmt: skip
    add("--no-detail", action="store_true",
        help="leave out the step recorded with stacks, shapes, modules and memory")  # fmt: skip
    add("--range", default="", metavar="NAME",
        help="show the kernels of this range or module (blocks.0.attention, blocks.*.attention) "
        "instead of every phase's")  # fmt: skip
    add_view_flag(parser)
    add("--top", type=int, default=5, metavar="N", help="kernels to show for each phase")
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="seconds it may take")
    add_store_flag(parser)
    add("--out", type=folder_to_write("--out"), default=None, metavar="DIR",
        help="folder for summary.csv and a copy of the files; default: the store")  # fmt: skip
    if has_playbook(entry.name):
        add_playbook_flags(parser)


def _run(args: argparse.Namespace) -> int:
    asked_workload(args)
    if asks_for_playbook(args):
        return run_playbook(args)
    # Everything is checked before a worker starts, which takes 2 s: typos are reported at once.
    plan = ProfilePlan(tuple(args.schedule), not args.no_detail, shown=args.range)
    if not args.timeout > 0 or args.top < 1:
        raise UserError("--timeout must be more than 0 seconds and --top at least 1.")
    if args.range and args.by:
        raise UserError("--range and --by show two things.", "Give one of them.")
    if args.no_detail and (args.by or "." in args.range or args.range.startswith(MODULE)):
        raise UserError(
            "Modules and lines are recorded in the detailed step only.", "Leave out --no-detail."
        )
    step_spec(args, assumed_device(args.device))
    store = Store(args.store)
    store.check_writable()
    summary = summary_file(args.out, "--out") if args.out else summary_file(store.root, "--store")
    summary.check()
    with scratch_folder(store) as folder:
        run = _record(args, plan, folder)
        if run.status != "ok":
            store.save(run)
            kind = Unsupported if run.status == "unsupported" else MeasurementError
            raise kind(f"{run.status}: {run.reason.rstrip('.')}.")
        try:
            run, analysis = read_traces(run, folder)
        finally:
            # Even when the traces cannot be read they are kept: they were recorded.
            saved = save_files(store, run, folder)
    if args.out:
        saved = _copy(saved, args.out)
    assert run.profile is not None
    summary.append(summary_cells(run, saved / run.profile.traces[0]))
    _show(args, run, analysis, saved, summary.path)
    return 0


def _record(args: argparse.Namespace, plan: ProfilePlan, folder: Path) -> Run:
    """Measure and record in a worker; a failure is in the Run."""
    with TrialRunner(args.timeout, PROFILE_SPEC) as runner, CellProgress(1) as progress:
        environment = runner.environment()
        spec = step_spec(args, resolve_device(args.device, environment))
        stage = functools.partial(progress.stage, spec)
        with rank_folders(folder, spec.ranks) as folders:
            run = runner.trial(spec, environment, progress=stage, plan=plan, folder=folders)
        if run.status == "ok":
            progress.done(run)
    return replace(run, command=tuple(sys.argv))


def _copy(saved: Path, out: Path) -> Path:
    with disk_errors(out, "--out"):
        return Path(shutil.copytree(saved, out / saved.name))


def _show(
    args: argparse.Namespace, run: Run, analysis: Analysis, saved: Path, summary: Path
) -> None:
    """Print what was found: the budget first, the files last; then refuse an unknown --range."""
    assert run.profile is not None and run.profile.budget is not None
    ranks = analyze_run_ranks(run, saved)
    if ranks is None:
        print_budget(run.profile.budget)
    else:
        print_ranks(ranks)
    refusal = None
    try:
        for table in _kernel_tables(analysis, args.range, args.top, args.by):
            print_table(table)
    except UserError as error:
        refusal = error
    if run.profile.memory is not None:
        print_memory(run.profile.memory)
    for note in run.notes:
        print(f"note: {note}")
    print(f"\n{run.environment.conditions_on(run.spec.device)}\nsaved {saved}")
    for name, what in _files(run):
        print(f"  {name:<18} {what}")
    where = "" if args.store == DEFAULT_ROOT else f" --store {args.store}"
    print(f"  {summary}: one line more\nwhat is in the way: steplab explain {run.id}{where}")
    if refusal is not None:
        raise refusal


def _kernel_tables(analysis: Analysis, name: str, top: int, views: Sequence[View]) -> list[Table]:
    """Return the views that are asked for, else the kernels of every phase, range or module."""
    if views:
        return [work_table(analysis, view) for view in views]
    if not name:
        tables = [kernel_table(analysis, phase, top=top) for phase in _phases(analysis)]
        return [*(replace(table, note="") for table in tables[:-1]), *tables[-1:]]
    module = name.removeprefix(MODULE)
    if modules_below(analysis, module):
        return [kernel_table(analysis, module=module, top=top)]
    return [kernel_table(analysis, range_name=name, top=top)]


def _phases(analysis: Analysis) -> list[str]:
    """Return the phases worth a table, in the order of a step."""
    work = analysis.work
    inside = work.step >= 0
    least = SMALL_PHASE * work.duration[inside].sum()
    worth = [
        phase
        for phase in phases_by_time(analysis)
        if phase != UNATTRIBUTED
        and work.duration[inside & (work.phase == work.labels.index(phase))].sum() >= least
    ]
    return sorted(worth, key=lambda phase: PHASES.index(phase) if phase in PHASES else len(PHASES))


def _files(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the names of a Run's files and what they are for."""
    assert run.profile is not None
    yield PAGE_FILE, "budget, timeline, kernels and memory in one page for a browser"
    for name in run.profile.traces:
        yield name, "trace for https://ui.perfetto.dev"
    if run.profile.detail:
        yield run.profile.detail, "one step with stacks, shapes, modules and memory, likewise"
    if run.spec.ranks > 1:
        yield "rank1_...", "the same files of the other ranks"
    yield AVERAGES_FILE, "time of every range, and torch's table of operators"


COMMAND = Command(_flags, _run)
