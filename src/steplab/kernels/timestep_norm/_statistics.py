"""What a timestep norm is given beside its input, and what it carries from token to token."""

# B batch, D width, G groups
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Affine(NamedTuple):
    """Groups of neighbouring channels, and what follows the norm: times 1 + weight, plus bias."""

    weight_D: Tensor
    bias_D: Tensor
    groups: int
    eps: float


class Statistics(NamedTuple):
    """Mean and variance of all tokens so far, per group; they do not grow with their number."""

    count_B: Tensor  # int64
    mean_BG: Tensor  # fp32, or fp64 in an fp64 model
    variance_BG: Tensor

    @classmethod
    def fresh(cls, batch: int, groups: int, like: Tensor) -> Statistics:
        """Return those before the first token, on the device of `like`."""
        wide = torch.promote_types(like.dtype, torch.float32)
        zeros_BG = torch.zeros(batch, groups, dtype=wide, device=like.device)
        count_B = torch.zeros(batch, dtype=torch.int64, device=like.device)
        return cls(count_B, zeros_BG, torch.ones_like(zeros_BG))
