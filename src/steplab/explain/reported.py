"""What the step itself told of its experts: known whatever kernel ran, with or without a trace."""

from __future__ import annotations

from steplab.explain.case import Case


def loads(case: Case) -> tuple[tuple[float, ...], ...]:
    """Return (layers, experts): the share of a layer's assignments that each expert got."""
    reported = case.run.metrics.get("load_LE") if case.run else None
    rows = reported if isinstance(reported, tuple) else ()
    return tuple(row for row in rows if isinstance(row, tuple) and sum(row) > 0)


def dropped_share(case: Case) -> float | None:
    """Return the share of the assignments that no expert took; None where nobody told."""
    reported = case.run.metrics.get("dropped") if case.run else None
    return reported if isinstance(reported, float) else None
