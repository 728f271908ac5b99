"""Product, softmax, choice and gate in one kernel; all gradients in another."""

# T tokens, D width, E experts, K chosen
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steplab.kernels._triton import refuse_device

MOST_EXPERTS = 255  # and the gate, in one tile: the registers of a program end there
NEEDS_GPU = True


def refuse(x_TD: Tensor, weight_ED: Tensor) -> str:
    """Return why it cannot run, or ""."""
    reason = refuse_device(x_TD)
    if reason:
        return reason
    if x_TD.dtype != torch.bfloat16:
        return f"needs bf16, not {x_TD.dtype}"
    if weight_ED.shape[0] > MOST_EXPERTS:
        return f"needs at most {MOST_EXPERTS} experts, not {weight_ED.shape[0]}"
    return ""


@torch.library.custom_op("steplab::router", mutates_args=())
def router(
    x_TD: Tensor, weight_ED: Tensor, gate_1D: Tensor, chosen: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (probabilities_TE, weights_TK, experts_TK, gate_T1)."""
    from steplab.kernels.router import _launch

    return _launch.forward(x_TD.contiguous(), *_rows(weight_ED, gate_1D), chosen)


@router.register_fake
def _(
    x_TD: Tensor, weight_ED: Tensor, gate_1D: Tensor, chosen: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    probabilities_TE = x_TD.new_empty(x_TD.shape[0], weight_ED.shape[0], dtype=torch.float32)
    weights_TK = probabilities_TE.new_empty(x_TD.shape[0], chosen)
    experts_TK = torch.empty_like(weights_TK, dtype=torch.int64)
    return probabilities_TE, weights_TK, experts_TK, probabilities_TE.new_empty(x_TD.shape[0], 1)


@torch.library.custom_op("steplab::router_backward", mutates_args=())
def router_backward(
    dprobabilities_TE: Tensor,
    dweights_TK: Tensor,
    dgate_T1: Tensor,
    x_TD: Tensor,
    weight_ED: Tensor,
    gate_1D: Tensor,
    probabilities_TE: Tensor,
    experts_TK: Tensor,
    gate_T1: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return dx and, in fp32, the gradient of the weight's rows followed by the gate's."""
    from steplab.kernels.router import _launch

    gradients = dprobabilities_TE.contiguous(), dweights_TK.contiguous(), dgate_T1.contiguous()
    inputs = (x_TD.contiguous(), *_rows(weight_ED, gate_1D))
    return _launch.backward(gradients, inputs, (probabilities_TE, experts_TK, gate_T1))


@router_backward.register_fake
def _(
    dprobabilities_TE: Tensor,
    dweights_TK: Tensor,
    dgate_T1: Tensor,
    x_TD: Tensor,
    weight_ED: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    E, D = weight_ED.shape
    return x_TD.new_empty(x_TD.shape), x_TD.new_empty(E + 1, D, dtype=torch.float32)


def _rows(weight_ED: Tensor, gate_1D: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in one dtype: a tile takes its rows from either."""
    dtype = torch.promote_types(weight_ED.dtype, gate_1D.dtype)
    return weight_ED.to(dtype).contiguous(), gate_1D.to(dtype).contiguous()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    probabilities_TE, _, experts_TK, gate_T1 = output
    ctx.mark_non_differentiable(experts_TK)
    ctx.save_for_backward(*inputs[:3], probabilities_TE, experts_TK, gate_T1)


def _differentiate(
    ctx: Any, dprobabilities_TE: Tensor, dweights_TK: Tensor, _: Tensor | None, dgate_T1: Tensor
) -> tuple[Tensor, Tensor, Tensor, None]:
    kept = ctx.saved_tensors  # asked for once: a checkpoint gives them out only once
    dx_TD, drows_ED = router_backward(dprobabilities_TE, dweights_TK, dgate_T1, *kept)
    weight_ED, gate_1D = kept[1:3]
    return dx_TD, drows_ED[:-1].to(weight_ED.dtype), drows_ED[-1:].to(gate_1D.dtype), None


router.register_autograd(_differentiate, setup_context=_keep)
