"""torch's caching allocator of CUDA memory, without a GPU: which bytes are allocated and reserved.

A request is rounded up, looks for the smallest free block of its pool and stream that holds it,
and splits it where enough is left; without one, a segment is asked of the driver. What torch calls
allocated are whole blocks, so up to a mebibyte more than was asked for.
"""

# The rules of c10/cuda/CUDACachingAllocator, as of torch 2.11 to 2.15, with its default settings.
from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

ROUND = 512  # bytes; every block is a multiple of it
SMALL = 2**20  # largest request that the small pool serves, and what may be left unsplit of others
SMALL_SEGMENT = 2 * 2**20
LARGE_SEGMENT = 20 * 2**20  # for requests up to half of it; larger ones get a segment of their own
LARGE_ROUND = 2 * 2**20


@dataclass(eq=False)
class Block:
    """A piece of a segment; neighbors are those of the same segment."""

    size: int
    pool: tuple[int, bool]  # stream, and whether it is the small one
    place: int  # order among free blocks of one size: the older segment and the lower address first
    before: Block | None = None
    after: Block | None = None
    is_free: bool = True


class CachingAllocator:
    """Counts `allocated` and `reserved` bytes now and at most; it hands out no memory."""

    def __init__(self) -> None:
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self._free: dict[tuple[int, bool], list[tuple[int, int]]] = {}  # (size, place), sorted
        self._at: dict[int, Block] = {}  # place -> block
        self._end = 0  # of all segments so far, as if they lay one after the other

    def allocate(self, size: int, stream: int = 0) -> Block | None:
        """Return a block of at least `size` bytes; None for nothing."""
        if size <= 0:
            return None
        size = -(-size // ROUND) * ROUND
        block = self._smallest(size, (stream, size <= SMALL)) or self._segment(size, stream)
        rest = block.size - size
        if rest >= ROUND if block.pool[1] else rest > SMALL:
            self._split(block, size)
        block.is_free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def release(self, block: Block | None) -> None:
        """Give a block back; it merges with free neighbors."""
        if block is None:
            return
        self.allocated -= block.size
        block.is_free = True
        if block.after is not None and block.after.is_free:
            self._merge(block, block.after)
        if block.before is not None and block.before.is_free:
            block = self._merge(block.before, block)
        insort(self._free.setdefault(block.pool, []), (block.size, block.place))

    def reset_peaks(self) -> None:
        """Begin to look for the most anew."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def _smallest(self, size: int, pool: tuple[int, bool]) -> Block | None:
        free = self._free.get(pool, [])
        index = bisect_left(free, (size, -1))
        return self._at[free.pop(index)[1]] if index < len(free) else None

    def _segment(self, size: int, stream: int) -> Block:
        if size <= SMALL:
            reserved = SMALL_SEGMENT
        elif size < LARGE_SEGMENT // 2:
            reserved = LARGE_SEGMENT
        else:
            reserved = -(-size // LARGE_ROUND) * LARGE_ROUND
        block = Block(reserved, (stream, size <= SMALL), self._end)
        self._at[block.place] = block
        self._end += reserved
        self.reserved += reserved
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.size - size, block.pool, block.place + size, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._at[rest.place] = rest
        insort(self._free.setdefault(rest.pool, []), (rest.size, rest.place))

    def _merge(self, first: Block, second: Block) -> Block:
        """Return one block of two neighbors, of which one has just become free."""
        for block in (first, second):
            free = self._free.get(block.pool, [])
            index = bisect_left(free, (block.size, block.place))
            if index < len(free) and free[index] == (block.size, block.place):
                del free[index]
        del self._at[second.place]
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first
