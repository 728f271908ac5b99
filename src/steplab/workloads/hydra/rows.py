"""Which rows of a sequence are taken."""

# B batch, S rows, K rows taken
from __future__ import annotations

import torch
from torch import Tensor

from steplab.kernels.stream_norm import Chosen


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
