"""One update of AdamW (decoupled decay), with the clipping of the gradient inside.

Nothing is read on the host: the step count, the rate and the clip coefficient are tensors on the
device, so that an update can be captured in a CUDA graph. Every implementation file offers
`update(weight, rule, lr, coefficient)` and `refuse(param)`, which returns the reason why it cannot
update this parameter, or "".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from steplab.core.errors import Unsupported
from steplab.kernels.dispatch import AUTO, impls, load


class Weight(NamedTuple):
    """One parameter and what belongs to it, all of one shape but the step."""

    param: Tensor
    master: Tensor | None  # the same in fp32, where the parameter is a rounded copy of it
    grad: Tensor
    exp_avg: Tensor  # fp32 or better
    exp_avg_sq: Tensor
    step: Tensor  # scalar, fp32: updates so far, this one included


class Rule(NamedTuple):
    """The constants of a group of parameters."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float


# After the types above, which the implementations import.
IMPLS = {name: load("adamw", name) for name in impls("adamw")}


def choose(impl: str, params: Iterable[Tensor]) -> str:
    """Return the implementation to run for all `params`; `auto`: the one-pass kernel if it can."""
    reasons = (IMPLS["triton_update" if impl == AUTO else impl].refuse(p) for p in params)
    reason = next(filter(None, reasons), "")
    if impl == AUTO:
        return "reference" if reason else "triton_update"
    if reason:
        raise Unsupported(f"adamw {impl!r} {reason}.", "Leave the choice to auto.")
    return impl


def update(
    impl: str, weight: Weight, rule: Rule, lr: Tensor, coefficient: Tensor | None = None
) -> None:
    """Update param, master and moments in place by the implementation named (not `auto`).

    `lr` is a scalar in fp64; the gradient counts times `coefficient`, a scalar in fp32.
    """
    IMPLS[impl].update(weight, rule, lr, coefficient)
