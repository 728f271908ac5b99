"""Root-mean-square norm of the rows of a residual stream, and the addition before it.

Every implementation offers `rms_norm(x, weight, eps, added, dtype)` and, unless it takes
everything, `refuse(x, weight, added)`.

The stream is returned beside its norm. A caller that continues with the returned one, and not with
`x`, lets the backward kernel add both gradients of the stream in the same pass.
"""

# D width
from __future__ import annotations

import torch
from torch import Tensor

from steplab.kernels.dispatch import load_all, select

IMPLS = load_all("rms_norm")

# `aten` is torch's own op: fused on CUDA where stream and weight have one dtype.
PREFERENCE = ("triton_norm", "aten", "reference")


def choose(impl: str, x: Tensor, weight_D: Tensor, added: Tensor | None = None) -> str:
    """Return the implementation to run. `auto` takes the first that accepts the inputs."""
    return select("rms_norm", IMPLS, PREFERENCE, impl, x, weight_D, added)


def rms_norm(
    impl: str,
    x: Tensor,
    weight_D: Tensor,
    eps: float,
    added: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (normed, stream), both (..., D), by exactly the implementation named (not `auto`).

    The stream is x, or x + added in the wider of their dtypes. Its norm, stream /
    sqrt(mean(stream^2) + eps) * weight, is computed in fp32 or better and rounded once, to `dtype`
    (None: the stream's).
    """
    out: tuple[Tensor, Tensor] = IMPLS[impl].rms_norm(x, weight_D, eps, added, dtype)
    return out
