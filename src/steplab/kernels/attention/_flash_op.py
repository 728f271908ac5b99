"""A pair of forward and backward functions as one differentiable op.

torch.compile sees a single node and does not look inside; a profile shows the op by its name.
"""

# B batch, H query heads, G key heads, T queries, S keys, D head width
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from steplab.kernels.attention._inputs import AttentionInputs, document_bounds

Forward = Callable[..., tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]
Attention = Callable[[AttentionInputs], Tensor]


def empty_as_BTHD(x_BHTD: Tensor) -> Tensor:
    """Return an empty tensor of the shape of `x_BHTD` that lies in memory as (B, T, H, D).

    So the projections before and after attention read and write it without a copy.
    """
    B, H, T, D = x_BHTD.shape
    return x_BHTD.new_empty(B, T, H, D).transpose(1, 2)


def empty_lse(q_BHTD: Tensor) -> Tensor:
    """Return an empty (B, H, T) in fp32 or better for the log-sum-exp of the scores."""
    wide = torch.promote_types(q_BHTD.dtype, torch.float32)
    return q_BHTD.new_empty(q_BHTD.shape[:-1], dtype=wide)


def flash_op(
    name: str, forward: Forward, backward: Backward
) -> Callable[[AttentionInputs], Tensor]:
    """Register `steplab::<name>` and its gradient; return the function that calls it.

    `forward(q, k, v, causal, first, past)` returns the output and the log-sum-exp of the scores;
    `backward(d_out, q, k, v, out, lse, causal, first, past)` returns dq, dk and dv. `first` and
    `past` are the bounds of each key position's document, or None.
    """

    def run(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, first: Tensor | None, past: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return forward(q, k, v, causal, first, past)

    def run_backward(
        d_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        first: Tensor | None,
        past: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return backward(d_out, q, k, v, out, lse, causal, first, past)

    def differentiate(ctx: Any, d_out: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if d_out is None:
            return (None,) * 6
        q, k, v, out, lse, first, past = ctx.saved_tensors
        gradients = gradient_op(d_out, q, k, v, out, lse, ctx.causal, first, past)
        return *gradients, None, None, None

    op = torch.library.custom_op(f"steplab::{name}", run, mutates_args=())
    op.register_fake(lambda q, *rest: (empty_as_BTHD(q), empty_lse(q)))
    gradient_op = torch.library.custom_op(
        f"steplab::{name}_backward", run_backward, mutates_args=()
    )
    gradient_op.register_fake(lambda d_out, q, k, v, *rest: tuple(map(empty_as_BTHD, (q, k, v))))
    op.register_autograd(differentiate, setup_context=_keep)

    def attention(inputs: AttentionInputs) -> Tensor:
        q_BHTD, k_BGSD, v_BGSD, causal, documents_BS = inputs
        bounds = (None, None) if documents_BS is None else document_bounds(documents_BS)
        out_BHTD: Tensor = op(q_BHTD, k_BGSD, v_BGSD, causal, *bounds)[0]
        return out_BHTD

    return attention


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.causal, first, past = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros in the size of what is kept
    ctx.save_for_backward(q, k, v, *output, first, past)
