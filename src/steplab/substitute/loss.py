"""A linear head and the cross-entropy of its logits become one op, which never holds all logits.

What it saves is memory: at 16,384 tokens and 50,257 words logits and their gradients take 3,242
MiB, the chunks 293 (benchmarks/loss_h200.md). Only where nobody else uses the logits.
"""

# B batch, T tokens, N rows of logits, D width, V vocabulary
from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

from steplab.kernels.cross_entropy import IGNORE_INDEX, IMPLS, PREFERENCE
from steplab.kernels.dispatch import AUTO, select
from steplab.substitute.match import Declined, Match, argument, is_method, shape_of, value_of

ARGUMENTS = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
DEFAULTS = {"ignore_index": IGNORE_INDEX, "reduction": "mean", "label_smoothing": 0.0}
CASTS = ("float", "to", "contiguous", "clone")  # of logits: in fp64 they change nothing
RESHAPES = ("view", "reshape", "flatten")
SWAPS = ("transpose", "permute", "movedim", "swapaxes")
SMALL_BATCH, SMALL_CONTEXT = 2, 9
LARGEST = 1 << 26  # logits that a proof may hold, where they cannot be made fewer

# Does to rows of the head's input, of a given width, what was done to its logits.
Step = Callable[[Graph, Node, int], Node]


class ChunkedHeadLoss:
    """The rewrite."""

    def find(self, graph: GraphModule) -> Iterator[Match | Declined]:
        """Look at every cross-entropy."""
        for node in list(graph.graph.nodes):
            if node.op == "call_function" and node.target is F.cross_entropy:
                found = _match(node)
                yield Declined(node, found) if isinstance(found, str) else found


def _match(node: Node) -> Match | str:
    """Return the match, or why there is none."""
    given = {name: argument(node, 2 + i, name, DEFAULTS) for i, name in enumerate(ARGUMENTS)}
    logits, targets = argument(node, 0, "input"), argument(node, 1, "target")
    if given["weight"] is not None:
        return "it weighs the classes"
    if given["label_smoothing"]:
        return "it smooths the labels"
    if given["size_average"] is not None or given["reduce"] is not None:
        return "it uses arguments that torch has deprecated"
    if value_of(targets) is None or value_of(targets).is_floating_point():
        return "its targets are probabilities"
    way = _way_from_head(logits)
    if isinstance(way, str):
        return way
    head, rows_of = way
    x, weight = (argument(head, i, name) for i, name in enumerate(("input", "weight")))
    if argument(head, 2, "bias") is not None:
        return "its head has a bias"
    (V, D), dtype = shape_of(weight), value_of(head).dtype
    impl = _implementation(x, weight, dtype)
    ignore, reduction = given["ignore_index"], given["reduction"]

    def emit(into: Graph, nodes: Sequence[Node], impl: str = impl) -> tuple[Node, ...]:
        rows, head_weight, target = nodes
        rows = into.call_method("to", (rows, dtype))
        for step in rows_of:
            rows = step(into, rows, D)
        rows = into.call_method("reshape", (rows, -1, D))
        flat = into.call_method("reshape", (target, -1))
        name = "mean" if reduction == "mean" else "per_token"
        loss = into.call_function(getattr(IMPLS[impl], name), (rows, head_weight, flat, ignore))
        if reduction == "sum":
            loss = into.call_method("sum", (loss,))
        elif reduction == "none":
            loss = into.call_method("view_as", (loss, target))
        return (into.call_method("to", (loss, value_of(node).dtype)),)

    sizes = _small_sizes(shape_of(x))
    if not sizes and value_of(logits).numel() > LARGEST:
        return "it is too large to be run as a proof"

    def shrink(given: Sequence[int]) -> list[int]:
        return [*(sizes.get(size, size) for size in given[:-1]), given[-1]]

    small = {
        x: tuple(shrink(shape_of(x))),
        targets: tuple(sizes.get(size, size) for size in shape_of(targets)),
    }
    integers = {targets: (V, ignore)}
    inputs, what = (x, weight, targets), f"cross_entropy {impl}"
    in_torch = partial(emit, impl=PREFERENCE[-1])
    return Match((node,), inputs, emit, what, {}, integers, shrink, small, in_torch)


