"""How the scan's kernels are cut: a fixed table, so that the same input always runs the same way.

`benchmarks/ema_kernels.py` measures others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MOST_CHUNKS = 32  # their states are carried one after another, so their number has a bound


@dataclass(frozen=True)
class Cut:
    """The shape of the three kernels."""

    chunk: int = 256  # steps of time per program, at least
    lanes: int = 32  # channels per program
    warps: int = 1
    sum_steps: int = 4  # steps that the chunk sums advance at once
    sum_block: int = 16  # steps that the chunk sums load at once; a multiple of `sum_steps`
    output_steps: int = 2  # likewise for the outputs
    output_block: int = 8
    gradient_block: int = 4

    def chunk_length(self, length: int) -> int:
        """Return the steps of a chunk for a sequence of `length` steps."""
        chunk = self.chunk
        while chunk * MOST_CHUNKS < length:
            chunk *= 2
        return chunk


# Small enough that short tests have several chunks, and blocks with a rest.
INTERPRETED = Cut(chunk=8, lanes=4, sum_block=4, output_block=4, gradient_block=2)
HOPPER = Cut()


def cut_for(modes: int, interpreted: bool) -> Cut:
    """Return the cut for a number of modes. Beyond 16 the powers do not fit into registers."""
    chosen = INTERPRETED if interpreted else HOPPER
    if modes > 16:
        chosen = replace(chosen, sum_steps=1, output_steps=1)
    return chosen


def packed(modes: int) -> tuple[int, int]:
    """Return how many groups of how many modes the kernels work with; they may be a few more."""
    per_group = min(4, 1 << (modes - 1).bit_length())
    return -(-modes // per_group), per_group
