"""Norms: two that store their scale minus one, and one whose statistics run along time."""

# B batch, L tokens, D width, G groups, S channels of a group
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steplab.modules.autocast import matmul_dtype


class Precise(nn.Module):
    """A module whose parameters keep fp32 when a model is cast to 16 bits."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def keep(x: Tensor) -> Tensor:
            moved = fn(x)
            if moved.dtype in (torch.bfloat16, torch.float16):
                return x.to(moved.device)  # not back from `moved`: that has been rounded
            return moved

        return super()._apply(keep, recurse)


class RootMeanSquareNorm(Precise):
    """x / sqrt(mean(x^2) + eps) times 1 + weight: weight decay pulls the scale towards 1."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to (..., D) in the dtype of the product that follows."""
        dtype = matmul_dtype(x)
        with torch.autocast(x.device.type, enabled=False):
            y = F.rms_norm(x, self.weight.shape, (1 + self.weight).to(x.dtype), self.eps)
        return y.to(dtype)


class LayerNorm(Precise):
    """Mean 0, deviation 1, times 1 + weight, plus bias."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to (..., D) in the dtype of the product that follows."""
        dtype = matmul_dtype(x)
        with torch.autocast(x.device.type, enabled=False):
            scale, shift = (1 + self.weight).to(x.dtype), self.bias.to(x.dtype)
            y = F.layer_norm(x, self.weight.shape, scale, shift, self.eps)
        return y.to(dtype)


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


class TimestepNorm(Precise):
    """Normalises a token by the mean and variance of its group over all tokens up to itself."""

    def __init__(self, width: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.groups, self.eps = groups, eps

    def forward(
        self,
        x_BLD: Tensor,
        before: Statistics | None = None,
        valid_BL: Tensor | None = None,
        keeps: bool = False,
    ) -> tuple[Tensor, Statistics | None]:
        """Return (B, L, D) and, if `keeps`, the statistics behind the last token.

        A token that is not valid changes no statistics, and its output is 0.
        """
        dtype = matmul_dtype(x_BLD)
        if x_BLD.shape[1] == 0:
            return x_BLD.to(dtype), before if keeps else None
        with torch.autocast(x_BLD.device.type, enabled=False):
            wide = torch.promote_types(x_BLD.dtype, torch.float32)
            x_BLGS = x_BLD.to(wide).unflatten(-1, (self.groups, -1))
            variance_BLG, mean_BLG = torch.var_mean(x_BLGS, -1, correction=0)
            count_BL, mean_BGL, variance_BGL = running(mean_BLG, variance_BLG, before, valid_BL)
            mean_BLG1 = mean_BGL.to(wide).transpose(1, 2).unsqueeze(-1)
            rstd_BLG1 = (variance_BGL + self.eps).rsqrt().to(wide).transpose(1, 2).unsqueeze(-1)
            y_BLD = ((x_BLGS - mean_BLG1) * rstd_BLG1).flatten(-2)
            y_BLD = y_BLD * (1 + self.weight) + self.bias
            if valid_BL is not None:
                y_BLD = torch.where(valid_BL[..., None], y_BLD, 0.0)
        after = None
        if keeps:
            last = mean_BGL[..., -1], variance_BGL[..., -1]
            after = Statistics(count_BL[:, -1], last[0].to(wide), last[1].to(wide))
        return y_BLD.to(dtype), after


def running(
    mean_BLG: Tensor, variance_BLG: Tensor, before: Statistics | None, valid_BL: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return count (B, L), mean and variance (B, G, L) of all tokens up to each, in fp64.

    Sums of differences from a first guess of the mean: it has no part in the result, so no gradient
    flows through it. The sums are a share of 1 / S of the activations; in fp64 they neither cancel
    nor drift over any length. Time comes last: along it a sum is quick.
    """
    B, L, G = mean_BLG.shape
    if before is None:
        before = Statistics.fresh(B, G, mean_BLG)
    count_B, prior_BG, prior_variance_BG = before
    mean_BGL, variance_BGL = (x.double().transpose(1, 2) for x in (mean_BLG, variance_BLG))
    is_new_B1 = (count_B == 0)[:, None]
    if valid_BL is not None:
        is_new_B1 = is_new_B1 & valid_BL[:, :1]  # what stands in for a token may be anything
    guess_BG1 = torch.where(is_new_B1, mean_BGL[..., 0], prior_BG.double()).detach()[..., None]
    away_BGL = mean_BGL - guess_BG1
    square_BGL = variance_BGL + away_BGL.square()
    if valid_BL is None:
        step_L = torch.arange(1, L + 1, device=mean_BLG.device)
        count_BL = count_B[:, None] + step_L
    else:
        away_BGL, square_BGL = (
            torch.where(valid_BL[:, None], x, 0.0) for x in (away_BGL, square_BGL)
        )
        count_BL = count_B[:, None] + valid_BL.cumsum(1)
    tokens_B1L = count_BL[:, None].clamp_min(1).double()
    prior_BG1 = (count_B[:, None] * prior_variance_BG.double())[..., None]
    shift_BGL = away_BGL.cumsum(-1) / tokens_B1L
    spread_BGL = (prior_BG1 + square_BGL.cumsum(-1)) / tokens_B1L
    mean_BGL = guess_BG1 + shift_BGL
    variance_BGL = (spread_BGL - shift_BGL.square()).clamp_min(0)
    if valid_BL is not None:
        none_B1L = (count_BL == 0)[:, None]
        mean_BGL = torch.where(none_B1L, prior_BG.double()[..., None], mean_BGL)
        variance_BGL = torch.where(none_B1L, prior_variance_BG.double()[..., None], variance_BGL)
    return count_BL, mean_BGL, variance_BGL
