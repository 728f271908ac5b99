"""The scan as one differentiable op, `steplab::ema_scan`, which torch.compile does not open."""

# B batch, L steps of time, D channels, N modes of each
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steplab.kernels.ema._parameters import Parameters


def _fp32(x: Tensor) -> Tensor:
    return x.detach().float().contiguous()


@torch.library.custom_op("steplab::ema_scan", mutates_args=())
def ema_scan(
    x: Tensor,
    alpha: Tensor,
    delta: Tensor,
    theta: Tensor,
    gamma: Tensor,
    omega: Tensor,
    state: Tensor | None,
    wants_last: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y, the last state, and the tables and states that a backward needs.

    Tensors nobody wants have no elements.
    """
    from steplab.kernels.ema import _scan_launch

    parameters = [_fp32(p) for p in (alpha, delta, theta, gamma, omega)]
    first = None if state is None else _fp32(state)
    y, last, kept = _scan_launch.forward(x.contiguous(), parameters, first, wants_last)
    return y, last, *kept


@ema_scan.register_fake
def _(x: Tensor, alpha: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from steplab.kernels.ema import _scan_launch

    wants_last = rest[-1]
    (B, L, D), N = x.shape, alpha.shape[1]
    last = alpha.new_empty(B if wants_last else 0, 2, N, D, dtype=torch.float32)
    shapes = _scan_launch.kept_shapes(B, L, D, N)
    tables, entering = (alpha.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return x.new_empty(B, L, D), last, tables, entering


@torch.library.custom_op("steplab::ema_scan_backward", mutates_args=())
def ema_scan_backward(
    dy: Tensor | None,
    dlast: Tensor | None,
    x: Tensor,
    alpha: Tensor,
    delta: Tensor,
    theta: Tensor,
    gamma: Tensor,
    omega: Tensor,
    tables: Tensor,
    entering: Tensor,
    has_start: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, the five parameters and the first state (maybe empty)."""
    from steplab.kernels.ema import _scan_launch

    stored = (alpha, delta, theta, gamma, omega)
    dx, *gradients, dstate = _scan_launch.backward(
        None if dy is None else dy.contiguous(),
        None if dlast is None else _fp32(dlast),
        x.contiguous(),
        [_fp32(p) for p in stored],
        _scan_launch.Kept(tables, entering),
        has_start,
    )
    cast = [g.to(p.dtype) for g, p in zip(gradients, stored, strict=True)]
    return dx, cast[0], cast[1], cast[2], cast[3], cast[4], dstate


@ema_scan_backward.register_fake
def _(dy: Tensor | None, dlast: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
    x, alpha, *_, tables, _, has_start = inputs
    B, (D, N) = x.shape[0], alpha.shape
    state = tables.new_empty(B if has_start else 0, 2, N, D)
    return *(p.new_empty(p.shape) for p in inputs[:6]), state


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, state, wants_last = inputs
    ctx.has_start, ctx.wants_last = state is not None, wants_last
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(*tensors, *output[2:])


def _differentiate(
    ctx: Any, dy: Tensor | None, dlast: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    if not ctx.wants_last:
        dlast = None
    *gradients, dstate = ema_scan_backward(dy, dlast, *ctx.saved_tensors, ctx.has_start)
    return *gradients, dstate if ctx.has_start else None, None


ema_scan.register_autograd(_differentiate, setup_context=_keep)


def run(
    x_BLD: Tensor, parameters: Parameters, state_B2ND: Tensor | None, wants_last: bool
) -> tuple[Tensor, Tensor | None]:
    """Call the op."""
    y_BLD, last_B2ND, *_ = ema_scan(x_BLD, *parameters, state_B2ND, wants_last)
    return y_BLD, last_B2ND if wants_last else None
