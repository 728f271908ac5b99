"""Attention of q, k and v from one projection writes one gradient, not three that are then joined.

Compiled, nanoGPT's step on an H200 (B16 H12 T1024 D64) spends 34 us a layer on a pass that only
puts dq, dk and dv side by side. The kernels of `triton_flash` write them into the gradient of the
projection itself: forward and backward take 324.5 us a layer, where cuDNN's take 358.9 and the pass
comes on top.
"""

# B batch, H heads, G heads of keys and values, T tokens, D head width
from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from steplab.kernels.attention import IMPLS, AttentionInputs, attention
from steplab.kernels.attention._packed import cover_once, packed_attention, place_in
from steplab.kernels.dispatch import REFERENCE, refusal
from steplab.kernels.triton_runtime import INTERPRETED
from steplab.substitute.attention import ARGUMENTS as OPTIONS
from steplab.substitute.attention import ATTENTION, DEFAULTS
from steplab.substitute.match import Declined, Match, argument, is_method, shape_of, value_of
from steplab.substitute.modes import is_transformed
from steplab.substitute.proof import SIZED

KERNELS = "triton_flash"
VIEWS = (
    *("split", "chunk", "unbind", "select", "narrow", "view", "reshape", "flatten", "unflatten"),
    *("transpose", "swapaxes", "permute", "movedim", "squeeze", "unsqueeze", "contiguous"),
)
# Where it pays. Forward and backward by triton_flash against cuDNN on one H200, bf16, causal,
# without the pass that cuDNN's gradients need: B16 H12 T1024 D64 324.5 us against 358.9, B4 H32
# T4096 D64 2,489 against 2,397. B1 H4 D64: T128 1.24 times faster, 256 1.15, 512 1.09, 1024 1.05,
# 2048 equal, 4096 slower by 1.19. D128 (B16 H12 T4096) is slower: 6.35 ms against 5.65. Other cards
# than Hopper have not been measured.
WIDEST, LONGEST, CARD = 64, 2048, (9, 0)
SMALL_BATCH, SMALL_TIME = 2, 48  # of the small form that is run as a proof


class PackedAttention:
    """The rewrite, by the kernels, or by the definition, which runs anywhere."""

    def __init__(self, impl: str = KERNELS) -> None:
        self.impl = impl

    def find(self, graph: GraphModule) -> Iterator[Match | Declined]:
        """Look at every call of attention."""
        for node in list(graph.graph.nodes):
            if node.op == "call_function" and node.target is ATTENTION:
                found = self._match(node)
                yield Declined(node, found) if isinstance(found, str) else found

    def _match(self, node: Node) -> Match | str:
        """Return the match, or why there is none."""
        if is_transformed(node):  # what it is given has no memory of its own
            return "torch.func maps or differentiates it"
        causal = _is_causal(node)
        if isinstance(causal, str):
            return causal
        parts = [argument(node, i, name) for i, name in enumerate(("query", "key", "value"))]
        chains = [_views_before(part) for part in parts]
        source = chains[0][0]
        if any(chain[0] is not source for chain in chains):
            return "its q, k and v are not views of one tensor"
        between = {one for chain in chains for one in chain[1:]}
        if any(user not in between | {node} for one in (source, *between) for user in one.users):
            return "what holds q, k and v is used elsewhere"
        reason = self._refusal(node, source, parts, causal)
        if reason:
            return reason
        views = [one for one in node.graph.nodes if one in between]
        dtype, shorter = value_of(node).dtype, _shorter(value_of(parts[0]))
        small: dict[tuple[Any, ...], list[int]] = {}
        for one in views:
            sizes = _sizes_given(one)
            pairs = zip(sizes, shorter(value_of(one)), strict=True) if sizes else ()
            fewer = [-1 if size == -1 else less for size, less in pairs]
            if small.setdefault(sizes, fewer) != fewer:
                return "two of its views have the same sizes and mean others by them"

        def emit(into: Graph, nodes: Sequence[Node], impl: str = self.impl) -> tuple[Node, ...]:
            # As autocast does to the operands of attention; in fp64 it changes nothing.
            packed = into.call_method("to", (nodes[0], dtype))
            copies = {source: packed}
            for one in views:
                copies[one] = into.node_copy(one, copies.__getitem__)
            qkv = [copies[part] for part in parts]
            if impl == KERNELS:
                return (into.call_function(packed_attention, (packed, *qkv, causal)),)
            return (into.call_function(attention, (impl, *qkv, causal)),)

        def by_definition(into: Graph, nodes: Sequence[Node]) -> tuple[Node, ...]:
            return emit(into, nodes, REFERENCE)

        def shrink(sizes: Sequence[int]) -> list[int]:
            return small.get(tuple(sizes), [*sizes])

        shapes = {source: shorter(value_of(source))}
        what = f"packed_attention {self.impl}"
        return Match((node,), (source,), emit, what, {}, {}, shrink, shapes, by_definition)

    def _refusal(self, node: Node, source: Node, parts: Sequence[Node], causal: bool) -> str:
        """Return why these views are not taken, or ""."""
        packed, (q, k, v) = value_of(source), (value_of(part) for part in parts)
        shapes = [shape_of(one) for one in (*parts, source)]
        if any(len(shape) != 4 for shape in shapes[:3]) or not shapes[3]:
            return "it has other than four axes, or sizes that are not known"
        if not packed.is_contiguous() or any(one.dtype != packed.dtype for one in (q, k, v)):
            return "what holds q, k and v is not contiguous, or read in another dtype"
        if q.shape[2] != k.shape[2]:
            return "it has not as many keys as queries"
        if not cover_once(packed.numel(), tuple(place_in(packed, one) for one in (q, k, v))):
            return "its q, k and v do not fill the tensor that they are views of, each place once"
        if not value_of(node).requires_grad:
            return "no gradient goes through it"
        if self.impl == REFERENCE:
            return ""
        one = torch.empty((), dtype=value_of(node).dtype, device=packed.device)
        like = [one.expand(shape) for shape in shapes[:3]]
        reason = refusal(IMPLS[self.impl], AttentionInputs(like[0], like[1], like[2], causal))
        if reason:
            return f"attention {self.impl!r} {reason}"
        if INTERPRETED:  # where nothing is fast
            return ""
        return does_not_pay(shapes[0], one.dtype, torch.cuda.get_device_capability(one.device))


