"""GraphedCall: a function of tensors that runs eagerly at first, then as a CUDA graph.

A graph replays the kernels that were launched while it was captured, on the very memory they used
then. So every call's inputs are copied into static buffers, its outputs are copied out of them,
and whatever the capture has frozen (shapes, dtypes, Python values) must stay as it was.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import (
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from steplab.core.errors import SteplabError, Unsupported
from steplab.probes.compilation import graph_count
from steplab.probes.disturbances import note_event
from steplab.step.usual_shapes import PLAIN_TYPES, describe_leaf, shape_of
from steplab.trace.user_frames import error_line

SYNC_MESSAGE = "called a synchronizing CUDA operation"  # torch's words in sync debug mode


def no_values() -> Mapping[str, Any]:
    """A capture that freezes no Python values."""
    return {}


class GraphBackend(Protocol):
    """What captures: CUDA, or a stand-in that records the call."""

    device: torch.device

    def warm(self, run: Callable[[], Any], strict: bool) -> Any:
        """Run eagerly on the stream of the capture; `strict` refuses any wait for the device."""
        ...

    def capture(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Record `run` without its effects; return what replays it and gives its outputs."""
        ...


class GraphedCall:
    """Calls `function(inputs)`: eagerly at first, then by replaying a graph of it.

    The first `warmup` calls run eagerly: they create what is created lazily, compile, and the last
    of them shows that the host never waits for the device. The next call captures, the ones after
    it replay. `frozen_values` returns the Python values that a capture freezes, by name: a call
    after one of them has changed is refused.
    """

    captures = 0  # so far

    def __init__(
        self,
        function: Callable[[Any], Any],
        graphs: GraphBackend,
        warmup: int,
        frozen_values: Callable[[], Mapping[str, Any]] = no_values,
    ) -> None:
        self.function = function
        self.graphs = graphs
        self.warmup = warmup
        self.frozen_values = frozen_values
        self.forget()

    def __call__(self, inputs: Any) -> Any:
        """Do the work of one call; return outputs that later calls do not overwrite."""
        if not self.is_captured:
            if self._warmed < self.warmup:
                self._warmed += 1
                strict = self._warmed == self.warmup
                note_event("ran op by op before a capture")
                return self.graphs.warm(partial(self.function, inputs), strict)
            self._capture(inputs)
        assert self._replay is not None and self._inputs is not None
        self._refuse_changes()
        self._inputs.fill(inputs)
        return tree_map(_clone, self._replay())

    @property
    def is_captured(self) -> bool:
        """Whether the next call is a replay.

        Not once something was compiled: that may have freed what the captured kernels read.
        """
        if self._replay is not None and graph_count() != self._compiled:
            self.forget()
        return self._replay is not None

    def forget(self) -> None:
        """Drop the graph: the next calls warm up and capture again.

        Call it when a tensor that the function reads has been replaced by another one.
        """
        self._replay: Callable[[], Any] | None = None
        self._inputs: StaticInputs | None = None
        self._frozen: Mapping[str, Any] = {}
        self._warmed = self._compiled = 0

    def _capture(self, inputs: Any) -> None:
        static = StaticInputs(inputs, self.graphs.device)
        self._frozen = self.frozen_values()
        self._replay = self.graphs.capture(partial(self.function, static.values))
        self._inputs, self._compiled = static, graph_count()
        self.captures += 1
        note_event("captured the CUDA graph")

    def _refuse_changes(self) -> None:
        for name, value in self.frozen_values().items():
            if value != self._frozen.get(name):
                raise Unsupported(
                    f"{name} was {self._frozen.get(name)} when the CUDA graph was captured and is "
                    f"{value} now: a graph cannot see that.",
                    "Keep it as it was, hold it in a tensor, or leave the graph out.",
                )


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


class CudaGraphs:
    """Warms up and captures on one side stream of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def warm(self, run: Callable[[], Any], strict: bool) -> Any:
        """Run eagerly on the stream of the capture; `strict` refuses any wait for the device."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            out = _run_without_syncs(run) if strict else run()
        current.wait_stream(self.stream)
        return out

    def watch(self, run: Callable[[], Any]) -> tuple[Any, str]:
        """Run eagerly on the stream of the capture; also say where the host waited, or ""."""
        with warnings.catch_warnings(record=True) as seen, sync_debug_mode("warn"):
            warnings.simplefilter("always")
            out = self.warm(run, strict=False)
        waits = [f"{one.filename}:{one.lineno}" for one in seen if SYNC_MESSAGE in str(one.message)]
        for one in seen:
            if SYNC_MESSAGE not in str(one.message):
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        return out, waits[0] if waits else ""

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


