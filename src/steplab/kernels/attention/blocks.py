"""Attention by matrix products over blocks of queries, each with the keys that it can see.

For values that are wider than keys, which fused kernels do not take: recomputing narrow scores is
cheap beside the product with wide values, but a row of those does not fit on chip. Of the pairs
that a causal mask forbids, only those within a block are computed: with 4 blocks 62% of all pairs.
Saved for the backward: the inputs and the weights. torch.compile sees opaque ops.
"""

# B batch (and heads, where there is no H), H heads, T queries, S keys (in the kernels padded to a
# power of two), K width of keys, V of values
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from steplab.costs.op_flops import ATTENTION_BLOCK
from steplab.kernels.attention._inputs import AttentionInputs, refuse_for_torch
from steplab.kernels.triton_blocks import narrow
from steplab.kernels.triton_runtime import (
    DTYPES,
    INTERPRETED,
    on_device_of,
    tl,
    triton,
    use_triton,
)

# Queries of a block: 8 sequences of them with 2048 values are 256 tiles of 128 x 256, two for each
# multiprocessor of an H200.
BLOCK = 4 if INTERPRETED else ATTENTION_BLOCK
MAX_KEYS = 16_384  # a row of weights stays in registers
NOT_TUNED = "where values are as wide as keys, fused kernels store no weights"


# fmt: off
@triton.jit
def _row(queries, keys, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    """Return this row's offset, how many keys it sees, and how many the last of its block sees."""
    row = tl.program_id(0)
    seen, set_to = keys, keys
    if CAUSAL:
        query = row % queries
        seen = keys - queries + query + 1
        set_to = keys - queries + tl.minimum((query // BLOCK + 1) * BLOCK, queries)
    return row.to(tl.int64) * keys, seen, set_to


@triton.jit(do_not_specialize=["queries"])
def softmax_kernel(
    scores, queries, keys, scale, CAUSAL: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Write weights over one row of scores, 0 for what the rest of its block sees."""
    offset, seen, set_to = _row(queries, keys, CAUSAL, BLOCK)
    s_S = tl.arange(0, S)
    pointer_S = scores + offset + s_S
    x_S = tl.load(pointer_S, mask=s_S < seen, other=-float("inf")).to(tl.float32) * scale
    weight_S = tl.exp(x_S - tl.max(x_S, 0))
    weight_S = weight_S / tl.sum(weight_S, 0)
    tl.store(pointer_S, narrow(weight_S, scores.dtype.element_ty, UPCAST), mask=s_S < set_to)


@triton.jit(do_not_specialize=["queries"])
def softmax_backward_kernel(
    gradients, weights, queries, keys, scale, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
    S: tl.constexpr, UPCAST: tl.constexpr,
):
    """Write the gradients of scores over one row of those of weights."""
    offset, seen, set_to = _row(queries, keys, CAUSAL, BLOCK)
    s_S = tl.arange(0, S)
    pointer_S = gradients + offset + s_S
    d_S = tl.load(pointer_S, mask=s_S < seen, other=0.0).to(tl.float32)
    weight_S = tl.load(weights + offset + s_S, mask=s_S < seen, other=0.0).to(tl.float32)
    d_S = weight_S * (d_S - tl.sum(weight_S * d_S, 0)) * scale
    tl.store(pointer_S, narrow(d_S, gradients.dtype.element_ty, UPCAST), mask=s_S < set_to)
# fmt: on


def launch_softmax(scores_BTS: Tensor, scale: float, causal: bool, block: int) -> None:
    """Turn (B, T, S) scores into weights, in place."""
    B, T, S = scores_BTS.shape
    padded = triton.next_power_of_2(S)
    softmax_kernel[(B * T,)](
        scores_BTS, T, S, scale, CAUSAL=causal, BLOCK=block, S=padded, UPCAST=INTERPRETED,
        num_warps=_row_warps(padded),
    )  # fmt: skip


def launch_softmax_backward(
    gradients_BTS: Tensor, weights_BTS: Tensor, scale: float, causal: bool, block: int
) -> None:
    """Turn the gradients of weights into those of scores, in place."""
    B, T, S = weights_BTS.shape
    padded = triton.next_power_of_2(S)
    softmax_backward_kernel[(B * T,)](
        gradients_BTS, weights_BTS, T, S, scale, CAUSAL=causal, BLOCK=block, S=padded,
        UPCAST=INTERPRETED, num_warps=_row_warps(padded),
    )  # fmt: skip


def _row_warps(padded: int) -> int:
    """Return the warps of a row: at best 16 elements in each thread."""
    return min(max(padded // 512, 1), 16)


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


def forward_by_blocks(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSV: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
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


def backward_by_blocks(
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
    if use_triton(scores_BTS) and scores_BTS.dtype in DTYPES:
        with on_device_of(scores_BTS):
            launch_softmax(scores_BTS, scale, causal, BLOCK)
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
    if use_triton(weights_BTS) and weights_BTS.dtype in DTYPES:
        with on_device_of(weights_BTS):
            launch_softmax_backward(d_weights_BTS, weights_BTS, scale, causal, BLOCK)
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
    position = torch.arange(own.start, own.stop, device=like.device)[:, None] + S - T
    key = torch.arange(seen.stop, device=like.device)
    return key > position if causal else torch.zeros_like(key, dtype=torch.bool)


def refuse(inputs: AttentionInputs) -> str:
    """Return why it cannot run, or ""."""
    q_BHTK, k_BHSK, v_BHSV, causal, _ = inputs
    if not q_BHTK.dtype == k_BHSK.dtype == v_BHSV.dtype:
        return f"needs one dtype, not {q_BHTK.dtype}, {k_BHSK.dtype} and {v_BHSV.dtype}"
    if k_BHSK.shape[-2] > MAX_KEYS:
        return f"needs at most {MAX_KEYS} keys, not {k_BHSK.shape[-2]}"
    if 0 in (q_BHTK.shape[-2], k_BHSK.shape[-2]):
        return "needs at least one query and one key"
    if causal and q_BHTK.shape[-2] > k_BHSK.shape[-2]:
        return "needs at least as many keys as queries when causal"
    return refuse_for_torch(inputs._replace(causal=False))  # queries may be fewer than keys


def attention(inputs: AttentionInputs) -> Tensor:
    """Return (B, H, T, V)."""
    out_BHTV: Tensor = _forward(inputs.q_BHTD, inputs.k_BHSD, inputs.v_BHSD, inputs.causal)[0]
    return out_BHTV


@torch.library.custom_op("steplab::blocks_attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output and the weights, (B H, T, S), of which what no query sees is not set."""
    return forward_by_blocks(q, k, v, causal)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    B, H, T, _ = q.shape
    return q.new_empty(B, H, T, v.shape[-1]), q.new_empty(B * H, T, k.shape[2])


@torch.library.custom_op("steplab::blocks_attention_backward", mutates_args=())
def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, weights: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return backward_by_blocks(d_out, q, k, v, weights, causal)


@_backward.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.causal = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, output[1])


def _differentiate(ctx: Any, d_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *_backward(d_out, *ctx.saved_tensors, ctx.causal), None


_forward.register_autograd(_differentiate, setup_context=_keep)
