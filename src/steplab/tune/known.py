"""What champions have told of the parts of a step, from one to the next. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from steplab.record import Run
from steplab.tune.offers import impls_of


def still_known(known: Mapping[str, float], before: Run, after: Run) -> dict[str, float]:
    """Return the ms by part that may be said of the step `after`, where it tells none itself.

    Of an op that another implementation computes now, nothing is known.
    """
    had, has = impls_of(before), impls_of(after)
    changed = {op for op in had.keys() | has.keys() if had.get(op) != has.get(op)}
    gone = {f"{scheme}:{op}" for scheme in ("op", "idle") for op in changed}
    return {part: ms for part, ms in known.items() if part not in gone}
