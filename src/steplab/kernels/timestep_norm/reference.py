"""The definition of the timestep norm: running sums of each token's moments, in fp64."""

# B batch, L tokens, D width, G groups, S channels of a group
from __future__ import annotations

import torch
from torch import Tensor

from steplab.kernels.timestep_norm import Affine, Statistics


def timestep_norm(
    x_BLD: Tensor,
    affine: Affine,
    before: Statistics | None,
    valid_BL: Tensor | None,
    keeps: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Statistics | None]:
    """Return the normed tokens and, if `keeps`, the statistics after the last one."""
    wide = torch.promote_types(x_BLD.dtype, torch.float32)
    if valid_BL is not None:
        # Before any arithmetic: a NaN would spoil all gradients, even through outputs of 0.
        x_BLD = torch.where(valid_BL[..., None], x_BLD, 0.0)
    x_BLGS = x_BLD.to(wide).unflatten(-1, (affine.groups, -1))
    # Far from zero a mean has few digits left for what is between the tokens: at 1e4 rounding it to
    # fp32 costs 5e-4. So all is computed from one of the numbers, which then has no part in it.
    origin_BG = x_BLGS[:, 0, :, 0].detach()
    x_BLGS = x_BLGS - origin_BG[:, None, :, None]
    variance_BLG, mean_BLG = torch.var_mean(x_BLGS, -1, correction=0)
    mean_BLG = mean_BLG.double() + origin_BG.double()[:, None]
    count_BL, mean_BGL, variance_BGL = running(mean_BLG, variance_BLG, before, valid_BL)
    away_BGL = mean_BGL - origin_BG.double()[..., None]
    away_BLG1 = away_BGL.to(wide).transpose(1, 2).unsqueeze(-1)
    rstd_BLG1 = (variance_BGL + affine.eps).rsqrt().to(wide).transpose(1, 2).unsqueeze(-1)
    y_BLD = ((x_BLGS - away_BLG1) * rstd_BLG1).flatten(-2)
    y_BLD = y_BLD * (1 + affine.weight_D.to(wide)) + affine.bias_D.to(wide)
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
    # Of earlier tokens the guess is the mean, so this is 0, but its gradient is not.
    prior_away_BG1 = prior_BG.double()[..., None] - guess_BG1
    prior_square_BG1 = prior_variance_BG.double()[..., None] + prior_away_BG1.square()
    before_B11 = count_B[:, None, None]
    shift_BGL = (before_B11 * prior_away_BG1 + away_BGL.cumsum(-1)) / tokens_B1L
    spread_BGL = (before_B11 * prior_square_BG1 + square_BGL.cumsum(-1)) / tokens_B1L
    mean_BGL = guess_BG1 + shift_BGL
    variance_BGL = (spread_BGL - shift_BGL.square()).clamp_min(0)
    if valid_BL is not None:
        none_B1L = (count_BL == 0)[:, None]
        mean_BGL = torch.where(none_B1L, prior_BG.double()[..., None], mean_BGL)
        variance_BGL = torch.where(none_B1L, prior_variance_BG.double()[..., None], variance_BGL)
    return count_BL, mean_BGL, variance_BGL
