"""Hazards of a step: what makes the host wait, branches on values, sizes that vary."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from steplab.core import Column, Table
from steplab.step import step
from steplab.trace.user_frames import calling_line

WAIT = "host sync"
BRANCH = "control flow"
VARIES = "varying size"
BREAK = "graph break"
RECOMPILES = "recompiles"
KINDS = (WAIT, BRANCH, VARIES, BREAK, RECOMPILES)
STEP_FILE = step.__file__  # only lines that were called from here belong to a step

OpLocation = tuple[str, str]  # line, op


@dataclass(frozen=True)
class Hazard:
    """One line of the user's code, what it calls, why that costs and what to do instead."""

    kind: str
    line: str
    op: str
    why: str
    remedy: str
    times: float | None = None  # per step; None where it was not counted


def hazard_table(hazards: list[Hazard], title: str, note: str) -> Table:
    """Return one row per hazard, grouped by kind, in the order in which they were met."""
    columns = tuple(map(Column, ("kind", "line", "op", "a step", "why", "remedy")))
    ordered = sorted(hazards, key=lambda one: KINDS.index(one.kind))
    rows = tuple((h.kind, h.line, h.op, _count(h.times), h.why, h.remedy) for h in ordered)
    return Table(title, columns, rows, note)


def _count(times: float | None) -> str:
    """A dash and not "unknown": a break is one place, however often it is passed."""
    return "-" if times is None else f"{times:.3g}"


class Wait(NamedTuple):
    """A call that makes the host wait, and what to write instead."""

    kind: str
    op: str
    why: str
    remedy: str


READ = "the host reads a value and waits until the device has it"
COPY = "the host waits for a copy of the tensor"
COUNT = "how many results there are depends on the values: the host waits for the number"
KEEP = "keep it a tensor; read it every N steps, after the step"

# Methods of tensors, by the name that Python calls.
METHODS = {
    "item": Wait(WAIT, ".item()", READ, KEEP),
    "__float__": Wait(WAIT, "float(tensor)", READ, KEEP),
    "__int__": Wait(WAIT, "int(tensor)", READ, KEEP),
    "__index__": Wait(WAIT, "tensor as an index", READ, "index with the tensor, or index_select"),
    "__bool__": Wait(
        BRANCH, "bool(tensor)", "a branch by a value waits for it, and no graph can hold it",
        "compute both and choose with torch.where"
    ),
    "tolist": Wait(WAIT, ".tolist()", COPY, KEEP),
    "numpy": Wait(WAIT, ".numpy()", COPY, KEEP),
    "cpu": Wait(WAIT, ".cpu()", COPY, "copy to pinned memory, non_blocking=True, read it later"),
    "__repr__": Wait(WAIT, "print(tensor)", COPY, "print every N steps, after the step"),
    "__format__": Wait(WAIT, "f'{tensor}'", COPY, "print every N steps, after the step"),
}  # fmt: skip
TO_HOST = METHODS["cpu"]._replace(op='.to("cpu")')

# Operators, by the name that torch dispatches.
MASK = "x[mask]"
OPERATORS = {
    "_local_scalar_dense": METHODS["item"],
    "nonzero": Wait(WAIT, "nonzero", COUNT, "torch.where(mask, a, b), or topk of a fixed size"),
    MASK: Wait(WAIT, MASK, COUNT, "torch.where(mask, x, 0), or gather a fixed number of rows"),
    "masked_select": Wait(WAIT, "masked_select", COUNT, "torch.where(mask, x, 0)"),
    "bincount": Wait(WAIT, "bincount", COUNT, "zeros(n).scatter_add(0, x, ones), or histc"),
    "repeat_interleave": Wait(WAIT, "repeat_interleave", COUNT, "give it output_size="),
    "equal": Wait(WAIT, "torch.equal", READ, "(a == b).all(), kept a tensor"),
    "allclose": Wait(WAIT, "torch.allclose", READ, "torch.isclose(a, b).all(), kept a tensor"),
}
TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.cudagraph_unsafe)


def operator_wait(func: Any, args: Any) -> Wait | None:
    """Return the Wait of an operator; None if it does not make the host wait."""
    name = func._overloadpacket.__name__
    if name in ("index", "index_put", "index_put_"):
        return OPERATORS[MASK] if _selects_by_mask(name, args) else None
    if not any(tag in func.tags for tag in TAGS):
        return None
    if name in OPERATORS:
        return OPERATORS[name]
    if torch.Tag.cudagraph_unsafe in func.tags:
        reads = "it reads values on the host"
        return Wait(WAIT, f"{func.namespace}::{name}", reads, "use another implementation of it")
    return Wait(WAIT, name.strip("_"), COUNT, "an operation whose result has a fixed size")


def _selects_by_mask(name: str, args: Any) -> bool:
    """Whether a boolean mask selects; filling with one value needs no count."""
    masked = any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return masked and (name == "index" or args[2].numel() != 1)


LineWait = tuple[str, Wait]


class ObservedStep:
    """The waits and result sizes of one step, by line."""

    def __init__(self) -> None:
        self.waits: Counter[LineWait] = Counter()
        self.read: dict[LineWait, set[int]] = defaultdict(set)  # whole numbers that came of them
        self.shapes: dict[OpLocation, Counter[tuple[int, ...]]] = defaultdict(Counter)

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Observe the step that runs inside."""
        calls = _Calls(self)
        with calls, _Operators(self, calls):
            yield

    def note(self, wait: Wait, out: Any = None) -> None:
        """Count a wait for `out`, unless it is in torch's own code, such as an optimizer's loop."""
        line = calling_line(STEP_FILE)
        if line:
            self.waits[line, wait] += 1
            self.read[line, wait] |= {one for one in tree_leaves(out) if type(one) is int}


class _Calls(TorchFunctionMode):
    """Sees the calls of Python code: on a CPU, tolist, numpy and cpu dispatch no operator."""

    def __init__(self, observed: ObservedStep) -> None:
        super().__init__()
        self.step = observed
        self.inside = (
            0  # depth of calls that were noted: the operators inside them are not noted again
        )

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note the call, then make it."""
        wait = _method_wait(func, args, kwargs or {})
        if wait is None:
            return func(*args, **(kwargs or {}))
        self.inside += 1
        try:
            out = func(*args, **(kwargs or {}))
        finally:
            self.inside -= 1
        if not self.inside:
            self.step.note(wait, out)
        return out


class _Operators(TorchDispatchMode):
    """Sees operators, including those of backward and of the user's autograd functions."""

    supports_higher_order_operators = True

    def __init__(self, observed: ObservedStep, calls: _Calls) -> None:
        super().__init__()
        self.step = observed
        self.calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator, then note it."""
        out = func(*args, **(kwargs or {}))
        if isinstance(func, HigherOrderOperator):
            return out
        wait = None if self.calls.inside else operator_wait(func, args)
        if wait is not None:
            self.step.note(wait)
        line = calling_line(STEP_FILE)
        if line:
            where = (line, func._overloadpacket.__name__)
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self.step.shapes[where][tuple(leaf.shape)] += 1
        return out


def _method_wait(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Wait | None:
    name = getattr(func, "__name__", "")
    if name == "to" and "cpu" in [*args[1:], *kwargs.values()]:
        return TO_HOST
    # Methods called `numpy` or `item` of other classes may do anything.
    own = getattr(torch.Tensor, name, None)
    return METHODS.get(name) if own is func or name.startswith("__") else None
