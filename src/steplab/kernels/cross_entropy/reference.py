"""The definition of head and loss: all logits at once, softmax in fp32 or better."""

# T tokens, D width, V vocabulary
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def mean(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, ignore: int) -> Tensor:
    """Return the mean loss of the targets that are not ignored."""
    return F.cross_entropy(_logits(x_TD, weight_VD), targets_T, ignore_index=ignore)


def per_token(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, ignore: int) -> Tensor:
    """Return (T): the loss of every token."""
    logits_TV = _logits(x_TD, weight_VD)
    return F.cross_entropy(logits_TV, targets_T, ignore_index=ignore, reduction="none")


def _logits(x_TD: Tensor, weight_VD: Tensor) -> Tensor:
    logits_TV = F.linear(x_TD, weight_VD.to(x_TD.dtype))
    return logits_TV.to(torch.promote_types(x_TD.dtype, torch.float32))
