"""Dense masks that are causal become `is_causal`, and keys repeated for many heads are shared.

Fused attention skips what a causal mask hides, and reads each key once for all heads that share it.
A dense mask is read like any other matrix: on an H200 attention took 2 to 3.3 times as long with
one (benchmarks/attention_h200.md). Compiled transformers models build such a mask in every step.
"""

# B batch, H heads, G heads of keys and values, T queries, S keys, D head width
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from steplab.substitute.match import (
    Declined,
    Match,
    argument,
    constant_value,
    is_method,
    shape_of,
    value_of,
)

ATTENTION = torch.nn.functional.scaled_dot_product_attention
ARGUMENTS = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")  # behind q, k and v
DEFAULTS = {"dropout_p": 0.0, "is_causal": False, "enable_gqa": False}
# What may stand between shared keys and those of every head.
VIEWS = tuple("getitem unsqueeze expand reshape view flatten contiguous repeat_interleave".split())
MATH = 0  # the number of torch's attention by plain products, which no other took
SMALL = 48  # tokens that tell a group of heads from another


class SharedCausalAttention:
    """The rewrite."""

    def find(self, graph: GraphModule) -> Iterator[Match | Declined]:
        """Look at every call of attention with a mask, or with repeated keys."""
        masks: dict[Node, Tensor | str] = {}  # computed once for all layers
        for node in list(graph.graph.nodes):
            if node.op != "call_function" or node.target is not ATTENTION:
                continue
            found = _match(node, masks)
            if found is not None:
                yield found


def _match(node: Node, masks: dict[Node, Tensor | str]) -> Match | Declined | None:
    q, k, v = (argument(node, i, name) for i, name in enumerate(("query", "key", "value")))
    given = {name: argument(node, 3 + i, name, DEFAULTS) for i, name in enumerate(ARGUMENTS)}
    mask, is_causal = given["attn_mask"], bool(given["is_causal"])
    q_shape, k_shape = shape_of(q), shape_of(k)
    if len(q_shape) != 4 or len(k_shape) != 4:
        return None if mask is None else Declined(node, "attention over other than four axes")
    constants: dict[Node, Tensor] = {}
    if mask is not None:
        value = masks[mask] if mask in masks else masks.setdefault(mask, constant_value(mask))
        if isinstance(value, str):
            return Declined(node, f"its mask {value}")
        seen = visible(value, q_shape[2], k_shape[2])
        if seen is None:
            return Declined(node, "its mask is neither causal nor empty")
        small_mask = value[..., :SMALL, :SMALL]
        constants = {mask: small_mask[:2] if value.ndim == 4 else small_mask}
        is_causal = seen == "causal"
    sources = None if given["enable_gqa"] else shared_heads(q, k, v, is_causal)
    if mask is None and sources is None:
        return None
    inputs = (q, *(sources or (k, v)))
    words = ["is_causal" if is_causal else "no mask"] if mask is not None else []
    if sources:
        words.append(f"{shape_of(sources[0])[1]} heads of keys for {q_shape[1]}")
    options = {**given, "attn_mask": None, "is_causal": is_causal}
    options["enable_gqa"] = bool(given["enable_gqa"] or sources)

    def emit(into: Graph, nodes: Sequence[Node]) -> tuple[Node, ...]:
        kept = {name: value for name, value in options.items() if value is not None}
        return (into.call_function(ATTENTION, tuple(nodes), {"attn_mask": None, **kept}),)

    small = {one: tuple(_shrink(shape_of(one))) for one in inputs}
    return Match((node,), inputs, emit, ", ".join(words), constants, {}, _shrink, small)


def visible(mask: Tensor, queries: int, keys: int) -> str | None:
    """Return "causal" or "full" for a mask that hides exactly the keys to come, or none; else None.

    A mask of floats must add 0 to what is seen, and to the rest what no score can make up for.
    """
    if mask.shape[-2:] != (queries, keys) or queries != keys or keys < 2:
        return None
    if mask.dtype == torch.bool:
        shown = mask
    elif mask.is_floating_point():
        shown = mask == 0
        hidden = mask <= torch.finfo(mask.dtype).min
        if not bool((shown | hidden).all()):
            return None
    else:
        return None
    causal = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()
    if torch.equal(shown, causal.expand_as(shown)):
        return "causal"
    return "full" if bool(shown.all()) else None


def shared_heads(q: Node, k: Node, v: Node, is_causal: bool) -> tuple[Node, Node] | None:
    """Return keys and values before they were repeated for every head; None where they were not.

    None also where only torch's plain products take shared heads.
    """
    found = [_before_repetition(one, shape_of(q)[1]) for one in (k, v)]
    k_BGSD, v_BGSD = found
    if k_BGSD is None or v_BGSD is None or shape_of(k_BGSD)[1] != shape_of(v_BGSD)[1]:
        return None
    device = value_of(q).device
    dtype = value_of(q).dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    shapes = (shape_of(q), shape_of(k_BGSD), shape_of(v_BGSD))
    q_, k_, v_ = (torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
    chosen = torch._fused_sdp_choice(q_, k_, v_, None, 0.0, is_causal, enable_gqa=True)
    return None if chosen == MATH else (k_BGSD, v_BGSD)


def _before_repetition(node: Node, heads: int) -> Node | None:
    """Walk back over views to a tensor of fewer heads whose repetition is exactly `node`."""
    B, H, S, D = shape_of(node)
    chain = [node]
    while isinstance(chain[-1], Node) and (chain[-1].op != "placeholder"):
        last = chain[-1]
        if not is_method(last, *VIEWS) and "getitem" not in str(last.target):
            return None
        source = last.args[0]
        if not isinstance(source, Node):
            return None
        chain.append(source)
        shape = shape_of(source)
        if len(shape) == 4 and shape[1] < H == heads and shape[::2] == (B, S) and shape[3] == D:
            numbers = torch.arange(B * shape[1] * S * D, dtype=torch.int32).reshape(shape)
            value: Any = numbers
            for one in reversed(chain[:-1]):
                value = _apply(one, value)
            same = H % shape[1] == 0 and torch.equal(
                value, numbers.repeat_interleave(H // shape[1], dim=1)
            )
            return source if same else None
    return None


def _apply(node: Node, value: Tensor) -> Any:
    args = node.args[1:]
    if node.op == "call_method":
        return getattr(value, str(node.target))(*args, **node.kwargs)
    return node.target(value, *args, **node.kwargs)  # type: ignore[operator]


def _shrink(sizes: Sequence[int]) -> list[int]:
    """Shorten batch and tokens of (B, ..., T, D); a -1 stays."""
    return [min(sizes[0], 2), *sizes[1:-2], min(sizes[-2], SMALL), sizes[-1]]


REWRITE = SharedCausalAttention()
