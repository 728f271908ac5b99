"""The Triton kernels of the passes in `e4m3_passes.py`, which defines what they compute."""

# R rows of the tile, C columns of one step
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from steplab.kernels.activation.triton_rows import gelu, gelu_and_slope
from steplab.kernels.e4m3 import (
    E4M3_MAX,
    LARGEST_EXPONENT,
    LARGEST_PRODUCT,
    LEAST_EXPONENT,
    PRODUCT_SLACK,
    STEEPEST,
)
from steplab.kernels.triton_runtime import tl, triton

_FOUR_CASTS = tl.constexpr(
    "{ .reg .b16 low, high;"
    " cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;"
    " mov.b32 $0, {low, high}; }"
)
_TWELVE_CASTS = tl.constexpr(
    "{ .reg .b16 low, high;"
    " cvt.rn.satfinite.e4m3x2.f32 low, $4, $3; cvt.rn.satfinite.e4m3x2.f32 high, $6, $5;"
    " mov.b32 $0, {low, high};"
    " cvt.rn.satfinite.e4m3x2.f32 low, $8, $7; cvt.rn.satfinite.e4m3x2.f32 high, $10, $9;"
    " mov.b32 $1, {low, high};"
    " cvt.rn.satfinite.e4m3x2.f32 low, $12, $11; cvt.rn.satfinite.e4m3x2.f32 high, $14, $13;"
    " mov.b32 $2, {low, high}; }"
)
_LARGEST = tl.constexpr(E4M3_MAX)
_LEAST_EXPONENT = tl.constexpr(LEAST_EXPONENT)
_LARGEST_EXPONENT = tl.constexpr(LARGEST_EXPONENT)
_LARGEST_PRODUCT = tl.constexpr(LARGEST_PRODUCT)
_PRODUCT_SLACK = tl.constexpr(PRODUCT_SLACK)
_SLOPE_SLACK = tl.constexpr(PRODUCT_SLACK * STEEPEST)


# fmt: off
@triton.jit
def _exponent(x):
    """Return the exponent of positive numbers as fp32 holds it."""
    return x.to(tl.int32, bitcast=True) >> 23


