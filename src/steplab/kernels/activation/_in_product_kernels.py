"""The kernels of `_in_product.py`: a product, and gelu by warps of its own (Gluon, Hopper).

On every multiprocessor one warp loads tiles of both factors, eight multiply them, and eight more
take the finished tile, rounded as the product would store it, through shared memory: they apply the
activation while the next tile is multiplied.
"""

# M rows, N columns and H half the columns of a tile, K along the sum; R rows and C columns that the
# activation takes at a time; D width, F inner width, E groups
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from steplab.kernels.triton_runtime import HAS_GLUON, gl, gluon, hopper, tl, triton

if HAS_GLUON:
    mbarrier, tma = hopper.mbarrier, hopper.tma

# Eight elements of a thread of the activation are 16 bytes of a row.
VECTOR = gl.constexpr(8)
# As in triton_rows.py, with the density in place of the bell curve.
S = gl.constexpr(0.31)
P0 = gl.constexpr(0.31047271)
P1 = gl.constexpr(0.30190169)
P2 = gl.constexpr(0.33445836)
P3 = gl.constexpr(0.03946698)
P4 = gl.constexpr(0.45232122)
P5 = gl.constexpr(-0.18531276)
ROOT_OF_HALF_LOG2_E = gl.constexpr(0.8493218002880191)
LOG2_OF_DENSITY_AT_0 = gl.constexpr(-1.3257480647361592)


# fmt: off
@gluon.jit
def _find_rows(offsets, block, E: gl.constexpr, M: gl.constexpr):
    """Return the group, the first row and the end of the group's rows of one block of rows."""
    start = 0
    before = 0
    group = 0
    row = 0
    end = 0
    for e in range(E):
        stop = gl.load(offsets + e)
        after = before + (stop - start + M - 1) // M
        if (block >= before) & (block < after):
            group = e
            row = start + (block - before) * M
            end = stop
        before = after
        start = stop
    return group, row, end


@gluon.jit
def _count_blocks(offsets, E: gl.constexpr, M: gl.constexpr):
    """Return how many blocks of rows all groups have."""
    start = 0
    blocks = 0
    for e in range(E):
        stop = gl.load(offsets + e)
        blocks += (stop - start + M - 1) // M
        start = stop
    return blocks


