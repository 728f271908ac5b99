"""Rows of a sequence taken out and put back, each the other's gradient.

torch's own gradient of a gather adds with atomics into zeros, because an index may repeat. Here
none does: the backward of taking is putting back, and both read each row once.
"""

# B batch, S rows, K rows taken, D width
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Chosen(NamedTuple):
    """K different rows of each sequence of S."""

    rows_BK: Tensor  # int64: which row stands at each place
    places_BS: Tensor  # int64: at which place each row stands; K for rows that were not taken


def chosen(rows_BK: Tensor, length: int) -> Chosen:
    """Return the choice of `rows_BK`, all different, out of `length` rows."""
    taken = rows_BK.shape[1]
    places_K = torch.arange(taken, device=rows_BK.device)
    places_BS = rows_BK.new_full((len(rows_BK), length), taken)
    return Chosen(rows_BK, places_BS.scatter(1, rows_BK, places_K.expand_as(rows_BK)))


def best(score_BS: Tensor, taken: int) -> tuple[Chosen, Tensor]:
    """Return the choice of the `taken` highest scores of each sequence, and the lowest of them (B).

    Compiled, a row's place is the number of rows before it in the order: comparisons that become
    one kernel, where a radix selection keeps one processor per sequence busy for 16 turns.
    """
    length = score_BS.shape[1]
    if not torch.compiler.is_compiling():
        found = score_BS.topk(taken, sorted=False)
        return chosen(found.indices, length), found.values.amin(1)
    rows_S = torch.arange(length, device=score_BS.device)
    own, other = score_BS[:, :, None], score_BS[:, None]
    earlier = (other == own) & (rows_S < rows_S[:, None])
    rank_BS = ((other > own) | earlier).sum(-1)
    here_BKS = rank_BS[:, None] == rows_S[:taken, None]
    rows_BK = torch.where(here_BKS, rows_S, 0).sum(-1)
    return Chosen(rows_BK, rank_BS.clamp(max=taken)), score_BS.gather(1, rows_BK[:, -1:])[:, 0]


def take(x_BSD: Tensor, choice: Chosen) -> Tensor:
    """Return the chosen rows, (B, K, D)."""
    out_BKD: Tensor = _Take.apply(x_BSD, *choice)
    return out_BKD


def put_back(y_BKD: Tensor, choice: Chosen) -> Tensor:
    """Return (B, S, D): the chosen rows where they came from, zeros elsewhere."""
    out_BSD: Tensor = _PutBack.apply(y_BKD, *choice)
    return out_BSD


def _take(x_BSD: Tensor, rows_BK: Tensor) -> Tensor:
    batch, length, _ = x_BSD.shape
    first_B1 = torch.arange(0, batch * length, length, device=x_BSD.device)[:, None]
    flat = x_BSD.reshape(batch * length, -1).index_select(0, (rows_BK + first_B1).flatten())
    return flat.view(*rows_BK.shape, -1)


def _put_back(y_BKD: Tensor, places_BS: Tensor) -> Tensor:
    taken = y_BKD.shape[1]
    rows_BSD = _take(y_BKD, places_BS.clamp(max=taken - 1))
    return rows_BSD.masked_fill((places_BS == taken)[..., None], 0)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, rows_BK: Tensor, places_BS: Tensor) -> Tensor:
        ctx.save_for_backward(places_BS)
        return _take(x_BSD, rows_BK)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _put_back(gradients[0], *ctx.saved_tensors), None, None


class _PutBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_BKD: Tensor, rows_BK: Tensor, places_BS: Tensor) -> Tensor:
        ctx.save_for_backward(rows_BK)
        return _put_back(y_BKD, places_BS)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _take(gradients[0], *ctx.saved_tensors), None, None
