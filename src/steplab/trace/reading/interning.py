"""Interning: texts and threads as numbers, each kept once, in order of first appearance."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
from msgspec import Raw

from steplab.trace.events import Codes
from steplab.trace.reading.decode import Place

NOT_RECORDED = -1


class Texts(dict[str, int]):
    """A number for every text."""

    def __missing__(self, text: str) -> int:
        self[text] = number = len(self)
        return number

    def codes(self, texts: Iterable[str]) -> Codes:
        """Return the number of each text."""
        return np.array([self[text] for text in texts], np.int32)


class JsonTexts(dict[bytes, int]):
    """The number, in a `Texts`, of JSON values that are kept as text on one line."""

    def __init__(self, texts: Texts) -> None:
        super().__init__({b"": NOT_RECORDED, b"null": NOT_RECORDED})
        self._texts = texts

    def __missing__(self, value: bytes) -> int:
        # A tool that indents its files breaks every list of shapes into lines.
        line = msgspec.json.format(value, indent=0) if b"\n" in value else value
        self[value] = number = self._texts[line.decode(errors="replace")]
        return number

    def codes(self, values: Iterable[Raw]) -> Codes:
        """Return the number of each value; NOT_RECORDED for none."""
        return np.array([self[bytes(value)] for value in values], np.int32)


class Threads(dict[tuple[Place, Place], int]):
    """A number for every pair of process and thread, or of device and stream."""

    def __init__(self) -> None:
        super().__init__()
        self.names = Texts()

    def __missing__(self, pair: tuple[Place, Place]) -> int:
        # Early versions of torch named the threads of a device "stream 7".
        first, second = pair
        self[pair] = number = self.names[f"{first}/{str(second).removeprefix('stream ')}"]
        return number

    def codes(self, pairs: Iterable[tuple[Place, Place]]) -> Codes:
        """Return the number of each pair."""
        return np.array([self[pair] for pair in pairs], np.int32)
