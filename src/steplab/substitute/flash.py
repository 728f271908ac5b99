"""Attention without a mask, or with a causal one, runs by our own kernel instead of torch's choice.

On an H200 with heads of 64, forward and backward, `triton_flash` took 3.47 ms and cuDNN, which
torch chooses there, 3.57 (benchmarks/attention_h200.md); in a Llama of 32 heads and 8 of keys
cuDNN's backward ran at 320 TFLOP/s. So it is taken only where it is named: measure both.
"""

# B batch, H heads, G heads of keys and values, T queries, S keys, D head width
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch.fx import Graph, GraphModule, Node

from steplab.kernels.attention import IMPLS, AttentionInputs, attention
from steplab.kernels.dispatch import REFERENCE, refusal
from steplab.substitute.attention import ARGUMENTS, ATTENTION, DEFAULTS, SMALL
from steplab.substitute.match import Declined, Match, argument, shape_of, value_of


class OwnAttention:
    """The rewrite, by one implementation."""

    def __init__(self, impl: str = "triton_flash") -> None:
        self.impl = impl

    def find(self, graph: GraphModule) -> Iterator[Match | Declined]:
        """Look at every call of torch's attention."""
        for node in list(graph.graph.nodes):
            if node.op == "call_function" and node.target is ATTENTION:
                found = self._match(node)
                yield Declined(node, found) if isinstance(found, str) else found

    def _match(self, node: Node) -> Match | str:
        """Return the match, or why there is none."""
        inputs = tuple(argument(node, i, name) for i, name in enumerate(("query", "key", "value")))
        given = {name: argument(node, 3 + i, name, DEFAULTS) for i, name in enumerate(ARGUMENTS)}
        causal, shapes = bool(given["is_causal"]), [shape_of(one) for one in inputs]
        if given["attn_mask"] is not None:
            return "it has a mask"
        if given["dropout_p"]:
            return "it drops out"
        if any(len(shape) != 4 for shape in shapes) or shapes[1] != shapes[2]:
            return "attention over other than four axes, or values unlike their keys"
        (B, H, T, D), (key_batch, G, S, _) = shapes[:2]
        if key_batch != B:
            return "its keys are shared by several sequences"
        if given["scale"] is not None and not math.isclose(given["scale"], D**-0.5):
            return "it scales in its own way"
        if causal and T != S:
            return "it has not as many queries as keys"
        if H != G and not given["enable_gqa"]:
            return "its heads are shared in another way"
        dtype = value_of(node).dtype
        empty = torch.empty((), dtype=dtype, device=value_of(node).device)
        q, k, v = (empty.expand(shape) for shape in shapes)
        reason = refusal(IMPLS[self.impl], AttentionInputs(q, k, v, causal))
        if reason:
            return f"attention {self.impl!r} {reason}"

        def emit(into: Graph, nodes: Sequence[Node], impl: str = self.impl) -> tuple[Node, ...]:
            # As autocast does to the operands of torch's.
            narrow = [into.call_method("to", (one, dtype)) for one in nodes]
            return (into.call_function(attention, (impl, *narrow, causal)),)

        small = {
            one: (min(shape[0], 2), shape[1], min(shape[2], SMALL), D)
            for one, shape in zip(inputs, shapes, strict=True)
        }
        by_definition = partial(emit, impl=REFERENCE)
        what = f"attention {self.impl}"
        return Match((node,), inputs, emit, what, {}, {}, list, small, by_definition)


REWRITE = OwnAttention()
