"""What reading one trace may take, checked before it is taken.

Counted are the columns of the events that are kept, with what analyzing them needs, every distinct
text once, and several copies of the text that is not yet a whole event. Of a gzip file the ratio is
bounded too: nobody waits for a file of 6 MB that unpacks to 6 GB.
"""

from __future__ import annotations

from steplab.core.errors import UserError
from steplab.core.input_file import memory_limit, shorten
from steplab.core.units import bytes_

ROW = 160  # bytes of memory per event at the peak of an analysis; see benchmarks/trace_speed.md
TEXT_COPIES = 24  # of text while its brackets are counted; 16 of them if it has nothing else
# A single event, and all that stands around the list of events. The longest events of a profiler
# have some 10 KB of shapes.
LONGEST_TEXT = 32 << 20
# Traces are 8 to 40 times smaller with gzip; blanks, or one event repeated, 1,000 times.
LARGEST_RATIO = 200
SMALL = 64 << 20  # bytes of text that may have any ratio
# Elements of the list that are not events, after which it is no list of events.
MOST_UNREADABLE = 1_000_000


class ReadingLimits:
    """What is held while one file is read, `name` in messages."""

    def __init__(self, name: str) -> None:
        self._name = shorten(name)
        self._held = 0

    def hold(self, rows: int, texts: int = 0) -> None:
        """Count events that are kept from now on, and bytes of texts; refuse them if too many."""
        self._held += rows * ROW + texts
        self._check(self._held)

    def check_text(self, size: int) -> None:
        """Refuse `size` bytes of text at once, before they are joined."""
        if size > LONGEST_TEXT:
            raise UserError(
                f"{self._name} has more than {bytes_(LONGEST_TEXT)} of text in one event or around "
                "the events: no profiler writes that."
            )
        self._check(self._held + TEXT_COPIES * size)

    def check_unreadable(self, count: int) -> None:
        """Refuse a list with many elements that are not events."""
        if count > MOST_UNREADABLE:
            raise UserError(
                f"{self._name} is no trace: {MOST_UNREADABLE:,} elements in it are not events."
            )

    def check_ratio(self, compressed: int, text: int) -> None:
        """Refuse a gzip file that unpacks to much more than traces do."""
        if text > max(SMALL, LARGEST_RATIO * compressed):
            raise UserError(
                f"{self._name} unpacks to more than {LARGEST_RATIO} times its size, which no "
                "trace does.",
                "Unpack it with gunzip if you trust it, and give the file that this makes.",
            )

    def _check(self, needed: int) -> None:
        limit = memory_limit()
        if needed > limit:
            raise UserError(
                f"{self._name} needs more than {bytes_(limit)} of memory, which is the limit.",
                f"Allow more with --max-memory {-(-2 * limit // 2**30)}GiB if you trust it.",
            )
