"""Rows between tokens and experts: by Triton where it runs, else the same in torch."""

# T tokens, K chosen experts, E experts, D width, R = T * K rows
from __future__ import annotations

import torch
from torch import Tensor

from steplab.kernels._triton import by_triton
from steplab.kernels.experts._sorting import place_assignments


def gather(x_TD: Tensor, source_R: Tensor, chosen: int) -> Tensor:
    """Return (R, D): the token of each row's assignment; assignment a is of token a // chosen."""
    if by_triton(x_TD):
        from steplab.kernels.experts import _triton_launch

        return _triton_launch.gather(x_TD.contiguous(), source_R, chosen)
    return x_TD[source_R // chosen]


def add_up(y_RD: Tensor, row_TK: Tensor) -> Tensor:
    """Return (T, D): the sum of each token's K rows, in fp32 or better until it is rounded."""
    if by_triton(y_RD):
        from steplab.kernels.experts import _triton_launch

        return _triton_launch.add_up(y_RD, row_TK)
    wide = torch.promote_types(y_RD.dtype, torch.float32)
    return y_RD[row_TK].to(wide).sum(1).to(y_RD.dtype)


@torch.library.custom_op("steplab::place_assignments", mutates_args=())
def place(experts_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return row_TK, source_R and offsets_E, all int32.

    Sorted by expert, tokens in order within each: the row of every assignment, the assignment
    (t * K + k) of every row, and the end of each expert's rows.
    """
    experts_TK = experts_TK.contiguous()
    if by_triton(experts_TK):
        from steplab.kernels.experts import _triton_launch

        return _triton_launch.place(experts_TK, experts)
    row_TK, offsets_E = place_assignments(experts_TK, experts)
    assignment_R = torch.arange(row_TK.numel(), dtype=torch.int32, device=row_TK.device)
    source_R = torch.empty_like(assignment_R).scatter_(0, row_TK.flatten(), assignment_R)
    return row_TK.int(), source_R, offsets_E.int()


@place.register_fake
def _(experts_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    row_TK = torch.empty(experts_TK.shape, dtype=torch.int32, device=experts_TK.device)
    return row_TK, row_TK.new_empty(row_TK.numel()), row_TK.new_empty(experts)
