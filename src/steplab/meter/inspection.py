"""Inspection: one step of a user's loop under the profiler, for its launches and its dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.profiler import profile

from steplab.probes.ran import GRAPH_LAUNCH, LAUNCHES, matmul_dtype, profiler_activities

COUNTED = LAUNCHES | {GRAPH_LAUNCH}  # a replayed graph is one launch of the host


@dataclass(frozen=True)
class Inspected:
    """What the inspected step showed; all None before it has run."""

    step: int | None = None  # its number, from 1
    launches: int | None = None  # kernels and graphs that the host launched; None on CPU
    dtype: str | None = None  # of the matrix products
    why_no_dtype: str = ""  # "" where it is known, or still may be


class Inspection:
    """A profiler around one step, which is never timed: the profiler slows it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_cuda = device.type == "cuda"
        activities = profiler_activities(self._on_cuda)
        # record_shapes also records dtypes; the shapes weigh one matrix product against another.
        self._profiler = profile(activities=activities, record_shapes=True, acc_events=True)
        self._profiler.start()

    def stop(self, step: int) -> Inspected:
        """End the profile of step number `step` and return what it showed."""
        if self._on_cuda:
            torch.cuda.synchronize(self._device)
        self._profiler.stop()
        events = self._profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        launches = sum(event.name() in COUNTED for event in events) if self._on_cuda else None
        dtype, reason = matmul_dtype(events, self._device)
        return Inspected(step, launches, dtype, f"step {step} {reason}" if reason else "")

    def abandon(self) -> None:
        """End the profile of a step that failed; only the step's own exception may surface."""
        try:
            self._profiler.stop()
        except RuntimeError:
            # A CUDA fault in the step makes every later CUDA call fail too, this one included.
            return


def another_profiler_runs() -> bool:
    """Whether the user profiles this step: a second profiler would silently end theirs."""
    return torch._C._autograd._profiler_enabled()
