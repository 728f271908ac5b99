"""Kernel launches of one step, counted under the profiler."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from steplab.probes.ran import GRAPH_LAUNCH, LAUNCHES

COUNTED = LAUNCHES | {GRAPH_LAUNCH}  # a replayed graph is one launch of the host


class LaunchCount:
    """A profiler around one step of the user's loop. The step is slower for it: never timed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_cuda = device.type == "cuda"
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_cuda else [])
        self._profiler = profile(activities=activities, acc_events=True)
        self._profiler.start()

    def stop(self) -> int | None:
        """End the profile and return the launches the host issued; None on CPU."""
        if self._device.type != "cuda":
            self._profiler.stop()
            return None
        torch.cuda.synchronize(self._device)
        self._profiler.stop()
        events = self._profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        return sum(event.name() in COUNTED for event in events)

    def abandon(self) -> None:
        """End the profile of a step that failed; its own exception is the one to be seen."""
        try:
            self._profiler.stop()
        except RuntimeError:
            # A CUDA fault in the step makes every later CUDA call fail too, this one included.
            return


def another_profiler_runs() -> bool:
    """Whether the user profiles this step: a second profiler would end theirs without a word."""
    return torch._C._autograd._profiler_enabled()
