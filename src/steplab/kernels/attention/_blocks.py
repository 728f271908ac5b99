"""The products of `blocks`, and the softmax between them, written over the scores."""

# B batch and heads, T queries, S keys, K width of keys, V of values
from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from steplab.hardware.op_costs import ATTENTION_BLOCK
from steplab.kernels._triton import DTYPES, INTERPRETED, by_triton, on_device_of

# Queries of a block: 8 sequences of them with 2048 values are 256 tiles of 128 x 256, two
# for each multiprocessor of an H200.
BLOCK = 4 if INTERPRETED else ATTENTION_BLOCK


def query_blocks(queries: int, keys: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of queries, and all keys that the last query of each sees."""
    if not causal:
        yield slice(0, queries), slice(0, keys)
        return
    for start in range(0, queries, BLOCK):
        stop = min(start + BLOCK, queries)
        yield slice(start, stop), slice(0, keys - queries + stop)


def key_blocks(queries: int, keys: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Yield the keys that each block of queries is the first to see, and all queries from it on."""
    seen = 0
    for own, visible in query_blocks(queries, keys, causal):
        yield slice(seen, visible.stop), slice(own.start, queries)
        seen = visible.stop


def forward(q_BHTK: Tensor, k_BHSK: Tensor, v_BHSV: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, T, V) and the weights (B H, T, S)."""
    q, k, v = (x.flatten(0, 1) for x in (q_BHTK, k_BHSK, v_BHSV))
    (B, T, K), S = q.shape, k.shape[1]
    weights_BTS, out_BTV = q.new_empty(B, T, S), q.new_empty(B, T, v.shape[-1])
    blocks = list(query_blocks(T, S, causal))
    for own, seen in blocks:
        torch.bmm(q[:, own], k[:, seen].mT, out=weights_BTS[:, own, seen])
    softmax_rows(weights_BTS, 1 / math.sqrt(K), causal)
    for own, seen in blocks:
        torch.bmm(weights_BTS[:, own, seen], v[:, seen], out=out_BTV[:, own])
    return out_BTV.unflatten(0, q_BHTK.shape[:2]), weights_BTS


def backward(
    d_out_BHTV: Tensor,
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSV: Tensor,
    weights_BTS: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv."""
    q, k, v, d_out = (x.flatten(0, 1) for x in (q_BHTK, k_BHSK, v_BHSV, d_out_BHTV))
    (_, T, K), S = q.shape, k.shape[1]
    d_scores_BTS = torch.empty_like(weights_BTS)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    for own, seen in query_blocks(T, S, causal):
        torch.bmm(d_out[:, own], v[:, seen].mT, out=d_scores_BTS[:, own, seen])
    softmax_rows_backward(d_scores_BTS, weights_BTS, 1 / math.sqrt(K), causal)
    for own, seen in query_blocks(T, S, causal):
        torch.bmm(d_scores_BTS[:, own, seen], k[:, seen], out=dq[:, own])
    for own, later in key_blocks(T, S, causal):
        torch.bmm(weights_BTS[:, later, own].mT, d_out[:, later], out=dv[:, own])
        torch.bmm(d_scores_BTS[:, later, own].mT, q[:, later], out=dk[:, own])
    heads = q_BHTK.shape[:2]
    return dq.unflatten(0, heads), dk.unflatten(0, heads), dv.unflatten(0, heads)


def softmax_rows(scores_BTS: Tensor, scale: float, causal: bool) -> None:
    """Turn scores into weights in place; of each block, what a query does not see becomes 0."""
    if by_triton(scores_BTS) and scores_BTS.dtype in DTYPES:
        from steplab.kernels.attention import _blocks_kernels

        with on_device_of(scores_BTS):
            _blocks_kernels.softmax(scores_BTS, scale, causal, BLOCK)
        return
    _, T, S = scores_BTS.shape
    for own, seen in query_blocks(T, S, causal):
        scores = scores_BTS[:, own, seen]
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
        scores.copy_(
            wide.masked_fill(_hidden(own, seen, T, S, causal, wide), -math.inf).softmax(-1)
        )


def softmax_rows_backward(
    d_weights_BTS: Tensor, weights_BTS: Tensor, scale: float, causal: bool
) -> None:
    """Turn the gradients of weights into those of scores, in place."""
    if by_triton(weights_BTS) and weights_BTS.dtype in DTYPES:
        from steplab.kernels.attention import _blocks_kernels

        with on_device_of(weights_BTS):
            _blocks_kernels.softmax_backward(d_weights_BTS, weights_BTS, scale, causal, BLOCK)
        return
    _, T, S = weights_BTS.shape
    for own, seen in query_blocks(T, S, causal):
        target, weights = d_weights_BTS[:, own, seen], weights_BTS[:, own, seen]
        wide = torch.promote_types(weights.dtype, torch.float32)
        weights, d_weights = weights.to(wide), target.to(wide)
        mean = (weights * d_weights).sum(-1, keepdim=True)
        target.copy_(weights * (d_weights - mean) * scale)


def _hidden(own: slice, seen: slice, T: int, S: int, causal: bool, like: Tensor) -> Tensor:
    """Return which keys the queries of a block do not see."""
    place = torch.arange(own.start, own.stop, device=like.device)[:, None] + S - T
    key = torch.arange(seen.stop, device=like.device)
    return key > place if causal else torch.zeros_like(key, dtype=torch.bool)
