"""FlashAttention-2 forward: one program per tile of queries and head walks over the keys."""

# R queries of the tile, C keys of one step, D head width padded to a power of two
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from steplab.kernels.attention._triton_tile import (
    add_product,
    key_spans,
    keys_seen,
    load_tile,
    product,
    store_tile,
)


# fmt: off
@triton.jit
def _attend(
    sum_RD, top_R, total_R, q_RD, k, v, k_strides, v_strides, batch, key_head, begin, end,
    start_R, stop_R, S, to_bits, MASKED: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, D: tl.constexpr, DESCRIPTORS: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add keys [begin, end) to the weighted sum, with the running maximum (in bits) and total."""
    for column in tl.range(begin, end, COLUMNS):
        k_CD = load_tile(
            k, k_strides, batch, key_head, column, S, COLUMNS, WIDTH, D, MASKED, DESCRIPTORS
        )
        scores_RC = product(q_RD, tl.trans(k_CD), UPCAST, PRECISION)
        if MASKED:
            key_C = column + tl.arange(0, COLUMNS)
            seen_RC = (key_C[None, :] >= start_R[:, None]) & (key_C[None, :] < stop_R[:, None])
            scores_RC = tl.where(seen_RC, scores_RC, float("-inf"))
        higher_R = tl.maximum(top_R, tl.max(scores_RC, 1) * to_bits)
        # 2^(scores log2(e) / sqrt(D) - maximum): one multiply-add and one exp2 per score.
        weights_RC = tl.exp2(scores_RC * to_bits - higher_R[:, None])
        shrink_R = tl.exp2(top_R - higher_R)
        total_R = total_R * shrink_R + tl.sum(weights_RC, 1)
        v_CD = load_tile(
            v, v_strides, batch, key_head, column, S, COLUMNS, WIDTH, D, MASKED, DESCRIPTORS
        )
        sum_RD = add_product(sum_RD * shrink_R[:, None], weights_RC, v_CD, UPCAST, PRECISION)
        top_R = higher_R
    return sum_RD, top_R, total_R


@triton.jit
def attention_forward_kernel(
    q, k, v, out, lse, first, past, q_strides, k_strides, v_strides, T, S, to_bits,
    SHARING: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr,
    DESCRIPTORS: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):
    """Write one tile of the output and of the log-sum-exp. Grid: query tiles, query heads, batch.

    `lse` is in bits (base 2): maximum + log2 of the total. SHARING query heads share a key head.
    """
    tile = tl.program_id(0)
    if CAUSAL:
        tile = tl.num_programs(0) - 1 - tile  # the longest first, so that none is left at the end
    head, batch, heads = tl.program_id(1), tl.program_id(2), tl.num_programs(1)
    row = tile * ROWS
    query_R = row + tl.arange(0, ROWS)
    start_R, stop_R = keys_seen(query_R, batch, T, S, first, past, CAUSAL, DOCUMENTS)
    ends = key_spans(row, batch, T, S, first, past, ROWS, COLUMNS, CAUSAL, DOCUMENTS)

    q_RD = load_tile(q, q_strides, batch, head, row, T, ROWS, WIDTH, D, True, DESCRIPTORS)
    sum_RD = tl.zeros([ROWS, D], tl.float32)
    # A finite start: a row that has seen no key yet must not compute inf - inf.
    top_R = tl.full([ROWS], -1e30, tl.float32)
    total_R = tl.zeros([ROWS], tl.float32)
    for span in tl.static_range(3):
        if span > 0 or DOCUMENTS:  # without documents every row begins at key 0
            sum_RD, top_R, total_R = _attend(
                sum_RD, top_R, total_R, q_RD, k, v, k_strides, v_strides, batch, head // SHARING,
                ends[span], ends[span + 1], start_R, stop_R, S, to_bits, span != 1, COLUMNS,
                WIDTH, D, DESCRIPTORS, UPCAST, PRECISION,
            )

    store_tile(out, sum_RD / total_R[:, None], batch, head, heads, row, T, ROWS, WIDTH, D, UPCAST)
    lse_row = lse + (batch.to(tl.int64) * heads + head) * T
    tl.store(lse_row + query_R, top_R + tl.log2(total_R), mask=query_R < T)
