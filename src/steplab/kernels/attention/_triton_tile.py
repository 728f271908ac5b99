"""What the Triton kernels share: which columns a row sees, and how a tile is loaded.

A kernel owns a tile of rows (queries, or keys for dk and dv) and walks over the columns (keys, or
queries). Every row sees one interval [start, stop) of columns, and both ends never decrease from
one row to the next. So the columns of a tile of rows fall into at most three spans: a masked one,
one that all rows see and that needs no mask, and a masked one; tiles outside are never loaded.
"""

# R rows of the tile, C columns of one step, D head width padded to a power of two
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from steplab.kernels._triton_rounding import narrow


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
    target, tile_RD, batch, head, heads, row, length, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    D: tl.constexpr, UPCAST: tl.constexpr,
):
    """Store (ROWS, D) as rows of one head of a tensor that is contiguous as (B, T, H, D)."""
    origin = target + ((batch.to(tl.int64) * length + row) * heads + head) * WIDTH
    row_R1, d_1D = tl.arange(0, ROWS)[:, None], tl.arange(0, D)[None, :]
    pointers_RD = origin + (row_R1 * (heads * WIDTH) + d_1D)
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
