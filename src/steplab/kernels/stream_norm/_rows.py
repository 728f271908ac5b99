"""Rows of a sequence gathered and scattered back, each the gradient of the other.

torch's own gradient of a gather adds with atomics into zeros, because an index may repeat. Here
none does: the backward of gathering is scattering back, and both read each row once.
"""

# B batch, S rows, K rows taken, D width
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class RowSelection(NamedTuple):
    """K different rows of each sequence of S."""

    rows_BK: Tensor  # int64: which row each slot holds
    slots_BS: Tensor  # int64: which slot holds each row; K for rows that were not taken


def gather_rows(x_BSD: Tensor, selection: RowSelection) -> Tensor:
    """Return the selected rows, (B, K, D)."""
    out_BKD: Tensor = _GatherRows.apply(x_BSD, *selection)
    return out_BKD


def scatter_rows(y_BKD: Tensor, selection: RowSelection) -> Tensor:
    """Return (B, S, D): the selected rows where they came from, zeros elsewhere."""
    out_BSD: Tensor = _ScatterRows.apply(y_BKD, *selection)
    return out_BSD


def index_rows(x_BSD: Tensor, rows_BK: Tensor) -> Tensor:
    """Return rows (B, K, D) of `x`, with torch's own gradient."""
    batch, length, _ = x_BSD.shape
    first_B1 = torch.arange(0, batch * length, length, device=x_BSD.device)[:, None]
    flat = x_BSD.reshape(batch * length, -1).index_select(0, (rows_BK + first_B1).flatten())
    return flat.view(*rows_BK.shape, -1)


def _scatter_rows(y_BKD: Tensor, slots_BS: Tensor) -> Tensor:
    taken = y_BKD.shape[1]
    rows_BSD = index_rows(y_BKD, slots_BS.clamp(max=taken - 1))
    return rows_BSD.masked_fill((slots_BS == taken)[..., None], 0)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, rows_BK: Tensor, slots_BS: Tensor) -> Tensor:
        ctx.save_for_backward(slots_BS)
        return index_rows(x_BSD, rows_BK)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _scatter_rows(gradients[0], *ctx.saved_tensors), None, None


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_BKD: Tensor, rows_BK: Tensor, slots_BS: Tensor) -> Tensor:
        ctx.save_for_backward(rows_BK)
        return _scatter_rows(y_BKD, slots_BS)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return index_rows(gradients[0], *ctx.saved_tensors), None, None
