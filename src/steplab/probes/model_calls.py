"""Calls of whole models in a step, as stretches of its operators."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from steplab.probes.value_graph import WatchedOp

MIN_CALLS = 3
HOOKS_ARE_SEEN = r"Using `torch.compile\(module\)` when there are global hooks"


class ModelCall(NamedTuple):
    """One outermost call of a module."""

    module: int
    begin: int  # number of its first operator
    end: int  # and of the first after it


@contextmanager
def model_calls(operators: Callable[[], int]) -> Iterator[list[ModelCall]]:
    """Yield a list that gets the outermost calls of modules inside the block.

    `operators` tells how many have run.
    """
    found: list[ModelCall] = []
    running: list[tuple[int, int]] = []

    def enter(module: nn.Module, args: Any) -> None:
        running.append((id(module), operators()))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        one, begin = running.pop()
        if not running:
            found.append(ModelCall(one, begin, operators()))

    hooks = (
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    )
    try:
        with warnings.catch_warnings():
            # A compiled module is called twice by them, as torch says: `running` counts that.
            warnings.filterwarnings("ignore", HOOKS_ARE_SEEN)
            yield found
    finally:
        for hook in hooks:
            hook.remove()


def feeds_itself(ops: list[WatchedOp], calls: list[ModelCall]) -> bool:
    """Whether a model that is called three times or more needs its own results, as a cell does.

    What a call leaves in a buffer, as statistics of a batch norm, is no result.
    """
    for module in {call.module for call in calls}:
        own = [call for call in calls if call.module == module]
        if len(own) >= MIN_CALLS and any(_needs(ops, *pair) for pair in list(pairwise(own))[:2]):
            return True
    return False


def _needs(ops: list[WatchedOp], first: ModelCall, second: ModelCall) -> bool:
    reached = {index for index in range(first.begin, first.end) if not ops[index].lasts}
    for index in range(first.end, second.end):
        if not ops[index].lasts and not reached.isdisjoint(ops[index].needs):
            if index >= second.begin:
                return True
            reached.add(index)
    return False
