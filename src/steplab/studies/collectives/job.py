"""What a group of ranks is asked to measure, and what comes back: plain data for both sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from steplab.record import Status

Op = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]
OPS: tuple[Op, ...] = get_args(Op)
Dtype = Literal["fp32", "bf16"]
Backend = Literal["gloo", "nccl"]

# Results are verified with integers of 0 to 3: their sum over 85 ranks stays below 256, up to
# which bf16 holds every integer.
LARGEST_VALUE, MAX_WORLD = 3, 85

# Names of the files through which a group and its starter talk, inside one folder.
JOB_FILE, OUTCOME_FILE, FAILURE_FILE, LOG_FILE = "job.json", "outcomes", "failure", "log"


@dataclass(frozen=True)
class Cell:
    """One collective and the size of its message."""

    op: Op
    mib: float

    def __str__(self) -> str:
        return f"{self.op} of {self.mib:g} MiB"


@dataclass(frozen=True)
class Job:
    """The cells that one group of `world` ranks measures, in order."""

    world: int
    backend: Backend
    dtype: Dtype
    cells: tuple[Cell, ...]
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
    late_runs: int = 0  # runs whose time on the device holds a wait for the host
    window_ms: float = 0.0  # wall time of all timed runs, refills and barriers included
