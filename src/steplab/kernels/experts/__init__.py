"""Routed experts: every token goes to K of E small networks, whose outputs are weighted and added.

`loop` is the definition. `grouped` computes the same with static shapes: on one device K copies of
T tokens are always T * K rows, and only the borders between experts move. `fused` does that in
hand-written kernels and keeps half as much for the backward; `in_product` is `fused` with the
activation inside two of the products. `capacity` gives every expert the same number of rows and
drops the assignments that find their expert full.

Every implementation offers `experts(tokens, experts, matmul)` and, unless it takes everything,
`refuse(x, experts)`.
"""

# T tokens, K chosen experts, E experts, D width, F inner width (2F for swiglu), R = T * K rows
from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from steplab.kernels.dispatch import load_all, select


class GroupedMatmul(Protocol):
    """The grouped product that implementations with sorted rows use."""

    def choose(self, x_RK: Tensor, w_EKN: Tensor) -> str:
        """Return the name of the implementation that will multiply these."""
        ...

    def __call__(self, x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
        """Return (R, N)."""
        ...


class ExpertWeights(NamedTuple):
    """Stacked weights of E experts and the activation between their two matrices."""

    w_in_EFD: Tensor  # for swiglu the gate's rows come first, then the up projection's
    w_out_EDF: Tensor
    activation: str  # "gelu" or "swiglu"

    def to(self, dtype: torch.dtype) -> ExpertWeights:
        """Return the same weights in another dtype."""
        return ExpertWeights(self.w_in_EFD.to(dtype), self.w_out_EDF.to(dtype), self.activation)


class RoutedTokens(NamedTuple):
    """Tokens, and the K experts that each goes to."""

    x_TD: Tensor
    weights_TK: Tensor
    experts_TK: Tensor  # int64: their indices


# After the types above, which the implementations import.
IMPLS = load_all("experts")
PREFERENCE = ("in_product", "fused", "grouped")


def choose(impl: str, x_TD: Tensor, experts: ExpertWeights) -> str:
    """Return the implementation to run; `auto` is a dropless one with static shapes."""
    return select("experts", IMPLS, PREFERENCE, impl, x_TD, experts)


def experts(
    impl: str,
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    experts: ExpertWeights,
    matmul: GroupedMatmul,
) -> tuple[Tensor, Tensor]:
    """Return (output_TD, share of assignments that were dropped, a scalar).

    `weights_TK` weighs the K experts whose indices are `experts_TK`.
    """
    tokens = RoutedTokens(x_TD, weights_TK, experts_TK)
    out: tuple[Tensor, Tensor] = IMPLS[impl].experts(tokens, experts, matmul)
    return out
