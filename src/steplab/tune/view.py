"""View: what a search shows while it climbs, and a stopwatch for its stages. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Protocol

from steplab.core.ladder import Rung, Untried


class View(Protocol):
    """Somebody who watches."""

    def stage(self, text: str) -> None:
        """Show what is being done right now."""
        ...

    def say(self, text: str) -> None:
        """Tell something that stays."""
        ...

    def rung(self, rung: Rung) -> None:
        """Show a rung that is done."""
        ...

    def untried(self, suggestion: Untried) -> None:
        """Show a suggestion that is left alone."""
        ...


class NullView:
    """A view for those who look at the ladder afterwards."""

    def stage(self, text: str) -> None:
        """Show nothing."""

    def say(self, text: str) -> None:
        """Show nothing."""

    def rung(self, rung: Rung) -> None:
        """Show nothing."""

    def untried(self, suggestion: Untried) -> None:
        """Show nothing."""


class Stopwatch:
    """Stands before another view. A stage is called by its first word: "comparing", "turns".

    What was done `since` then, before there was a view, is called "importing".
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
        self._word, self._since = text.split()[0].strip(",:"), monotonic()

    def _count(self) -> None:
        self._parts[self._word] = self._parts.get(self._word, 0.0) + monotonic() - self._since


def add_timings(parts: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of both, by stage."""
    return {key: parts.get(key, 0.0) + more.get(key, 0.0) for key in {**parts, **more}}


def format_timings(parts: Mapping[str, float]) -> str:
    """Name what took half a second or more, in the order in which it came."""
    return ", ".join(f"{word} {s:.1f}" for word, s in parts.items() if s >= 0.5)
