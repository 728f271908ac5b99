"""The time that a search may take, and what its next step is expected to take. No torch."""

from __future__ import annotations

import statistics
from time import monotonic

from steplab.tune.proposals import PLAIN_SECONDS, SLOW_SECONDS

CONFIRM_SHARE = 0.2  # of the budget at most, for two processes that confirm one small gain
MIN_TIMEOUT = 60.0  # seconds: on a busy machine even a plain candidate may take so long


class SearchClock:
    """Counts from `begun` on. `seconds` is the budget."""

    def __init__(self, seconds: float, begun: float, spent_before: float = 0.0) -> None:
        self.begun = begun
        self.seconds = seconds
        self.spent_before = spent_before
        self.taken: dict[bool, list[float]] = {True: [], False: []}  # by whether it compiles

    @property
    def elapsed(self) -> float:
        """Seconds of this call."""
        return monotonic() - self.begun

    @property
    def total(self) -> float:
        """Seconds of this call and of those that were interrupted."""
        return self.spent_before + self.elapsed

    @property
    def left(self) -> float:
        """Seconds until the budget is spent; below 0 it is."""
        return self.seconds - self.elapsed

    def expected(self, slow: bool) -> float:
        """Return the seconds that a candidate will take: the median of its kind so far."""
        known = self.taken[slow]
        if known:
            return statistics.median(known)
        plain = statistics.median(self.taken[False] or [PLAIN_SECONDS])
        return plain + SLOW_SECONDS - PLAIN_SECONDS if slow else plain

    def can_confirm(self, slow: bool) -> bool:
        """Whether there is time to try a candidate and to confirm it by two new processes."""
        one = self.expected(slow)
        return 2 * one <= CONFIRM_SHARE * self.seconds and 3 * one <= self.left

    def note(self, slow: bool, seconds: float) -> None:
        """Remember what a candidate took."""
        self.taken[slow].append(seconds)

    def timeout(self, slow: bool) -> float:
        """Return how long a single answer may take: what is left, and some grace."""
        return max(MIN_TIMEOUT, self.left + self.expected(slow))
