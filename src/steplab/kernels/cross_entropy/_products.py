"""Products whose sums are kept wider than their factors."""

# M rows, K terms of a sum, N columns
from __future__ import annotations

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are kept: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def add_product(total_MN: Tensor, a_MK: Tensor, b_KN: Tensor, first: bool) -> None:
    """Add a b to `total_MN` in its wider dtype; the `first` product overwrites it."""
    beta = 0 if first else 1
    if a_MK.dtype == total_MN.dtype:
        torch.addmm(total_MN, a_MK, b_KN, beta=beta, out=total_MN)
    elif a_MK.is_cuda and torch.version.cuda is not None:
        narrow_in_wide_out = torch.ops.aten.addmm.dtype_out
        narrow_in_wide_out(total_MN, a_MK, b_KN, total_MN.dtype, beta=beta, out=total_MN)
    else:  # only CUDA has such a product
        a_MK, b_KN = a_MK.to(total_MN.dtype), b_KN.to(total_MN.dtype)
        torch.addmm(total_MN, a_MK, b_KN, beta=beta, out=total_MN)


def round_up(number: int, step: int) -> int:
    """Return the least multiple of `step` that is not below `number`."""
    return -(-number // step) * step
