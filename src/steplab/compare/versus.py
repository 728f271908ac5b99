"""Two specs that were measured in turns, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from steplab.compare.bootstrap import CONFIDENCE, MIN_SAMPLES, ratio_of_rounds
from steplab.core import Cell, Column, RunSpec, Samples, Table


def versus_table(
    first: RunSpec, a: Sequence[Samples], second: RunSpec, b: Sequence[Samples], conditions: str
) -> Table:
    """Return medians and the ratio of the second to the first with its interval, by rounds."""
    interval = ratio_of_rounds([s.values for s in a], [s.values for s in b])
    if len(a) < MIN_SAMPLES or not interval.excludes_one:
        verdict = "cannot tell"
    else:
        verdict = "faster" if interval.ratio > 1 else "slower"
    columns = (
        Column("recipe"),
        Column("mode"),
        Column("step median", "ms"),
        Column("spread", "%"),
        Column("samples"),
        Column("speed-up"),
        Column("interval"),
        Column("verdict"),
    )
    span = f"{interval.low:.3f} to {interval.high:.3f}"
    rows = (
        (*_measured(first, a), 1.0, "", "baseline"),
        (*_measured(second, b), interval.ratio, span, verdict),
    )
    note = (
        f"measured in turns by two live workers, {len(a)} rounds; bootstrap interval over rounds "
        f"at {CONFIDENCE:.0%}\n{conditions}"
    )
    return Table("one against the other", columns, rows, note)


def rounds_table(a: Sequence[Samples], b: Sequence[Samples]) -> Table:
    """Return every sample: round, which of the two, milliseconds."""
    rows = [
        (number + 1, side, value)
        for number, pair in enumerate(zip(a, b, strict=True))
        for side, samples in zip(("first", "second"), pair, strict=True)
        for value in samples.values
    ]
    return Table("rounds", (Column("round"), Column("spec"), Column("step", "ms")), tuple(rows))


def _measured(spec: RunSpec, rounds: Sequence[Samples]) -> tuple[Cell, ...]:
    pooled = Samples(tuple(v for samples in rounds for v in samples.values), "ms")
    return spec.recipe.label, spec.mode, pooled.median, pooled.spread * 100, len(pooled)
