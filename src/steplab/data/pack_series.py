"""Any series to a Time-300B folder: written piece by piece, then read back and compared."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from steplab.core.errors import MeasurementError, UserError
from steplab.data.formats.time300b import PART_ELEMENTS, SeriesWriter, Time300B
from steplab.data.series import SeriesSet, chunks


@dataclass(frozen=True)
class Packed:
    """What a folder holds after packing."""

    series: int
    points: int


def pack_sets(
    sets: Sequence[SeriesSet],
    folder: Path,
    advance: Callable[[int], None] = lambda points: None,
    part_elements: int = PART_ELEMENTS,
) -> Packed:
    """Write all series of all sets, in their order; `advance` is told the points written."""
    with SeriesWriter(folder, part_elements) as writer:
        for series in sets:
            for index in range(len(series)):
                for points in chunks(series, index):
                    writer.append(points)
                    advance(len(points))
                writer.end_series()
    if not len(writer.lengths):
        raise UserError(f"There is no series to write to {folder}.")
    verify(writer)
    return Packed(len(writer.lengths), sum(writer.lengths))


def verify(writer: SeriesWriter) -> None:
    """Read a written folder back and compare every length and every bit."""
    found = Time300B(writer.folder)
    checksum = 0
    for index in range(len(found)):
        for points in chunks(found, index):
            checksum = zlib.crc32(points.astype("<f4", copy=False).tobytes(), checksum)
    if checksum != writer.checksum or found.lengths.tolist() != list(writer.lengths):
        raise MeasurementError(
            f"{writer.folder} reads back other numbers than were written to it.",
            "Look after the disk, and write it again.",
        )
