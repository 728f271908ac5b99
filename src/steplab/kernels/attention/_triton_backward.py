"""FlashAttention-2 backward: one kernel for dq, one for dk and dv, no atomics.

Both compute the weights again from the saved log-sum-exp, so 7 matrix products stand against the 5
of a kernel that adds dq up in memory; but every sum has one fixed order, so a repeated backward
gives the same bits.
"""

# R rows of the tile (queries for dq, keys for dk and dv), C columns of one step, D head width
# padded to a power of two
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from steplab.kernels.attention._triton_tile import (
    add_product,
    key_spans,
    keys_seen,
    load_line,
    load_tile,
    product,
    queries_seen,
    query_spans,
    store_tile,
)


# fmt: off
@triton.jit
def _add_to_dq(
    dq_RD, q_RD, dout_RD, lse_R, delta_R, k, v, k_strides, v_strides, batch, key_head, begin, end,
    start_R, stop_R, S, to_bits, MASKED: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, D: tl.constexpr, DESCRIPTORS: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add what the keys [begin, end) give to dq, before the factor 1 / sqrt(D)."""
    for column in tl.range(begin, end, COLUMNS):
        k_CD = load_tile(
            k, k_strides, batch, key_head, column, S, COLUMNS, WIDTH, D, MASKED, DESCRIPTORS
        )
        v_CD = load_tile(
            v, v_strides, batch, key_head, column, S, COLUMNS, WIDTH, D, MASKED, DESCRIPTORS
        )
        scores_RC = product(q_RD, tl.trans(k_CD), UPCAST, PRECISION)
        dweights_RC = product(dout_RD, tl.trans(v_CD), UPCAST, PRECISION)
        if MASKED:
            key_C = column + tl.arange(0, COLUMNS)
            seen_RC = (key_C[None, :] >= start_R[:, None]) & (key_C[None, :] < stop_R[:, None])
            scores_RC = tl.where(seen_RC, scores_RC, float("-inf"))
        weights_RC = tl.exp2(scores_RC * to_bits - lse_R[:, None])
        dscores_RC = weights_RC * (dweights_RC - delta_R[:, None])
        dq_RD = add_product(dq_RD, dscores_RC, k_CD, UPCAST, PRECISION)
    return dq_RD


@triton.jit
def attention_dq_kernel(
    q, k, v, out, d_out, lse, delta, dq, first, past, q_strides, k_strides, v_strides, out_strides,
    dout_strides, T, S, to_bits, scale, SHARING: tl.constexpr, WIDTH: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr,
    DOCUMENTS: tl.constexpr, DESCRIPTORS: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write one tile of dq, and of delta = sum(out d_out), which the kernel of dk and dv reads.

    Grid: query tiles, query heads, batch.
    """
    tile = tl.program_id(0)
    if CAUSAL:
        tile = tl.num_programs(0) - 1 - tile  # the longest first
    head, batch, heads = tl.program_id(1), tl.program_id(2), tl.num_programs(1)
    row = tile * ROWS
    query_R = row + tl.arange(0, ROWS)
    dout_RD = load_tile(d_out, dout_strides, batch, head, row, T, ROWS, WIDTH, D, True, DESCRIPTORS)
    out_RD = load_tile(out, out_strides, batch, head, row, T, ROWS, WIDTH, D, True, False)
    delta_R = tl.sum(out_RD.to(tl.float32) * dout_RD.to(tl.float32), 1)
    place = (batch.to(tl.int64) * heads + head) * T
    tl.store(delta + place + query_R, delta_R, mask=query_R < T)
    lse_R = tl.load(lse + place + query_R, mask=query_R < T, other=0.0)
    q_RD = load_tile(q, q_strides, batch, head, row, T, ROWS, WIDTH, D, True, DESCRIPTORS)

    start_R, stop_R = keys_seen(query_R, batch, T, S, first, past, CAUSAL, DOCUMENTS)
    ends = key_spans(row, batch, T, S, first, past, ROWS, COLUMNS, CAUSAL, DOCUMENTS)
    dq_RD = tl.zeros([ROWS, D], tl.float32)
    for span in tl.static_range(3):
        if span > 0 or DOCUMENTS:  # without documents every row begins at key 0
            dq_RD = _add_to_dq(
                dq_RD, q_RD, dout_RD, lse_R, delta_R, k, v, k_strides, v_strides, batch,
                head // SHARING, ends[span], ends[span + 1], start_R, stop_R, S, to_bits,
                span != 1, COLUMNS, WIDTH, D, DESCRIPTORS, UPCAST, PRECISION,
            )
    store_tile(dq, dq_RD * scale, batch, head, heads, row, T, ROWS, WIDTH, D, UPCAST)


@triton.jit
def _add_to_dkdv(
    dk_RD, dv_RD, k_RD, v_RD, q, d_out, lse, delta, q_strides, dout_strides, batch, head, heads,
    begin, end, start_R, stop_R, T, to_bits, MASKED: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, D: tl.constexpr, DESCRIPTORS: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add what the queries [begin, end) of one head give to dk (before 1 / sqrt(D)) and dv.

    Scores stand transposed, (keys, queries): so weights go from one product into the next in
    registers.
    """
    for column in tl.range(begin, end, COLUMNS):
        q_CD = load_tile(
            q, q_strides, batch, head, column, T, COLUMNS, WIDTH, D, MASKED, DESCRIPTORS
        )
        dout_CD = load_tile(
            d_out, dout_strides, batch, head, column, T, COLUMNS, WIDTH, D, MASKED, DESCRIPTORS
        )
        lse_C = load_line(lse, batch, head, heads, column, T, COLUMNS, MASKED, DESCRIPTORS)
        delta_C = load_line(delta, batch, head, heads, column, T, COLUMNS, MASKED, DESCRIPTORS)
        scores_RC = product(k_RD, tl.trans(q_CD), UPCAST, PRECISION)
        if MASKED:
            query_C = column + tl.arange(0, COLUMNS)
            seen_RC = (query_C[None, :] >= start_R[:, None]) & (query_C[None, :] < stop_R[:, None])
            scores_RC = tl.where(seen_RC, scores_RC, float("-inf"))
        weights_RC = tl.exp2(scores_RC * to_bits - lse_C[None, :])
        dv_RD = add_product(dv_RD, weights_RC, dout_CD, UPCAST, PRECISION)
        dweights_RC = product(v_RD, tl.trans(dout_CD), UPCAST, PRECISION)
        dscores_RC = weights_RC * (dweights_RC - delta_C[None, :])
        dk_RD = add_product(dk_RD, dscores_RC, q_CD, UPCAST, PRECISION)
    return dk_RD, dv_RD


@triton.jit
def attention_dkdv_kernel(
    q, k, v, d_out, lse, delta, dk, dv, first, past, q_strides, k_strides, v_strides, dout_strides,
    T, S, to_bits, scale, SHARING: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr,
    DESCRIPTORS: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):
    """Write one tile of dk and dv, over all query heads of a key head in turn.

    Grid: key tiles, key heads, batch.
    """
    key_head, batch, key_heads = tl.program_id(1), tl.program_id(2), tl.num_programs(1)
    row = tl.program_id(0) * ROWS
    k_RD = load_tile(k, k_strides, batch, key_head, row, S, ROWS, WIDTH, D, True, DESCRIPTORS)
    v_RD = load_tile(v, v_strides, batch, key_head, row, S, ROWS, WIDTH, D, True, DESCRIPTORS)
    key_R = row + tl.arange(0, ROWS)
    start_R, stop_R = queries_seen(key_R, batch, T, S, first, past, CAUSAL, DOCUMENTS)
    ends = query_spans(row, batch, T, S, first, past, ROWS, COLUMNS, CAUSAL, DOCUMENTS)

    dk_RD = tl.zeros([ROWS, D], tl.float32)
    dv_RD = tl.zeros([ROWS, D], tl.float32)
    for shared in range(SHARING):
        head = key_head * SHARING + shared
        for span in tl.static_range(3):
            if span > 0 or CAUSAL or DOCUMENTS:  # otherwise every key is seen from query 0 on
                dk_RD, dv_RD = _add_to_dkdv(
                    dk_RD, dv_RD, k_RD, v_RD, q, d_out, lse, delta, q_strides, dout_strides, batch,
                    head, key_heads * SHARING, ends[span], ends[span + 1], start_R, stop_R, T,
                    to_bits, span != 1, COLUMNS, WIDTH, D, DESCRIPTORS, UPCAST, PRECISION,
                )
    store_tile(dk, dk_RD * scale, batch, key_head, key_heads, row, S, ROWS, WIDTH, D, UPCAST)
    store_tile(dv, dv_RD, batch, key_head, key_heads, row, S, ROWS, WIDTH, D, UPCAST)
