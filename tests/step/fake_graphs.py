"""A stand-in for CUDA graphs: a closure that is called again and overwrites its outputs."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


class FakeGraphs:
    """Captures on the CPU, without effects, and counts what is asked of it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.warmed: list[bool] = []  # one per plain call: whether it was strict
        self.captures = self.replays = 0

    def warm(self, run: Callable[[], Any], strict: bool) -> Any:
        self.warmed.append(strict)
        return run()

    def capture(self, run: Callable[[], Any]) -> Callable[[], Any]:
        self.captures += 1
        static: list[Any] = []

        def replay() -> Any:
            self.replays += 1
            outputs = run()
            if not static:
                static.append(outputs)
            for kept, new in zip(tree_leaves(static[0]), tree_leaves(outputs), strict=True):
                kept.copy_(new)
            return static[0]

        return replay
