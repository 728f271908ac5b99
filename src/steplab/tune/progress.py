"""What a search shows (View), where its time goes (Stopwatch), how much is left (SearchClock)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from time import monotonic
from typing import Protocol

from steplab.core.ladder import Rung, Untried
from steplab.tune.proposals import PLAIN_SECONDS, SLOW_SECONDS
from steplab.verify.remote import MAKING_REFERENCES

PLAIN_OF_WARM = 0.75  # of the seconds of a candidate whose compilation is left out
CONFIRM_SHARE = 0.2  # of the budget at most, for two processes that confirm one small gain
MIN_TIMEOUT = 60.0  # seconds, for what a search cannot do without: truth, baseline, last turns
MIN_TRY = 10.0  # seconds that a candidate gets however little is left


class View(Protocol):
    """What a search reports to while it climbs."""

    def stage(self, text: str) -> None:
        """Show what is being done right now."""
        ...

    def say(self, text: str) -> None:
        """Print a line that stays."""
        ...

    def rung(self, rung: Rung) -> None:
        """Show a rung that is done."""
        ...

    def untried(self, untried: Untried) -> None:
        """Show a suggestion that cannot be tried here."""
        ...


class NullView:
    """Shows nothing."""

    def stage(self, text: str) -> None:
        """Show nothing."""

    def say(self, text: str) -> None:
        """Show nothing."""

    def rung(self, rung: Rung) -> None:
        """Show nothing."""

    def untried(self, untried: Untried) -> None:
        """Show nothing."""


class Stopwatch:
    """A view that also notes the seconds of every stage, by its first word: "comparing", "turns".

    What was done from `since` on, before there was a view, is called "importing".
    """

    def __init__(self, view: View, since: float) -> None:
        self.view = view
        self.say, self.rung, self.untried = view.say, view.rung, view.untried
        self.name = ""  # of what is tried; shown before its stages
        self._parts: dict[str, float] = {"importing": monotonic() - since}
        self._begin("starting")

    def stage(self, text: str) -> None:
        """Show what is being done right now, and count from here on."""
        self._count()
        self._begin(text)
        self.view.stage(f"{self.name}: {text}" if self.name else text)

    def lap(self, name: str = "") -> dict[str, float]:
        """Return the seconds by stage since the last lap; what follows is about `name`."""
        self._count()
        parts, self._parts, self.name = self._parts, {}, name
        self._begin("starting")
        return parts

    def _begin(self, text: str) -> None:
        self._word, self._since = _stage_key(text), monotonic()

    def _count(self) -> None:
        self._parts[self._word] = self._parts.get(self._word, 0.0) + monotonic() - self._since


def add_timings(parts: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of both, by stage."""
    return {key: parts.get(key, 0.0) + more.get(key, 0.0) for key in {**parts, **more}}


def without_references(parts: Mapping[str, float]) -> float:
    """Return the seconds of all stages but the making of references, which the next one finds."""
    return sum(parts.values()) - parts.get(_stage_key(MAKING_REFERENCES), 0.0)


def _stage_key(text: str) -> str:
    return text.split()[0].strip(",:")


def format_timings(parts: Mapping[str, float]) -> str:
    """Name the stages that took half a second or more, in order."""
    return ", ".join(f"{word} {s:.1f}" for word, s in parts.items() if s >= 0.5)


class SearchClock:
    """The budget of a search, `seconds` counted from `begun` on, and what candidates take."""

    def __init__(self, seconds: float, begun: float, spent_before: float = 0.0) -> None:
        self.begun = begun
        self.seconds = seconds
        self.spent_before = spent_before
        self.taken: dict[bool, list[float]] = {True: [], False: []}  # by whether it compiles
        self.taken_warm: list[float] = []  # where the same had been compiled before

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

    @property
    def end(self) -> float:
        """When the budget is spent, by `monotonic`."""
        return self.begun + self.seconds

    def expected(self, slow: bool, warm: bool = False) -> float:
        """Return the seconds that a candidate will take: the median of its kind so far.

        `slow` ones compile; `warm` ones what the recipe below has compiled already.
        """
        known = (slow and warm and self.taken_warm) or self.taken[slow]
        if known:
            return statistics.median(known)
        # Until a plain one was tried, those that compile tell what comparing with fp64 takes here.
        unseen = max(PLAIN_SECONDS, PLAIN_OF_WARM * min(self.taken_warm, default=0.0))
        plain = statistics.median(self.taken[False] or [unseen])
        return plain + SLOW_SECONDS - PLAIN_SECONDS if slow else plain

    def can_confirm(self, seconds: float, share: float = CONFIRM_SHARE) -> bool:
        """Whether there are so many `seconds` to confirm a gain, and no more than the `share`."""
        return seconds <= min(share * self.seconds, self.left)

    def note(self, slow: bool, seconds: float, warm: bool = False, cold: float = 0.0) -> None:
        """Remember what a candidate took; `cold` seconds of it because it was not `warm`."""
        if slow:
            self.taken_warm.append(seconds - cold)
        if not (slow and warm):
            self.taken[slow].append(seconds)

    @property
    def timeout(self) -> float:
        """Return how many seconds a call may take without which there is no result."""
        return max(MIN_TIMEOUT, self.left)

    def candidate_timeout(self, last: float) -> float:
        """Return how many seconds a candidate may take: what is left but for `last` at the end."""
        return max(MIN_TRY, self.left - last)
