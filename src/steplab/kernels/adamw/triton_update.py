"""One kernel per parameter that reads and writes every number once: 28 bytes per element."""

# N elements of one step of the loop
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math
import struct
from functools import lru_cache

import torch
from torch import Tensor

from steplab.kernels.adamw import Hyperparameters, ParameterState
from steplab.kernels.triton_blocks import narrow
from steplab.kernels.triton_runtime import (
    INTERPRETED,
    on_device_of,
    refuse_device,
    refuse_dtype,
    tl,
    triton,
)

NEEDS_GPU = True
BLOCK = 64 if INTERPRETED else 512  # four to a thread: 16-byte loads of fp32
BLOCKS = 2 if INTERPRETED else 1  # of one program: 1 is the fastest on an H200, by 4%
WARPS = 4


# fmt: off
@triton.jit
def adamw_kernel(
    param, master, grad, exp_avg, exp_avg_sq, step, lr, coefficient, size, log_beta1,
    log_beta1_rest, log_beta2, log_beta2_rest, decay, decay_rest, less1, beta2, less2, eps,
    HAS_MASTER: tl.constexpr, CLIPPED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Update BLOCKS times BLOCK elements. Grid: as many programs as that takes.

    less1 and less2 are 1 - beta. No number of the rule is a constexpr: a schedule of the weight
    decay would compile the kernel anew for every value.
    """
    # In fp64: 1 - beta2^step in fp32 would be off by 6e-5 at the first step with beta2 0.999.
    # Triton passes a float as fp32, so what takes part in that comes in two pieces.
    number, rate = tl.load(step).to(tl.float64), tl.load(lr)
    power1 = tl.exp(number * log_beta1 + number * log_beta1_rest)
    power2 = tl.exp(number * log_beta2 + number * log_beta2_rest)
    step_size = (rate / (1.0 - power1)).to(tl.float32)
    root = tl.sqrt(1.0 - power2).to(tl.float32)
    keep = (1.0 - (rate * decay + rate * decay_rest)).to(tl.float32)
    begin = tl.program_id(0).to(tl.int64) * (BLOCK * BLOCKS)
    for block in tl.range(BLOCKS):
        offset_N = begin + block * BLOCK + tl.arange(0, BLOCK)
        inside_N = offset_N < size
        grad_N = tl.load(grad + offset_N, mask=inside_N, other=0.0).to(tl.float32)
        if CLIPPED:
            grad_N *= tl.load(coefficient)
        avg_N = tl.load(exp_avg + offset_N, mask=inside_N, other=0.0)
        sq_N = tl.load(exp_avg_sq + offset_N, mask=inside_N, other=0.0)
        if HAS_MASTER:
            weight_N = tl.load(master + offset_N, mask=inside_N, other=0.0)
        else:
            weight_N = tl.load(param + offset_N, mask=inside_N, other=0.0).to(tl.float32)
        avg_N += (grad_N - avg_N) * less1
        sq_N = sq_N * beta2 + grad_N * grad_N * less2
        weight_N = weight_N * keep - step_size * avg_N / (tl.sqrt(sq_N) / root + eps)
        tl.store(exp_avg + offset_N, avg_N, mask=inside_N)
        tl.store(exp_avg_sq + offset_N, sq_N, mask=inside_N)
        if HAS_MASTER:
            tl.store(master + offset_N, weight_N, mask=inside_N)
        tl.store(param + offset_N, narrow(weight_N, param.dtype.element_ty, UPCAST), mask=inside_N)
# fmt: on


def refuse(param: Tensor) -> str:
    """Return why it cannot run, or ""."""
    strided = "" if param.is_contiguous() else "needs contiguous parameters"
    return refuse_dtype(param) or strided or refuse_device(param)


@torch.no_grad()
def update(
    weight: ParameterState,
    hyper: Hyperparameters,
    lr: Tensor,
    coefficient: Tensor | None,
    block: int = BLOCK,
    blocks: int = BLOCKS,
    warps: int = WARPS,
) -> None:
    """Update param, master and moments in place; all but the gradient must be contiguous."""
    size = weight.param.numel()
    if not size:
        return
    with on_device_of(weight.param):
        adamw_kernel[(triton.cdiv(size, block * blocks),)](
            weight.param, weight.master, weight.grad.contiguous(), weight.exp_avg,
            weight.exp_avg_sq, weight.step, lr, coefficient, size, *_in_two(_log(hyper.beta1)),
            *_in_two(_log(hyper.beta2)), *_in_two(hyper.weight_decay), 1 - hyper.beta1,
            hyper.beta2, 1 - hyper.beta2, hyper.eps, HAS_MASTER=weight.master is not None,
            CLIPPED=coefficient is not None, BLOCK=block, BLOCKS=blocks, UPCAST=INTERPRETED,
            num_warps=warps,
        )  # fmt: skip


def _log(beta: float) -> float:
    """Return log(beta), or for 0 a number whose power underflows to 0, as 0^step does."""
    return math.log(beta) if beta else -1e3


@lru_cache(maxsize=64)
def _in_two(number: float) -> tuple[float, float]:
    """Return the fp32 number nearest to a Python one, and what is left of it."""
    (near,) = struct.unpack("f", struct.pack("f", number))
    return near, number - near
