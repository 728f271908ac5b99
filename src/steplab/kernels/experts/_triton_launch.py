"""Launches the kernels that move rows between tokens and experts."""

# T tokens, K chosen experts, E experts, D width, R = T * K rows
from __future__ import annotations

import torch
import triton
from torch import Tensor

from steplab.kernels._tiles import Tile, column_block
from steplab.kernels._triton import INTERPRETED, on_device_of
from steplab.kernels.experts._triton_rows import (
    gather_rows_kernel,
    gather_sum_kernel,
    routing_count_kernel,
    routing_place_kernel,
)

# The fastest on an H200 (`benchmarks/experts_kernels.py`).
GATHER = Tile(4, 256, 4)
ADD_UP = Tile(16, 256, 8)
HITS = 4096  # assignments times experts that one program compares
FEWEST = 16 if INTERPRETED else 64  # assignments of one program


def gather(x_TD: Tensor, source_R: Tensor, chosen: int, tile: Tile = GATHER) -> Tensor:
    """Return (R, D): the token of each row's assignment."""
    R, D = source_R.shape[0], x_TD.shape[1]
    out_RD = x_TD.new_empty(R, D)
    with on_device_of(x_TD):
        gather_rows_kernel[(triton.cdiv(R, tile.rows),)](
            *(x_TD, source_R, out_RD, R, chosen, D, tile.rows, column_block(D, tile.columns)),
            num_warps=tile.warps,
        )
    return out_RD


def add_up(y_RD: Tensor, row_TK: Tensor, tile: Tile = ADD_UP) -> Tensor:
    """Return (T, D): the sum of each token's K rows."""
    (T, K), D = row_TK.shape, y_RD.shape[1]
    out_TD = y_RD.new_empty(T, D)
    with on_device_of(y_RD):
        gather_sum_kernel[(triton.cdiv(T, tile.rows),)](
            *(y_RD, row_TK, out_TD, T, K, D, tile.rows, column_block(D, tile.columns)),
            UPCAST=INTERPRETED,
            num_warps=tile.warps,
        )
    return out_TD


def place(experts_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return row_TK, source_R and offsets_E, int32; no value is read on the host."""
    R = experts_TK.numel()
    padded = triton.next_power_of_2(experts)
    block = FEWEST if INTERPRETED else max(HITS // padded, FEWEST)
    blocks = max(1, triton.cdiv(R, block))  # one writes the offsets, also where nobody came
    counts_EB = torch.empty(experts, blocks, dtype=torch.int32, device=experts_TK.device)
    row_TK = torch.empty_like(experts_TK, dtype=torch.int32)
    source_R, offsets_E = row_TK.new_empty(R), row_TK.new_empty(experts)
    shape = (R, experts, block, padded)
    with on_device_of(experts_TK):
        routing_count_kernel[(blocks,)](experts_TK, counts_EB, *shape)
        running_EB = counts_EB.flatten().cumsum(0, dtype=torch.int32)
        routing_place_kernel[(blocks,)](
            experts_TK, counts_EB, running_EB, row_TK, source_R, offsets_E, *shape
        )
    return row_TK, source_R, offsets_E
