"""Places: where in the user's code some rows come from, as lines of evidence."""

from __future__ import annotations

from steplab import units
from steplab.explain.rows import Mask, Rows
from steplab.trace.analysis import UNATTRIBUTED


def places(rows: Rows, mask: Mask, most: int = 3) -> tuple[str, ...]:
    """Name the lines that hold most of the time; the modules or operators where none is known."""
    for column in ("line", "module", "op", "name"):
        groups = rows.groups(column, mask, most + 1)
        known = [group for group in groups if group.label != UNATTRIBUTED]
        if known:
            return tuple(
                f"{group.label}: {group.count:.3g} a step, {units.milliseconds(group.ms)}"
                for group in known[:most]
            )
    return ()
