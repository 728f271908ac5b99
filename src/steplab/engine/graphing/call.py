"""GraphedCall: a function of tensors that is run plainly at first, then captured and replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from steplab.engine.graphing.inputs import StaticInputs
from steplab.errors import Unsupported
from steplab.probes.compilation import graph_count


class Graphs(Protocol):
    """What captures: CUDA, or a stand-in that records the call."""

    device: torch.device

    def warm(self, run: Callable[[], Any], strict: bool) -> Any:
        """Run plainly where the capture will be; `strict` refuses any wait for the device."""
        ...

    def capture(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Record `run` without its effects; return what replays it and gives its outputs."""
        ...


def nothing() -> Mapping[str, Any]:
    """No values of Python that a capture would freeze."""
    return {}


class GraphedCall:
    """Calls `function(inputs)`; every call does its work once, whichever way it is done.

    The first `warmup` calls run plainly: they create what is created lazily, compile, and the
    last of them shows that the host never waits for the device. The next call captures. From
    then on inputs are copied into the graph's own buffers and outputs are copied out of them.
    `baked` tells the values of Python that the capture freezes: one that changes is refused.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        graphs: Graphs,
        warmup: int,
        baked: Callable[[], Mapping[str, Any]] = nothing,
    ) -> None:
        self.function = function
        self.graphs = graphs
        self.warmup = warmup
        self.baked = baked
        self.forget()

    def __call__(self, inputs: Any) -> Any:
        """Do the work of one call and return outputs that later calls leave alone."""
        # Code that was compiled anew may have freed what the captured kernels read.
        if self._replay is not None and graph_count() != self._compiled:
            self.forget()
        if self._replay is None and self._warmed < self.warmup:
            self._warmed += 1
            strict = self._warmed == self.warmup
            return self.graphs.warm(partial(self.function, inputs), strict)
        if self._replay is None:
            self._capture(inputs)
        assert self._replay is not None and self._inputs is not None
        self._refuse_changes()
        self._inputs.fill(inputs)
        return tree_map(_cloned, self._replay())

    def forget(self) -> None:
        """Drop the graph: the next calls warm up and capture anew.

        To be called when a tensor that the function reads has been replaced by another one.
        """
        self._replay: Callable[[], Any] | None = None
        self._inputs: StaticInputs | None = None
        self._frozen: Mapping[str, Any] = {}
        self._warmed = self._compiled = 0

    def _capture(self, inputs: Any) -> None:
        static = StaticInputs(inputs, self.graphs.device)
        self._frozen = self.baked()
        self._replay = self.graphs.capture(partial(self.function, static.values))
        self._inputs, self._compiled = static, graph_count()

    def _refuse_changes(self) -> None:
        now = self.baked()
        for name, value in now.items():
            if value != self._frozen.get(name):
                raise Unsupported(
                    f"{name} was {self._frozen.get(name)} when the CUDA graph was captured and is "
                    f"{value} now: a graph cannot see that.",
                    "Keep it as it was, hold it in a tensor, or leave the graph out.",
                )


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
