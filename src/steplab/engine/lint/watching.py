"""Watches a step from inside torch: which calls wait, and the sizes of all results."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from steplab.engine import step
from steplab.engine.lint.waits import METHODS, TO_HOST, Wait, wait_of
from steplab.engine.places import calling_line

Place = tuple[str, str]  # line, op
STEP_FILE = step.__file__  # lines count that the step calls


class Sightings:
    """What was seen in one step."""

    def __init__(self) -> None:
        self.waits: Counter[tuple[str, Wait]] = Counter()  # by line
        self.shapes: dict[Place, Counter[tuple[int, ...]]] = defaultdict(Counter)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what runs inside."""
        calls = _Calls(self)
        with calls, _Operators(self, calls):
            yield

    def wait(self, wait: Wait) -> None:
        """Note a wait; one in torch's own loops, such as an optimizer's, is none of the user's."""
        line = calling_line(STEP_FILE)
        if line:
            self.waits[line, wait] += 1


class _Calls(TorchFunctionMode):
    """Sees calls as Python makes them: tolist, numpy and cpu dispatch nothing on a CPU."""

    def __init__(self, seen: Sightings) -> None:
        super().__init__()
        self.seen = seen
        self.inside = 0  # of calls that were noted: their own operators are not noted again

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note it, then do it."""
        wait = _method_wait(func, args, kwargs or {})
        if wait is None:
            return func(*args, **(kwargs or {}))
        if not self.inside:
            self.seen.wait(wait)
        self.inside += 1
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.inside -= 1


class _Operators(TorchDispatchMode):
    """Sees operators, also those of backward and of a user's own autograd functions."""

    supports_higher_order_operators = True

    def __init__(self, seen: Sightings, calls: _Calls) -> None:
        super().__init__()
        self.seen = seen
        self.calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the op, then note it."""
        out = func(*args, **(kwargs or {}))
        if isinstance(func, HigherOrderOperator):
            return out
        wait = None if self.calls.inside else wait_of(func, args)
        if wait is not None:
            self.seen.wait(wait)
        line = calling_line(STEP_FILE)
        if line:
            place = (line, func._overloadpacket.__name__)
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self.seen.shapes[place][tuple(leaf.shape)] += 1
        return out


def _method_wait(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Wait | None:
    name = getattr(func, "__name__", "")
    if name == "to" and "cpu" in [*args[1:], *kwargs.values()]:
        return TO_HOST
    # Of another class, `numpy` or `item` may be anything.
    own = getattr(torch.Tensor, name, None)
    return METHODS.get(name) if own is func or name.startswith("__") else None
