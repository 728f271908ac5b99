"""View: what a search tells while it climbs. The command line has one that draws. No torch."""

from __future__ import annotations

from typing import Protocol

from steplab.record.ladder import Rung, Untried


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

    def untried(self, offer: Untried) -> None:
        """Show an offer that is left alone."""
        ...


class Blind:
    """A view for those who look at the ladder afterwards."""

    def stage(self, text: str) -> None:
        """Show nothing."""

    def say(self, text: str) -> None:
        """Show nothing."""

    def rung(self, rung: Rung) -> None:
        """Show nothing."""

    def untried(self, offer: Untried) -> None:
        """Show nothing."""
