"""Windows in which several short pieces lie side by side, each a document of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from steplab.data.normalise import Normalise
from steplab.data.packing import Group, footprint, pack
from steplab.data.windows import (
    LEAST_POINTS,
    Points,
    check_shape,
    full_windows,
    no_windows,
    nothing_finite,
    skipped,
    substitutes,
)

if TYPE_CHECKING:
    from steplab.data.series import SeriesSet

PackedWindow = tuple[NDArray[np.float32], NDArray[np.bool_], NDArray[np.int32]]
PADDING = -1  # the document of points that belong to no series


class PackedWindows:
    """Full windows as in `Windows`; then packed ones, of short series and of tails.

    A tail is what follows the last full window of a series: it begins where the next window would
    and is taken if it has points that no window has. Pieces begin at a multiple of `patch_length`.
    What lies where depends on the lengths alone. 16 bytes per series.
    """

    def __init__(
        self,
        series: SeriesSet,
        length: int,
        stride: int,
        normalise: Normalise = "series",
        patch_length: int = 1,
    ) -> None:
        check_shape(length, stride)
        self.series, self.length, self.stride, self.patch_length = (
            series, length, stride, patch_length,
        )  # fmt: skip
        self._points = Points(series, normalise)
        self._too_short = int((series.lengths < LEAST_POINTS).sum())
        pieces = piece_lengths(series.lengths, length, stride)
        # The longest first; of one length in the order of the series.
        self._order = np.argsort(-pieces, kind="stable")[: int((pieces > 0).sum())]
        self._groups = pack(np.bincount(pieces), length, patch_length)
        self._full_ends = np.cumsum(full_windows(series.lengths, length, stride))
        self._full = int(self._full_ends[-1]) if len(series) else 0
        self._group_ends = self._full + np.cumsum([group.windows for group in self._groups])
        self._count = int(self._group_ends[-1]) if self._groups else self._full
        if not self._count:
            raise no_windows(series)

    def __len__(self) -> int:
        return self._count

    @property
    def skipped(self) -> dict[str, int]:
        """Series left out by reason; NaN series count from the moment they are first touched."""
        return skipped(self._too_short, self._points)

    def pieces(self, window: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (series, start, stop, place in the window) of the pieces of a window."""
        if not 0 <= window < self._count:
            raise IndexError(f"window {window} of {self._count}")
        if window < self._full:
            series = int(np.searchsorted(self._full_ends, window, side="right"))
            before = int(self._full_ends[series - 1]) if series else 0
            start = (window - before) * self.stride
            yield series, start, start + self.length, 0
            return
        number = int(np.searchsorted(self._group_ends, window, side="right"))
        group = self._groups[number]
        yield from self._short_pieces(group, window - int(self._group_ends[number]))

    def _short_pieces(self, group: Group, window: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the pieces of one window of a group; `window` is counted from the group's end."""
        place = 0
        for run in group.part(group.windows + window, 1).runs:
            for series in self._order[run.first : run.first + run.each].tolist():
                stop = int(self.series.lengths[series])
                yield series, stop - run.length, stop, place
                place += footprint(run.length, self.patch_length)

    def read(self, window: int) -> PackedWindow:
        """Return (values, mask, documents), all of shape [length].

        Documents are numbered from 0 in every window. The mask is False on padding and on NaN or
        Inf points; values are 0 there. A piece with fewer than 2 finite points is padding.
        """
        for number in substitutes(window, self._count):
            found = self._read(number)
            if found is not None:
                return found
        raise nothing_finite(self.series, self._count)

    def _read(self, window: int) -> PackedWindow | None:
        values = np.zeros(self.length, np.float32)
        mask = np.zeros(self.length, np.bool_)
        documents = np.full(self.length, PADDING, np.int32)
        document = 0
        for series, start, stop, place in self.pieces(window):
            found = self._points.read(series, start, stop)
            if found is None:
                continue
            end = place + stop - start
            values[place:end], mask[place:end] = found
            # What is left of its last token belongs to the piece too.
            documents[place : place + footprint(stop - start, self.patch_length)] = document
            document += 1
        return (values, mask, documents) if document else None


def piece_lengths(lengths: NDArray[np.int64], length: int, stride: int) -> NDArray[np.int64]:
    """Return the points of each series' short piece: a whole short series, a tail, or 0."""
    full = full_windows(lengths, length, stride)
    start = full * stride
    seen = np.where(full > 0, start - stride + length, 0)
    pieces = lengths - start
    return np.where((lengths > seen) & (pieces >= LEAST_POINTS), pieces, 0)