def does_not_pay(shape_BHTD: Sequence[int], dtype: torch.dtype, capability: tuple[int, int]) -> str:
    """Return why attention by the kernels would be slower than torch's, or ""."""
    T, D = shape_BHTD[2:]
    if capability != CARD:
        return f"it has been measured on cards of compute capability {CARD[0]}.{CARD[1]} only"
    if dtype.itemsize != 2:
        return f"it pays in bf16 and fp16 only, not in {dtype}"
    if D > WIDEST:
        return f"with heads wider than {WIDEST} torch's attention is faster"
    if T > LONGEST:
        return f"with more than {LONGEST:,} tokens torch's attention is faster"
    return ""


def _is_causal(node: Node) -> bool | str:
    """Return whether a query sees no later key; else why these options are not taken."""
    given = {name: argument(node, 3 + i, name, DEFAULTS) for i, name in enumerate(OPTIONS)}
    if given["attn_mask"] is not None:
        return "it has a mask"
    if given["dropout_p"] != 0:
        return "it has dropout"
    width = (shape_of(argument(node, 0, "query")) or (0,))[-1]
    if given["scale"] is not None and not (
        isinstance(given["scale"], float)
        and math.isclose(given["scale"] * math.sqrt(width), 1, rel_tol=1e-12)
    ):
        return "it has a scale of its own"
    causal = given["is_causal"]
    return causal if isinstance(causal, bool) else "its is_causal is no constant"


def _views_before(node: Any) -> list[Node]:
    """Return the nodes by which `node` is a view of the first of them."""
    chain = [node]
    while is_method(chain[0], *VIEWS) or chain[0].target is operator.getitem:
        sources = chain[0].all_input_nodes
        if len(sources) != 1 or _memory(sources[0]) != _memory(chain[0]):  # a copy begins here
            break
        chain.insert(0, sources[0])
    return chain


def _memory(node: Node) -> int | None:
    """Return what tells the memory of a tensor, or of parts of one, from that of others."""
    value = node.meta.get("example_value")
    one = value[0] if isinstance(value, (tuple, list)) and value else value
    return one.untyped_storage()._cdata if isinstance(one, Tensor) else None


def _shorter(q_BHTD: Tensor) -> Callable[[Tensor], tuple[int, ...]]:
    """Return the function that gives a view's shape for fewer and shorter sequences.

    Which axis is batch and which is time, or both at once, is told by strides: of the axes of a
    view no two have the same.
    """
    (B, _, T, _), (sequence, _, token, _) = q_BHTD.shape, q_BHTD.stride()
    few, short = min(B, SMALL_BATCH), min(T, SMALL_TIME)
    axes = {(B, sequence): few, (T, token): short}
    if sequence == T * token:
        axes[B * T, token] = few * short

    def shape(view: Tensor) -> tuple[int, ...]:
        sizes = zip(view.shape, view.stride(), strict=True)
        return tuple(axes.get(axis, axis[0]) for axis in sizes)

    return shape


def _sizes_given(node: Node) -> tuple[Any, ...]:
    """Return what a view is told to become; () where it is told nothing of the kind."""
    if not is_method(node, *SIZED):
        return ()
    sizes: Any = node.args[1:]
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes


REWRITE = PackedAttention()
