"""FlashAttention-2: the forward, one kernel for dq, and one for dk and dv; no atomics.

A kernel owns a tile of rows (queries, or keys for dk and dv) and goes over the columns (keys, or
queries). Every row sees one interval [start, stop) of columns, and neither end ever decreases from
one row to the next. So the columns of a tile of rows fall into at most three spans: a masked one,
one that all rows see and that needs no mask, and a masked one; tiles outside are never loaded.

Both kernels of the backward compute the weights again from the saved log-sum-exp. That makes 7
matrix products against the 5 of a kernel that adds dq up in memory; but every sum has one fixed
order, so a repeated backward gives the same bits.
"""

# R rows of the tile (queries, or keys for dk and dv), C columns of one step, D head width padded to
# a power of two
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from steplab.kernels.triton_blocks import narrow
from steplab.kernels.triton_runtime import tl, triton


# fmt: off
@triton.jit
def keys_seen(
    query, batch, T, S, first, past, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr
):
    """Return [start, stop) of the keys that a query sees, or each of several.

    For a query beyond the end the last one stands in. `first` and `past` are (B, S).
    """
    position = tl.minimum(query, T - 1) + (S - T)
    start = position * 0
    stop = start + S
    if DOCUMENTS:
        start = tl.load(first + batch.to(tl.int64) * S + position)
        stop = tl.load(past + batch.to(tl.int64) * S + position)
    if CAUSAL:
        stop = tl.minimum(stop, position + 1)
    return start, stop


@triton.jit
def queries_seen(
    key, batch, T, S, first, past, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr
):
    """Return [start, stop) of the queries that see a key, or each of several."""
    key = tl.minimum(key, S - 1)
    start = key * 0
    stop = start + T
    if DOCUMENTS:
        start = tl.maximum(tl.load(first + batch.to(tl.int64) * S + key) - (S - T), 0)
        stop = tl.maximum(tl.load(past + batch.to(tl.int64) * S + key) - (S - T), 0)
    if CAUSAL:
        start = tl.maximum(key - (S - T), 0)
    return start, stop


