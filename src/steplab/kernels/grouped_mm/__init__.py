"""Rows in groups, one matrix per group: (R, K) x (E, K, N) -> (R, N).

`offsets_E` (int32) holds the end of each group; the last one is R. Two implementations: `aten`
(torch's own op: one kernel, offsets stay on the device) and `loop` (group by group, for what
torch's op cannot take).
"""

# R rows, E groups, K inner width, N outer width
from __future__ import annotations

import torch
from torch import Tensor

from steplab.errors import Unsupported
from steplab.kernels.impl import AUTO, impls, load

IMPLS = {name: load("grouped_mm", name) for name in impls("grouped_mm")}


def choose(impl: str, x_RK: Tensor, w_EKN: Tensor) -> str:
    """Return the implementation to run; `auto` takes torch's op wherever it can run."""
    if impl == AUTO:
        return "loop" if IMPLS["aten"].refuse(x_RK, w_EKN) else "aten"
    reason = IMPLS[impl].refuse(x_RK, w_EKN)
    if reason:
        raise Unsupported(f"grouped_mm {impl!r} {reason}.", "Use impl.grouped_mm=auto.")
    return impl


def grouped_mm(impl: str, x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """Return (R, N) by exactly the implementation named (not `auto`)."""
    out_RN: Tensor = IMPLS[impl].grouped_mm(x_RK, w_EKN, offsets_E.to(torch.int32))
    return out_RN
