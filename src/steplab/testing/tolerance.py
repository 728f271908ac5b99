"""Error budgets that are derived, never guessed."""

from __future__ import annotations

import torch
from torch import Tensor

# Of fewer numbers a peer's may all be right by chance; each of them is rounded twice or more.
FEW = 64


def relative_error(actual: Tensor, truth: Tensor) -> float:
    """Return |actual - truth| / |truth| in fp64; NaN or Inf anywhere gives infinity."""
    difference = actual.double() - truth.double()
    if not bool(torch.isfinite(difference).all()):
        return float("inf")
    return float(difference.norm() / truth.double().norm().clamp_min(1e-300))


def assert_as_good_as(
    actual: Tensor, peer: Tensor, truth: Tensor, name: str = "value", floor: float = 0.0
) -> None:
    """Assert that `actual` is about as close to the fp64 `truth` as a same-precision `peer` is.

    The budget is twice the peer's own error plus one rounding of the truth to the dtype: another
    order of summation may cost that much and no more. `floor` is the relative error that is allowed
    whatever the peer's, derived by the caller; of fewer than 64 numbers two roundings are.
    """
    if truth.numel() < FEW:
        floor = max(floor, torch.finfo(actual.dtype).eps)
    rounding = relative_error(truth.to(actual.dtype), truth)
    budget = max(2 * relative_error(peer, truth), floor) + rounding
    error = relative_error(actual, truth)
    assert error <= budget, f"{name}: error {error:.2e} exceeds the budget {budget:.2e}"
