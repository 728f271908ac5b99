"""A first step that is cut: the device still runs what was launched before the recording began."""

from __future__ import annotations

from collections.abc import Sequence

from steplab.trace.analysis import Window, Work

# Of the device's time in a step, by work whose launch nobody saw. A host that is ahead of the
# device by a step makes it all of the first one and none of the others.
SHARE = 0.05


def first_is_cut(windows: Sequence[Window], work: Work) -> bool:
    """Whether the first step shows the work of one that was launched before.

    Of that work only what began after the recording did is there, without operator and shapes:
    idle time would be seen where the device was busy, and ideals would be missing. A trace that
    knows no launches at all is not cut.
    """
    if len(windows) < 2:
        return False
    others = Window(windows[1].number, windows[1].start, windows[-1].end)
    return _unseen(windows[0], work, 0.0) > SHARE >= _unseen(others, work, 1.0)


def _unseen(window: Window, work: Work, without: float) -> float:
    """The share of the work in a window whose launch is not known; `without` any work."""
    here = (work.start >= window.start) & (work.start < window.end)
    total = work.duration[here].sum()
    return float(work.duration[here & (work.launched < 0)].sum() / total) if total else without


def without_cut(windows: Sequence[Window], work: Work) -> tuple[Sequence[Window], tuple[str, ...]]:
    """Return the whole steps, and a remark where the first was left out."""
    if not first_is_cut(windows, work):
        return windows, ()
    return windows[1:], ("the first step is left out: it shows work launched before the recording",)
