"""Fewer boxes than events: a picture is some thousand pixels wide, a step has 100,000 kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steplab.report.pages.lanes import Lane

MOST_BOXES = 3000  # in all lanes together


@dataclass(frozen=True)
class Box:
    """One rectangle; `count` events stand in it, of which the longest gives name and colour."""

    start: int  # ns
    end: int
    name: int  # code in Lane.names
    colour: int  # code in Lane.classes
    count: int = 1


def thin(lanes: Sequence[Lane], span: int, most: int = MOST_BOXES) -> list[list[Box]]:
    """Return the boxes of every lane, `most` at most in all.

    Events shorter than a slot of time are merged with the short ones that begin in the same slot;
    slots grow until the boxes are few enough. `span` (ns) is the length of the picture.
    """
    slots = most
    while True:
        boxes = [_boxes(lane, span // slots) for lane in lanes]
        if sum(map(len, boxes)) <= most or slots == 1:
            return boxes
        slots = max(1, slots // 2)


def _boxes(lane: Lane, slot: int) -> list[Box]:
    duration = lane.end - lane.start
    short = duration < slot
    whole = zip(
        *(lane.start[~short], lane.end[~short], lane.name[~short], lane.colour[~short]),
        strict=True,
    )
    boxes = [Box(*map(int, values)) for values in whole]
    rows = np.flatnonzero(short)
    if len(rows):
        # Within a slot the longest comes first, and so stands for the others.
        slots = lane.start[rows] // slot
        rows = rows[np.lexsort((-duration[rows], slots))]
        slots = lane.start[rows] // slot
        first = np.flatnonzero(np.concatenate([[True], slots[1:] != slots[:-1]]))
        boxes += _merged(lane, rows, first)
    return sorted(boxes, key=lambda box: box.start)


def _merged(lane: Lane, rows: NDArray[np.int64], first: NDArray[np.int64]) -> list[Box]:
    starts = np.minimum.reduceat(lane.start[rows], first)
    ends = np.maximum.reduceat(lane.end[rows], first)
    counts = np.diff([*first, len(rows)])
    names, colours = lane.name[rows[first]], lane.colour[rows[first]]
    values = zip(starts, ends, names, colours, counts, strict=True)
    return [Box(*map(int, row)) for row in values]
