"""What stands below the table of a study of an op: conditions, method, reasons. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from steplab.record import Run
from steplab.studies.ops.op import Op, shape_text, way_text
from steplab.studies.ops.rows import WRONG, Seen, seen

METHOD = (
    "forward, backward and both: medians, each measured by itself and in turns; forward keeps what "
    "the backward needs; spread: of the middle half; FLOP/s: forward / backward\n"
    "extra: most bytes held beyond the inputs, output and gradients among them; error: norm of the "
    "difference to fp64 / norm of the truth, the largest\n"
    "of budget: the largest share of what rounding allows (twice the error of the definition in "
    "this dtype and one rounding); above 1 is wrong"
)
ON_CUDA = (
    "before every sample the L2 cache is emptied, and launches are issued ahead; host: its time to "
    "issue both"
)
ON_CPU = "wall time, caches warm"
MOST_REASONS = 12  # lines on a terminal; files have them in their rows


def note(op: Op, runs: Sequence[Run], whole: bool) -> str:
    """Return the lines below the table; a file has the reasons in its rows instead."""
    first, all_seen = runs[0], [seen(run) for run in runs]
    how = ON_CUDA if first.spec.device == "cuda" else ON_CPU
    lines = [
        first.environment.conditions_on(first.spec.device),
        f"{_effort(all_seen, first)}; {how}",
        METHOD,
        f"FLOPs: {op.flops_told}",
    ]
    axes = varying_axes(op, runs)
    reasons = [] if whole else _reasons(op, runs, axes)
    reasons += [f"{_name(op, run, axes)}: {text}" for run in runs for text in run.notes]
    reasons += _partly_checked(op, runs)
    told = list(dict.fromkeys(reasons))
    if not whole and len(told) > MOST_REASONS:
        told = [*told[:MOST_REASONS], f"and {len(told) - MOST_REASONS} more; --out has them all"]
    return "\n".join([*lines, *told])


def varying_axes(op: Op, runs: Sequence[Run]) -> list[str]:
    """Return the axes of the shape that differ among the Runs."""
    return [name for name in op.shape if len({run.spec.config[name] for run in runs}) > 1]


def _name(op: Op, run: Run, axes: Sequence[str]) -> str:
    where = shape_text(op, run.spec.config, axes)
    return f"{way_text(op, run.spec.config)} ({where})" if where else way_text(op, run.spec.config)


def _reasons(op: Op, runs: Sequence[Run], axes: Sequence[str]) -> list[str]:
    """Return one line per row that failed; a wrong one's reason begins with that word."""
    failed = [(seen(run).status, _name(op, run, axes), run.reason) for run in runs if run.reason]
    return [f"{status}: {name}: {why.removeprefix(f'{WRONG}: ')}" for status, name, why in failed]


def _effort(all_seen: Sequence[Seen], first: Run) -> str:
    counts = {found.repeats for found in all_seen if found.repeats}
    if not counts:
        return "nothing was timed"
    told = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{max(counts)}"
    return f"{told} samples per number after {first.spec.warmup} untimed"


def _partly_checked(op: Op, runs: Sequence[Run]) -> list[str]:
    """Say which shapes were not compared with fp64 whole."""
    return [
        f"error of {found.checked}: {shape_text(op, run.spec.config)}"
        for run in runs
        if (found := seen(run)).checked and not found.checked.startswith("all ")
    ]
