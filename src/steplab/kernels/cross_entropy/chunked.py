"""Chunks of tokens in plain torch, on any device: to be read and to test against."""

# C tokens of one chunk and V vocabulary, or T tokens and C words of one chunk
from __future__ import annotations

import torch
from torch import Tensor

from steplab.kernels.cross_entropy._chunked_op import RowMath, chunked_op
from steplab.kernels.cross_entropy._chunks import wide


def _loss(
    logits_CV: Tensor,
    targets_C: Tensor,
    ignore: int,
    losses_C: Tensor,
    norms_2C: Tensor,
    factor: Tensor | None,
) -> None:
    counts_C = targets_C != ignore
    z_CV = logits_CV.to(wide(logits_CV.dtype))
    top_C, log_sum_C = norms_2C
    top_C.copy_(z_CV.amax(-1))
    log_sum_C.copy_((z_CV - top_C[:, None]).exp_().sum(-1).log_())
    own_C = z_CV.gather(-1, torch.where(counts_C, targets_C, 0)[:, None]).squeeze(-1)
    losses_C.copy_(torch.where(counts_C, (top_C - own_C) + log_sum_C, 0))
    if factor is not None:
        _gradient(logits_CV, targets_C, ignore, norms_2C, 0, factor.expand(len(targets_C)))


def _gradient(
    logits_TC: Tensor,
    targets_T: Tensor,
    ignore: int,
    norms_2T: Tensor,
    first: int,
    d_losses_T: Tensor,
) -> None:
    top_T, log_sum_T = norms_2T
    z_TC = logits_TC.to(wide(logits_TC.dtype))
    z_TC.sub_(top_T[:, None]).sub_(log_sum_T[:, None]).exp_()
    column_T = targets_T - first
    is_here_T = (column_T >= 0) & (column_T < logits_TC.shape[1])
    column_T1 = torch.where(is_here_T, column_T, 0)[:, None]
    z_TC.scatter_add_(-1, column_T1, -is_here_T.to(z_TC.dtype)[:, None])
    z_TC.mul_(torch.where(targets_T != ignore, d_losses_T, 0)[:, None])
    logits_TC.copy_(z_TC)


mean, per_token = chunked_op("chunked_cross_entropy", RowMath(_loss, _gradient))
