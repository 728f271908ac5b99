"""Match: a part of a traced graph and what could replace it; how the nodes of a graph are read."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from steplab.trace.lines import line_text

Emit = Callable[[Graph, Sequence[Node]], tuple[Node, ...]]


@dataclass(frozen=True)
class Match:
    """A part of a graph, and the nodes that would compute its results instead."""

    outputs: tuple[Node, ...]  # the first one names the place
    inputs: tuple[Node, ...]  # nothing before these belongs to the part
    emit: Emit  # adds the replacement behind the given inputs, and returns its results
    what: str  # the replacement in words: "is_causal, 2 heads for 8"
    constants: Mapping[Node, Tensor] = field(default_factory=dict)  # of the small form
    # Values that an input of integers may have: from 0 to below the first, and the second.
    integers: Mapping[Node, tuple[int, int]] = field(default_factory=dict)
    # What the sizes of a view become, and what inputs and constants are, in the small form that is
    # run as a proof.
    shrink: Callable[[Sequence[int]], list[int]] = list
    small_shapes: Mapping[Node, tuple[int, ...]] = field(default_factory=dict)
    # The same by an implementation that takes fp64, where the one that is chosen does not.
    emit_wide: Emit | None = None
    # Whether no_grad and autocast change nothing in it, so that it may reach across their ends.
    ignores_modes: bool = False

    @property
    def interior(self) -> list[Node]:
        """The nodes that the replacement makes superfluous, in the order of the graph."""
        found, left = set(), [*self.outputs]
        while left:
            node = left.pop()
            if node in found or node in self.inputs or node in self.constants:
                continue
            found.add(node)
            left.extend(node.all_input_nodes)
        return [node for node in self.outputs[0].graph.nodes if node in found]


@dataclass(frozen=True)
class Declined:
    """A place that looked like one for a substitution, and why it is left alone."""

    anchor: Node
    reason: str


class Rewrite(Protocol):
    """One kind of substitution."""

    def find(self, graph: GraphModule) -> Iterator[Match | Declined]:
        """Yield every place that may be meant, in the order of the graph."""
        ...


def value_of(node: Any) -> Any:
    """Return the tensor without data that Dynamo saw for a node; None for what is no tensor."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def shape_of(node: Any) -> tuple[int, ...]:
    """Return the shape of a node; () for what is no tensor, or has a size that is not known."""
    value = value_of(node)
    if value is None or not all(isinstance(size, int) for size in value.shape):
        return ()
    return tuple(value.shape)


def place_of(node: Node) -> str:
    """Return "model.py:12 (forward)": the innermost line outside torch that made a node."""
    frames = re.findall(r'File "(.+?)", line (\d+), in (\S+)', node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if "/torch/" not in frame[0]] or frames
    if not own:
        return node.name
    path, line, function = own[-1]
    return line_text(path, int(line), function)


def argument(node: Node, index: int, name: str, defaults: Mapping[str, Any] = {}) -> Any:
    """Return an argument of a call, given by place or by name; else its default, or None."""
    if index < len(node.args):
        return node.args[index]
    return node.kwargs.get(name, defaults.get(name))


def is_method(node: Any, *names: str) -> bool:
    """Whether a node calls one of these methods of a tensor, or torch's function of that name."""
    if not isinstance(node, Node):
        return False
    if node.op == "call_method":
        return node.target in names
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and name in names and node.target is not operator.getitem


def changes_in_place(node: Node) -> bool:
    """Whether a node writes into a tensor that it was given."""
    if node.op == "call_method":
        name = str(node.target)
    elif node.op == "call_function":
        name = getattr(node.target, "__name__", str(node.target))
        if getattr(node.target, "__module__", "") == "_operator":  # and_ and or_ change nothing
            return name in IN_PLACE_OPERATORS
    else:
        return False
    if name == "__setitem__" or "out" in node.kwargs or node.kwargs.get("inplace") is True:
        return True
    return name.endswith("_") and not name.endswith("__")


IN_PLACE_OPERATORS = frozenset(
    "setitem iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor".split()
)
_RANDOM = re.compile(r"rand|bernoulli|dropout|multinomial|normal|uniform|poisson|exponential")


def constant_value(node: Node) -> Tensor | str:
    """Compute a tensor that depends on no input of its graph; else return why it cannot be had."""
    sources = _ancestors(node)
    for source in sources:
        if source.op in ("placeholder", "get_attr"):
            return f"depends on {source.name}"
        if _RANDOM.search(str(getattr(source.target, "__name__", source.target))):
            return "is random"
    for other in node.graph.nodes:
        if changes_in_place(other) and _may_write_into(other, sources):
            return "is changed in place"
    values: dict[Node, Any] = {}
    with torch.no_grad():
        for one in node.graph.nodes:
            if one in sources:
                args, kwargs = torch.fx.node.map_arg(
                    (one.args, dict(one.kwargs)), values.__getitem__
                )
                if one.op == "call_method":
                    values[one] = getattr(args[0], str(one.target))(*args[1:], **kwargs)
                else:
                    values[one] = one.target(*args, **kwargs)
    value: Tensor = values[node]
    return value


def _may_write_into(node: Node, sources: set[Node]) -> bool:
    """Whether a node that changes a tensor in place may change one of these, or a view of one."""
    target = value_of(node.kwargs.get("out", argument(node, 0, "input")))
    if target is None:
        return bool(sources & _ancestors(node))
    storages = {
        value.untyped_storage()._cdata for value in map(value_of, sources) if value is not None
    }
    return target.untyped_storage()._cdata in storages


def _ancestors(node: Node) -> set[Node]:
    found, left = {node}, [node]
    while left:
        new = set(left.pop().all_input_nodes) - found
        found |= new
        left.extend(new)
    return found
