"""RMSNorm and LayerNorm, with the addition to the residual stream before them, become one kernel.

Written op by op or by torch's function. Inductor fuses such chains by itself, so this is taken only
where it is named (`substitute=norm`), for a measurement to decide: on an H200 nanoGPT's step gained
1 % by it, a Llama's lost half of one (benchmarks/own_loop_h200.md).
"""

# D width
from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from steplab.kernels import layer_norm, rms_norm
from steplab.kernels.dispatch import REFERENCE, refusal
from steplab.substitute.match import Declined, Match, argument, is_method, shape_of, value_of

CASTS = ("float", "to", "type_as")
SMALL = 6  # rows along each axis before the width


@dataclass(frozen=True)
class Norm:
    """A norm that was found: `stream` is what it is of, `output` what it returns."""

    op: Any  # the kernel's package
    output: Node
    stream: Node
    weight: Node
    bias: Node | None
    eps: float


class FusedNorm:
    """The rewrite, by one implementation of both norms."""

    def __init__(self, impl: str = "triton_norm") -> None:
        self.impl = impl

    def find(self, graph: GraphModule) -> Iterator[Match | Declined]:
        """Look at every norm of torch, and at every reciprocal root of a mean of squares."""
        for node in list(graph.graph.nodes):
            if node._erased:
                continue
            if is_method(node, "rsqrt"):
                found: Norm | str = _written_out(node)
            elif is_method(node, "layer_norm", "rms_norm"):
                found = _by_torch(node)
            else:
                continue
            if isinstance(found, str):
                yield Declined(node, found)
            else:
                yield self._match(replace(found, output=_show_rounding(found.output)))

    def _match(self, norm: Norm) -> Match | Declined:
        vectors = [norm.weight, *([norm.bias] if norm.bias is not None else [])]
        added = _addition(norm.stream)
        inputs = (*(added or (norm.stream,)), *vectors)
        has_users = bool(set(norm.stream.users) - set(_interior(norm)))
        outputs = (norm.output, norm.stream) if added and has_users else (norm.output,)
        dtype = value_of(norm.output).dtype
        reason = self._refusal(norm, added)
        if reason:
            name = norm.op.__name__.rpartition(".")[2]
            return Declined(norm.output, f"{name} {self.impl!r} {reason}")

        def emit(into: Graph, nodes: Sequence[Node], impl: str = self.impl) -> tuple[Node, ...]:
            streams, own = nodes[: -len(vectors)], nodes[-len(vectors) :]
            more = streams[1] if len(streams) > 1 else None
            bias = [own[1] if len(own) > 1 else None] if norm.op is layer_norm else []
            arguments = (impl, streams[0], own[0], *bias, norm.eps, more, dtype)
            call = norm.op.layer_norm if norm.op is layer_norm else norm.op.rms_norm
            both = into.call_function(call, arguments)
            parts = [into.call_function(operator.getitem, (both, i)) for i in range(len(outputs))]
            return tuple(parts)

        small = {
            node: (*(min(size, SMALL) for size in shape_of(node)[:-1]), shape_of(node)[-1])
            for node in inputs[: -len(vectors)]
        }
        kind = "layer_norm" if norm.op is layer_norm else "rms_norm"
        what = f"{'add and ' if added else ''}{kind} {self.impl}"
        by_definition = partial(emit, impl=REFERENCE)
        return Match(outputs, inputs, emit, what, {}, {}, list, small, by_definition)

    def _refusal(self, norm: Norm, added: tuple[Node, Node] | None) -> str:
        def like(node: Node | None) -> Any:
            if node is None:
                return None
            value = value_of(node)
            one = torch.empty((), dtype=value.dtype, device=value.device)
            return one.expand(value.shape)

        x, more = added or (norm.stream, None)
        bias = [like(norm.bias)] if norm.op is layer_norm else []
        return refusal(norm.op.IMPLS[self.impl], like(x), like(norm.weight), *bias, like(more))


