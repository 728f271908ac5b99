"""Omissions: what of a file cannot be used, counted by reason, the first of each by name.

A damaged event is left out and said, not guessed: the times of the others stay true.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from steplab.core.input_file import shorten
from steplab.core.units import counted

NAME_WIDTH = 60  # letters of a name in a note

NOT_AN_EVENT = "left out: {} that cannot be read"
NO_TIME = "left out: {} without a finite time"
NO_DURATION = "left out: {} without a finite duration"
NEGATIVE = "left out: {} with a negative duration"
TOO_LONG = "left out: {} longer than a year"
TOO_FAR = "left out: {} more than a year from the others"
NEVER_ENDS = "left out: {} that begin and never end"
NO_ARGUMENTS = "arguments that cannot be read count as not recorded: {}"
NO_DEVICE_NAMES = "deviceProperties cannot be read: the device is not named"


class Omissions:
    """Counts by reason; a reason is a sentence with {} for the number of events."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def add(self, reason: str, count: int, first: str = "") -> int:
        """Count `count` events, `first` by name; return how many that makes for the reason."""
        if count:
            self._counts[reason] += count
            self._first.setdefault(reason, first)
        return self._counts[reason]

    def add_rows(self, reason: str, rows: NDArray[np.bool_], name_of: Callable[[int], str]) -> None:
        """Count the rows that are True; `name_of` gives the name of a row."""
        if rows.any():
            self.add(reason, int(rows.sum()), name_of(int(rows.argmax())))

    def sentences(self) -> tuple[str, ...]:
        """Return a sentence for every reason, with the name of its first event."""
        return tuple(self._sentence(reason, count) for reason, count in self._counts.items())

    def _sentence(self, reason: str, count: int) -> str:
        first = self._first[reason]
        named = f" (the first: {shorten(first, NAME_WIDTH)})" if first else ""
        return reason.format(counted(count, "event")) + named
