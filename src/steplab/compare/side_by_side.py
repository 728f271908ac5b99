"""The two sides of a comparison as the rows of one table."""

from __future__ import annotations

from steplab.compare.axes import constants
from steplab.compare.sides import Side
from steplab.record import Column, Samples, Table
from steplab.record.table import Cell


def sides_table(a: Side, samples_a: Samples, b: Side, samples_b: Samples) -> Table:
    """Return A and B with their step times, and what a Run tells besides."""
    columns = (
        *(Column(""), Column("Run or trace"), Column("what"), Column("step median", "ms")),
        *(Column("p10", "ms"), Column("p90", "ms"), Column("spread", "%"), Column("steps")),
        *(Column("tokens/s"), Column("MFU", "%"), Column("peak memory", "GiB")),
    )
    rows = (("A", *_row(a, samples_a)), ("B", *_row(b, samples_b)))
    return Table("A and B", columns, rows).without_unknown_columns()


def _row(side: Side, samples: Samples) -> tuple[Cell, ...]:
    times = (samples.median, samples.percentile(10), samples.percentile(90), samples.spread * 100)
    run = side.run
    if run is None:
        return (side.name, None, *times, len(samples), None, None, None)
    tokens = round(run.work.tokens / samples.median * 1e3) if run.work else None
    # A stored MFU belongs to the stored times, not to those of another measurement.
    own = run.clock is not None and samples == run.clock.step
    mfu = run.figures.possible_mfu if run.figures and own else None
    what = f"{run.spec.workload}: {constants([run])}"
    memory = run.memory.peak / 2**30 if run.memory else None
    share = None if mfu is None else mfu * 100
    return (side.name, what, *times, len(samples), tokens, share, memory)
