"""Rows between tokens and experts: placed by a counting sort, gathered, and added up again.

`place_assignments` and what builds on it are torch alone. `place_rows`, `gather_rows` and
`sum_rows` run in Triton where it runs, else in torch; nothing is read on the host.
"""

# T tokens, K chosen experts, E experts, D width, R = T * K rows; in the kernels R rows or tokens of
# the tile, C columns of one step, B assignments of a block
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from steplab.kernels.triton_blocks import Tile, column_block, narrow
from steplab.kernels.triton_runtime import (
    INTERPRETED,
    on_device_of,
    tl,
    triton,
    use_triton,
)

# The fastest on an H200 (`benchmarks/experts_kernels.py`).
GATHER = Tile(4, 256, 4)
SUM = Tile(16, 256, 8)
HITS = 4096  # assignments times experts that one program compares
FEWEST = 16 if INTERPRETED else 64  # assignments of one program


# fmt: off
@triton.jit
def gather_rows_kernel(
    x, source, out, rows, CHOSEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copy to each row the token of its assignment; assignment a belongs to token a // CHOSEN."""
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_R = row_R < rows
    token_R = tl.load(source + row_R, mask=inside_R, other=0) // CHOSEN
    for column in tl.static_range(0, WIDTH, COLUMNS):
        column_C = column + tl.arange(0, COLUMNS)
        inside_RC = inside_R[:, None]
        if WIDTH % COLUMNS:
            inside_RC = inside_RC & (column_C < WIDTH)[None, :]
        x_RC = x + token_R.to(tl.int64)[:, None] * WIDTH + column_C[None, :]
        out_RC = out + row_R.to(tl.int64)[:, None] * WIDTH + column_C[None, :]
        tl.store(out_RC, tl.load(x_RC, mask=inside_RC, other=0.0), mask=inside_RC)


@triton.jit
def gather_sum_kernel(
    y, row, out, tokens, CHOSEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, UPCAST: tl.constexpr,
):
    """Write for each token the sum of its CHOSEN rows, in fp32 until it is stored."""
    token_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_R = token_R < tokens
    for column in tl.static_range(0, WIDTH, COLUMNS):
        column_C = column + tl.arange(0, COLUMNS)
        inside_RC = inside_R[:, None]
        if WIDTH % COLUMNS:
            inside_RC = inside_RC & (column_C < WIDTH)[None, :]
        sum_RC = tl.zeros([ROWS, COLUMNS], tl.float32)
        for chosen in tl.static_range(CHOSEN):
            row_R = tl.load(row + token_R * CHOSEN + chosen, mask=inside_R, other=0)
            y_RC = y + row_R.to(tl.int64)[:, None] * WIDTH + column_C[None, :]
            sum_RC += tl.load(y_RC, mask=inside_RC, other=0.0).to(tl.float32)
        out_RC = out + token_R.to(tl.int64)[:, None] * WIDTH + column_C[None, :]
        tl.store(out_RC, narrow(sum_RC, out.dtype.element_ty, UPCAST), mask=inside_RC)


@triton.jit
def _hits(experts, assignments, BLOCK: tl.constexpr, PADDED: tl.constexpr):
    """Return the block's assignments, and 1 where one went to an expert (BLOCK, PADDED)."""
    index_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert_B = tl.load(experts + index_B, mask=index_B < assignments, other=-1).to(tl.int32)
    return index_B, (expert_B[:, None] == tl.arange(0, PADDED)[None, :]).to(tl.int32)


@triton.jit
def routing_count_kernel(
    experts, counts, assignments, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Count each expert's assignments in one block. `counts` is (experts, blocks)."""
    _, hit_BE = _hits(experts, assignments, BLOCK, PADDED)
    expert_E = tl.arange(0, PADDED)
    offset_E = expert_E * tl.num_programs(0) + tl.program_id(0)
    tl.store(counts + offset_E, tl.sum(hit_BE, 0), mask=expert_E < EXPERTS)


@triton.jit
def routing_place_kernel(
    experts, counts, running, row, source, offsets, assignments, EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr, PADDED: tl.constexpr,
):
    """Write one block's rows, and the assignments of those rows.

    `running` is the sum of `counts` up to and with each entry, expert after expert: that of the
    last block is the end of the expert's rows.
    """
    index_B, hit_BE = _hits(experts, assignments, BLOCK, PADDED)
    expert_E = tl.arange(0, PADDED)
    known_E = expert_E < EXPERTS
    offset_E = expert_E * tl.num_programs(0) + tl.program_id(0)
    end_E = tl.load(running + offset_E, mask=known_E, other=0)
    start_E = end_E - tl.load(counts + offset_E, mask=known_E, other=0)
    nth_BE = tl.cumsum(hit_BE, 0) - 1 + start_E[None, :]
    row_B = tl.sum(nth_BE * hit_BE, 1)
    inside_B = index_B < assignments
    tl.store(row + index_B, row_B, mask=inside_B)
    tl.store(source + row_B, index_B, mask=inside_B)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(offsets + expert_E, end_E, mask=known_E)
# fmt: on


class Places(NamedTuple):
    """The row of every assignment, sorted by expert and by token within each."""

    row_TK: Tensor  # int64: row of token t's k-th copy
    offsets_E: Tensor  # int64: end of each expert's rows


def place_assignments(experts_TK: Tensor, experts: int) -> Places:
    """Place assignments by a counting sort: a one-hot, expert-major, and one running sum.

    Laid out flat, the running sum at (e, r) counts all assignments of earlier experts too, so it is
    the row itself; and a flat sum is one fast kernel. (Down the columns of an (R, E) one-hot, one
    thread per column works alone: with R = 131,072 and 12 layers, a step on an H200 took 605 ms
    instead of 336.)
    """
    flat_R = experts_TK.flatten()
    if not flat_R.numel():  # there is no last column to read
        return Places(experts_TK.long(), flat_R.new_zeros(experts, dtype=torch.int64))
    hot_ER = torch.arange(experts, device=flat_R.device)[:, None] == flat_R
    running_ER = hot_ER.flatten().cumsum(0).view_as(hot_ER)
    row_R = running_ER.gather(0, flat_R[None]).squeeze(0) - 1
    return Places(row_R.view_as(experts_TK), running_ER[:, -1])


def rank_assignments(experts_TK: Tensor, experts: int) -> Tensor:
    """Return (T, K) int64: 0 for the first assignment of an expert, in token order."""
    row_TK, offsets_E = place_assignments(experts_TK, experts)
    before_E = torch.cat([offsets_E.new_zeros(1), offsets_E[:-1]])
    return row_TK - before_E[experts_TK]


class SortedRows(NamedTuple):
    """Rows sorted by expert: where each assignment went, and where each row came from."""

    row_TK: Tensor  # row of token t's k-th copy
    token_R: Tensor  # token of each row
    offsets_E: Tensor  # end of each expert's rows


def sort_rows(experts_TK: Tensor, experts: int) -> SortedRows:
    """Give every assignment its row, sorted by expert and by token within each."""
    row_TK, offsets_E = place_assignments(experts_TK, experts)
    T, K = experts_TK.shape
    tokens_TK = torch.arange(T, device=row_TK.device)[:, None].expand(T, K)
    token_R = torch.empty_like(row_TK.flatten()).scatter_(0, row_TK.flatten(), tokens_TK.flatten())
    return SortedRows(row_TK, token_R, offsets_E)


def launch_gather(x_TD: Tensor, source_R: Tensor, chosen: int, tile: Tile = GATHER) -> Tensor:
    """Return (R, D): the token of each row's assignment."""
    R, D = source_R.shape[0], x_TD.shape[1]
    out_RD = x_TD.new_empty(R, D)
    with on_device_of(x_TD):
        gather_rows_kernel[(triton.cdiv(R, tile.rows),)](
            x_TD, source_R, out_RD, R, chosen, D, tile.rows, column_block(D, tile.columns),
            num_warps=tile.warps,
        )  # fmt: skip
    return out_RD


def launch_sum(y_RD: Tensor, row_TK: Tensor, tile: Tile = SUM) -> Tensor:
    """Return (T, D): the sum of each token's K rows."""
    (T, K), D = row_TK.shape, y_RD.shape[1]
    out_TD = y_RD.new_empty(T, D)
    with on_device_of(y_RD):
        gather_sum_kernel[(triton.cdiv(T, tile.rows),)](
            y_RD, row_TK, out_TD, T, K, D, tile.rows, column_block(D, tile.columns),
            UPCAST=INTERPRETED, num_warps=tile.warps,
        )  # fmt: skip
    return out_TD


def launch_place(experts_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return row_TK, source_R and offsets_E, int32; no value is read on the host."""
    R = experts_TK.numel()
    padded = triton.next_power_of_2(experts)
    block = FEWEST if INTERPRETED else max(HITS // padded, FEWEST)
    blocks = max(1, triton.cdiv(R, block))  # one writes the offsets even if there are no rows
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


def gather_rows(x_TD: Tensor, source_R: Tensor, chosen: int) -> Tensor:
    """Return (R, D): each row's token; assignment a belongs to token a // chosen."""
    if use_triton(x_TD):
        return launch_gather(x_TD.contiguous(), source_R, chosen)
    return x_TD[source_R // chosen]


def sum_rows(y_RD: Tensor, row_TK: Tensor) -> Tensor:
    """Return (T, D): the sum of each token's K rows, in fp32 or better until it is rounded."""
    if use_triton(y_RD):
        return launch_sum(y_RD, row_TK)
    wide = torch.promote_types(y_RD.dtype, torch.float32)
    return y_RD[row_TK].to(wide).sum(1).to(y_RD.dtype)


@torch.library.custom_op("steplab::place_assignments", mutates_args=())
def place_rows(experts_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return row_TK, source_R and offsets_E, all int32.

    Sorted by expert, tokens in order within each: the row of every assignment, the assignment
    (t * K + k) of every row, and the end of each expert's rows.
    """
    experts_TK = experts_TK.contiguous()
    if use_triton(experts_TK):
        return launch_place(experts_TK, experts)
    row_TK, offsets_E = place_assignments(experts_TK, experts)
    assignment_R = torch.arange(row_TK.numel(), dtype=torch.int32, device=row_TK.device)
    source_R = torch.empty_like(assignment_R).scatter_(0, row_TK.flatten(), assignment_R)
    return row_TK.int(), source_R, offsets_E.int()


@place_rows.register_fake
def _(experts_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    row_TK = torch.empty(experts_TK.shape, dtype=torch.int32, device=experts_TK.device)
    return row_TK, row_TK.new_empty(row_TK.numel()), row_TK.new_empty(experts)
