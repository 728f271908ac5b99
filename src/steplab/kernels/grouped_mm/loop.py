"""Group by group: the definition. A custom op, so that torch.compile does not look inside.

Reading the offsets waits for the device, so on CUDA this is for checks, not for speed.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def refuse(x_RK: Tensor, w_EKN: Tensor) -> str:
    """The definition takes everything."""
    return ""


def grouped_mm(x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """Return (R, N)."""
    out_RN: Tensor = torch.ops.steplab.grouped_mm(x_RK, w_EKN, offsets_E)
    return out_RN


def _groups(offsets_E: Tensor) -> list[tuple[int, int]]:
    return list(pairwise([0, *offsets_E.tolist()]))


# It reads the offsets on the host, which no CUDA graph can replay.
UNSAFE = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("steplab::grouped_mm", mutates_args=(), tags=UNSAFE)
def _grouped_mm(x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    parts = [x_RK[a:b] @ w_EKN[e] for e, (a, b) in enumerate(_groups(offsets_E))]
    return torch.cat(parts)


@_grouped_mm.register_fake
def _(x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    return x_RK.new_empty(x_RK.shape[0], w_EKN.shape[-1])


@torch.library.custom_op("steplab::grouped_mm_weight_gradient", mutates_args=(), tags=UNSAFE)
def _weight_gradient(x_RK: Tensor, dout_RN: Tensor, offsets_E: Tensor) -> Tensor:
    return torch.stack([x_RK[a:b].T @ dout_RN[a:b] for a, b in _groups(offsets_E)])


@_weight_gradient.register_fake
def _(x_RK: Tensor, dout_RN: Tensor, offsets_E: Tensor) -> Tensor:
    return x_RK.new_empty(offsets_E.shape[0], x_RK.shape[-1], dout_RN.shape[-1])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dout_RN: Tensor) -> tuple[Tensor, Tensor, None]:
    x_RK, w_EKN, offsets_E = ctx.saved_tensors
    dx_RK = torch.ops.steplab.grouped_mm(dout_RN, w_EKN.transpose(-2, -1), offsets_E)
    return dx_RK, torch.ops.steplab.grouped_mm_weight_gradient(x_RK, dout_RN, offsets_E), None


_grouped_mm.register_autograd(_backward, setup_context=_keep)
