"""One pass that reads and writes every number once: 28 bytes per element.

Beside fp32 weights it is 30: the 16-bit ones are read too, since somebody may have changed them
(see `reference.take_over`). A large parameter has a launch of its own; up to BATCH small ones of
the same kind share one.
"""

# N elements of one step of the loop
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

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
# A launch of its own takes 2 us on an H200 even for one element. Up to here the bytes, 1.8 MB, take
# 0.4, and 128 programs leave some of the 132 multiprocessors without work.
SMALL = 200 if INTERPRETED else 65_536
BATCH = 4 if INTERPRETED else 64  # 56 bytes each of the 4096 that a kernel's arguments may have


class Rule(NamedTuple):
    """The hyperparameters as kernels take them.

    Triton passes a float as fp32, so what takes part in fp64 comes in two pieces.
    """

    log_beta1: float
    log_beta1_rest: float
    log_beta2: float
    log_beta2_rest: float
    decay: float
    decay_rest: float
    less1: float  # 1 - beta1
    beta2: float
    less2: float
    eps: float


# fmt: off
@triton.jit
def update_elements(
    param, master, grad, exp_avg, exp_avg_sq, step, lr, coefficient, begin, size, rule,
    HAS_MASTER: tl.constexpr, CLIPPED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Update BLOCKS times BLOCK elements of one parameter, from `begin` on.

    No number of the rule is a constexpr: a schedule of the weight decay would compile the kernel
    anew for every value.
    """
    # In fp64: 1 - beta2^step in fp32 would be off by 6e-5 at the first step with beta2 0.999.
    number, rate = tl.load(step).to(tl.float64), tl.load(lr)
    power1 = tl.exp(number * rule.log_beta1 + number * rule.log_beta1_rest)
    power2 = tl.exp(number * rule.log_beta2 + number * rule.log_beta2_rest)
    step_size = (rate / (1.0 - power1)).to(tl.float32)
    root = tl.sqrt(1.0 - power2).to(tl.float32)
    keep = (1.0 - (rate * rule.decay + rate * rule.decay_rest)).to(tl.float32)
    for block in tl.range(BLOCKS):
        offset_N = begin + block * BLOCK + tl.arange(0, BLOCK)
        inside_N = offset_N < size
        grad_N = tl.load(grad + offset_N, mask=inside_N, other=0.0).to(tl.float32)
        if CLIPPED:
            grad_N *= tl.load(coefficient)
        avg_N = tl.load(exp_avg + offset_N, mask=inside_N, other=0.0)
        sq_N = tl.load(exp_avg_sq + offset_N, mask=inside_N, other=0.0)
        param_N = tl.load(param + offset_N, mask=inside_N, other=0.0)
        if HAS_MASTER:
            weight_N = tl.load(master + offset_N, mask=inside_N, other=0.0)
            rounded_N = narrow(weight_N, param.dtype.element_ty, UPCAST)
            weight_N = tl.where(param_N == rounded_N, weight_N, param_N.to(tl.float32))
        else:
            weight_N = param_N.to(tl.float32)
        avg_N += (grad_N - avg_N) * rule.less1
        sq_N = sq_N * rule.beta2 + grad_N * grad_N * rule.less2
        weight_N = weight_N * keep - step_size * avg_N / (tl.sqrt(sq_N) / root + rule.eps)
        tl.store(exp_avg + offset_N, avg_N, mask=inside_N)
        tl.store(exp_avg_sq + offset_N, sq_N, mask=inside_N)
        if HAS_MASTER:
            tl.store(master + offset_N, weight_N, mask=inside_N)
        tl.store(param + offset_N, narrow(weight_N, param.dtype.element_ty, UPCAST), mask=inside_N)


@triton.jit
def adamw_kernel(
    param, master, grad, exp_avg, exp_avg_sq, step, lr, coefficient, size, rule,
    HAS_MASTER: tl.constexpr, CLIPPED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Update one parameter. Grid: as many programs of BLOCKS times BLOCK elements as that takes."""
    begin = tl.program_id(0).to(tl.int64) * (BLOCK * BLOCKS)
    update_elements(
        param, master, grad, exp_avg, exp_avg_sq, step, lr, coefficient, begin, size, rule,
        HAS_MASTER, CLIPPED, BLOCK, BLOCKS, UPCAST,
    )


@triton.jit
def small_adamw_kernel(
    parameters, masters, grads, exp_avgs, exp_avg_sqs, steps, firsts, sizes, lr, coefficient, rule,
    COUNT: tl.constexpr, HAS_MASTER: tl.constexpr, CLIPPED: tl.constexpr, BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Update COUNT parameters, each argument of theirs a tuple. Grid: the blocks of all of them.

    firsts: the blocks before each parameter, and at last all. Nothing but a constant can be an
    index here, so every program goes through all parameters for its own.
    """
    program = tl.program_id(0)
    first, size, step = firsts[0], sizes[0], steps[0]
    param, master, grad = parameters[0], masters[0], grads[0]
    exp_avg, exp_avg_sq = exp_avgs[0], exp_avg_sqs[0]
    for i in tl.static_range(1, COUNT):
        own = (program >= firsts[i]) & (program < firsts[i + 1])
        first, size = tl.where(own, firsts[i], first), tl.where(own, sizes[i], size)
        step = tl.where(own, steps[i], step)
        param, grad = tl.where(own, parameters[i], param), tl.where(own, grads[i], grad)
        if HAS_MASTER:
            master = tl.where(own, masters[i], master)
        exp_avg = tl.where(own, exp_avgs[i], exp_avg)
        exp_avg_sq = tl.where(own, exp_avg_sqs[i], exp_avg_sq)
    begin = (program - first).to(tl.int32) * BLOCK
    update_elements(
        param, master, grad, exp_avg, exp_avg_sq, step, lr, coefficient, begin, size, rule,
        HAS_MASTER, CLIPPED, BLOCK, 1, UPCAST,
    )
# fmt: on


def refuse(param: Tensor) -> str:
    """Return why it cannot run, or ""."""
    strided = "" if param.is_contiguous() else "needs contiguous parameters"
    return refuse_dtype(param) or strided or refuse_device(param)


@torch.no_grad()
def update_all(
    weights: Sequence[ParameterState],
    hyper: Hyperparameters,
    lr: Tensor,
    coefficient: Tensor | None,
) -> None:
    """Update all in place, small ones of the same dtypes together."""
    alike: dict[Any, list[ParameterState]] = defaultdict(list)
    for weight in weights:
        weight = weight._replace(grad=weight.grad.contiguous())
        if _is_small(weight):
            kind = (weight.param.device, *(None if t is None else t.dtype for t in weight))
            alike[kind].append(weight)
        else:
            update(weight, hyper, lr, coefficient)
    for small in alike.values():
        for i in range(0, len(small), BATCH):
            update_together(small[i : i + BATCH], hyper, lr, coefficient)


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
            weight.exp_avg_sq, weight.step, lr, coefficient, size, _rule(hyper),
            HAS_MASTER=weight.master is not None, CLIPPED=coefficient is not None, BLOCK=block,
            BLOCKS=blocks, UPCAST=INTERPRETED, num_warps=warps,
        )  # fmt: skip


@torch.no_grad()
def update_together(
    weights: Sequence[ParameterState],
    hyper: Hyperparameters,
    lr: Tensor,
    coefficient: Tensor | None,
) -> None:
    """Update 1 to BATCH small parameters of the same dtypes in one launch."""
    # Few counts, hence few kernels: what is repeated to fill up has no element and no program.
    count = triton.next_power_of_2(len(weights))
    missing = count - len(weights)
    columns = zip(*weights, *[weights[0]] * missing, strict=True)
    sizes = [*(weight.param.numel() for weight in weights), *[0] * missing]
    firsts = [0, *accumulate(triton.cdiv(size, BLOCK) for size in sizes)]
    with on_device_of(weights[0].param):
        # As floats: among integers of a tuple, Triton compiles anew for every pattern of those that
        # are 1 or divisible by 16.
        small_adamw_kernel[(firsts[-1],)](
            *columns, tuple(map(float, firsts)), tuple(map(float, sizes)), lr, coefficient,
            _rule(hyper), COUNT=count, HAS_MASTER=weights[0].master is not None,
            CLIPPED=coefficient is not None, BLOCK=BLOCK, UPCAST=INTERPRETED,
            num_warps=WARPS,
        )  # fmt: skip


def _is_small(weight: ParameterState) -> bool:
    """Whether the parameter is updated together with others.

    Not at odd addresses: Triton compiles anew for every pattern of those among its arguments.
    """
    aligned = all(t.data_ptr() % 16 == 0 for t in weight if t is not None)
    return 0 < weight.param.numel() <= SMALL and aligned


@lru_cache(maxsize=64)
def _rule(hyper: Hyperparameters) -> Rule:
    beta1, beta2, eps, decay = map(float, hyper)
    logs = *_in_two(_log(beta1)), *_in_two(_log(beta2))
    return Rule(*logs, *_in_two(decay), 1 - beta1, beta2, 1 - beta2, eps)


def _log(beta: float) -> float:
    """Return log(beta), or for 0 a number whose power underflows to 0, as 0^step does."""
    return math.log(beta) if beta else -1e3


def _in_two(number: float) -> tuple[float, float]:
    """Return the fp32 number nearest to a Python one, and what is left of it."""
    (near,) = struct.unpack("f", struct.pack("f", number))
    return near, number - near
