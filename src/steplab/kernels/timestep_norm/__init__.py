"""Timestep norm: a token by the mean and variance of its group over all tokens up to itself.

Every implementation file offers `timestep_norm(x, affine, before, valid, keeps, dtype)` and
`refuse(x, affine, before, valid)`, which returns the reason why it cannot, or "".
"""

# B batch, L tokens, D width, G groups
from __future__ import annotations

import torch
from torch import Tensor

from steplab.kernels.impl import impls, load, select
from steplab.kernels.timestep_norm._statistics import Affine, Statistics

# Loaded once, so that torch.compile traces plain dictionary look-ups.
IMPLS = {name: load("timestep_norm", name) for name in impls("timestep_norm")}
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
    """Return (B, L, D) in `dtype` and, if `keeps`, the statistics behind the last token.

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
