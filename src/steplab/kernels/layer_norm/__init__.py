"""Layer norm of the rows of a residual stream, and the addition before it.

Every implementation offers `layer_norm(x, weight, bias, eps, added, dtype)` and, unless it takes
everything, `refuse(x, weight, bias, added)`. The stream is returned beside its norm, as `rms_norm`
does.
"""

# D width
from __future__ import annotations

import torch
from torch import Tensor

from steplab.kernels.dispatch import load_all, select

IMPLS = load_all("layer_norm")
PREFERENCE = ("triton_norm", "reference")


def choose(
    impl: str, x: Tensor, weight_D: Tensor, bias_D: Tensor | None, added: Tensor | None = None
) -> str:
    """Return the implementation to run. `auto` takes the first that accepts the inputs."""
    return select("layer_norm", IMPLS, PREFERENCE, impl, x, weight_D, bias_D, added)


def layer_norm(
    impl: str,
    x: Tensor,
    weight_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
    added: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (normed, stream), both (..., D), by exactly the implementation named (not `auto`).

    The stream is x, or x + added in the wider of their dtypes. Its norm, (stream - mean) /
    sqrt(variance + eps) * weight + bias, is computed in fp32 or better and rounded once, to `dtype`
    (None: the stream's).
    """
    out: tuple[Tensor, Tensor] = IMPLS[impl].layer_norm(x, weight_D, bias_D, eps, added, dtype)
    return out