@triton.jit
def _power_of_two(exponent):
    clamped = tl.minimum(tl.maximum(exponent, _LEAST_EXPONENT), _LARGEST_EXPONENT)
    return (clamped << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scale_for(bound):
    """Return the least power of two with which values up to `bound` fit."""
    significand = bound.to(tl.int32, bitcast=True) & 0x7FFFFF
    return _power_of_two(_exponent(bound) - 8 + (significand > 0x600000).to(tl.int32))


@triton.jit
def _reciprocal(scale):
    """Return 1 / scale, which is a power of two as well."""
    return ((254 - _exponent(scale)) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _balanced(own, other, largest, FIRST: tl.constexpr):
    """Return the scale of one of two factors (see `balanced_scales`)."""
    missing = _exponent(largest) + 127 - _exponent(own) - _exponent(other)
    taken = missing >> 1
    return _power_of_two(_exponent(own) + (taken if FIRST else missing - taken))


@triton.jit
def _code(x):
    """Return the bits of `x` in e4m3 as an integer, as `_to_e4m3` rounds it.

    For Triton's interpreter, which rounds otherwise and knows no NaN.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(x), _LARGEST)
    size_bits = size.to(tl.int32, bitcast=True)
    normal = (size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20
    is_small = size < 0.015625
    small = ((tl.where(is_small, size, 0.0) + 24576.0) - 24576.0) * 512.0  # multiples of 2^-9
    code = tl.where(is_small, small.to(tl.int32), normal - 960)
    return tl.where(x != x, 127, code) | ((bits >> 24) & 128)


@triton.jit
def _to_e4m3(x, UPCAST: tl.constexpr):
    """Round to e4m3, to nearest even; what does not fit saturates, a NaN stays."""
    if UPCAST:
        return _code(x).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return x.to(tl.float8e4nv)


@triton.jit
def _four_to_e4m3(a, b, c, d, UPCAST: tl.constexpr):
    """Return int32: the e4m3 bits of four rows, those of `a` lowest."""
    if UPCAST:
        return _code(a) | (_code(b) << 8) | (_code(c) << 16) | (_code(d) << 24)
    else:
        return tl.inline_asm_elementwise(
            _FOUR_CASTS, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _twelve_to_e4m3(a, b, c, UPCAST: tl.constexpr):
    """Return three times what `_four_to_e4m3` returns, of three tuples of four rows.

    At once: one by one, Triton prefers to move their 8-bit sources to the threads that store the
    transposed ones, and computes the activation there once more.
    """
    if UPCAST:
        return _four_to_e4m3(*a, UPCAST), _four_to_e4m3(*b, UPCAST), _four_to_e4m3(*c, UPCAST)
    else:
        return tl.inline_asm_elementwise(
            _TWELVE_CASTS, "=r,=r,=r,f,f,f,f,f,f,f,f,f,f,f,f",
            [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], c[0], c[1], c[2], c[3]],
            dtype=(tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )


@triton.jit
def _tokens_of(source, row_R, inside_R, CHOSEN: tl.constexpr):
    """Return the tokens of rows, and which rows have one."""
    token_R, has_R = row_R, inside_R
    if source is not None:
        assignment_R = tl.load(source + row_R, mask=inside_R, other=-1)
        token_R, has_R = assignment_R // CHOSEN, assignment_R >= 0
    return token_R, has_R


@triton.jit
def _weights_of(values, source, row_R, inside_R):
    """Return the rows' weights in fp32, where their gradients go, and which rows have any."""
    index_R, has_R = row_R, inside_R
    if source is not None:
        index_R = tl.load(source + row_R, mask=inside_R, other=-1)
        has_R = index_R >= 0
    weight_R = has_R.to(tl.float32)
    if values is not None:
        weight_R = tl.load(values + index_R, mask=has_R, other=0.0).to(tl.float32)
    return weight_R, index_R, has_R


@triton.jit
def quantize_rows_kernel(
    x, source, values, scale, norm, rows, CHOSEN: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UPCAST: tl.constexpr,
):
    """Round whole rows; rows without a token are zero."""
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_R = row_R < rows
    column_C = tl.arange(0, COLUMNS)
    token_R, has_R = _tokens_of(source, row_R, inside_R, CHOSEN)
    within_C = column_C < WIDTH
    x_RC = x + token_R.to(tl.int64)[:, None] * WIDTH + column_C[None, :]
    x_RC = tl.load(x_RC, mask=has_R[:, None] & within_C[None, :], other=0.0).to(tl.float32)
    size_RC = tl.abs(x_RC)
    finite_RC = tl.where(size_RC < float("inf"), size_RC, 0.0)
    scale_R = _scale_for(tl.max(finite_RC, 1))
    factor_R = _reciprocal(scale_R)
    values_RC = values + row_R.to(tl.int64)[:, None] * WIDTH + column_C[None, :]
    rounded_RC = _to_e4m3(x_RC * factor_R[:, None], UPCAST)
    tl.store(values_RC, rounded_RC, mask=inside_R[:, None] & within_C[None, :])
    tl.store(scale + row_R, scale_R, mask=inside_R)
    # Over the scale, since squares of the numbers themselves may leave the range of fp32.
    finite_RC *= factor_R[:, None]
    tl.store(norm + row_R, tl.sqrt(tl.sum(finite_RC * finite_RC, 1)) * scale_R, mask=inside_R)


@triton.jit
def quantize_columns_kernel(
    w, values, scale, norm, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
):
    """Round columns of one matrix and write them as rows. Grid: blocks of columns, matrices."""
    column_C = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    within_C = column_C < WIDTH
    matrix = tl.program_id(1).to(tl.int64)
    w += matrix * HEIGHT * WIDTH
    most_RC = tl.zeros([ROWS, COLUMNS], tl.float32)
    square_RC = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(0, HEIGHT, ROWS, num_stages=STAGES):
        row_R = first + tl.arange(0, ROWS)
        inside_RC = (row_R < HEIGHT)[:, None] & within_C[None, :]
        w_RC = tl.load(w + row_R[:, None] * WIDTH + column_C[None, :], mask=inside_RC, other=0.0)
        size_RC = tl.abs(w_RC.to(tl.float32))
        size_RC = tl.where(size_RC < float("inf"), size_RC, 0.0)
        most_RC = tl.maximum(most_RC, size_RC)
        square_RC += size_RC * size_RC
    scale_C = _scale_for(tl.max(most_RC, 0))
    factor_C = _reciprocal(scale_C)
    tl.store(scale + matrix * WIDTH + column_C, scale_C, mask=within_C)
    tl.store(norm + matrix * WIDTH + column_C, tl.sqrt(tl.sum(square_RC, 0)), mask=within_C)
    values += matrix * HEIGHT * WIDTH
    for first in tl.range(0, HEIGHT, ROWS, num_stages=STAGES):
        row_R = first + tl.arange(0, ROWS)
        inside_RC = (row_R < HEIGHT)[:, None] & within_C[None, :]
        w_RC = tl.load(w + row_R[:, None] * WIDTH + column_C[None, :], mask=inside_RC, other=0.0)
        rounded_RC = _to_e4m3(w_RC.to(tl.float32) * factor_C[None, :], UPCAST)
        target_CR = values + column_C[:, None] * HEIGHT + row_R[None, :]
        tl.store(target_CR, tl.trans(rounded_RC), mask=tl.trans(inside_RC))


@triton.jit
def activate_e4m3_kernel(
    z, x_norm, w_norm, weights, source, h, h_scale, kept, kept_scale, R, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UPCAST: tl.constexpr,
):
    """Write one tile of h and of z, rounded. Grid: tiles, those of the same rows in a row."""
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    row_R = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    column_C = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    inside_R = row_R < R
    inside_RC = inside_R[:, None]
    if WIDTH % COLUMNS:
        inside_RC = inside_RC & (column_C < WIDTH)[None, :]
    weight_R, _, has_R = _weights_of(weights, source, row_R, inside_R)
    norm_R = tl.load(x_norm + row_R, mask=has_R, other=0.0)
    z_scale_R = _scale_for(norm_R * tl.load(w_norm) * _PRODUCT_SLACK)
    h_scale_R = _scale_for(z_scale_R * tl.abs(weight_R) * _LARGEST)
    place_RC = row_R.to(tl.int64)[:, None] * WIDTH + column_C[None, :]
    z_RC = tl.load(z + place_RC, mask=inside_RC & has_R[:, None], other=0.0).to(tl.float32)
    h_RC = gelu(z_RC) * (weight_R * _reciprocal(h_scale_R))[:, None]
    tl.store(h + place_RC, _to_e4m3(h_RC, UPCAST), mask=inside_RC)
    z_RC *= _reciprocal(z_scale_R)[:, None]
    tl.store(kept + place_RC, _to_e4m3(z_RC, UPCAST), mask=inside_RC)
    if tl.program_id(0) % across == 0:
        tl.store(h_scale + row_R, h_scale_R, mask=inside_R)
        tl.store(kept_scale + row_R, z_scale_R, mask=inside_R)


@triton.jit
def gradient_scales_kernel(
    dout_norm, w_norm, weights, source, x_scale, h_scale, dout_scale, dz_scale, largest, R,
    ROWS: tl.constexpr,
):
    """Write the scales of dz, and raise `largest` to the products of the scales of two factors."""
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_R = row_R < R
    weight_R, _, has_R = _weights_of(weights, source, row_R, inside_R)
    norm_R = tl.load(dout_norm + row_R, mask=has_R, other=0.0)
    dz_R = _scale_for(norm_R * tl.load(w_norm) * tl.abs(weight_R) * _SLOPE_SLACK)
    tl.store(dz_scale + row_R, dz_R, mask=inside_R)
    first_R = tl.where(has_R, dz_R, 0.0) * tl.load(x_scale + row_R, mask=has_R, other=0.0)
    second_R = tl.load(dout_scale + row_R, mask=has_R, other=0.0)
    second_R *= tl.load(h_scale + row_R, mask=has_R, other=0.0)
    first = tl.minimum(tl.max(first_R, 0), _LARGEST_PRODUCT)
    second = tl.minimum(tl.max(second_R, 0), _LARGEST_PRODUCT)
    # Positive numbers are ordered as their bits are.
    tl.atomic_max(largest, first.to(tl.int32, bitcast=True))
    tl.atomic_max(largest + 4, second.to(tl.int32, bitcast=True))


@triton.jit
def _slope_factors(
    row_Q, z_scale, weights, source, x_scale, dz_scale, h_scale, dout_scale, largest_in,
    largest_out, R,
):
    """Return of rows: what z, dz along, dz across and h are multiplied by, and their weights."""
    inside_Q = row_Q < R
    weight_Q, index_Q, has_Q = _weights_of(weights, source, row_Q, inside_Q)
    z_scale_Q = tl.load(z_scale + row_Q, mask=inside_Q, other=1.0)
    dz_scale_Q = tl.load(dz_scale + row_Q, mask=inside_Q, other=1.0)
    x_scale_Q = tl.load(x_scale + row_Q, mask=inside_Q, other=1.0)
    h_scale_Q = tl.load(h_scale + row_Q, mask=inside_Q, other=1.0)
    dout_scale_Q = tl.load(dout_scale + row_Q, mask=inside_Q, other=1.0)
    dz_across_Q = _balanced(dz_scale_Q, x_scale_Q, tl.load(largest_in), True)
    h_across_Q = _balanced(h_scale_Q, dout_scale_Q, tl.load(largest_out), False)
    along_Q = weight_Q * _reciprocal(dz_scale_Q)
    across_Q = dz_scale_Q * _reciprocal(dz_across_Q)
    return (z_scale_Q, along_Q, across_Q, weight_Q * _reciprocal(h_across_Q), index_Q, has_Q)


@triton.jit
def _slope_tile(z, dh, row_Q, factors, column_C, within_C, WIDTH: tl.constexpr):
    """Return a tile of dz for either factor and of h, and the rows' part of d(weight)."""
    z_scale_Q, along_Q, across_Q, h_factor_Q, _, has_Q = factors
    has_QC = has_Q[:, None] & within_C[None, :]
    place_QC = row_Q.to(tl.int64)[:, None] * WIDTH + column_C[None, :]
    z_QC = tl.load(z + place_QC, mask=has_QC, other=0.0).to(tl.float32) * z_scale_Q[:, None]
    dh_QC = tl.load(dh + place_QC, mask=has_QC, other=0.0).to(tl.float32)
    h_QC, rise_QC = gelu_and_slope(z_QC)
    dz_QC = dh_QC * rise_QC * along_Q[:, None]
    dot_Q = tl.sum(dh_QC * h_QC, 1)
    return dz_QC, dz_QC * across_Q[:, None], h_QC * h_factor_Q[:, None], dot_Q


@triton.jit
def _store_code(dz, code_QC, row_Q, column_C, within_C, R, WIDTH: tl.constexpr):
    """Store the lowest 8 bits."""
    place_QC = row_Q.to(tl.int64)[:, None] * WIDTH + column_C[None, :]
    inside_QC = (row_Q < R)[:, None] & within_C[None, :]
    tl.store(dz + place_QC, code_QC.to(tl.uint8), mask=inside_QC)


@triton.jit
def slopes_e4m3_kernel(
    z, z_scale, dh, weights, source, x_scale, dz_scale, h_scale, dout_scale, largest_in,
    largest_out, dz, dz_across, h_across, dweights, R, WIDTH: tl.constexpr, QUADS: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
):
    """Write rows of dz, the same and h transposed, and the gradients of the rows' weights.

    Four rows of a column are one number of 32 bits in the transposed tensors, so that threads hand
    each other words and not bytes. R is a multiple of four.
    """
    quad_Q = tl.program_id(0) * QUADS + tl.arange(0, QUADS)
    rows = (z_scale, weights, source, x_scale, dz_scale, h_scale, dout_scale)
    row0, row1, row2, row3 = 4 * quad_Q, 4 * quad_Q + 1, 4 * quad_Q + 2, 4 * quad_Q + 3
    factors0 = _slope_factors(row0, *rows, largest_in, largest_out, R)
    factors1 = _slope_factors(row1, *rows, largest_in, largest_out, R)
    factors2 = _slope_factors(row2, *rows, largest_in, largest_out, R)
    factors3 = _slope_factors(row3, *rows, largest_in, largest_out, R)
    dot0 = tl.zeros([QUADS], tl.float32)
    dot1 = tl.zeros([QUADS], tl.float32)
    dot2 = tl.zeros([QUADS], tl.float32)
    dot3 = tl.zeros([QUADS], tl.float32)
    for column in tl.range(0, WIDTH, COLUMNS, num_stages=STAGES):
        column_C = column + tl.arange(0, COLUMNS)
        within_C = column_C < WIDTH
        a0, b0, c0, part0 = _slope_tile(z, dh, row0, factors0, column_C, within_C, WIDTH)
        a1, b1, c1, part1 = _slope_tile(z, dh, row1, factors1, column_C, within_C, WIDTH)
        a2, b2, c2, part2 = _slope_tile(z, dh, row2, factors2, column_C, within_C, WIDTH)
        a3, b3, c3, part3 = _slope_tile(z, dh, row3, factors3, column_C, within_C, WIDTH)
        along_QC, across_QC, h_QC = _twelve_to_e4m3(
            (a0, a1, a2, a3), (b0, b1, b2, b3), (c0, c1, c2, c3), UPCAST
        )
        _store_code(dz, along_QC, row0, column_C, within_C, R, WIDTH)
        _store_code(dz, along_QC >> 8, row1, column_C, within_C, R, WIDTH)
        _store_code(dz, along_QC >> 16, row2, column_C, within_C, R, WIDTH)
        _store_code(dz, along_QC >> 24, row3, column_C, within_C, R, WIDTH)
        place_CQ = column_C.to(tl.int64)[:, None] * (R // 4) + quad_Q[None, :]
        inside_CQ = within_C[:, None] & (row0 < R)[None, :]
        tl.store(dz_across + place_CQ, tl.trans(across_QC), mask=inside_CQ)
        tl.store(h_across + place_CQ, tl.trans(h_QC), mask=inside_CQ)
        dot0 += part0
        dot1 += part1
        dot2 += part2
        dot3 += part3
    if dweights is not None:
        tl.store(dweights + factors0[4], dot0, mask=factors0[5])
        tl.store(dweights + factors1[4], dot1, mask=factors1[5])
        tl.store(dweights + factors2[4], dot2, mask=factors2[5])
        tl.store(dweights + factors3[4], dot3, mask=factors3[5])


@triton.jit
def _scaled_tile(
    x, source, own_scale, other_scale, largest, row_Q, column_C, R, CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr, FIRST: tl.constexpr,
):
    """Return a tile of the rows' tokens over their balanced scales."""
    inside_Q = row_Q < R
    token_Q, has_Q = _tokens_of(source, row_Q, inside_Q, CHOSEN)
    own_Q = tl.load(own_scale + row_Q, mask=inside_Q, other=1.0)
    other_Q = tl.load(other_scale + row_Q, mask=inside_Q, other=1.0)
    factor_Q = _reciprocal(_balanced(own_Q, other_Q, tl.load(largest), FIRST))
    x_QC = x + token_Q.to(tl.int64)[:, None] * WIDTH + column_C[None, :]
    has_QC = has_Q[:, None] & (column_C < WIDTH)[None, :]
    return tl.load(x_QC, mask=has_QC, other=0.0).to(tl.float32) * factor_Q[:, None]


@triton.jit
def transpose_rows_kernel(
    x, source, own_scale, other_scale, largest, out, R, CHOSEN: tl.constexpr, WIDTH: tl.constexpr,
    FIRST: tl.constexpr, QUADS: tl.constexpr, COLUMNS: tl.constexpr, UPCAST: tl.constexpr,
):
    """Round one tile and write it transposed, four rows as one number of 32 bits.

    Grid: tiles, those of the same rows in a row.
    """
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    quad_Q = tl.program_id(0) // across * QUADS + tl.arange(0, QUADS)
    column_C = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    rows = (x, source, own_scale, other_scale, largest)
    a = _scaled_tile(*rows, 4 * quad_Q, column_C, R, CHOSEN, WIDTH, FIRST)
    b = _scaled_tile(*rows, 4 * quad_Q + 1, column_C, R, CHOSEN, WIDTH, FIRST)
    c = _scaled_tile(*rows, 4 * quad_Q + 2, column_C, R, CHOSEN, WIDTH, FIRST)
    d = _scaled_tile(*rows, 4 * quad_Q + 3, column_C, R, CHOSEN, WIDTH, FIRST)
    out_CQ = tl.trans(_four_to_e4m3(a, b, c, d, UPCAST))
    place_CQ = column_C.to(tl.int64)[:, None] * (R // 4) + quad_Q[None, :]
    inside_CQ = (column_C < WIDTH)[:, None] & (4 * quad_Q < R)[None, :]
    tl.store(out + place_CQ, out_CQ, mask=inside_CQ)
# fmt: on
