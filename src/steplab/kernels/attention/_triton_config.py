"""How large a tile each kernel takes, and with how many warps and pipeline stages.

A fixed table: the same input always runs the same kernel. `benchmarks/attention_tiles.py`
measures others.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiling:
    """One kernel's shape: `rows` that a program owns, `columns` of one step of its loop."""

    rows: int
    columns: int
    warps: int
    stages: int
    descriptors: bool = False  # tiles come by the copy engine (TMA) instead of by pointers
    registers: int | None = None  # at most so many per thread


@dataclass(frozen=True)
class Tilings:
    """The three kernels: rows are queries, queries and keys."""

    forward: Tiling
    dq: Tiling
    dkdv: Tiling


# Small enough that short tests have several tiles, and rows and columns of different length.
INTERPRETED = Tilings(Tiling(32, 16, 1, 1), Tiling(16, 32, 1, 1), Tiling(32, 16, 1, 1))

# Keyed by bytes per element and padded head width. Compute capability 9.0: the copy engine. The
# fastest of 81 on an H200, causal, 4096 tokens (benchmarks/attention_tiles_h200.txt); 256: untried.
HOPPER = {
    (2, 64): Tilings(
        Tiling(64, 128, 4, 2, True), Tiling(64, 64, 4, 3, True), Tiling(64, 64, 4, 2, True, 168)
    ),
    (2, 128): Tilings(
        Tiling(64, 64, 4, 3, True), Tiling(128, 64, 8, 3, True), Tiling(64, 64, 4, 2, True)
    ),
    (2, 256): Tilings(
        Tiling(128, 64, 8, 2, True), Tiling(64, 32, 4, 2, True), Tiling(64, 32, 8, 2, True)
    ),
}
# Any other, and fp32: within the 99 KiB of shared memory that the smaller cards have.
ANY = {
    (2, 64): Tilings(Tiling(128, 64, 4, 2), Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 2)),
    (2, 128): Tilings(Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 2), Tiling(64, 32, 8, 2)),
    (2, 256): Tilings(Tiling(64, 32, 8, 2), Tiling(32, 32, 4, 2), Tiling(32, 32, 8, 2)),
    (4, 64): Tilings(Tiling(64, 32, 8, 2), Tiling(64, 32, 8, 2), Tiling(64, 16, 8, 2)),
    (4, 128): Tilings(Tiling(64, 16, 8, 2), Tiling(32, 32, 8, 2), Tiling(32, 16, 8, 2)),
    (4, 256): Tilings(Tiling(32, 16, 8, 2), Tiling(16, 16, 8, 2), Tiling(16, 16, 8, 2)),
}


def tilings_for(width: int, itemsize: int, capability: tuple[int, int] | None) -> Tilings:
    """Return the tilings for a padded head width and bytes per element; None: the interpreter."""
    if capability is None:
        return INTERPRETED
    key = (itemsize, max(width, 64))
    return HOPPER[key] if capability == (9, 0) and key in HOPPER else ANY[key]
