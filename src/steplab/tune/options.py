"""What a search is asked for (TuneOptions), and what every rung of it must pass (GateOptions)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from steplab.core import Recipe
from steplab.techniques.context import Objective
from steplab.verify.shapes import GateShape
from steplab.workers.alternate import MAX_SECONDS, Patience
from steplab.workers.pool import WorkerPool


@dataclass(frozen=True)
class TuneOptions:
    """What a search is for, and what it may cost."""

    objective: Objective = "time"
    minutes: float = 8.0  # of this call; a search that is continued gets them again
    begun: float = field(default_factory=monotonic)  # when they started
    memory_limit: int | None = None  # bytes; None: what the device has
    also_batch: int | None = None  # another batch size at which numerics must hold
    against: Recipe | None = None  # what the winner is compared with at the end
    own: Recipe | None = None  # what the script that is tuned has already
    larger_batches: bool = False  # whether the batch may grow at the end
    allowed: tuple[str, ...] = ()  # settings that change what is computed and may be tried


@dataclass(frozen=True)
class GateOptions:
    """How candidates are verified and measured, and the pool that their workers come from."""

    objective: Objective = "time"
    memory_limit: int | None = None  # bytes; None: what the device has
    shapes: tuple[GateShape, ...] = ()  # at which numerics are compared
    references: Path = Path()  # the folder of what they are compared with
    pool: WorkerPool = field(default_factory=WorkerPool)
    turns_seconds: float = MAX_SECONDS  # that the alternation of one rung may take
    # Whether there are so many seconds to measure an odd gain again with two new processes.
    may_confirm: Callable[[float], bool] = lambda seconds: True
    confirms: bool = False  # other processes found the gain before: these two confirm it
    patience: Patience | None = None  # beyond turns_seconds, where they leave it undecided
