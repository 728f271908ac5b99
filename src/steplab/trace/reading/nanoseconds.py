"""Nanoseconds from the text of numbers: a float64 of the microseconds since 1970 is 125 ns off.

Profilers write microseconds with one to three decimals; such numbers are read all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

import numpy as np
from msgspec import Raw

from steplab.trace.events import Ints

# Half the range of 64 bits, so that a base time can be added: 2**62 ns after 1970 is the year 2116.
LATEST = 2**62
NO_TIME = LATEST  # stands for a text that is no time


def nanoseconds(texts: Sequence[Raw]) -> Ints:
    """Return JSON numbers of microseconds as ns, halves to even; NO_TIME for what is no time."""
    if not texts:
        return np.empty(0, np.int64)
    joined = b"\n".join(texts)
    read = _decimals(joined, len(texts)) if b"." in joined else _integers(joined, 1000)
    return np.array([_one(bytes(text)) for text in texts], np.int64) if read is None else read


def _decimals(joined: bytes, count: int) -> Ints | None:
    """Read lines that all have one to three decimals; None if one has not."""
    codes = np.frombuffer(joined, np.uint8)
    dots = np.flatnonzero(codes == ord("."))
    if len(dots) != count:
        return None
    decimals = np.append(np.flatnonzero(codes == ord("\n")), len(codes)) - dots - 1
    if decimals.min() < 1 or decimals.max() > 3:
        return None
    return _integers(joined.replace(b".", b""), 10 ** (3 - decimals))


def _integers(joined: bytes, scale: Ints | int) -> Ints | None:
    """Read lines of digits and multiply them; None if they are not all digits, or too many."""
    if joined.translate(None, b"0123456789-\n"):
        return None
    read = np.fromstring(joined, np.int64, sep="\n")
    largest = max(int(read.max()), -int(read.min()))
    return read * scale if largest < LATEST // np.max(scale) else None


def _one(text: bytes) -> int:
    try:
        exact = Decimal(text.decode().strip('"')) * 1000
        return int(exact.to_integral_value()) if abs(exact) < LATEST else NO_TIME
    except (InvalidOperation, ValueError, OverflowError):
        return NO_TIME
