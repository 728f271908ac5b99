"""Which row each assignment takes when rows are sorted by expert, without sorting or a sync."""

# T tokens, K chosen experts, E experts, R = T * K rows
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Ranks(NamedTuple):
    """Place of every assignment within its expert, and how many each expert has."""

    rank_TK: Tensor  # int64: 0 for the first assignment of an expert, in token order
    counts_E: Tensor  # int64


def rank_assignments(experts_TK: Tensor, experts: int) -> Ranks:
    """Rank assignments within their expert by a counting sort: one-hot and a running sum.

    For few experts this is less work than a radix sort, and it is stable.
    """
    flat_R = experts_TK.flatten()
    hot_RE = flat_R[:, None] == torch.arange(experts, device=flat_R.device)
    running_RE = hot_RE.cumsum(0)
    rank_R = running_RE.gather(1, flat_R[:, None]).squeeze(1) - 1
    return Ranks(rank_R.view_as(experts_TK), running_RE[-1])


class SortedRows(NamedTuple):
    """Rows sorted by expert: where each assignment went, and where each row came from."""

    row_TK: Tensor  # row of token t's k-th copy
    token_R: Tensor  # token of each row
    offsets_E: Tensor  # end of each expert's rows


def sort_rows(experts_TK: Tensor, experts: int) -> SortedRows:
    """Give every assignment its row; experts one after another, tokens in order within each."""
    ranks = rank_assignments(experts_TK, experts)
    offsets_E = ranks.counts_E.cumsum(0)
    starts_E = offsets_E - ranks.counts_E
    row_TK = ranks.rank_TK + starts_E[experts_TK]
    T, K = experts_TK.shape
    tokens_TK = torch.arange(T, device=row_TK.device)[:, None].expand(T, K)
    token_R = torch.empty_like(row_TK.flatten()).scatter_(0, row_TK.flatten(), tokens_TK.flatten())
    return SortedRows(row_TK, token_R, offsets_E)
