"""One update of AdamW (decoupled weight decay) that clips the gradient too.

Nothing is read on the host: the step count, the learning rate and the clip coefficient are tensors
on the device, so that an update can be captured in a CUDA graph. Every implementation offers
`update(weight, hyper, lr, coefficient)`, `update_all` of several weights and, unless it takes
everything, `refuse(param)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from steplab.core.errors import Unsupported
from steplab.kernels.dispatch import AUTO, load_all, refusal


class ParameterState(NamedTuple):
    """One parameter, its gradient and its state: all of one shape but the step."""

    param: Tensor
    # The same in fp32, where the parameter is a rounded copy of it. What has been changed in the
    # copy since counts: it is taken over before the update.
    master: Tensor | None
    grad: Tensor
    exp_avg: Tensor  # fp32 or better
    exp_avg_sq: Tensor
    step: Tensor  # scalar, fp32: updates so far, this one included


class Hyperparameters(NamedTuple):
    """The settings of a group of parameters, as Python numbers."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float


# After the types above, which the implementations import.
IMPLS = load_all("adamw")


def choose(impl: str, params: Iterable[Tensor]) -> str:
    """Return the implementation to run for all `params`. `auto`: the kernel if it takes all."""
    module = IMPLS["triton_update" if impl == AUTO else impl]
    reason = next(filter(None, (refusal(module, p) for p in params)), "")
    if impl == AUTO:
        return "reference" if reason else "triton_update"
    if reason:
        raise Unsupported(f"adamw {impl!r} {reason}.", "Leave the choice to auto.")
    return impl


def update(
    impl: str,
    weight: ParameterState,
    hyper: Hyperparameters,
    lr: Tensor,
    coefficient: Tensor | None = None,
) -> None:
    """Update param, master and moments in place by the implementation named (not `auto`).

    `lr` is a scalar in fp64. The gradient is multiplied by `coefficient`, a scalar in fp32.
    """
    IMPLS[impl].update(weight, hyper, lr, coefficient)


def update_all(
    impl: str,
    weights: Sequence[ParameterState],
    hyper: Hyperparameters,
    lr: Tensor,
    coefficient: Tensor | None = None,
) -> None:
    """Update each as `update` would, to the same bits, in few launches."""
    IMPLS[impl].update_all(weights, hyper, lr, coefficient)
