"""How a step scales over ranks: time of the slowest, tokens of all, what they wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from steplab.core import Cell, Column, Run, Settings, Table
from steplab.core.run import rate_name
from steplab.core.spec import axis_value, varying_axes

PARALLEL = "parallel"
NOTE = (
    "efficiency: tokens/s per rank over that of the fewest ranks with the same recipe; exposed "
    "communication: in one profiled step of the slowest rank, while nothing else ran; sent: "
    "messages of one rank's collectives in a step; memory: the most of any rank; verdict: against "
    "one process with the micro-batches of all ranks"
)


def rank_table(runs: Sequence[Run]) -> Table | None:
    """Return one row per Run, or None where no step is shared by several ranks."""
    if all(run.spec.ranks == 1 for run in runs):
        return None
    axes = [axis for axis in varying_axes([run.spec for run in runs]) if axis != "ranks"]
    rate = rate_name(runs)
    columns = [Column(axis) for axis in axes]
    columns += [Column("ranks"), Column("step, slowest rank", "ms"), Column(rate)]
    columns += [
        Column(f"{rate} per rank"),
        Column("efficiency", "%"),
        Column("exposed communication", "ms"),
    ]
    columns += [Column("sent", "MiB"), Column("memory per rank", "GiB")]
    columns += [Column("verdict"), Column("status")]
    rows = []
    for run in runs:
        labels = (axis_value(run.spec, axis) for axis in axes)
        rows.append((*labels, run.spec.ranks, *_measured(run, runs)))
    return Table("scaling over ranks", tuple(columns), tuple(rows), NOTE).without_unknown_columns()


def _measured(run: Run, runs: Sequence[Run]) -> list[Cell]:
    if run.status != "ok" or run.clock is None:
        return [*[None] * 7, run.verdict, run.outcome]
    rate = run.tokens_per_second or 0.0
    base = _fewest_ranks(run, runs)
    alone = (base.tokens_per_second or 0.0) / base.spec.ranks
    share = rate / run.spec.ranks
    peaks = [rank.peak_bytes for rank in run.ranks if rank.peak_bytes is not None]
    peak = max(peaks) if peaks else run.memory.peak if run.memory else None
    return [
        run.clock.step.median,
        round(rate),
        round(share),
        share / alone * 100 if alone else None,
        max((rank.exposed_ms for rank in run.ranks), default=None),
        run.communication.bytes / 2**20 if run.communication else None,
        None if peak is None else peak / 2**30,
        run.verdict,
        run.outcome,
    ]


def _fewest_ranks(run: Run, runs: Sequence[Run]) -> Run:
    """Return the Run of the same work on the fewest ranks; on one rank, without a scheme."""

    def fits(other: Run) -> bool:
        theirs, own = other.spec.recipe.techniques, run.spec.recipe.techniques
        scheme = theirs.get(PARALLEL)
        same_recipe = _rest(theirs) == _rest(own) and scheme in (None, own.get(PARALLEL))
        return other.status == "ok" and same_recipe and _work(other) == _work(run)

    return min(
        filter(fits, runs), key=lambda one: (one.spec.ranks, PARALLEL in one.spec.recipe.techniques)
    )


def _rest(techniques: Mapping[str, Settings]) -> dict[str, Settings]:
    return {name: how for name, how in techniques.items() if name != PARALLEL}


def _work(run: Run) -> tuple[object, ...]:
    spec = run.spec
    return (spec.workload, spec.size, str(sorted(spec.config.items())), spec.batch, spec.mode)
