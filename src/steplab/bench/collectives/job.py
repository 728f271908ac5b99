"""What a group of ranks is asked to measure and what comes back: plain data for both sides.

Bytes and bandwidths of a collective are those that nccl-tests defines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from steplab.core import Status
from steplab.costs.collectives import bus_factor

CollectiveOp = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]
OPS: tuple[CollectiveOp, ...] = get_args(CollectiveOp)
Dtype = Literal["fp32", "bf16"]
Backend = Literal["gloo", "nccl"]
ITEM_BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2}

# Results are verified with integers of 0 to 3: their sum over 85 ranks stays below 256, up to
# which bf16 holds every integer.
LARGEST_VALUE, MAX_WORLD = 3, 85

# Files in one folder, through which the ranks and the process that starts them talk.
JOB_FILE, OUTCOME_FILE, FAILURE_FILE, LOG_FILE = "job.json", "outcomes", "failure", "log"


@dataclass(frozen=True)
class Collective:
    """One collective and the size of its message."""

    op: CollectiveOp
    mib: float

    def __str__(self) -> str:
        return f"{self.op} of {self.mib:g} MiB"


@dataclass(frozen=True)
class Job:
    """The cells that one group of `world` ranks measures, in order."""

    world: int
    backend: Backend
    dtype: Dtype
    cells: tuple[Collective, ...]
    runs: int  # timed operations per cell
    warmup: int  # untimed operations before them
    timeout_s: float  # for the whole group, its start included


@dataclass(frozen=True)
class Outcome:
    """How one cell ended. Times in milliseconds, indexed [rank][run]; empty unless ok."""

    status: Status = "ok"
    reason: str = ""
    rank_ms: tuple[tuple[float, ...], ...] = ()
    rank_host_ms: tuple[tuple[float, ...], ...] = ()  # until the call returned to Python
    late_runs: int = 0  # runs whose time on the device includes a wait for the host
    window_ms: float = 0.0  # wall time of all timed runs, refills and barriers included


def message_elements(mib: float, dtype: Dtype, world: int) -> int:
    """Return the elements of a message of `mib` MiB, rounded down to equal parts for all ranks.

    The full message is the buffer of an all-reduce, the output of an all-gather, the input of a
    reduce-scatter, and what one rank sends in an all-to-all.
    """
    return int(mib * 2**20) // ITEM_BYTES[dtype] // world * world


def message_bytes(mib: float, dtype: Dtype, world: int) -> int:
    """Return the bytes of the full message."""
    return message_elements(mib, dtype, world) * ITEM_BYTES[dtype]


def algorithm_gbs(message: int, ms: float) -> float:
    """Return message bytes over time, in GB/s (1 GB = 10**9 bytes)."""
    return message / ms / 1e6


def bus_gbs(op: CollectiveOp, world: int, message: int, ms: float) -> float:
    """Return the bandwidth over the link of every rank in GB/s, as hardware peaks are given."""
    return algorithm_gbs(message, ms) * bus_factor(op, world)


def slowest(rank_ms: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return, per run, the time of the slowest rank. `rank_ms` is indexed [rank][run]."""
    return tuple(max(run) for run in zip(*rank_ms, strict=True))
