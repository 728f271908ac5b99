"""Two specs that were measured in turns, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from steplab.compare.bootstrap import CONFIDENCE, MIN_SAMPLES, ratio_of_rounds
from steplab.core import Cell, Column, RunSpec, Samples, Table
from steplab.core.spec import axis_value, shared_text, varying_axes


def versus_table(
    first: RunSpec, a: Sequence[Samples], second: RunSpec, b: Sequence[Samples], conditions: str
) -> Table:
    """Return medians and the ratio of the second to the first with its interval, by rounds."""
    interval = ratio_of_rounds([s.values for s in a], [s.values for s in b])
    if len(a) < MIN_SAMPLES or not interval.excludes_one:
        verdict = "cannot tell"
    else:
        verdict = "faster" if interval.ratio > 1 else "slower"
    axes = varying_axes([first, second]) or ["recipe"]
    columns = (
        *(Column(axis) for axis in axes),
        Column("step median", "ms"),
        Column("spread", "%"),
        Column("samples"),
        Column("speed-up"),
        Column("interval"),
        Column("verdict"),
    )
    span = f"{interval.low:.3f} to {interval.high:.3f}"
    rows = (
        (*_measured(first, axes, a), 1.0, "", "baseline"),
        (*_measured(second, axes, b), interval.ratio, span, verdict),
    )
    few = f"; a verdict needs {MIN_SAMPLES} rounds or more" if len(a) < MIN_SAMPLES else ""
    note = (
        f"measured in turns by two live workers, {len(a)} rounds{few}; bootstrap interval over "
        f"rounds at {CONFIDENCE:.0%}\n{conditions}"
    )
    title = f"one against the other: {first.workload} {shared_text([first, second])}"
    return Table(title, columns, rows, note)


def rounds_table(a: Sequence[Samples], b: Sequence[Samples]) -> Table:
    """Return every sample: round, which of the two, milliseconds."""
    rows = [
        (number + 1, side, value)
        for number, pair in enumerate(zip(a, b, strict=True))
        for side, samples in zip(("first", "second"), pair, strict=True)
        for value in samples.values
    ]
    return Table("rounds", (Column("round"), Column("spec"), Column("step", "ms")), tuple(rows))


def _measured(spec: RunSpec, axes: Sequence[str], rounds: Sequence[Samples]) -> tuple[Cell, ...]:
    pooled = Samples(tuple(v for samples in rounds for v in samples.values), "ms")
    labels = (axis_value(spec, axis) for axis in axes)
    return *labels, pooled.median, pooled.spread * 100, len(pooled)
