"""Two specs that were measured in turns, side by side."""

from __future__ import annotations

from steplab.compare.statistics import CONFIDENCE, median_ratio
from steplab.record import Column, Samples, Table
from steplab.spec import RunSpec


def versus_table(first: RunSpec, a: Samples, second: RunSpec, b: Samples) -> Table:
    """Return medians and the ratio of the second to the first with its interval."""
    interval = median_ratio(a.values, b.values)
    if not interval.excludes_one:
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
    one = (first.recipe.label, first.mode, a.median, a.spread * 100, len(a), 1.0, "", "baseline")
    span = f"{interval.low:.3f} to {interval.high:.3f}"
    two = (
        *(second.recipe.label, second.mode, b.median, b.spread * 100, len(b)),
        *(interval.ratio, span, verdict),
    )
    note = f"measured in turns by two live workers; bootstrap interval at {CONFIDENCE:.0%}"
    return Table("one against the other", columns, (one, two), note)
