"""The router: softmax of x w^T over E experts, of which the K most probable are chosen.

The gate of the shared expert, sigmoid(x gate^T), is one more row for the same x. Everything is in
fp32 or better, whatever x is in. The weights are the chosen probabilities, not renormalized.
`reference` is the definition; `triton_router` is one kernel each way. Every implementation offers
`router(...)` and, unless it takes everything, `refuse(x, weight)`.
"""

# T tokens, D width, E experts, K chosen
from __future__ import annotations

from torch import Tensor

from steplab.kernels.dispatch import load_all, select

IMPLS = load_all("router")
PREFERENCE = ("triton_router", "reference")


def choose(impl: str, x_TD: Tensor, weight_ED: Tensor) -> str:
    """Return the implementation to run; `auto` is the single kernel wherever it can run."""
    return select("router", IMPLS, PREFERENCE, impl, x_TD, weight_ED)


def router(
    impl: str, x_TD: Tensor, weight_ED: Tensor, gate_1D: Tensor, chosen: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (probabilities_TE, weights_TK, experts_TK, gate_T1), the likeliest expert first."""
    found: tuple[Tensor, Tensor, Tensor, Tensor]
    found = IMPLS[impl].router(x_TD, weight_ED, gate_1D, chosen)
    return found
