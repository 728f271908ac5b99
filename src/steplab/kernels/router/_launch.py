"""Launches the router's kernels."""

# T tokens, D width, E experts, K chosen, B tiles of tokens
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from steplab.kernels._triton import INTERPRETED, on_device_of
from steplab.kernels.router._triton_kernels import (
    router_softmax_backward_kernel,
    router_softmax_kernel,
)


class Tiling(NamedTuple):
    """Tokens that a program routes, columns of one step of its loop, warps and stages."""

    rows: int
    columns: int
    warps: int
    stages: int


# By the padded number of experts up to which they serve, forward and backward.
# `benchmarks/experts_kernels.py` measures others.
TILINGS = {
    32: (Tiling(64, 128, 4, 2), Tiling(64, 128, 4, 3)),  # 8 experts: the fastest on an H200
    64: (Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 2)),
    256: (Tiling(64, 32, 8, 2), Tiling(64, 32, 8, 1)),
}
INTERPRETED_TILING = Tiling(16, 16, 1, 1)


def forward(
    x_TD: Tensor, weight_ED: Tensor, gate_1D: Tensor, chosen: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (probabilities_TE, weights_TK, experts_TK, gate_T1)."""
    return forward_by(tilings(weight_ED)[0], x_TD, weight_ED, gate_1D, chosen)


def backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    outputs: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Return dx and, in fp32, the gradient of the weight's rows followed by the gate's.

    Of probabilities, weights and gate the gradients; x, weight and gate; and, of what the forward
    gave, probabilities, experts and gate.
    """
    return backward_by(tilings(inputs[1])[1], *gradients, *inputs, *outputs)


def tilings(weight_ED: Tensor) -> tuple[Tiling, Tiling]:
    """Return those of the forward and of the backward."""
    if INTERPRETED:
        return INTERPRETED_TILING, INTERPRETED_TILING
    return next(found for most, found in TILINGS.items() if _padded(weight_ED) <= most)


def _padded(weight_ED: Tensor) -> int:
    """Return the rows of a tile of the weight: one is the gate's, and tensor cores take 16."""
    return max(16, triton.next_power_of_2(weight_ED.shape[0] + 1))


def _options(tiling: Tiling, weight_ED: Tensor, chosen: int) -> dict[str, Any]:
    return {
        "EXPERTS": weight_ED.shape[0],
        "CHOSEN": chosen,
        "WIDTH": weight_ED.shape[1],
        "PADDED": _padded(weight_ED),
        "ROWS": tiling.rows,
        "COLUMNS": tiling.columns,
        "UPCAST": INTERPRETED,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }


def forward_by(
    tiling: Tiling, x_TD: Tensor, weight_ED: Tensor, gate_1D: Tensor, chosen: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `forward`, by the tiling given."""
    T, E = x_TD.shape[0], weight_ED.shape[0]
    probabilities_TE = x_TD.new_empty(T, E, dtype=torch.float32)
    weights_TK = probabilities_TE.new_empty(T, chosen)
    experts_TK = probabilities_TE.new_empty(T, chosen, dtype=torch.int64)
    gate_T1 = probabilities_TE.new_empty(T, 1)
    with on_device_of(x_TD):
        router_softmax_kernel[(triton.cdiv(T, tiling.rows),)](
            *(x_TD, weight_ED, gate_1D, probabilities_TE, weights_TK, experts_TK, gate_T1, T),
            **_options(tiling, weight_ED, chosen),
        )
    return probabilities_TE, weights_TK, experts_TK, gate_T1


def backward_by(
    tiling: Tiling,
    dprobabilities_TE: Tensor,
    dweights_TK: Tensor,
    dgate_T1: Tensor,
    x_TD: Tensor,
    weight_ED: Tensor,
    gate_1D: Tensor,
    probabilities_TE: Tensor,
    experts_TK: Tensor,
    gate_T1: Tensor,
) -> tuple[Tensor, Tensor]:
    """As `backward`, by the tiling given."""
    T, tiles = x_TD.shape[0], triton.cdiv(x_TD.shape[0], tiling.rows)
    E, D = weight_ED.shape
    dx_TD = torch.empty_like(x_TD)
    parts_BED = probabilities_TE.new_empty(tiles, E + 1, D)
    with on_device_of(x_TD):
        router_softmax_backward_kernel[(tiles,)](
            *(dprobabilities_TE, dweights_TK, dgate_T1, x_TD, weight_ED, gate_1D),
            *(probabilities_TE, experts_TK, gate_T1, dx_TD, parts_BED, T),
            **_options(tiling, weight_ED, experts_TK.shape[1]),
        )
    # Added up by torch, always in the same order: the same inputs give the same bits.
    return dx_TD, parts_BED.sum(0)
