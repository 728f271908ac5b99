"""The kernels as ops that torch.compile does not look into."""

# B batch, S rows of a sequence, K rows taken, D width
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _outputs(
    x: Tensor, added: Tensor | None, router_D: Tensor | None, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return stream, norm, 1 / root-mean-square and score; those not asked for have no elements."""
    wide = x.dtype if added is None else torch.promote_types(x.dtype, added.dtype)
    stream = x.new_empty(x.shape if added is not None else 0, dtype=wide)
    normed = x.new_empty(x.shape if dtype is not None else 0, dtype=dtype or x.dtype)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    score = rstd.new_empty(rstd.shape if router_D is not None else 0)
    return stream, normed, rstd, score


@torch.library.custom_op("steplab::stream_norm", mutates_args=())
def stream_forward(
    x: Tensor,
    added: Tensor | None,
    places: Tensor | None,
    weight_D: Tensor,
    offset_D: Tensor | None,
    router_D: Tensor | None,
    eps: float,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return stream (if something is added), norm (if it has a dtype), 1 / rms, score (if routed).

    What is not asked for has no elements.
    """
    from steplab.kernels.stream_norm import _triton_launch

    found = stream, normed, rstd, score = _outputs(x, added, router_D, dtype)
    outputs = (
        None if added is None else stream,
        None if dtype is None else normed,
        rstd,
        None if router_D is None else score,
    )
    _triton_launch.forward(x, added, places, weight_D, offset_D, router_D, eps, outputs)
    return found


@stream_forward.register_fake
def _(
    x: Tensor,
    added: Tensor | None,
    places: Tensor | None,
    weight_D: Tensor,
    offset_D: Tensor | None,
    router_D: Tensor | None,
    eps: float,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _outputs(x, added, router_D, dtype)


@torch.library.custom_op("steplab::stream_norm_rows", mutates_args=())
def stream_rows(
    stream: Tensor,
    rstd: Tensor,
    rows: Tensor,
    weight_D: Tensor,
    offset_D: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the norm of the chosen rows, (B, K, D)."""
    from steplab.kernels.stream_norm import _triton_launch

    normed = stream.new_empty(*rows.shape, stream.shape[-1], dtype=dtype)
    _triton_launch.rows(stream, rstd, rows, weight_D, offset_D, normed)
    return normed


@stream_rows.register_fake
def _(
    stream: Tensor,
    rstd: Tensor,
    rows: Tensor,
    weight_D: Tensor,
    offset_D: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return stream.new_empty(*rows.shape, stream.shape[-1], dtype=dtype)


@torch.library.custom_op("steplab::stream_norm_backward", mutates_args=())
def stream_backward(
    d_normed: Tensor,
    places: Tensor | None,
    d_score: Tensor | None,
    d_stream: Tensor | None,
    stream: Tensor,
    rstd: Tensor,
    weight_D: Tensor,
    offset_D: Tensor | None,
    router_D: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return dx and three sums over all rows, (3, D) in fp32; see the kernel."""
    from steplab.kernels.stream_norm import _triton_launch

    gradients = (d_normed, places, d_score, d_stream)
    return _triton_launch.backward(*gradients, stream, rstd, weight_D, offset_D, router_D)


@stream_backward.register_fake
def _(
    d_normed: Tensor,
    places: Any,
    d_score: Any,
    d_stream: Any,
    stream: Tensor,
    rstd: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    return stream.new_empty(stream.shape), rstd.new_empty(3, stream.shape[-1])
