"""Attention by matrix products over blocks of queries, each with the keys that it can see.

For values that are wider than keys, which fused kernels do not take: recomputing narrow scores is
cheap beside the product with wide values, but a row of those does not fit on chip. Of the pairs
that a causal mask forbids, only those within a block are computed: with 4 blocks 62 % of all pairs.
Saved for the backward: the inputs and the weights. torch.compile sees opaque ops.
"""

# B batch, H heads, T queries, S keys, K width of keys, V of values
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steplab.kernels.attention import _limits

MOST_KEYS = 16_384  # a row of weights stays in registers
UNTRIED = "where values are as wide as keys, fused kernels store no weights"


def refuse(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSV: Tensor,
    causal: bool,
    documents_BS: Tensor | None = None,
) -> str:
    """Return why it cannot run, or ""."""
    if not q_BHTK.dtype == k_BHSK.dtype == v_BHSV.dtype:
        return f"needs one dtype, not {q_BHTK.dtype}, {k_BHSK.dtype} and {v_BHSV.dtype}"
    if k_BHSK.shape[-2] > MOST_KEYS:
        return f"needs at most {MOST_KEYS} keys, not {k_BHSK.shape[-2]}"
    if 0 in (q_BHTK.shape[-2], k_BHSK.shape[-2]):
        return "needs at least one query and one key"
    if causal and q_BHTK.shape[-2] > k_BHSK.shape[-2]:
        return "needs at least as many keys as queries when causal"
    return _limits.simple_inputs(q_BHTK, k_BHSK, False, documents_BS)


def attention(q_BHTK: Tensor, k_BHSK: Tensor, v_BHSV: Tensor, causal: bool) -> Tensor:
    """Return (B, H, T, V)."""
    out_BHTV: Tensor = _forward(q_BHTK, k_BHSK, v_BHSV, causal)[0]
    return out_BHTV


@torch.library.custom_op("steplab::blocks_attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output and the weights, (B H, T, S); what no query sees of these is not set."""
    from steplab.kernels.attention import _blocks

    return _blocks.forward(q, k, v, causal)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    B, H, T, _ = q.shape
    return q.new_empty(B, H, T, v.shape[-1]), q.new_empty(B * H, T, k.shape[2])


@torch.library.custom_op("steplab::blocks_attention_backward", mutates_args=())
def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, weights: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from steplab.kernels.attention import _blocks

    return _blocks.backward(d_out, q, k, v, weights, causal)


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
