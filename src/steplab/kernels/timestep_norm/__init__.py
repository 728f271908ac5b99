"""Timestep norm: a token by the mean and variance of its group over all tokens up to itself.

Every implementation offers `timestep_norm(x, affine, before, valid, keeps, dtype)` and, unless it
takes everything, `refuse(x, affine, before, valid)`.
"""

# B batch, L tokens, D width, G groups
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from steplab.kernels.dispatch import load_all, select


class Affine(NamedTuple):
    """Groups of neighboring channels, and what follows the norm: times 1 + weight, plus bias."""

    weight_D: Tensor
    bias_D: Tensor
    groups: int
    eps: float


class Statistics(NamedTuple):
    """Mean and variance of all tokens so far, per group."""

    count_B: Tensor  # int64
    mean_BG: Tensor  # fp32, or fp64 in an fp64 model
    variance_BG: Tensor

    @classmethod
    def fresh(cls, batch: int, groups: int, like: Tensor) -> Statistics:
        """Return the statistics before the first token, on the device of `like`."""
        wide = torch.promote_types(like.dtype, torch.float32)
        zeros_BG = torch.zeros(batch, groups, dtype=wide, device=like.device)
        count_B = torch.zeros(batch, dtype=torch.int64, device=like.device)
        return cls(count_B, zeros_BG, torch.ones_like(zeros_BG))


# After the types above, which the implementations import.
IMPLS = load_all("timestep_norm")
PREFERENCE = ("triton_running", "reference")


def choose(
    impl: str,
    x_BLD: Tensor,
    affine: Affine,
    before: Statistics | None = None,
    valid_BL: Tensor | None = None,
) -> str:
    """Return the implementation to run. `auto` takes the first that accepts the inputs."""
    return select("timestep_norm", IMPLS, PREFERENCE, impl, x_BLD, affine, before, valid_BL)


def timestep_norm(
    impl: str,
    x_BLD: Tensor,
    affine: Affine,
    before: Statistics | None = None,
    valid_BL: Tensor | None = None,
    keeps: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Statistics | None]:
    """Return (B, L, D) in `dtype` and, if `keeps`, the statistics after the last token.

    By exactly the implementation named (not `auto`). A token that is not valid changes no
    statistics, and its output is 0.
    """
    dtype = dtype or x_BLD.dtype
    if x_BLD.shape[1] == 0:
        if before is None:
            before = Statistics.fresh(x_BLD.shape[0], affine.groups, x_BLD)
        return x_BLD.to(dtype), before if keeps else None
    found: tuple[Tensor, Statistics | None] = IMPLS[impl].timestep_norm(
        x_BLD, affine, before, valid_BL, keeps, dtype
    )
    return found
