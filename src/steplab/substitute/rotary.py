"""The sines and cosines of rotary positions are computed once a step and kept, not in every layer.

A compiler takes them for cheap and computes them again wherever they are used, forward and
backward, from positions and frequencies: in Hugging Face's Llama on an H200 the rotations of q
and k took 5.9 ms of a step of 250, of which memory needs 1.3. Kept, they are a table of some
hundred kilobytes. Only where no gradient goes through them, and more than one place uses them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from steplab.substitute.match import Declined, Match, argument, is_method, value_of

CASTS = ("float", "to", "type_as")
LARGEST = 1 << 25  # elements of a table; a larger one had better be computed again


class KeptAngles:
    """The rewrite."""

    def find(self, graph: GraphModule) -> Iterator[Match | Declined]:
        """Look at every sine and cosine."""
        for node in list(graph.graph.nodes):
            if is_method(node, "cos", "sin"):
                found = _match(node)
                yield Declined(node, found) if isinstance(found, str) else found


def _match(node: Node) -> Match | str:
    """Return the match, or why there is none."""
    angles, value = argument(node, 0, "input"), value_of(node)
    if value is None or value.requires_grad:
        return "a gradient goes through it"
    if value.numel() > LARGEST:
        return f"a table of {value.numel():,} elements is too large to be kept"
    chain = [node]
    while len(chain[-1].users) == 1:  # to what is used in several places
        user = next(iter(chain[-1].users))
        if not is_method(user, *CASTS, "mul") or len(user.all_input_nodes) != 1:
            return "it is used in one place only"
        chain.append(user)
    if not chain[-1].users:
        return "nobody uses it"

    def emit(into: Graph, nodes: Sequence[Node]) -> tuple[Node, ...]:
        copies = {angles: nodes[0]}
        for one in chain:
            copies[one] = into.node_copy(one, copies.__getitem__)
        return (into.call_function(KEEP, (copies[chain[-1]],)),)

    # transformers computes them without autocast and rounds them outside: neither is a product.
    return Match((chain[-1],), (angles,), emit, "table kept", ignores_modes=True)


@torch.library.custom_op("steplab::kept_in_memory", mutates_args=())
def kept_in_memory(table: Tensor) -> Tensor:
    """Return a copy, which no compiler computes again: it cannot look inside."""
    return table.clone()


@kept_in_memory.register_fake
def _(table: Tensor) -> Tensor:
    return torch.empty_like(table)


kept_in_memory.register_autograd(lambda ctx, d_table: d_table)
KEEP = torch.ops.steplab.kept_in_memory.default

REWRITE = KeptAngles()
