"""Every row by every matrix, and each row keeps its own group's product: for few rows.

It multiplies E times as much as it needs, but reads every matrix once, which is what a step with
few rows waits for, and no offset on the host: where torch's op cannot run, as in fp32 on CUDA,
decoding can be captured as a CUDA graph all the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEEDS_GPU = True
NOT_TUNED = "it is for a step of decoding, and `auto` takes it there"
MOST_ROWS = 256  # 64 new points of one or two series, with two experts each
TAGS = ()


def refuse(x_RK: Tensor, w_EKN: Tensor) -> str:
    """Return why it cannot run, or ""."""
    if x_RK.device.type != "cuda":
        return f"needs cuda, not {x_RK.device.type}, where nobody waits for the offsets"
    if torch.is_grad_enabled():
        return "is for inference: its backward would multiply E times too much as well"
    if x_RK.shape[0] > MOST_ROWS:
        return f"is for at most {MOST_ROWS} rows, not {x_RK.shape[0]}"
    return ""


def product(x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """Return (R, N)."""
    row_R = torch.arange(x_RK.shape[0], device=x_RK.device)
    all_ERN = x_RK @ w_EKN
    return all_ERN[_group_of_rows(row_R, offsets_E), row_R]


def weight_gradient(x_RK: Tensor, dout_RN: Tensor, offsets_E: Tensor) -> Tensor:
    """Return (E, K, N)."""
    row_R = torch.arange(x_RK.shape[0], device=x_RK.device)
    expert_E1 = torch.arange(len(offsets_E), device=x_RK.device)[:, None]
    is_own_ER = _group_of_rows(row_R, offsets_E) == expert_E1
    own_ERK = torch.where(is_own_ER[..., None], x_RK, 0)
    return own_ERK.mT @ dout_RN


def _group_of_rows(row_R: Tensor, offsets_E: Tensor) -> Tensor:
    return torch.searchsorted(offsets_E.to(row_R.dtype), row_R, right=True)
