"""ProfilePlan: which steps are recorded, and in how much detail. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from steplab.core.errors import UserError

PROFILE_SPEC = "steplab.profiling.recorder:profile_spec"  # what a worker calls
DEFAULT_SCHEDULE = (1, 2, 3, 1)
# Names of files beside the traces.
AVERAGES_FILE = "key_averages.txt"
DETAIL_FILE = "detail.json.gz"


@dataclass(frozen=True)
class ProfilePlan:
    """The schedule of the lean traces, and whether a detailed step follows.

    A cycle skips `wait` steps, runs the profiler for `warmup` steps and discards them, and records
    `active` steps into one trace. There are `repeat` cycles.
    """

    schedule: tuple[int, ...] = DEFAULT_SCHEDULE  # wait, warmup, active, repeat
    detail: bool = True
    stacks: bool = True  # lines, memory and the flow of values as well, the slowest to record
    shown: str = ""  # the range or module that is asked for

    def __post_init__(self) -> None:
        if len(self.schedule) != 4:
            raise UserError("A schedule has four numbers: wait, warmup, active, repeat.")
        if self.wait < 0 or self.warmup < 0:
            raise UserError(f"A schedule waits and warms up 0 steps or more, not {self.schedule}.")
        if self.active < 1 or self.repeat < 1:
            raise UserError(
                f"The schedule {self.schedule} records nothing.",
                "Of wait, warmup, active and repeat the last two must be 1 or more.",
            )

    @property
    def wait(self) -> int:
        """Steps at the start of a cycle that are not recorded."""
        return self.schedule[0]

    @property
    def warmup(self) -> int:
        """Steps that the profiler discards: starting it costs time."""
        return self.schedule[1]

    @property
    def active(self) -> int:
        """Steps in one trace."""
        return self.schedule[2]

    @property
    def repeat(self) -> int:
        """Cycles, one trace each."""
        return self.schedule[3]

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """The schedule: wait, warmup, active, repeat."""
        return self.wait, self.warmup, self.active, self.repeat

    @property
    def steps(self) -> int:
        """Steps that run for the lean traces."""
        return (self.wait + self.warmup + self.active) * self.repeat
