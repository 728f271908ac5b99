"""What lies between the two matrices of a feed-forward network: one pass over its wide rows.

`z` is (R, F) for gelu and (R, 2F) for swiglu, whose gate's columns come first. Every row may have
a weight: row r that of assignment `source_R[r]`, or its own where `source_R` is None. These are
parts of fused layers, which keep z and nothing else of the wide rows; autograd does not see them.

Every implementation offers `forward` and `backward`, as below.
"""

# R rows, F inner width
from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from steplab.kernels.dispatch import load_all
from steplab.kernels.triton_runtime import use_triton


class RowWeights(NamedTuple):
    """The weight of each row."""

    values_R: Tensor  # in the order of the assignments
    source_R: Tensor | None = None  # int32: the assignment of each row; None: row by row


class Gradients(NamedTuple):
    """What the backward of an activation gives."""

    dz: Tensor
    h_RF: Tensor  # the weighted activation again, for the gradient of the second matrix
    dweights_R: Tensor | None  # in the order of the assignments, fp32 or better


# After the types above, which the implementations import.
IMPLS = load_all("activation")


def choose(z: Tensor) -> str:
    """Return the implementation to run: the definition where Triton does not run."""
    return "triton_rows" if use_triton(z) else "reference"


def forward(impl: str, z: Tensor, activation: str, weights: RowWeights | None = None) -> Tensor:
    """Return (R, F): weight times act(z)."""
    h_RF: Tensor = IMPLS[impl].forward(z, activation, weights)
    return h_RF


def backward(
    impl: str, z: Tensor, dh_RF: Tensor, activation: str, weights: RowWeights | None = None
) -> Gradients:
    """Return the gradients, given that of the weighted activation divided by the weights.

    That is d_out w_out, with unweighted d_out: so the gradient of a weight is the inner product of
    `dh` and act(z), and the layer's output is not needed. `dh` may be overwritten by h.
    """
    found: tuple[Tensor, Tensor, Tensor | None] = IMPLS[impl].backward(
        z, dh_RF, activation, weights
    )
    return Gradients(*found)
