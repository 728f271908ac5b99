"""From recorded traces to a stored Run with its budget, and a line in summary.csv. No torch."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from steplab.core import Run
from steplab.core.atomic import disk_errors
from steplab.report.pages import write_profile_page
from steplab.report.summary_file import SummaryFile
from steplab.store import Store
from steplab.trace.analysis import Analysis
from steplab.trace.analyze import analyze_cycles
from steplab.trace.ranks.folder import analyze_run_ranks, rank_file
from steplab.workers.ranks import PerRank

PAGE_FILE = "page.html"
COLUMNS = (
    "date",
    "run",
    "workload",
    "size",
    "recipe",
    "mode",
    "batch",
    "context",
    "device",
    "step_ms",
    "profiled_ms",
    "peak_gib",
    "kernels_per_step",
    "trace",
)


@contextlib.contextmanager
def scratch_folder(store: Store) -> Iterator[Path]:
    """Yield a hidden folder on the store's disk; the store removes what a killed process leaves."""
    folder = store.draft_path("profile")
    with disk_errors(store.root):
        folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def rank_folders(folder: Path, ranks: int) -> Iterator[Path | PerRank]:
    """Yield where each rank writes its files; those of rank 1 end in `folder` as `rank1_NAME`."""
    if ranks == 1:
        yield folder
        return
    others = {rank: folder / f"rank{rank}" for rank in range(1, ranks)}
    with disk_errors(folder):
        for own in others.values():
            own.mkdir()
    yield PerRank([folder, *others.values()])
    for rank, own in others.items():
        for path in own.iterdir():
            path.rename(folder / rank_file(path.name, rank))
        own.rmdir()


def read_traces(run: Run, folder: Path) -> tuple[Run, Analysis]:
    """Return the Run with its budget, and the analysis; write them as a page into `folder`."""
    cycles = analyze_cycles(run, folder)
    analysis = next(cycles)
    run = with_budget(run, analysis, cycles)
    write_profile_page(run, analysis, folder / PAGE_FILE, analyze_run_ranks(run, folder))
    return run, analysis


def with_budget(run: Run, first: Analysis, others: Iterable[Analysis]) -> Run:
    """Return the Run with the steps of all its cycles in its budget."""
    assert run.profile is not None
    steps, notes = [*first.budget.steps], first.budget.notes
    for cycle in others:
        steps += cycle.budget.steps
    cycles = len(run.profile.traces)
    if cycles > 1:
        notes = (*notes, f"all {cycles} cycles count here; kernels and findings are of the first")
    budget = replace(first.budget, steps=tuple(steps), notes=notes)
    return replace(run, profile=replace(run.profile, budget=budget))


def save_files(store: Store, run: Run, folder: Path) -> Path:
    """Store the Run with every file in `folder` beside it; return the Run's folder."""
    return store.save(run, {path.name: path for path in sorted(folder.iterdir())})


def summary_file(folder: Path, flag: str) -> SummaryFile:
    """Return the file with one line for every profile in `folder`, which `flag` named."""
    return SummaryFile(folder, COLUMNS, flag)


def summary_cells(run: Run, trace: Path) -> tuple[object, ...]:
    """Return the Run's line in that file."""
    spec, environment = run.spec, run.environment
    budget = run.profile.budget if run.profile else None
    step = budget.typical if budget else None
    return (
        run.created,
        run.id,
        spec.workload,
        spec.size,
        spec.recipe.label,
        spec.mode,
        spec.batch,
        spec.config.get("context") or spec.config.get("seq_max_len") or "",
        environment.device_name if spec.device == "cuda" else environment.cpu,
        run.clock.step.median if run.clock else "",
        step.wall_ms if step else "",
        run.memory.peak / 2**30 if run.memory else "",
        sum(category.launches for category in step.categories) if step else "",
        trace,
    )
