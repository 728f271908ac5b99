"""gelu(x w_in^T) w_out^T and its gradients with every factor of the six products in e4m3.

For one network, or for E of them whose rows lie in groups. Weights are rounded where they are used:
each of the two forms, along the rows and along the columns, once in a forward and a backward. Kept
for the backward are z in e4m3 and three scales per row.
"""

# T tokens, R rows, D width, F inner width, E networks
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from steplab.kernels.activation import RowWeights
from steplab.kernels.e4m3 import Rounded, product, weight_gradient
from steplab.kernels.e4m3_passes import (
    activate_rows,
    gradient_scales,
    quantize_columns,
    quantize_rows,
    refuse_widths,
    slope_rows,
    transpose_rows,
)


class Groups(NamedTuple):
    """Where rows come from and which network each goes to."""

    weights: RowWeights | None = None  # with the assignment of each row, -1 for none
    chosen: int = 1  # assignments of a token
    offsets_E: Tensor | None = None  # int32: the end of each group, a multiple of 16; None: one

    @property
    def source_R(self) -> Tensor | None:
        """The assignment of each row; None: its own token."""
        return None if self.weights is None else self.weights.source_R


class Kept(NamedTuple):
    """What the backward needs beside the inputs."""

    z_RF: Tensor  # e4m3
    scales_3R: Tensor  # of x, z and h


class Needs(NamedTuple):
    """The gradients that somebody wants."""

    dx: bool
    dw_in: bool
    dw_out: bool


def forward(x_TD: Tensor, w_in: Tensor, w_out: Tensor, groups: Groups) -> tuple[Tensor, Kept]:
    """Return y_RD, weighted, and what is kept; matrices are (..., F, D) and (..., D, F)."""
    x = quantize_rows(x_TD, groups.source_R, groups.chosen)
    w = quantize_rows(w_in)
    z_RF = product(x, w, groups.offsets_E, x_TD.dtype)
    h, z = activate_rows(z_RF, x.norm, w.norm.amax(), groups.weights)
    del z_RF
    y_RD = product(h, quantize_rows(w_out), groups.offsets_E, x_TD.dtype)
    return y_RD, Kept(z.values, torch.stack([x.scale, z.scale, h.scale]))


def backward(
    dout_TD: Tensor,
    x_TD: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    groups: Groups,
    kept: Kept,
    needs: Needs,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return dx_RD, both matrices' gradients (empty where not needed) and that of the weights."""
    dtype, offsets_E = x_TD.dtype, groups.offsets_E
    rows = (groups.source_R, groups.chosen)
    x_scale_R, z_scale_R, h_scale_R = kept.scales_3R
    dout = quantize_rows(dout_TD, *rows)
    w = quantize_columns(w_out)
    dh_RF = product(dout, w, offsets_E, dtype)
    scales = gradient_scales(dout, w.norm.amax(), groups.weights, x_scale_R, h_scale_R)
    z = Rounded(kept.z_RF, z_scale_R)
    dz, dz_FR, h_FR, dweights = slope_rows(z, dh_RF, groups.weights, scales)
    del dh_RF, dout, w
    dx_RD, dw_in, dw_out = (t.new_empty(0) for t in (x_TD, w_in, w_out))
    if needs.dw_out:
        pair = (scales.dout_R, scales.h_R, scales.largest_out)
        dout_DR = transpose_rows(dout_TD, *rows, pair, first=True)
        dw_out = weight_gradient(dout_DR, h_FR, scales.largest_out, offsets_E, dtype)
        del dout_DR
    del h_FR
    if needs.dw_in:
        pair = (scales.dz_R, scales.x_R, scales.largest_in)
        x_DR = transpose_rows(x_TD, *rows, pair, first=False)
        dw_in = weight_gradient(dz_FR, x_DR, scales.largest_in, offsets_E, dtype)
        del x_DR
    del dz_FR
    if needs.dx:
        dx_RD = product(dz, quantize_columns(w_in), offsets_E, dtype)
    return dx_RD, dw_in, dw_out, dweights


def refuse(x_TD: Tensor, width: int, inner: int, activation: str) -> str:
    """Return why a network of this shape cannot run on the device of `x`, or ""."""
    if activation != "gelu":
        return f"has gelu only, not {activation}"
    return refuse_widths(x_TD, width, inner)
