"""Launches the update of one parameter."""

from __future__ import annotations

import math

import triton
from torch import Tensor

from steplab.kernels._triton import INTERPRETED, on_device_of
from steplab.kernels.adamw import Rule, Weight
from steplab.kernels.adamw._triton_kernel import adamw_kernel

BLOCK = 64 if INTERPRETED else 512  # four to a thread: 16-byte loads of fp32
BLOCKS = 2 if INTERPRETED else 1  # of one program: 1 is the fastest on an H200, by 4 %
WARPS = 4


def update(
    weight: Weight,
    rule: Rule,
    lr: Tensor,
    coefficient: Tensor | None,
    block: int = BLOCK,
    blocks: int = BLOCKS,
    warps: int = WARPS,
) -> None:
    """Update param, master and moments in place; all are contiguous but perhaps the gradient."""
    size = weight.param.numel()
    if not size:
        return
    with on_device_of(weight.param):
        adamw_kernel[(triton.cdiv(size, block * blocks),)](
            *(weight.param, weight.master, weight.grad.contiguous()),
            *(weight.exp_avg, weight.exp_avg_sq, weight.step, lr, coefficient, size),
            LOG_BETA1=_log(rule.beta1),
            LOG_BETA2=_log(rule.beta2),
            LESS1=1 - rule.beta1,
            LESS2=1 - rule.beta2,
            EPS=rule.eps,
            DECAY=rule.weight_decay,
            HAS_MASTER=weight.master is not None,
            CLIPPED=coefficient is not None,
            BLOCK=block,
            BLOCKS=blocks,
            UPCAST=INTERPRETED,
            num_warps=warps,
        )


def _log(beta: float) -> float:
    """Return log(beta); of 0 a number whose power underflows to 0, as 0^step does."""
    return math.log(beta) if beta else -1e3