@gluon.jit
def _load_tiles(
    x, w, offsets, x_tiles, w_tiles, loaded, free, D: gl.constexpr, F: gl.constexpr,
    E: gl.constexpr, FORWARD: gl.constexpr,
):
    """Load the tiles of both factors, as many steps ahead as there are stages."""
    stages: gl.constexpr = x_tiles.type.shape[0]
    M: gl.constexpr = x.block_type.shape[0]
    K: gl.constexpr = x.block_type.shape[1]
    N: gl.constexpr = w.block_type.shape[0 if FORWARD else 1]
    across: gl.constexpr = F // N
    tiles = _count_blocks(offsets, E, M) * across
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        group, row, _end = _find_rows(offsets, tile // across, E, M)
        column = tile % across * N
        for k in range(0, D, K):
            stage = step % stages
            mbarrier.wait(free.index(stage), (step // stages & 1) ^ 1)
            arrived = loaded.index(stage)
            mbarrier.expect(arrived, x.block_type.nbytes + w.block_type.nbytes)
            tma.async_copy_global_to_shared(x, [row, k], arrived, x_tiles.index(stage))
            at = [group * F + column, k] if FORWARD else [group * D + k, column]
            tma.async_copy_global_to_shared(w, at, arrived, w_tiles.index(stage))
            step += 1


@gluon.jit
def _multiply_half(
    x_tiles, w_tiles, loaded, step, sum_MH, add, HALF: gl.constexpr, FORWARD: gl.constexpr
):
    """Start to multiply one half of a tile's columns, the left first, at one step of the sum."""
    stages: gl.constexpr = x_tiles.type.shape[0]
    H: gl.constexpr = w_tiles.type.shape[1 if FORWARD else 2] // 2
    stage = step % stages
    if HALF == 0:
        mbarrier.wait(loaded.index(stage), step // stages & 1)
    w_KN = w_tiles.index(stage)
    if FORWARD:
        w_KN = w_KN.permute((1, 0))
    w_KH = w_KN.slice(HALF * H, H, 1)
    return hopper.warpgroup_mma(x_tiles.index(stage), w_KH, sum_MH, use_acc=add, is_async=True)


@gluon.jit
def _multiply_rest(
    x_tiles, w_tiles, loaded, free, step, left_MH, right_MH, D: gl.constexpr, FORWARD: gl.constexpr
):
    """Multiply all steps of a tile but the first; the last one is still running in the end."""
    stages: gl.constexpr = x_tiles.type.shape[0]
    K: gl.constexpr = x_tiles.type.shape[2]
    for _k in range(K, D, K):
        left_MH = _multiply_half(x_tiles, w_tiles, loaded, step, left_MH, True, 0, FORWARD)
        right_MH = _multiply_half(x_tiles, w_tiles, loaded, step, right_MH, True, 1, FORWARD)
        left_MH, right_MH = _wait(2, left_MH, right_MH)  # the step before is done
        mbarrier.arrive(free.index((step + stages - 1) % stages))
        step += 1
    return step, left_MH, right_MH


@gluon.jit
def _wait(running: gl.constexpr, left_MH, right_MH):
    """Wait until so many products are running; both sums may go on."""
    left_MH, right_MH = hopper.warpgroup_mma_wait(running, deps=(left_MH, right_MH))
    return hopper.warpgroup_mma_init(left_MH), hopper.warpgroup_mma_init(right_MH)


@gluon.jit
def _multiply_tiles(
    offsets, x_tiles, w_tiles, parts, loaded, free, full, empty, layout: gl.constexpr,
    D: gl.constexpr, F: gl.constexpr, E: gl.constexpr, FORWARD: gl.constexpr,
):
    """Multiply, and hand over each finished tile: a half while the other one is multiplied."""
    stages: gl.constexpr = x_tiles.type.shape[0]
    M: gl.constexpr = x_tiles.type.shape[1]
    N: gl.constexpr = w_tiles.type.shape[1 if FORWARD else 2]
    H: gl.constexpr = N // 2
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, H, 16])
    finished = parts._reinterpret(parts.dtype, [M, N], layout)
    tiles = _count_blocks(offsets, E, M) * (F // N)
    programs = gl.num_programs(0)
    mine = (tiles - gl.program_id(0) + programs - 1) // programs
    if mine > 0:
        nothing = gl.zeros([M, H], gl.float32, sums)
        left_MH = _multiply_half(x_tiles, w_tiles, loaded, 0, nothing, False, 0, FORWARD)
        right_MH = _multiply_half(x_tiles, w_tiles, loaded, 0, nothing, False, 1, FORWARD)
        step = 1
        turn = 0
        for _tile in range(mine - 1):
            step, left_MH, right_MH = _multiply_rest(
                x_tiles, w_tiles, loaded, free, step, left_MH, right_MH, D, FORWARD
            )
            mbarrier.wait(empty, turn ^ 1)
            left_MH, right_MH = hopper.warpgroup_mma_wait(1, deps=(left_MH, right_MH))
            finished.slice(0, H, 1).store(left_MH.to(parts.dtype))
            left_MH = _multiply_half(x_tiles, w_tiles, loaded, step, left_MH, False, 0, FORWARD)
            left_MH, right_MH = hopper.warpgroup_mma_wait(1, deps=(left_MH, right_MH))
            left_MH = hopper.warpgroup_mma_init(left_MH)
            mbarrier.arrive(free.index((step + stages - 1) % stages))
            finished.slice(H, H, 1).store(right_MH.to(parts.dtype))
            mbarrier.arrive(full)
            right_MH = _multiply_half(x_tiles, w_tiles, loaded, step, right_MH, False, 1, FORWARD)
            step += 1
            turn ^= 1
        step, left_MH, right_MH = _multiply_rest(
            x_tiles, w_tiles, loaded, free, step, left_MH, right_MH, D, FORWARD
        )
        mbarrier.wait(empty, turn ^ 1)
        left_MH, right_MH = hopper.warpgroup_mma_wait(0, deps=(left_MH, right_MH))
        finished.slice(0, H, 1).store(left_MH.to(parts.dtype))
        finished.slice(H, H, 1).store(right_MH.to(parts.dtype))
        mbarrier.arrive(full)


@gluon.jit
def _one_instruction(name: gl.constexpr, x):
    """Return `name` of x: without its care for numbers below 1e-38, which takes three more."""
    assembly: gl.constexpr = name + ".approx.ftz.f32 $0, $1;"
    return gl.inline_asm_elementwise(assembly, "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def _normal(z):
    """Return the normal distribution at z, and its density."""
    scaled = z * ROOT_OF_HALF_LOG2_E
    density = _one_instruction("ex2", LOG2_OF_DENSITY_AT_0 - scaled * scaled)
    t = _one_instruction("rcp", gl.abs(z) * S + 1.0)
    polynomial = ((((t * P5 + P4) * t + P3) * t + P2) * t + P1) * t + P0
    tail = density * t * polynomial
    return gl.where(z > 0, 1.0 - tail, tail), density


@gluon.jit
def _load_part(
    z, weights, first, end, row_R, offset_RC, F: gl.constexpr, M: gl.constexpr,
    FORWARD: gl.constexpr,
):
    """Return the part of z (backward only) and of the weights (if any) that begins at `first`."""
    inside_R = (first + row_R < end) & (first + row_R < M)
    z_RC = 0.0
    weight_R = 1.0
    if not FORWARD:
        z_RC = gl.load(z + first * F + offset_RC, mask=inside_R[:, None], other=0.0)
    if weights is not None:
        weight_R = gl.load(weights + first + row_R, mask=inside_R, other=0.0).to(gl.float32)
    return z_RC, weight_R


@gluon.jit
def _activate_part(
    product_RC, z_RC, weight_R, z, dz, h, dots, first, end, row_R, offset_RC, F: gl.constexpr,
    FORWARD: gl.constexpr, WEIGHTED: gl.constexpr,
):
    """Forward: write z, the product, and h. Backward: the product is dh; write dz, h and dots."""
    inside_R = first + row_R < end
    inside_RC = inside_R[:, None]
    at = first * F + offset_RC
    dtype: gl.constexpr = h.dtype.element_ty
    product_RC = product_RC.to(gl.float32)
    z_RC = product_RC if FORWARD else z_RC.to(gl.float32)
    below_RC, density_RC = _normal(z_RC)
    h_RC = z_RC * below_RC
    if FORWARD:
        gl.store(z + at, z_RC.to(dtype), mask=inside_RC)
        if WEIGHTED:
            h_RC *= weight_R[:, None]
    else:
        slope_RC = z_RC * density_RC + below_RC
        if WEIGHTED:
            gl.store(dots + first + row_R, gl.sum(product_RC * h_RC, 1), mask=inside_R)
            h_RC *= weight_R[:, None]
            slope_RC *= weight_R[:, None]
        gl.store(dz + at, (product_RC * slope_RC).to(dtype), mask=inside_RC)
    gl.store(h + at, h_RC.to(dtype), mask=inside_RC)


@gluon.jit
def _activate_tiles(
    offsets, weights, z, dz, h, dots, R, parts, full, empty, F: gl.constexpr, E: gl.constexpr,
    FORWARD: gl.constexpr,
):
    """Apply the activation to finished tiles, part by part; the next two parts are loading."""
    count: gl.constexpr = parts.type.shape[0]
    rows: gl.constexpr = parts.type.shape[1]
    N: gl.constexpr = parts.type.shape[2]
    M: gl.constexpr = count * rows
    across: gl.constexpr = F // N
    lanes: gl.constexpr = N // VECTOR
    layout: gl.constexpr = gl.BlockedLayout([1, VECTOR], [1, lanes], [gl.num_warps(), 1], [1, 0])
    row_R = gl.arange(0, rows, gl.SliceLayout(1, layout))
    column_C = gl.arange(0, N, gl.SliceLayout(0, layout))
    offset_RC = row_R[:, None] * F + column_C[None, :]
    weighted: gl.constexpr = weights is not None
    tiles = _count_blocks(offsets, E, M) * across
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _group, row, stop = _find_rows(offsets, tile // across, E, M)
        corner = row.to(gl.int64) * F + tile % across * N
        end = stop - row
        z_, h_, dz_, dots_, weights_ = z + corner, h + corner, dz, dots, weights
        if not FORWARD:
            dz_ = dz + corner
        if weighted:
            weights_ = weights + row
            if not FORWARD:
                dots_ = dots + tile % across * R + row
        z0_RC, weight0_R = _load_part(z_, weights_, 0, end, row_R, offset_RC, F, M, FORWARD)
        z1_RC, weight1_R = _load_part(z_, weights_, rows, end, row_R, offset_RC, F, M, FORWARD)
        mbarrier.wait(full, turn)
        for part in range(0, count, 2):
            first = part * rows
            _activate_part(
                parts.index(part).load(layout), z0_RC, weight0_R, z_, dz_, h_, dots_, first, end,
                row_R, offset_RC, F, FORWARD, weighted,
            )
            z0_RC, weight0_R = _load_part(
                z_, weights_, first + 2 * rows, end, row_R, offset_RC, F, M, FORWARD
            )
            _activate_part(
                parts.index(part + 1).load(layout), z1_RC, weight1_R, z_, dz_, h_, dots_,
                first + rows, end, row_R, offset_RC, F, FORWARD, weighted,
            )
            z1_RC, weight1_R = _load_part(
                z_, weights_, first + 3 * rows, end, row_R, offset_RC, F, M, FORWARD
            )
        mbarrier.arrive(empty)
        turn ^= 1


@gluon.jit
def matmul_gelu_kernel(
    x, w, offsets, weights, z, dz, h, dots, R, D: gl.constexpr, F: gl.constexpr, E: gl.constexpr,
    FORWARD: gl.constexpr, STAGES: gl.constexpr, FINISHED: gl.constexpr, WARPS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Write z and h of x w^T; or, given z, dz and h of x w, and for each tile <dh, act(z)> of rows.

    Grid: as many programs as stay resident; they take tiles in turn, those of the same rows first.
    """
    M: gl.constexpr = x.block_type.shape[0]
    K: gl.constexpr = x.block_type.shape[1]
    N: gl.constexpr = w.block_type.shape[0 if FORWARD else 1]
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, M, K], x.layout)
    of_w: gl.constexpr = [STAGES, N, K] if FORWARD else [STAGES, K, N]
    w_tiles = gl.allocate_shared_memory(w.dtype, of_w, w.layout)
    # Rows of 16-byte vectors, of which eight rows' places differ: no bank is asked twice at once.
    layout: gl.constexpr = gl.SwizzledSharedLayout(VECTOR, 1, 8, [1, 0])
    parts = gl.allocate_shared_memory(x.dtype, [M // FINISHED, FINISHED, N], layout)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(loaded.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    hopper.fence_async_shared()
    gl.warp_specialize([
        (_multiply_tiles, (
            offsets, x_tiles, w_tiles, parts, loaded, free, full, empty, layout, D, F, E, FORWARD,
        )),
        (_activate_tiles, (offsets, weights, z, dz, h, dots, R, parts, full, empty, F, E, FORWARD)),
        (_load_tiles, (x, w, offsets, x_tiles, w_tiles, loaded, free, D, F, E, FORWARD)),
    ], [WARPS, 1], [REGISTERS, 24])


@triton.jit
def sum_dots_kernel(dots, source, dweights, R, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the dots of a row's tiles, in the order of the assignments."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < R
    total = tl.zeros([BLOCK], tl.float32)
    for tile in tl.static_range(TILES):
        total += tl.load(dots + tile * R + row, mask=inside, other=0.0)
    if source is not None:
        row = tl.load(source + row, mask=inside, other=0)
    tl.store(dweights + row, total, mask=inside)
# fmt: on
