"""The ladder of a systems course: the same step, shared by ranks in one way after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from steplab.core import Cell, Column, Recipe, Run, RunSpec, Setting, Table
from steplab.core.errors import UserError
from steplab.techniques.recipes import PARALLEL, technique

MIB = 2**20
BUCKETS_MB = (1, 5, 25)
BEFORE_BUCKETS = ("naive", "flat", "overlap")
AFTER_BUCKETS = ("ddp", "zero1", "fsdp")
EXACT = "exact"
NOTE = (
    "step: of the slowest rank; wait: after the backward, until the gradients of all ranks were "
    "there; exposed: in one profiled step, while ranks exchanged something and nothing else ran, "
    "also inside forward and backward; calls, sent: collectives of one rank in a step and the "
    "bytes of their messages; state: what the optimizer keeps, the most of any rank; "
    "verdict: gradients and weights against one process with the micro-batches of all ranks"
)


def plan(base: RunSpec, buckets_mb: Sequence[int] = BUCKETS_MB) -> list[RunSpec]:
    """Return the rungs in order: `base` with every scheme, and a bucket scheme for every size.

    At the end, a replicated and a sharded scheme once more with `exact`, whose price that shows.
    """
    if base.ranks < 2:
        raise UserError("The ladder compares how several ranks share a step.", "Use --ranks 2.")
    if PARALLEL in base.recipe.techniques:
        raise UserError(
            f"The ladder goes through the values of {PARALLEL}, so --recipe must not have one."
        )
    rungs: list[Mapping[str, Setting]] = [{"data": name} for name in BEFORE_BUCKETS]
    rungs += [{"data": "bucket", "bucket_mb": size} for size in buckets_mb]
    rungs += [{"data": name} for name in AFTER_BUCKETS]
    rungs += [{"data": "bucket", "bucket_mb": buckets_mb[-1], EXACT: True}]
    rungs += [{"data": "fsdp", EXACT: True}]
    return [replace(base, recipe=_with_scheme(base.recipe, settings)) for settings in rungs]


def _with_scheme(recipe: Recipe, settings: Mapping[str, Setting]) -> Recipe:
    complete = technique(PARALLEL).complete(settings)
    return Recipe({**recipe.techniques, PARALLEL: complete})


def ladder_table(runs: Sequence[Run]) -> Table:
    """Return one row per scheme."""
    columns = (
        Column("scheme"),
        Column("step", "ms"),
        Column("wait", "ms"),
        Column("exposed", "ms"),
        Column("calls"),
        Column("sent", "MiB"),
        Column("weights", "MiB"),
        Column("state", "MiB"),
        Column("verdict"),
        Column("status"),
    )
    title = f"one step of {runs[0].spec.title}"
    note = "; ".join([NOTE, *_prices_of_exact(runs)])
    return Table(title, columns, tuple((_label(_scheme(run)), *_cells(run)) for run in runs), note)


def _scheme(run: Run) -> Mapping[str, Setting]:
    return run.spec.recipe.techniques[PARALLEL]


def _label(scheme: Mapping[str, Setting]) -> str:
    bucket, exact = scheme.get("bucket_mb"), scheme.get(EXACT)
    words = [str(scheme["data"]), f"{bucket} MB" if bucket else "", EXACT if exact else ""]
    return ", ".join(filter(None, words))


def _prices_of_exact(runs: Sequence[Run]) -> list[str]:
    """Say how much longer each step with `exact` took than the same one without it."""
    steps = {_label(_scheme(run)): run.clock.step.median for run in runs if run.clock}
    return [
        f"{label} took {steps[label] / steps[without]:.2f}x as long as {without}"
        for label in steps
        if (without := label.removesuffix(f", {EXACT}")) != label and without in steps
    ]


def _cells(run: Run) -> list[Cell]:
    clock, sent = run.clock, run.communication
    if clock is None or sent is None:
        return [*[None] * 7, run.verdict, run.outcome]
    return [
        clock.step.median,
        max((rank.sync_ms for rank in run.ranks), default=None),
        max((rank.exposed_ms for rank in run.ranks), default=None),
        sent.calls,
        sent.bytes / MIB,
        sent.held_bytes["weights"] / MIB,
        sent.held_bytes["optimizer state"] / MIB,
        run.verdict,
        run.outcome,
    ]
