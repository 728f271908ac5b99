"""What `tune` shows while it climbs: a table that grows on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import Self

from rich import box
from rich.console import Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table as RichTable
from rich.text import Text

from steplab.record.ladder import Rung, Untried
from steplab.report.terminal import console
from steplab.tune.impact import interval, speed_up
from steplab.tune.stopwatch import told

_STYLES = {"kept": "green", "needed": "green", "red gate": "red", "failed": "red"}
_COLUMNS = ("rung", "ceiling", "outcome", "speed-up", "why")


class LadderView:
    """Draws on stderr, so that stdout holds the result alone."""

    def __init__(self, in_ms: bool) -> None:
        self.out = console(sys.stderr)
        self.in_ms = in_ms
        self.rungs: list[Rung] = []
        self.now = "starting"
        self.live = Live(console=self.out, transient=True, refresh_per_second=4)
        self.drawn = sys.stderr.isatty()

    def __enter__(self) -> Self:
        if self.drawn:
            self.live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.drawn:
            self.live.stop()

    def stage(self, text: str) -> None:
        """Show what is being done right now, where it can be wiped out again."""
        self.now = text
        self._draw()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self.out.print(Text(text))

    def rung(self, rung: Rung) -> None:
        """Add a row, or print it where nothing is drawn."""
        self.rungs.append(rung)
        if not self.drawn:
            self.say(f"[{len(self.rungs)}] " + ": ".join(filter(None, self._cells(rung))))
            self.say(f"    {rung.seconds:.1f} s: {told(rung.parts)}")
        self._draw()

    def untried(self, offer: Untried) -> None:
        """Print an offer that cannot be tried here."""
        if not self.drawn:
            self.say(f"[-] {offer.label}: not tried: {offer.reason}")

    def _draw(self) -> None:
        if not self.drawn:
            return
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for name in _COLUMNS:
            table.add_column(name)
        for rung in self.rungs:
            style = _STYLES.get(rung.outcome, "")
            table.add_row(*(Text(cell, style=style) for cell in self._cells(rung)))
        self.live.update(Group(table, Spinner("dots", Text(self.now))))

    def _cells(self, rung: Rung) -> tuple[str, ...]:
        """The cells of a row; over a red gate no speed-up is shown."""
        ceiling = ""
        if rung.ceiling_share is not None:
            ceiling = (
                f"at most {rung.ceiling_share * 100:.0f} % ({rung.ceiling_parts or 'nothing'})"
            )
        shown = rung.gain if rung.green else None
        gain = f"{speed_up(shown)}x ({interval(shown)})" if shown else ""
        why = f"{rung.reason}; {rung.remedy}" if rung.remedy else rung.reason
        if self.in_ms and shown:
            why = rung.remedy
        return rung.label, ceiling, rung.outcome, gain, why
