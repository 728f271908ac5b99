"""The router: softmax of x w^T over E experts, of which the K most probable are chosen.

The gate of the shared expert, sigmoid(x gate^T), comes with it: another row for the same x. All in
fp32 or better, whatever x is in. The chosen probabilities are the weights, not renormalised.
`reference` is the definition; `triton_router` is one kernel each way. Every implementation file
offers `router(...)` and `refuse(...)`, which returns the reason why it cannot run, or "".
"""

# T tokens, D width, E experts, K chosen
from __future__ import annotations

from torch import Tensor

from steplab.kernels.dispatch import impls, load, select

IMPLS = {name: load("router", name) for name in impls("router")}
PREFERENCE = ("triton_router", "reference")


def choose(impl: str, x_TD: Tensor, weight_ED: Tensor) -> str:
    """Return the implementation to run; `auto` is the single kernel wherever it can run."""
    return select("router", IMPLS, PREFERENCE, impl, x_TD, weight_ED)


def router(
    impl: str, x_TD: Tensor, weight_ED: Tensor, gate_1D: Tensor, chosen: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (probabilities_TE, weights_TK, experts_TK, gate_T1); the likeliest expert first."""
    found: tuple[Tensor, Tensor, Tensor, Tensor]
    found = IMPLS[impl].router(x_TD, weight_ED, gate_1D, chosen)
    return found