@triton.jit
def _spans(start_first, stop_first, start_last, stop_last, COLUMNS: tl.constexpr):
    """Return four ends: masked columns from the first to the second, unmasked ones to the third,
    masked ones to the fourth. The arguments are the intervals of the first and the last row."""
    begin = start_first // COLUMNS * COLUMNS
    clear = tl.minimum(tl.cdiv(start_last, COLUMNS), tl.cdiv(stop_last, COLUMNS)) * COLUMNS
    clear = tl.maximum(clear, begin)
    edge = tl.maximum(stop_first // COLUMNS * COLUMNS, clear)
    return begin, clear, edge, stop_last


@triton.jit
def key_spans(
    row, batch, T, S, first, past, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr,
):
    """Return the spans of keys for the queries [row, row + ROWS)."""
    a, b = keys_seen(row, batch, T, S, first, past, CAUSAL, DOCUMENTS)
    c, d = keys_seen(row + ROWS - 1, batch, T, S, first, past, CAUSAL, DOCUMENTS)
    return _spans(a, b, c, d, COLUMNS)


@triton.jit
def query_spans(
    row, batch, T, S, first, past, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr,
):
    """Return the spans of queries for the keys [row, row + ROWS)."""
    a, b = queries_seen(row, batch, T, S, first, past, CAUSAL, DOCUMENTS)
    c, d = queries_seen(row + ROWS - 1, batch, T, S, first, past, CAUSAL, DOCUMENTS)
    return _spans(a, b, c, d, COLUMNS)


@triton.jit
def load_tile(
    source, strides, batch, head, row, length, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    D: tl.constexpr, CHECKED: tl.constexpr, DESCRIPTORS: tl.constexpr,
):
    """Return rows [row, row + ROWS) of one head as (ROWS, D), 0 beyond its width and, if CHECKED,
    beyond its length. `source` is a pointer with four strides, or a tensor descriptor."""
    if DESCRIPTORS:
        tile_RD = source.load([batch, head, row, 0]).reshape(ROWS, D)
    else:
        # The large offset is one 64-bit number; those inside the tile fit into 32 bits.
        offset = batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
        origin = source + offset + tl.cast(row, tl.int64) * strides[2]
        row_R1, d_1D = tl.arange(0, ROWS)[:, None], tl.arange(0, D)[None, :]
        pointers_RD = origin + (row_R1 * strides[2] + d_1D * strides[3])
        if CHECKED and WIDTH < D:
            inside_RD = (row_R1 < length - row) & (d_1D < WIDTH)
            tile_RD = tl.load(pointers_RD, mask=inside_RD, other=0.0)
        elif CHECKED:
            tile_RD = tl.load(pointers_RD, mask=row_R1 < length - row, other=0.0)
        elif WIDTH < D:
            tile_RD = tl.load(pointers_RD, mask=d_1D < WIDTH, other=0.0)
        else:
            tile_RD = tl.load(pointers_RD)
    return tile_RD


@triton.jit
def load_line(
    source, batch, head, heads, column, length, COLUMNS: tl.constexpr, CHECKED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Return [column, column + COLUMNS) of one head of a (B, H, T), 0 beyond its length if CHECKED.

    `source` is a pointer to a contiguous tensor, or a tensor descriptor.
    """
    if DESCRIPTORS:
        line_C = source.load([batch, head, column]).reshape(COLUMNS)
    else:
        pointers_C = source + (batch.to(tl.int64) * heads + head) * length + column
        pointers_C += tl.arange(0, COLUMNS)
        if CHECKED:
            inside_C = tl.arange(0, COLUMNS) < length - column
            line_C = tl.load(pointers_C, mask=inside_C, other=0.0)
        else:
            line_C = tl.load(pointers_C)
    return line_C


@triton.jit
def store_tile(
    target, strides, tile_RD, batch, head, row, length, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    D: tl.constexpr, UPCAST: tl.constexpr,
):
    """Store (ROWS, D) as rows of one head of a (B, H, T, D) that lies anyhow."""
    offset = batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    origin = target + offset + tl.cast(row, tl.int64) * strides[2]
    row_R1, d_1D = tl.arange(0, ROWS)[:, None], tl.arange(0, D)[None, :]
    pointers_RD = origin + (row_R1 * strides[2] + d_1D * strides[3])
    mask_RD = (row_R1 < length - row) & (d_1D < WIDTH)
    tl.store(pointers_RD, narrow(tile_RD, target.dtype.element_ty, UPCAST), mask=mask_RD)


@triton.jit
def product(a, b, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """Return a b in fp32. UPCAST: Triton's interpreter multiplies bf16 wrongly."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def add_product(total, a, b, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """Return total + a b in fp32, with fp32 `a` rounded to the dtype of `b` for tensor cores."""
    a = narrow(a, b.dtype, UPCAST)
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


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
    q, k, v, out, lse, first, past, q_strides, k_strides, v_strides, out_strides, T, S, to_bits,
    SHARING: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr,
    DESCRIPTORS: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):
    """Write one tile of the output and of the log-sum-exp. Grid: query tiles, query heads, batch.

    `lse` is in bits (base 2): maximum + log2 of the total. SHARING query heads share a key head.
    """
    tile = tl.program_id(0)
    if CAUSAL:
        tile = tl.num_programs(0) - 1 - tile  # the longest first, so that none ends alone
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

    out_RD = sum_RD / total_R[:, None]
    store_tile(out, out_strides, out_RD, batch, head, row, T, ROWS, WIDTH, D, UPCAST)
    lse_row = lse + (batch.to(tl.int64) * heads + head) * T
    tl.store(lse_row + query_R, top_R + tl.log2(total_R), mask=query_R < T)


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
    dout_strides, dq_strides, T, S, to_bits, scale, SHARING: tl.constexpr, WIDTH: tl.constexpr,
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
    line = (batch.to(tl.int64) * heads + head) * T
    tl.store(delta + line + query_R, delta_R, mask=query_R < T)
    lse_R = tl.load(lse + line + query_R, mask=query_R < T, other=0.0)
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
    store_tile(dq, dq_strides, dq_RD * scale, batch, head, row, T, ROWS, WIDTH, D, UPCAST)


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
    dk_strides, dv_strides, T, S, to_bits, scale, SHARING: tl.constexpr, WIDTH: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr,
    DOCUMENTS: tl.constexpr, DESCRIPTORS: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
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
    store_tile(dk, dk_strides, dk_RD * scale, batch, key_head, row, S, ROWS, WIDTH, D, UPCAST)
    store_tile(dv, dv_strides, dv_RD, batch, key_head, row, S, ROWS, WIDTH, D, UPCAST)
# fmt: on
