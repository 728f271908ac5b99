"""Routed experts: every token goes to K of E small networks, whose outputs are weighed and added.

`loop` is the definition. `grouped` computes the same with static shapes: on one device K copies of
T tokens are always T * K rows, and only the borders between experts move. `capacity` gives every
expert the same number of rows and drops the assignments that find theirs full.

Every implementation file offers `experts(...)`, as `experts` below.
"""

# T tokens, K chosen experts, E experts, D width, F inner width (2F for swiglu), R = T * K rows
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from steplab.kernels.impl import AUTO, impls, load

GroupedMatmul = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x_RK, w_EKN, offsets_E) -> (R, N)


class ExpertWeights(NamedTuple):
    """Stacked weights of E experts and the activation between their two matrices."""

    w_in_EFD: Tensor  # for swiglu the gate's rows come first, then the up projection's
    w_out_EDF: Tensor
    activation: str  # "gelu" or "swiglu"


# After the types above, which the implementations import.
IMPLS = {name: load("experts", name) for name in impls("experts")}


def choose(impl: str) -> str:
    """Return the implementation to run; `auto` is the dropless one with static shapes."""
    return "grouped" if impl == AUTO else impl


def experts(
    impl: str,
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    experts: ExpertWeights,
    matmul: GroupedMatmul,
) -> tuple[Tensor, Tensor]:
    """Return (output_TD, share of assignments that were dropped, a scalar).

    `weights_TK` weighs the K experts whose indices are `experts_TK`; `matmul` is the grouped
    product that implementations with sorted rows use.
    """
    out: tuple[Tensor, Tensor] = IMPLS[impl].experts(x_TD, weights_TK, experts_TK, experts, matmul)
    return out
