"""Several sets of series as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from steplab.data.series import SeriesSet


class JoinedSeries:
    """The series of `members`, one member after the other."""

    def __init__(self, name: str, members: Sequence[SeriesSet]) -> None:
        self.name = name
        self.members = tuple(members)
        self.lengths = np.concatenate([member.lengths for member in members])
        self._ends = np.cumsum([len(member) for member in members])

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, index: int, start: int, stop: int) -> NDArray[np.float32]:
        """Return points [start, stop) of series `index`, counted over all members."""
        if not 0 <= index < len(self.lengths):
            raise IndexError(f"series {index} of {len(self.lengths)}")
        which = int(np.searchsorted(self._ends, index, side="right"))
        member = self.members[which]
        return member.read(index - int(self._ends[which]) + len(member), start, stop)
