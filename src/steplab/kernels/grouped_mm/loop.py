"""Group by group: the definition.

Reading the offsets waits for the device, so on CUDA it serves as a check and not for speed.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

# It reads the offsets on the host, which no CUDA graph can replay.
TAGS = (torch.Tag.cudagraph_unsafe,)


def product(x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """Return (R, N)."""
    parts = [x_RK[a:b] @ w_EKN[e] for e, (a, b) in enumerate(_groups(offsets_E))]
    return torch.cat(parts)


def weight_gradient(x_RK: Tensor, dout_RN: Tensor, offsets_E: Tensor) -> Tensor:
    """Return (E, K, N)."""
    return torch.stack([x_RK[a:b].T @ dout_RN[a:b] for a, b in _groups(offsets_E)])


def _groups(offsets_E: Tensor) -> list[tuple[int, int]]:
    return list(pairwise([0, *offsets_E.tolist()]))
