"""Rows between tokens and experts: copied, added up, and placed by a counting sort."""

# R rows or tokens of the tile, C columns of one step, B assignments of a block, E experts
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from steplab.kernels._triton_rounding import narrow


# fmt: off
@triton.jit
def gather_rows_kernel(
    x, source, out, rows, CHOSEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copy to each row the token of its assignment; assignment a is of token a // CHOSEN."""
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
    place_E = expert_E * tl.num_programs(0) + tl.program_id(0)
    tl.store(counts + place_E, tl.sum(hit_BE, 0), mask=expert_E < EXPERTS)


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
    place_E = expert_E * tl.num_programs(0) + tl.program_id(0)
    end_E = tl.load(running + place_E, mask=known_E, other=0)
    start_E = end_E - tl.load(counts + place_E, mask=known_E, other=0)
    nth_BE = tl.cumsum(hit_BE, 0) - 1 + start_E[None, :]
    row_B = tl.sum(nth_BE * hit_BE, 1)
    inside_B = index_B < assignments
    tl.store(row + index_B, row_B, mask=inside_B)
    tl.store(source + row_B, index_B, mask=inside_B)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(offsets + expert_E, end_E, mask=known_E)
