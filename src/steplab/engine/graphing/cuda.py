"""CUDA's side of it: warm up on a stream of its own, capture, replay."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from steplab.engine.graphing.refusals import refused_capture, refused_sync, waits


class CudaGraphs:
    """Warms up and captures on one side stream of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def warm(self, run: Callable[[], Any], strict: bool) -> Any:
        """Run plainly where the capture will be; `strict` refuses any wait for the device."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            out = _without_waits(run) if strict else run()
        current.wait_stream(self.stream)
        return out

    def capture(self, run: Callable[[], Any]) -> CudaReplay:
        """Record what `run` launches, without executing it."""
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        try:
            # Thread-local: threads that read data may allocate meanwhile.
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                outputs = run()
        except Exception as error:
            # A capture that fails leaves its own stream as the current one.
            torch.cuda.set_stream(before)
            raise refused_capture(error) from error
        return CudaReplay(graph, outputs)


class CudaReplay:
    """A captured graph with the tensors that it writes."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Any) -> None:
        self.graph = graph
        self.outputs = outputs

    def __call__(self) -> Any:
        """Launch it on the current stream; the outputs are overwritten by every call."""
        self.graph.replay()
        return self.outputs


def _without_waits(run: Callable[[], Any]) -> Any:
    try:
        with sync_debug_mode("error"):
            return run()
    except RuntimeError as error:
        if not waits(error):
            raise
        raise refused_sync(error) from error


@contextlib.contextmanager
def sync_debug_mode(mode: str) -> Iterator[None]:
    """Let torch warn or raise where the host waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        _set_mode(mode)
        yield
    finally:
        _set_mode(before)


def _set_mode(mode: str | int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)