class StaticInputs:
    """Copies of one call's inputs: tensors in tuples, lists, dicts and named tuples.

    `values` has their structure and is what the captured function is called with.
    """

    def __init__(self, inputs: Any, device: torch.device) -> None:
        leaves = tree_leaves(inputs)
        for path, leaf in tree_flatten_with_path(inputs)[0]:
            _check_leaf(leaf, keystr(path), device)
        self._example, self._tree = shape_of(inputs)
        static = [_strided_copy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._buffers = [leaf for leaf in static if isinstance(leaf, Tensor)]
        self.values = tree_unflatten(static, self._tree)

    def fill(self, inputs: Any) -> None:
        """Copy one call's tensors into the buffers; refuse inputs of another shape or structure."""
        if shape_of(inputs) != (self._example, self._tree):
            raise Unsupported(
                f"A CUDA graph has fixed shapes: {self._difference(inputs)}.",
                "Yield batches of one shape (drop the last, or pad), or leave the graph out.",
            )
        if self._buffers:
            given = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
            torch._foreach_copy_(self._buffers, given)

    def _difference(self, inputs: Any) -> str:
        """Say which input is not what it was when the graph was captured."""
        found = tree_flatten_with_path(inputs)[0]
        if len(found) != len(self._example):
            return f"{len(self._example)} inputs were captured, {len(found)} came"
        for (path, leaf), was in zip(found, self._example, strict=True):
            if describe_leaf(leaf) != was:
                return f"input {keystr(path)} was {was} and is {describe_leaf(leaf)}"
        return "the inputs are nested in another way than those captured"


def _strided_copy(x: Tensor) -> Tensor:
    """Return a copy with the strides of `x`, gaps included.

    A clone would close the gaps of a slice, and compiled code that was made for the slice would be
    compiled again for the clone, in the middle of the capture, which breaks it.
    """
    if any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True)):
        return x.detach().clone()  # an expanded tensor cannot be written to
    strided = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return strided.copy_(x.detach())


def _check_leaf(leaf: Any, path: str, device: torch.device) -> None:
    if isinstance(leaf, Tensor):
        if leaf.device.type != device.type:
            raise Unsupported(
                f"Input {path} is on {leaf.device}: a CUDA graph on {device} cannot read it.",
                "Move it to the device before the call.",
            )
    elif not isinstance(leaf, PLAIN_TYPES):
        raise Unsupported(
            f"Input {path} is a {type(leaf).__name__}: its tensors cannot be found and replaced.",
            "Use tensors in tuples, lists, dicts or named tuples.",
        )


def is_sync_error(error: BaseException) -> bool:
    """Whether torch raised because the host would have waited for the device."""
    return SYNC_MESSAGE in str(error)


def refused_sync(error: BaseException) -> Unsupported:
    """Return the refusal of a call in which the host waits for the device."""
    return Unsupported(
        f"No CUDA graph: the host waits for the device at {error_line(error)}.",
        "Keep the value on the device; steplab lint lists all such lines.",
    )


def refused_capture(error: Exception) -> Exception:
    """Return what to raise for an error in a capture: a refusal, or the error itself.

    Ending a broken capture raises once more; the first error is the cause.
    """
    first: BaseException = error
    while first.__context__ is not None:
        first = first.__context__
    if isinstance(first, (SteplabError, torch.OutOfMemoryError)):
        return first
    if is_sync_error(first):
        return refused_sync(first)
    cause = " ".join(str(first).split()).split(". ")[0][:200].rstrip(".")
    return Unsupported(
        f"No CUDA graph: {cause} ({error_line(first)}).",
        "steplab lint lists what a graph cannot hold; or leave the graph out.",
    )


def _run_without_syncs(run: Callable[[], Any]) -> Any:
    try:
        with sync_debug_mode("error"):
            return run()
    except RuntimeError as error:
        if not is_sync_error(error):
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