def _way_from_head(logits: Node) -> tuple[Node, list[Step]] | str:
    """Walk back from the logits that the loss gets to the head; return what happens in between.

    Only rows may be chosen or put in another order on the way, never classes or values.
    """
    steps: list[Step] = []
    axis = 1 if len(shape_of(logits)) > 2 else -1  # of the classes
    node, classes = logits, shape_of(logits)[axis] if shape_of(logits) else 0
    while True:
        if not isinstance(node, Node) or node.op == "placeholder":
            return "its logits come from outside the graph"
        if len(node.users) > 1:
            return "its logits are used elsewhere"
        if is_method(node, "linear"):
            break
        step = _row_step(node, axis, classes)
        if isinstance(step, str):
            return step
        if is_method(node, *SWAPS):
            axis = -1
        steps.insert(0, step)
        node = argument(node, 0, "input")
    if axis != -1 or shape_of(argument(node, 1, "weight"))[:1] != (classes,):
        return "its classes are not the rows of the head"
    return node, steps


def _row_step(node: Node, axis: int, classes: int) -> Step | str:
    """Return what a node does to rows of logits, as something to do to rows of the head's input."""
    shape, before = shape_of(node), shape_of(argument(node, 0, "input"))
    if is_method(node, *CASTS):
        if any(isinstance(value, Node) for value in (*node.args[1:], *node.kwargs.values())):
            return f"{node.target} depends on another tensor"
        return lambda into, rows, width: rows
    if is_method(node, *SWAPS) and axis == 1 and before[-1] == classes:
        # Of (B, T, V) to (B, V, T): the loss wants classes second, the op wants them last.
        return lambda into, rows, width: rows
    if axis != -1 or not shape or shape[-1] != classes:
        return "its classes are cut off or moved"
    if is_method(node, *RESHAPES):
        sizes = (-1,) if len(shape) == 2 else shape[:-1]
        return lambda into, rows, width: into.call_method("reshape", (rows, *sizes, width))
    if node.op == "call_function" and node.target is operator.getitem:
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        if not before:
            return "a function with several results stands between head and loss"
        if not _leaves_last_axis(index, len(before)):
            return "its classes are cut off"
        return lambda into, rows, width: into.call_function(operator.getitem, (rows, index))
    name = getattr(node.target, "__name__", node.target)
    return f"{name} stands between head and loss"


def _leaves_last_axis(index: Sequence[Any], axes: int) -> bool:
    """Whether an index of numbers and slices takes all of the last of so many axes."""
    if not all(part is ... or type(part) in (int, slice) for part in index):
        return False
    reaches_last = ... in index or len(index) == axes
    return not reaches_last or index[-1] in (..., slice(None))


def _implementation(x: Node, weight: Node, dtype: torch.dtype) -> str:
    """Return the first chunked implementation that takes these tensors."""

    device = value_of(x).device
    x_ = torch.empty(1, 1, dtype=dtype, device=device).expand(1, shape_of(x)[-1])
    weight_ = torch.empty(1, 1, dtype=value_of(weight).dtype, device=device)
    return select("cross_entropy", IMPLS, PREFERENCE, AUTO, x_, weight_.expand(shape_of(weight)))


def _small_sizes(shape: Sequence[int]) -> dict[int, int]:
    """Return what sizes of the batch become in a small one; {} where one size has two meanings."""
    if len(shape) != 3:
        return {shape[0]: min(shape[0], SMALL_BATCH * SMALL_CONTEXT)} if len(shape) == 2 else {}
    (B, T), (b, t) = shape[:2], (min(shape[0], SMALL_BATCH), min(shape[1], SMALL_CONTEXT))
    meanings = [(B, b), (T, t), (B * T, b * t), (T - 1, t - 1), (B * (T - 1), b * (t - 1))]
    sizes = dict(meanings)
    return sizes if all(sizes[size] == small for size, small in meanings) else {}


REWRITE = ChunkedHeadLoss()
