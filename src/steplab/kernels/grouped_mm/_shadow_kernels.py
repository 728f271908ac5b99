"""As `_epilogue_kernels`, but a tile's activation runs while the program's next tile is multiplied.

A warp that has issued a step of a product on the tensor cores has about 1000 cycles until they are
done (128 x 256 x 64). In them it finishes a part of the tile before: P of its rows, which it reads
back (from the second-level cache, a step ahead) as it stored them. Tile and part are laid out alike
over the threads, P being a multiple of the warps: each thread reads what it has written itself.
"""

# M rows, N columns and K inner columns of a tile; P rows of a part
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from steplab.kernels._triton_rounding import narrow
from steplab.kernels.activation._triton_kernels import gelu, gelu_and_slope
from steplab.kernels.grouped_mm._epilogue_kernels import fetch_ahead, find_tile, load_step


# fmt: off
@triton.jit
def _places(row, end, column, part, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
            P: tl.constexpr):
    """Return the rows of a part, the places of its elements, and which rows are in the group."""
    row_P = row + part * P + tl.arange(0, P)
    place_PN = row_P.to(tl.int64)[:, None] * WIDTH + (column + tl.arange(0, N))[None, :]
    return row_P, place_PN, (row_P < end) & (part < M // P)


@triton.jit
def _load_part(
    x, weights, row, end, column, part, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    P: tl.constexpr,
):
    """Return a part of a tile and the weights of its rows."""
    row_P, place_PN, inside_P = _places(row, end, column, part, WIDTH, M, N, P)
    weight_P = tl.full([P], 1.0, tl.float32)
    if weights is not None:
        weight_P = tl.load(weights + row_P, mask=inside_P, other=0.0).to(tl.float32)
    return tl.load(x + place_PN, mask=inside_P[:, None], other=0.0), weight_P


@triton.jit
def _store_tile(
    total_MN, out, row, end, column, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    row_M = row + tl.arange(0, M)
    place_MN = row_M.to(tl.int64)[:, None] * WIDTH + (column + tl.arange(0, N))[None, :]
    rounded_MN = narrow(total_MN, out.dtype.element_ty, UPCAST)
    tl.store(out + place_MN, rounded_MN, mask=(row_M < end)[:, None])


@triton.jit
def _finish_gelu(
    z_PN, weight_P, h, row, end, column, part, WIDTH: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, P: tl.constexpr, UPCAST: tl.constexpr,
):
    """Store weight * gelu(z) of a part."""
    _, place_PN, inside_P = _places(row, end, column, part, WIDTH, M, N, P)
    h_PN = gelu(z_PN.to(tl.float32)) * weight_P[:, None]
    tl.store(h + place_PN, narrow(h_PN, h.dtype.element_ty, UPCAST), mask=inside_P[:, None])


@triton.jit
def _finish_slope(
    z_PN, dh_PN, weight_P, dz, h, dots, row, end, column, part, WIDTH: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, P: tl.constexpr, UPCAST: tl.constexpr,
):
    """Store weight * dh * gelu'(z), weight * gelu(z) and <dh, gelu(z)> of a part."""
    row_P, place_PN, inside_P = _places(row, end, column, part, WIDTH, M, N, P)
    dtype: tl.constexpr = dz.dtype.element_ty
    h_PN, rise_PN = gelu_and_slope(z_PN.to(tl.float32))
    dh_PN = dh_PN.to(tl.float32)
    if dots is not None:
        target_P = dots + row_P.to(tl.int64) * (WIDTH // N) + column // N
        tl.store(target_P, tl.sum(dh_PN * h_PN, 1), mask=inside_P)
    dz_PN = narrow(dh_PN * weight_P[:, None] * rise_PN, dtype, UPCAST)
    tl.store(dz + place_PN, dz_PN, mask=inside_P[:, None])
    h_PN = narrow(h_PN * weight_P[:, None], dtype, UPCAST)
    tl.store(h + place_PN, h_PN, mask=inside_P[:, None])


@triton.jit
def shadow_matmul_gelu_kernel(
    x, w, table, weights, z, h, blocks, INNER: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, P: tl.constexpr, UPCAST: tl.constexpr,
):
    """Write z = x w^T and weight * gelu(z). Grid: as many programs as stay on the GPU."""
    tiles = tl.load(table + 3 * blocks) * (WIDTH // N)
    row, end, column = 0, 0, 0  # of the tile before: none
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        group, next_row, next_end, next_column = find_tile(table, blocks, tile, WIDTH, N)
        total_MN = tl.zeros([M, N], tl.float32)
        z_PN, weight_P = tl.zeros([P, N], z.dtype.element_ty), tl.zeros([P], tl.float32)
        for k in range(INNER // K):
            x_MK, w_KN = load_step(
                x, w, group, next_row, next_column, k, INNER, WIDTH, True, K, UPCAST)
            total_MN = tl.dot(x_MK, w_KN, total_MN)
            if k <= M // P:
                now_PN, now_P = z_PN, weight_P
                z_PN, weight_P = _load_part(z, weights, row, end, column, k, WIDTH, M, N, P)
                if k > 0:
                    _finish_gelu(
                        now_PN, now_P, h, row, end, column, k - 1, WIDTH, M, N, P, UPCAST)
        _store_tile(total_MN, z, next_row, next_end, next_column, WIDTH, M, N, UPCAST)
        row, end, column = next_row, next_end, next_column
    for part in range(M // P):
        z_PN, weight_P = _load_part(z, weights, row, end, column, part, WIDTH, M, N, P)
        _finish_gelu(z_PN, weight_P, h, row, end, column, part, WIDTH, M, N, P, UPCAST)


@triton.jit
def shadow_matmul_slope_kernel(
    dout, w, table, weights, z, dz, h, dots, rows, blocks, INNER: tl.constexpr,
    WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, P: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Write weight * dh * gelu'(z) of dh = dout w, and weight * gelu(z).

    Until it is finished, a tile of dh lies in the place of dz. `dots`, (rows, WIDTH / N), gets
    each tile's share of <dh, gelu(z)>.
    """
    tiles = tl.load(table + 3 * blocks) * (WIDTH // N)
    row, end, column = 0, 0, 0  # of the tile before: none
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        group, next_row, next_end, next_column = find_tile(table, blocks, tile, WIDTH, N)
        if not UPCAST:
            fetch_ahead(z, next_row, rows, next_column, WIDTH, M, N)
        total_MN = tl.zeros([M, N], tl.float32)
        z_PN, weight_P = tl.zeros([P, N], z.dtype.element_ty), tl.zeros([P], tl.float32)
        dh_PN = z_PN
        for k in range(INNER // K):
            x_MK, w_KN = load_step(
                dout, w, group, next_row, next_column, k, INNER, WIDTH, False, K, UPCAST)
            total_MN = tl.dot(x_MK, w_KN, total_MN)
            if k <= M // P:
                now_PN, slope_PN, now_P = z_PN, dh_PN, weight_P
                z_PN, weight_P = _load_part(z, weights, row, end, column, k, WIDTH, M, N, P)
                dh_PN, _ = _load_part(dz, None, row, end, column, k, WIDTH, M, N, P)
                if k > 0:
                    _finish_slope(
                        now_PN, slope_PN, now_P, dz, h, dots, row, end, column, k - 1, WIDTH, M,
                        N, P, UPCAST)
        _store_tile(total_MN, dz, next_row, next_end, next_column, WIDTH, M, N, UPCAST)
        row, end, column = next_row, next_end, next_column
    for part in range(M // P):
        z_PN, weight_P = _load_part(z, weights, row, end, column, part, WIDTH, M, N, P)
        dh_PN, _ = _load_part(dz, None, row, end, column, part, WIDTH, M, N, P)
        _finish_slope(
            z_PN, dh_PN, weight_P, dz, h, dots, row, end, column, part, WIDTH, M, N, P,
            UPCAST)
