"""The definition: a stable sort."""

# B batch, S rows of a sequence, K rows taken
from __future__ import annotations

import torch
from torch import Tensor


def top_rows(score_BS: Tensor, taken: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows (B, K), the slot of every row (B, S), K where not taken, and the lowest."""
    found = score_BS.sort(dim=1, descending=True, stable=True)
    rank_S = torch.arange(score_BS.shape[1], device=score_BS.device)
    rank_BS = torch.empty_like(found.indices).scatter(
        1, found.indices, rank_S.expand_as(found.indices)
    )
    rows_BK = found.indices[:, :taken].contiguous()
    return rows_BK, rank_BS.clamp(max=taken), found.values[:, taken - 1].clone()
