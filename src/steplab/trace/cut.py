"""A first step that is cut: the device still runs what was launched before the recording began."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from steplab.trace.analysis import Window, Work

# Of the device's time in a step, by work whose launch nobody saw. A host that is ahead of the
# device by a step makes it all of the first one and none of the others.
SHARE = 0.05


def without_cut(windows: Sequence[Window], work: Work) -> tuple[Sequence[Window], tuple[str, ...]]:
    """Return the whole steps, and a remark where the first is cut; the only one stays."""
    if not first_is_cut(windows[0], work):
        return windows, ()
    seen = "it shows work launched before the recording"
    if len(windows) == 1:
        return windows, (f"the only step is cut: {seen}; record more steps in a cycle",)
    return windows[1:], (f"the first step is left out: {seen}",)


def first_is_cut(first: Window, work: Work) -> bool:
    """Whether the first step shows the work of one that was launched before.

    Of that work only what began after the recording did is there, without operator and shapes:
    idle time would be seen where the device was busy, and ideals would be missing. A trace that
    knows no launches later on either is not cut.
    """
    here = (work.start >= first.start) & (work.start < first.end)
    later = work.start >= first.end
    return _unseen(work, here, 0.0) > SHARE >= _unseen(work, later, 1.0)


def _unseen(work: Work, rows: NDArray[np.bool_], without: float) -> float:
    """The share of the rows' time whose launch is not known; `without` any rows."""
    total = work.duration[rows].sum()
    return float(work.duration[rows & (work.launched < 0)].sum() / total) if total else without
