"""Probe: watches a Step and fills one field of its Run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import nn

    from steplab.core import Environment, RunSpec


T = TypeVar("T")


class WatchedStep(Protocol):
    """What a probe may know of a Step: it can be called, and its phases can be watched."""

    watch: Callable[[str], contextlib.AbstractContextManager[Any]]
    optimizer: torch.optim.Optimizer | None
    workload: Any
    parts: Any
    graph: Any  # what captures and replays the step; None where ops are launched one by one

    @property
    def model(self) -> nn.Module:
        """The model."""
        ...

    def __call__(self, micro_batches: Any) -> Any:
        """Run one step."""
        ...


@dataclass(frozen=True)
class Subject:
    """A step under measurement, with its stream of batches."""

    step: WatchedStep
    feed: Iterator[Any]
    spec: RunSpec
    environment: Environment

    @property
    def on_cuda(self) -> bool:
        """Whether the step runs on a CUDA device."""
        return self.spec.device == "cuda"

    def run_step(self) -> Any:
        """Run one more step, outside any window."""
        return self.step(next(self.feed))

    def settle_again(self) -> None:
        """Bring the step back to the state in which it is measured: compiled, captured."""
        for _ in range(self.step.parts.settle_steps):
            self.run_step()

    @contextlib.contextmanager
    def op_by_op(self) -> Iterator[None]:
        """Run the steps inside without replaying a CUDA graph, which would hide the ops.

        The graph is dropped to free its memory; the steps that follow capture it again.
        """
        kept, self.step.graph = self.step.graph, None
        if kept is not None:
            kept.forget()
        try:
            yield
        finally:
            self.step.graph = kept


class Probe:
    """Base of all probes; every hook but `result` is optional.

    Order of calls: `begin`, settle and warm-up steps, `open_window`, the timed steps,
    `close_window`, `inspect` (which may run further steps), `result`.
    """

    def begin(self, subject: Subject) -> None:
        """Look at the assembled step before it runs for the first time."""

    def open_window(self, subject: Subject) -> None:
        """Start watching; must be quick and must not slow the steps that follow."""

    def close_window(self, subject: Subject) -> None:
        """Stop watching; the device has been synchronized."""

    def inspect(self, subject: Subject) -> None:
        """Look closer; may run further steps."""

    def result(self) -> Any:
        """Return the record; None if there is nothing to record."""
        raise NotImplementedError


def without_gradients(run: Callable[[], T]) -> T:
    """Run a forward pass without gradients, which take memory; with them where it asks for some.

    A loss with a gradient penalty does.
    """
    import torch

    try:
        with torch.no_grad():
            return run()
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        return run()
