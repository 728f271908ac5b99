"""Two linear layers with GELU between them become one op, with GELU inside its first product.

Inductor fuses GELU by itself, into a pass that waits for memory; inside the product it waits for
nothing. nanoGPT's step on an H200: 30.2 ms with Inductor's passes, 29.1 with `in_product`; passes
of our own (`fused`) lost to Inductor's (30.2 against 29.8), so they are not offered here. On
another machine 28.6 with `in_product` and 28.2 with `in_product_kept`, which keeps the rows behind
the activation as well: 6.8 GiB instead of 5.7, where the step by hand takes 11.4.
"""

# B batch, T tokens, D width, F inner width
from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch.fx import Graph, GraphModule, Node

from steplab.kernels.dispatch import REFERENCE, refusal
from steplab.kernels.feed_forward import IMPLS
from steplab.substitute.match import Declined, Match, argument, is_method, shape_of, value_of

SMALL = 6  # rows along each axis before the width


class FusedFeedForward:
    """The rewrite, by one implementation."""

    def __init__(self, impl: str = "in_product_kept") -> None:
        self.impl = impl

    def find(self, graph: GraphModule) -> Iterator[Match | Declined]:
        """Look at every GELU."""
        for node in list(graph.graph.nodes):
            if is_method(node, "gelu"):
                found = self._match(node)
                yield Declined(node, found) if isinstance(found, str) else found

    def _match(self, gelu: Node) -> Match | str:
        """Return the match, or why there is none."""
        if argument(gelu, 1, "approximate", {"approximate": "none"}) != "none":
            return "it approximates by a tanh"
        first = argument(gelu, 0, "input")
        if not is_method(first, "linear"):
            return "no linear layer comes before it"
        if len(first.users) > 1 or len(gelu.users) != 1:
            return "a part of it is used elsewhere"
        second = next(iter(gelu.users))
        if not is_method(second, "linear") or argument(second, 0, "input") is not gelu:
            return "no linear layer comes after it"
        x, w_in = (argument(first, i, name) for i, name in enumerate(("input", "weight")))
        w_out = argument(second, 1, "weight")
        if argument(first, 2, "bias") is not None or argument(second, 2, "bias") is not None:
            return "its layers have a bias"
        if shape_of(w_in) != shape_of(w_out)[::-1] or len(shape_of(x)) < 2:
            return "it does not end in the width in which it began"
        inputs, dtype = (x, w_in, w_out), value_of(first).dtype
        reason = refusal(IMPLS[self.impl], *_like(inputs, dtype))
        if reason:
            return f"feed_forward {self.impl!r} {reason}"

        def emit(into: Graph, nodes: Sequence[Node], impl: str = self.impl) -> tuple[Node, ...]:
            # As autocast does to the operands of a product; in fp64 it changes nothing.
            narrow = [into.call_method("to", (node, dtype)) for node in nodes]
            rows = into.call_method("flatten", (narrow[0], 0, -2))
            call = IMPLS[impl].feed_forward
            out = into.call_function(call, (rows, *narrow[1:], "gelu", None))
            return (into.call_method("view_as", (out, narrow[0])),)

        small = {x: (*(min(size, SMALL) for size in shape_of(x)[:-1]), shape_of(x)[-1])}
        by_definition = partial(emit, impl=REFERENCE)
        what = f"feed_forward {self.impl}"
        return Match((second,), inputs, emit, what, {}, {}, list, small, by_definition)


def _like(nodes: Sequence[Node], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return x as rows and the weights, in the dtype of the products and without memory."""
    x, *weights = (value_of(node) for node in nodes)
    shapes = [(x.numel() // x.shape[-1], x.shape[-1]), *(tuple(w.shape) for w in weights)]
    return [torch.empty((), dtype=dtype, device=x.device).expand(shape) for shape in shapes]


REWRITE = FusedFeedForward()
