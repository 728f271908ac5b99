"""What an allocator has reserved from the driver, and the largest piece of it that is free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class SegmentChange:
    """Memory that came from the driver (bytes above 0) or went back to it (below 0)."""

    after: int  # number of allocations and frees that came before it; -1: before the step
    address: int
    bytes: int
    grows: bool = False  # an expandable segment: neighbours of this kind are one piece


Range = tuple[int, int]  # first address, and the one behind the last


def reserved_ranges(changes: Iterable[SegmentChange], position: int) -> list[Range]:
    """Return what was reserved after `position` allocations and frees, sorted."""
    ranges: list[tuple[int, int, bool]] = []
    for change in changes:
        if change.after >= position:
            break
        begin, end = change.address, change.address + abs(change.bytes)
        if change.bytes > 0:
            ranges.append((begin, end, change.grows))
        else:
            # An expandable segment may give back a part of what it had mapped in one piece.
            pieces = [
                piece
                for first, last, grows in ranges
                for piece in ((first, min(last, begin), grows), (max(first, end), last, grows))
            ]
            ranges = [piece for piece in pieces if piece[0] < piece[1]]
    joined: list[tuple[int, int, bool]] = []
    for first, last, grows in sorted(ranges):
        if joined and grows and joined[-1][2] and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], last, True)
        else:
            joined.append((first, last, grows))
    return [(first, last) for first, last, _ in joined]


def largest_gap(reserved: Iterable[Range], used: Iterable[Range]) -> int:
    """Return the bytes of the longest reserved piece that no used range touches."""
    largest = 0
    taken = sorted(used, reverse=True)
    for first, last in sorted(reserved):
        begin = first
        while taken and taken[-1][0] < last:
            low, high = taken.pop()
            largest = max(largest, low - begin)
            begin = max(begin, high)
        largest = max(largest, last - begin)
    return largest
