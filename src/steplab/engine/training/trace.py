"""`--profile`: one step recorded as a Chrome trace, on a fixed schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

from steplab.store.atomic import disk_errors

WAIT, WARMUP, ACTIVE = 10, 10, 1
LAST_STEP = WAIT + WARMUP + ACTIVE


class StepTrace:
    """Call `step()` after every training step; `path` exists once the active step is over."""

    def __init__(self, profiler: profile | None, path: Path) -> None:
        self.profiler = profiler
        self.path = path

    def step(self) -> None:
        """Tell the schedule that a step is over."""
        if self.profiler is not None:
            self.profiler.step()


def _export(profiler: profile, path: Path) -> None:
    """Write the trace; a run that ended before the active step has none to write."""
    if profiler.step_num >= LAST_STEP:
        profiler.export_chrome_trace(str(path))


@contextlib.contextmanager
def traced(wanted: bool, on_cuda: bool, path: Path) -> Iterator[StepTrace]:
    """Record step LAST_STEP with Python stacks into `path`, if it is wanted."""
    if not wanted:
        yield StepTrace(None, path)
        return
    with disk_errors(path.parent, "--checkpoint-dir"):
        path.parent.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_cuda else [])
    with profile(
        activities=activities,
        schedule=schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1),
        on_trace_ready=lambda profiler: _export(profiler, path),
        with_stack=True,
        record_shapes=True,
        acc_events=True,
    ) as profiler:
        yield StepTrace(profiler, path)
