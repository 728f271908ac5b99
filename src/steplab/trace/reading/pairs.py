"""Pairs: spans whose beginning and end are two events, as tools other than Kineto write them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from decimal import Decimal, InvalidOperation

from msgspec import Raw

from steplab.trace.reading.decode import Begin, End, Place, Span


class OpenSpans:
    """Beginnings that still wait for their end. The format orders both by time on a thread."""

    def __init__(self) -> None:
        self._open: dict[tuple[Place, Place], list[Begin]] = defaultdict(list)

    def closed_by(self, events: Iterable[Begin | End]) -> Iterator[Span]:
        """Yield the spans that end among `events`; an end without a beginning is passed over."""
        for event in events:
            waiting = self._open[event.pid, event.tid]
            if isinstance(event, Begin):
                # Copied: a view would keep the whole chunk alive as long as the span is open.
                event.ts, event.args = event.ts.copy(), event.args.copy()
                waiting.append(event)
            elif waiting and (span := _joined(waiting.pop(), event)):
                yield span


def _joined(begin: Begin, end: End) -> Span | None:
    try:
        duration = Decimal(bytes(end.ts).decode()) - Decimal(bytes(begin.ts).decode())
    except InvalidOperation:
        return None
    dur = Raw(f"{duration:f}".encode())
    return Span(begin.ts, begin.name, begin.cat, begin.pid, begin.tid, dur, begin.args)