def _show_rounding(output: Node) -> Node:
    """Return what the products behind a norm get: the node itself, or its rounding by autocast.

    That is no node of the graph, but autocast's; it is put there, so that a kernel can round what
    it writes. Otherwise fp32 would be written, and read again to be rounded.
    """
    dtypes = {_dtype_taken(user, output) for user in output.users}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    if dtype is None or dtype == value_of(output).dtype:
        return output
    with output.graph.inserting_after(output):
        rounded = output.graph.call_method("to", (output, dtype))
    rounded.meta = {**output.meta, "example_value": value_of(output).to(dtype)}
    output.replace_all_uses_with(rounded, delete_user_cb=lambda user: user is not rounded)
    return rounded


def _dtype_taken(user: Node, output: Node) -> torch.dtype | None:
    """Return the dtype in which a product takes a tensor, or a cast makes of it; else None."""
    if is_method(user, "linear") and argument(user, 0, "input") is output:
        dtype: torch.dtype = value_of(user).dtype
        return dtype
    asked = argument(user, 1, "dtype") if is_method(user, "to") else None
    return asked if isinstance(asked, torch.dtype) else None


def _by_torch(node: Node) -> Norm | str:
    """Read a call of torch's own function."""
    x, shape = argument(node, 0, "input"), argument(node, 1, "normalized_shape")
    weight = argument(node, 2, "weight")
    is_layer = is_method(node, "layer_norm")
    bias = argument(node, 3, "bias") if is_layer else None
    eps = argument(node, 4 if is_layer else 3, "eps", {"eps": 1e-5} if is_layer else {})
    if weight is None:
        return "it has no weight"
    if tuple(shape) != shape_of(x)[-1:]:
        return "it is over more than one axis"
    if eps is None:
        eps = torch.finfo(value_of(x).dtype).eps
    return Norm(layer_norm if is_layer else rms_norm, node, x, weight, bias, eps)


def _written_out(rsqrt: Node) -> Norm | str:
    """Read x * rsqrt(mean(x^2) + eps) * weight, with casts in between."""
    total = argument(rsqrt, 0, "input")
    if not is_method(total, "add") or not isinstance(total.args[1], float):
        return "no eps is added under the root"
    mean, eps = total.args
    if not is_method(mean, "mean") or argument(mean, 1, "dim") not in (-1, (-1,), [-1]):
        return "it is not of a mean over the last axis"
    square = argument(mean, 0, "input")
    wide = argument(square, 0, "input") if isinstance(square, Node) else None
    is_square = is_method(square, "square") or (
        (is_method(square, "pow") and square.args[1] == 2)
        or (is_method(square, "mul") and square.args[0] is square.args[1])
    )
    if not is_square or not isinstance(wide, Node):
        return "it is not of a mean of squares"
    inside = [square, mean, total, rsqrt]
    if any(len(node.users) != 1 for node in inside):
        return "a part of it is used elsewhere"
    unit = next(iter(rsqrt.users))
    if not is_method(unit, "mul") or {*unit.args} != {wide, rsqrt}:
        return "the root does not scale what it is of"
    node = unit
    while True:
        if len(node.users) != 1:
            return "a part of it is used elsewhere"
        node = next(iter(node.users))
        if is_method(node, "mul"):
            break
        if not is_method(node, *CASTS):
            return "no weight follows"
    weight = next((one for one in node.args if shape_of(one) == shape_of(node)[-1:]), None)
    if not isinstance(weight, Node):
        return "no weight as wide as the rows follows"
    stream = argument(wide, 0, "input") if is_method(wide, "float", "to") else wide
    return Norm(rms_norm, node, stream, weight, None, eps)


def _interior(norm: Norm) -> list[Node]:
    probe = Match((norm.output,), (norm.stream, norm.weight), lambda graph, nodes: (), "")
    return probe.interior


def _addition(stream: Node) -> tuple[Node, Node] | None:
    """Return the two tensors of one shape whose sum a stream is; None where it is no such sum."""
    if not is_method(stream, "add") or len(stream.args) != 2 or stream.kwargs:
        return None
    first, second = stream.args
    if not isinstance(first, Node) or not isinstance(second, Node) or first is second:
        return None
    same = shape_of(first) == shape_of(second) == shape_of(stream) != ()
    return (first, second) if same else None


REWRITE = FusedNorm()
