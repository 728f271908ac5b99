"""Triton: z is read once, and nothing wide is written twice."""

# R rows, F inner width
from __future__ import annotations

import torch
from torch import Tensor

from steplab.kernels._tiles import Tile, fitted
from steplab.kernels._triton import INTERPRETED, on_device_of
from steplab.kernels.activation import Weights

# The fastest on an H200 over (131,072, 3072): 3.79 and 4.15 TB/s, where a copy has 4.14
# (`benchmarks/experts_kernels.py`).
FORWARD = Tile(1, 1024, 2)
BACKWARD = Tile(2, 512, 4)


def forward(z: Tensor, activation: str, weights: Weights | None = None) -> Tensor:
    """Return (R, F)."""
    return forward_by(FORWARD, z, activation, weights)


def backward(
    z: Tensor, dh_RF: Tensor, activation: str, weights: Weights | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return dz, the weighed activation (over `dh`) and the gradient of the weights."""
    return backward_by(BACKWARD, z, dh_RF, activation, weights)


def forward_by(tile: Tile, z: Tensor, activation: str, weights: Weights | None) -> Tensor:
    """As `forward`, by the tile given."""
    from steplab.kernels.activation._triton_kernels import activation_forward_kernel

    gated = activation == "swiglu"
    R, F = z.shape[0], z.shape[1] // 2 if gated else z.shape[1]
    tile = fitted(tile, F)
    h_RF = z.new_empty(R, F)
    tiles = -(-R // tile.rows) * -(-F // tile.columns)
    with on_device_of(z):
        activation_forward_kernel[(tiles,)](
            *(z, *_pointers(weights), h_RF, R, F, gated, tile.rows, tile.columns),
            UPCAST=INTERPRETED,
            num_warps=tile.warps,
        )
    return h_RF


def backward_by(
    tile: Tile, z: Tensor, dh_RF: Tensor, activation: str, weights: Weights | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `backward`, by the tile given."""
    from steplab.kernels.activation._triton_kernels import activation_backward_kernel

    (R, F), dz, dvalues_R = dh_RF.shape, torch.empty_like(z), None
    tile = fitted(tile, F)
    if weights is not None:
        dvalues_R = z.new_empty(R, dtype=torch.float32)
    with on_device_of(z):
        activation_backward_kernel[(-(-R // tile.rows),)](
            *(z, dh_RF, *_pointers(weights), dz, dvalues_R, R, F, activation == "swiglu"),
            *(tile.rows, tile.columns),
            UPCAST=INTERPRETED,
            num_warps=tile.warps,
        )
    return dz, dh_RF, dvalues_R


def _pointers(weights: Weights | None) -> tuple[Tensor | None, Tensor | None]:
    if weights is None:
        return None, None
    return weights.values_R.contiguous(), weights.source_R
