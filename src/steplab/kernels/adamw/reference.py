"""The definition: op by op, in the order and with the rounding of torch.optim.AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from steplab.kernels.adamw import Hyperparameters, ParameterState


@torch.no_grad()
def take_over(param: Tensor, master: Tensor) -> Tensor:
    """Give fp32 weights what somebody has written into their rounded copy; return them.

    A loop may clip weights, load a part of the model or initialize it anew: all that it reaches is
    the 16-bit parameter. Where that is no longer the rounded weight, it is the new weight.
    """
    return master.copy_(
        torch.where(param == master.to(param.dtype), master, param.to(master.dtype))
    )


@torch.no_grad()
def update(
    weight: ParameterState, hyper: Hyperparameters, lr: Tensor, coefficient: Tensor | None
) -> None:
    """Update param, master and moments in place."""
    exact = weight.param if weight.master is None else take_over(weight.param, weight.master)
    grad = weight.grad.to(exact.dtype)
    if coefficient is not None:
        grad = grad * coefficient
    # Scalars in fp64, as Python has them, then rounded once.
    step = weight.step.double()
    step_size = (lr / (1 - hyper.beta1**step)).to(exact.dtype)
    root = (1 - hyper.beta2**step).sqrt().to(exact.dtype)
    exact.mul_((1 - lr * hyper.weight_decay).to(exact.dtype))
    weight.exp_avg.lerp_(grad, 1 - hyper.beta1)
    weight.exp_avg_sq.mul_(hyper.beta2).addcmul_(grad, grad, value=1 - hyper.beta2)
    spread = (weight.exp_avg_sq.sqrt() / root).add_(hyper.eps)
    exact.sub_(step_size * weight.exp_avg / spread)
    if weight.master is not None:
        weight.param.copy_(weight.master)


def update_all(
    weights: Sequence[ParameterState],
    hyper: Hyperparameters,
    lr: Tensor,
    coefficient: Tensor | None,
) -> None:
    """Update one after the other."""
    for weight in weights:
        update(weight, hyper, lr, coefficient)
