"""DecodeStep: what a decoder does for every next token, captured once and replayed on a GPU.

A step reads and writes tensors that stay where they are (the model's static cache, the newest
tokens), so that every call goes on where the last one ended, replayed or not. At batch 1 nearly all
of its time is spent on launches, which a graph has once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from steplab.core.errors import Unsupported
from steplab.step.graphed_call import CudaGraphs, GraphBackend, GraphedCall


class DecodeGraphs(GraphBackend, Protocol):
    """What captures, and can tell before whether that is possible."""

    def watch(self, run: Callable[[], Any]) -> tuple[Any, str]:
        """Run eagerly on the stream of the capture; also say where the host waited, or ""."""
        ...


class DecodeStep:
    """Calls `step(*inputs)`: once op by op, then by replaying a graph of it.

    The first call shows whether the host waits for the device in a step. If it does, if the
    capture fails or if `graphs` is None, as on a CPU, all calls run op by op: the same kernels, the
    same bits. What was to be captured and cannot be is told by `warn`; `why_not` keeps the reason.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        graphs: DecodeGraphs | None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.step = step
        self.graphs = graphs
        self.warn = warn
        self.why_not = ""
        self._call: GraphedCall | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Do one step; return outputs that later steps do not overwrite."""
        if self.graphs is None or self.why_not:
            return self.step(*inputs)
        if self._call is None:
            out, waits = self.graphs.watch(partial(self.step, *inputs))
            if waits:
                self._give_up(f"the host waits for the device at {waits}.")
            self._call = GraphedCall(lambda given: self.step(*given), self.graphs, warmup=0)
            return out
        try:
            return self._call(inputs)
        except Unsupported as error:
            if self._call.captures:  # inputs of another shape: the caller's fault
                raise
            self._give_up(str(error))
            return self.step(*inputs)

    def _give_up(self, why: str) -> None:
        self.why_not = why
        self.warn(f"no CUDA graph of the decoding step, which runs op by op: {why}")


def graphs_on(device: torch.device) -> DecodeGraphs | None:
    """Return what captures on `device`; None where nothing does."""
    return CudaGraphs(device) if device.type == "cuda" else None
