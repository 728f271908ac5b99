"""Grouped products on Hopper with gelu, or its derivative, applied in the same kernel.

Programs stay and take tiles in turn, those of the same rows one after another, so that a group's
matrix (4.7 MB for 768 x 3072) stays in the second-level cache. Which group a block of rows belongs
to stands in a table that a kernel of its own fills: nothing is read on the host.

In the `shadow` kernels a tile's activation runs while the program's next tile is multiplied. A warp
that has issued a step of a product on the tensor cores has about 1000 cycles until they are done
(128 x 256 x 64). Meanwhile it finishes a part of the previous tile: P of its rows, which it reads
back (from the second-level cache, a step ahead) as it stored them. Tile and part are laid out alike
over the threads, P being a multiple of the warps: each thread reads what it has written itself.
"""

# M rows, N columns and K inner columns of a tile; C columns that are finished at a time; P rows of
# a part; E groups
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from steplab.kernels.activation.triton_rows import gelu, gelu_and_slope
from steplab.kernels.triton_blocks import narrow
from steplab.kernels.triton_runtime import tl, triton


# fmt: off
@triton.jit
def block_table_kernel(
    offsets, table, rows, blocks, GROUPS: tl.constexpr, PADDED: tl.constexpr, M: tl.constexpr,
    FOUND: tl.constexpr,
):
    """Write for FOUND blocks of M rows their group, first row and end; last, how many there are.

    `table` is (3, blocks) and one number. Grid: the blocks that there are at most, by FOUND.
    """
    group_E = tl.arange(0, PADDED)
    known_E = group_E < GROUPS
    end_E = tl.load(offsets + group_E, mask=known_E, other=rows)
    start_E = tl.load(offsets + group_E - 1, mask=known_E & (group_E > 0), other=0)
    count_E = tl.where(known_E, (end_E - start_E + M - 1) // M, 0)
    last_E = tl.cumsum(count_E, 0)
    block_B = tl.program_id(0) * FOUND + tl.arange(0, FOUND)
    nth_BE = block_B[:, None] - (last_E - count_E)[None, :]  # of the group's own blocks
    own_BE = (nth_BE >= 0) & (nth_BE < count_E[None, :])
    first_BE = start_E[None, :] + nth_BE * M
    inside_B = block_B < blocks
    group_B = tl.sum(tl.where(own_BE, group_E[None, :], 0), 1)
    tl.store(table + block_B, group_B, mask=inside_B)
    tl.store(table + blocks + block_B, tl.sum(tl.where(own_BE, first_BE, 0), 1), mask=inside_B)
    end_B = tl.sum(tl.where(own_BE, end_E[None, :], 0), 1)
    tl.store(table + 2 * blocks + block_B, end_B, mask=inside_B)
    tl.store(table + 3 * blocks, tl.max(last_E, 0))


@triton.jit
def find_tile(table, blocks, tile, WIDTH: tl.constexpr, N: tl.constexpr):
    """Return the group of a tile, its first row, the end of the group's rows, and its column."""
    block = tile // (WIDTH // N)
    group = tl.load(table + block)
    row = tl.load(table + blocks + block)
    end = tl.load(table + 2 * blocks + block)
    return group, row, end, tile % (WIDTH // N) * N


@triton.jit
def fetch_ahead(
    z, row, rows, column, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):
    """Bring a tile of z, 2 bytes an element, into the second-level cache while others work."""
    row_M = tl.minimum(row + tl.arange(0, M), rows - 1).to(tl.int64)
    offset_M = z.to(tl.int64) + (row_M * WIDTH + column) * 2
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }", "=r,l,r",
        [offset_M, tl.full([M], N * 2, tl.int32)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load_step(
    x, w, group, row, column, k, INNER: tl.constexpr, WIDTH: tl.constexpr,
    TRANSPOSED: tl.constexpr, K: tl.constexpr, UPCAST: tl.constexpr,
):
    """Return what step k of a tile's product multiplies.

    `x` and `w` are descriptors; w has a group's (WIDTH, INNER) if TRANSPOSED, else (INNER, WIDTH).
    """
    x_MK = x.load([row, k * K])
    if TRANSPOSED:
        w_KN = w.load([group * WIDTH + column, k * K]).T
    else:
        w_KN = w.load([group * INNER + k * K, column])
    if UPCAST:  # Triton's interpreter multiplies bf16 wrongly
        x_MK, w_KN = x_MK.to(tl.float32), w_KN.to(tl.float32)
    return x_MK, w_KN


@triton.jit
def _halves(x_MN, M: tl.constexpr, N: tl.constexpr):
    return x_MN.reshape(M, 2, N // 2).permute(0, 2, 1).split()


@triton.jit
def _store_gelu(
    total_MN, z, h, weight_M, row_M, inside_M, column, WIDTH: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr, UPCAST: tl.constexpr,
):
    """Store z and weight * gelu(z), C columns at a time, which bounds the registers."""
    if N > C:
        left, right = _halves(total_MN, M, N)
        rest: tl.constexpr = N // 2
        _store_gelu(left, z, h, weight_M, row_M, inside_M, column, WIDTH, M, rest, C, UPCAST)
        _store_gelu(
            right, z, h, weight_M, row_M, inside_M, column + rest, WIDTH, M, rest, C, UPCAST)
    else:
        offset_MN = row_M.to(tl.int64)[:, None] * WIDTH + (column + tl.arange(0, N))[None, :]
        z_MN = narrow(total_MN, z.dtype.element_ty, UPCAST)
        tl.store(z + offset_MN, z_MN, mask=inside_M[:, None])
        # Of z as it is kept, so that the backward finds the same h.
        h_MN = gelu(z_MN.to(tl.float32)) * weight_M[:, None]
        tl.store(h + offset_MN, narrow(h_MN, h.dtype.element_ty, UPCAST), mask=inside_M[:, None])


@triton.jit
def _store_slope(
    dh_MN, z, dz, h, weight_M, row, row_M, inside_M, column, WIDTH: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, C: tl.constexpr, UPCAST: tl.constexpr,
):
    """Store dz and weight * gelu(z), C columns at a time; return each row's <dh, gelu(z)>."""
    if N > C:
        left, right = _halves(dh_MN, M, N)
        rest: tl.constexpr = N // 2
        dot_M = _store_slope(
            left, z, dz, h, weight_M, row, row_M, inside_M, column, WIDTH, M, rest, C, UPCAST)
        dot_M += _store_slope(
            right, z, dz, h, weight_M, row, row_M, inside_M, column + rest, WIDTH, M, rest, C,
            UPCAST)
    else:
        offset_MN = row_M.to(tl.int64)[:, None] * WIDTH + (column + tl.arange(0, N))[None, :]
        dtype: tl.constexpr = dz.dtype.element_ty
        h_MN, rise_MN = gelu_and_slope(z.load([row, column]).to(tl.float32))
        dot_M = tl.sum(dh_MN * h_MN, 1)
        dz_MN = narrow(dh_MN * weight_M[:, None] * rise_MN, dtype, UPCAST)
        tl.store(dz + offset_MN, dz_MN, mask=inside_M[:, None])
        h_MN = narrow(h_MN * weight_M[:, None], dtype, UPCAST)
        tl.store(h + offset_MN, h_MN, mask=inside_M[:, None])
    return dot_M


@triton.jit
def matmul_gelu_kernel(
    x, w, table, weights, z, h, blocks, INNER: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, C: tl.constexpr, FLATTEN: tl.constexpr,
    SPECIALIZE: tl.constexpr, UPCAST: tl.constexpr,
):
    """Write z = x w^T and weight * gelu(z). Grid: as many programs as stay on the GPU."""
    tiles = tl.load(table + 3 * blocks) * (WIDTH // N)
    for tile in tl.range(
        tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN, warp_specialize=SPECIALIZE
    ):
        group, row, end, column = find_tile(table, blocks, tile, WIDTH, N)
        total_MN = tl.zeros([M, N], tl.float32)
        for k in range(INNER // K):
            x_MK, w_KN = load_step(x, w, group, row, column, k, INNER, WIDTH, True, K, UPCAST)
            total_MN = tl.dot(x_MK, w_KN, total_MN)
        row_M = row + tl.arange(0, M)
        inside_M = row_M < end
        weight_M = tl.full([M], 1.0, tl.float32)
        if weights is not None:
            weight_M = tl.load(weights + row_M, mask=inside_M, other=0.0).to(tl.float32)
        _store_gelu(total_MN, z, h, weight_M, row_M, inside_M, column, WIDTH, M, N, C, UPCAST)


@triton.jit
def matmul_slope_kernel(
    dout, w, table, weights, z, tiles_of_z, dz, h, dots, rows, blocks, INNER: tl.constexpr,
    WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    FLATTEN: tl.constexpr, UPCAST: tl.constexpr,
):
    """Write weight * dh * gelu'(z) of dh = dout w, and weight * gelu(z).

    `dots`, (rows, WIDTH / N), gets each tile's share of <dh, gelu(z)>.
    """
    tiles = tl.load(table + 3 * blocks) * (WIDTH // N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        group, row, end, column = find_tile(table, blocks, tile, WIDTH, N)
        if not UPCAST:
            fetch_ahead(z, row, rows, column, WIDTH, M, N)
        dh_MN = tl.zeros([M, N], tl.float32)
        for k in range(INNER // K):
            x_MK, w_KN = load_step(dout, w, group, row, column, k, INNER, WIDTH, False, K, UPCAST)
            dh_MN = tl.dot(x_MK, w_KN, dh_MN)
        row_M = row + tl.arange(0, M)
        inside_M = row_M < end
        weight_M = tl.full([M], 1.0, tl.float32)
        if weights is not None:
            weight_M = tl.load(weights + row_M, mask=inside_M, other=0.0).to(tl.float32)
        dot_M = _store_slope(
            dh_MN, tiles_of_z, dz, h, weight_M, row, row_M, inside_M, column, WIDTH, M, N, C,
            UPCAST)
        if dots is not None:
            target_M = dots + row_M.to(tl.int64) * (WIDTH // N) + column // N
            tl.store(target_M, dot_M, mask=inside_M)


@triton.jit
def _offsets(row, end, column, part, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
            P: tl.constexpr):
    """Return the rows of a part, the offsets of its elements, and which rows are in the group."""
    row_P = row + part * P + tl.arange(0, P)
    offset_PN = row_P.to(tl.int64)[:, None] * WIDTH + (column + tl.arange(0, N))[None, :]
    return row_P, offset_PN, (row_P < end) & (part < M // P)


@triton.jit
def _load_part(
    x, weights, row, end, column, part, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    P: tl.constexpr,
):
    """Return a part of a tile and the weights of its rows."""
    row_P, offset_PN, inside_P = _offsets(row, end, column, part, WIDTH, M, N, P)
    weight_P = tl.full([P], 1.0, tl.float32)
    if weights is not None:
        weight_P = tl.load(weights + row_P, mask=inside_P, other=0.0).to(tl.float32)
    return tl.load(x + offset_PN, mask=inside_P[:, None], other=0.0), weight_P


@triton.jit
def _store_tile(
    total_MN, out, row, end, column, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    row_M = row + tl.arange(0, M)
    offset_MN = row_M.to(tl.int64)[:, None] * WIDTH + (column + tl.arange(0, N))[None, :]
    rounded_MN = narrow(total_MN, out.dtype.element_ty, UPCAST)
    tl.store(out + offset_MN, rounded_MN, mask=(row_M < end)[:, None])


@triton.jit
def _finish_gelu(
    z_PN, weight_P, h, row, end, column, part, WIDTH: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, P: tl.constexpr, UPCAST: tl.constexpr,
):
    """Store weight * gelu(z) of a part."""
    _, offset_PN, inside_P = _offsets(row, end, column, part, WIDTH, M, N, P)
    h_PN = gelu(z_PN.to(tl.float32)) * weight_P[:, None]
    tl.store(h + offset_PN, narrow(h_PN, h.dtype.element_ty, UPCAST), mask=inside_P[:, None])


@triton.jit
def _finish_slope(
    z_PN, dh_PN, weight_P, dz, h, dots, row, end, column, part, WIDTH: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, P: tl.constexpr, UPCAST: tl.constexpr,
):
    """Store weight * dh * gelu'(z), weight * gelu(z) and <dh, gelu(z)> of a part."""
    row_P, offset_PN, inside_P = _offsets(row, end, column, part, WIDTH, M, N, P)
    dtype: tl.constexpr = dz.dtype.element_ty
    h_PN, rise_PN = gelu_and_slope(z_PN.to(tl.float32))
    dh_PN = dh_PN.to(tl.float32)
    if dots is not None:
        target_P = dots + row_P.to(tl.int64) * (WIDTH // N) + column // N
        tl.store(target_P, tl.sum(dh_PN * h_PN, 1), mask=inside_P)
    dz_PN = narrow(dh_PN * weight_P[:, None] * rise_PN, dtype, UPCAST)
    tl.store(dz + offset_PN, dz_PN, mask=inside_P[:, None])
    h_PN = narrow(h_PN * weight_P[:, None], dtype, UPCAST)
    tl.store(h + offset_PN, h_PN, mask=inside_P[:, None])


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

    Until it is finished, a tile of dh is stored in dz. `dots`, (rows, WIDTH / N), gets
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
# fmt: on
