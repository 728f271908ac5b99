"""The kernels of `_in_product.py`: a product, and its activation by other warps (Gluon, Hopper).

On every multiprocessor one warp loads tiles of both factors, eight multiply them, and eight more
take the finished tile, rounded as the product would store it, through shared memory: they apply the
activation while the next tile is multiplied. In the backward one more warp loads z for them, part
by part and ahead, because loads of their own would wait for memory.

A tile has two halves of columns. They are neighbors, but for the product before swiglu: there the
left ones are a part of the gate and the right ones the same columns of what it lets through.
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
LOG2_E = gl.constexpr(1.4426950408889634)


# fmt: off
@gluon.jit
def _find_rows(offsets, R, block, E: gl.constexpr, M: gl.constexpr):
    """Return the group, the first row and the end of the group's rows of one block of rows."""
    start = 0
    before = 0
    group = 0
    row = block * M
    end = R
    if offsets is not None:
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
def _count_blocks(offsets, R, E: gl.constexpr, M: gl.constexpr):
    """Return how many blocks of rows all groups have; without offsets all rows are one group."""
    blocks = (R + M - 1) // M
    if offsets is not None:
        start = 0
        blocks = 0
        for e in range(E):
            stop = gl.load(offsets + e)
            blocks += (stop - start + M - 1) // M
            start = stop
    return blocks


@gluon.jit
def _barriers(count: gl.constexpr):
    """Return so many barriers, each for one arrival."""
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(made.index(i), count=1)
    return made


@gluon.jit
def _load_tiles(
    x, w, offsets, R, x_tiles, w_halves, loaded, free, D: gl.constexpr, F: gl.constexpr,
    E: gl.constexpr, GATED: gl.constexpr, FORWARD: gl.constexpr,
):
    """Load the tiles of both factors, as many steps ahead as there are stages."""
    stages: gl.constexpr = x_tiles.type.shape[0]
    M: gl.constexpr = x.block_type.shape[0]
    K: gl.constexpr = x.block_type.shape[1]
    H: gl.constexpr = w.block_type.shape[0 if FORWARD else 1]
    between: gl.constexpr = GATED and FORWARD  # the halves lie as far apart as gate and rest
    columns: gl.constexpr = H if between else 2 * H
    wide: gl.constexpr = 2 * F if GATED else F
    right: gl.constexpr = F if between else H
    across: gl.constexpr = F // columns
    tiles = _count_blocks(offsets, R, E, M) * across
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        group, row, _end = _find_rows(offsets, R, tile // across, E, M)
        column = tile % across * columns
        for k in range(0, D, K):
            stage = step % stages
            mbarrier.wait(free.index(stage), (step // stages & 1) ^ 1)
            arrived = loaded.index(stage)
            mbarrier.expect(arrived, x.block_type.nbytes + 2 * w.block_type.nbytes)
            tma.async_copy_global_to_shared(x, [row, k], arrived, x_tiles.index(stage))
            for half in gl.static_range(2):
                at = column + half * right
                at = [group * wide + at, k] if FORWARD else [group * D + k, at]
                tma.async_copy_global_to_shared(w, at, arrived, w_halves.index(2 * stage + half))
            step += 1


@gluon.jit
def _load_parts_of_z(
    z, offsets, R, z_parts, z_loaded, z_free, M: gl.constexpr, F: gl.constexpr, E: gl.constexpr,
    GATED: gl.constexpr,
):
    """Load what the backward needs of z, as many parts of a tile ahead as there is room for."""
    places: gl.constexpr = z_loaded.type.shape[0]
    rows: gl.constexpr = z.block_type.shape[0]
    C: gl.constexpr = z.block_type.shape[1]
    across: gl.constexpr = F // C
    kinds: gl.constexpr = 2 if GATED else 1
    tiles = _count_blocks(offsets, R, E, M) * across
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _group, row, _end = _find_rows(offsets, R, tile // across, E, M)
        for first in range(0, M, rows):
            place = step % places
            mbarrier.wait(z_free.index(place), (step // places & 1) ^ 1)
            arrived = z_loaded.index(place)
            mbarrier.expect(arrived, kinds * z.block_type.nbytes)
            for kind in gl.static_range(kinds):
                at = [row + first, tile % across * C + kind * F]
                part = z_parts.index(kinds * place + kind)
                tma.async_copy_global_to_shared(z, at, arrived, part)
            step += 1


@gluon.jit
def _multiply_half(
    x_tiles, w_halves, loaded, step, sum_MH, add, HALF: gl.constexpr, FORWARD: gl.constexpr
):
    """Start to multiply one half of a tile's columns, the left first, at one step of the sum."""
    stages: gl.constexpr = x_tiles.type.shape[0]
    stage = step % stages
    if HALF == 0:
        mbarrier.wait(loaded.index(stage), step // stages & 1)
    w_KH = w_halves.index(2 * stage + HALF)
    if FORWARD:
        w_KH = w_KH.permute((1, 0))
    return hopper.warpgroup_mma(x_tiles.index(stage), w_KH, sum_MH, use_acc=add, is_async=True)


@gluon.jit
def _multiply_rest(
    x_tiles, w_halves, loaded, free, step, left_MH, right_MH, D: gl.constexpr, FORWARD: gl.constexpr
):
    """Multiply all steps of a tile but the first; the last one is still running in the end."""
    stages: gl.constexpr = x_tiles.type.shape[0]
    K: gl.constexpr = x_tiles.type.shape[2]
    for _k in range(K, D, K):
        left_MH = _multiply_half(x_tiles, w_halves, loaded, step, left_MH, True, 0, FORWARD)
        right_MH = _multiply_half(x_tiles, w_halves, loaded, step, right_MH, True, 1, FORWARD)
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
    offsets, R, x_tiles, w_halves, parts, loaded, free, full, empty, layout: gl.constexpr,
    D: gl.constexpr, F: gl.constexpr, E: gl.constexpr, GATED: gl.constexpr, FORWARD: gl.constexpr,
):
    """Multiply, and hand over each finished tile: a half while the other one is multiplied."""
    stages: gl.constexpr = x_tiles.type.shape[0]
    M: gl.constexpr = x_tiles.type.shape[1]
    H: gl.constexpr = w_halves.type.shape[1 if FORWARD else 2]
    N: gl.constexpr = 2 * H
    across: gl.constexpr = F // (H if GATED and FORWARD else N)
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, H, 16])
    finished = parts._reinterpret(parts.dtype, [M, N], layout)
    tiles = _count_blocks(offsets, R, E, M) * across
    programs = gl.num_programs(0)
    mine = (tiles - gl.program_id(0) + programs - 1) // programs
    if mine > 0:
        nothing = gl.zeros([M, H], gl.float32, sums)
        left_MH = _multiply_half(x_tiles, w_halves, loaded, 0, nothing, False, 0, FORWARD)
        right_MH = _multiply_half(x_tiles, w_halves, loaded, 0, nothing, False, 1, FORWARD)
        step = 1
        turn = 0
        for _tile in range(mine - 1):
            step, left_MH, right_MH = _multiply_rest(
                x_tiles, w_halves, loaded, free, step, left_MH, right_MH, D, FORWARD
            )
            mbarrier.wait(empty, turn ^ 1)
            left_MH, right_MH = hopper.warpgroup_mma_wait(1, deps=(left_MH, right_MH))
            finished.slice(0, H, 1).store(left_MH.to(parts.dtype))
            left_MH = _multiply_half(x_tiles, w_halves, loaded, step, left_MH, False, 0, FORWARD)
            left_MH, right_MH = hopper.warpgroup_mma_wait(1, deps=(left_MH, right_MH))
            left_MH = hopper.warpgroup_mma_init(left_MH)
            mbarrier.arrive(free.index((step + stages - 1) % stages))
            finished.slice(H, H, 1).store(right_MH.to(parts.dtype))
            mbarrier.arrive(full)
            right_MH = _multiply_half(x_tiles, w_halves, loaded, step, right_MH, False, 1, FORWARD)
            step += 1
            turn ^= 1
        step, left_MH, right_MH = _multiply_rest(
            x_tiles, w_halves, loaded, free, step, left_MH, right_MH, D, FORWARD
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
def _activate(z, up, GATED: gl.constexpr):
    """Return the activation, its derivative by z and, where z is a gate of `up`, by `up`."""
    if GATED:
        is_open = _one_instruction("rcp", _one_instruction("ex2", z * -LOG2_E) + 1.0)
        by_up = z * is_open
        h = by_up * up
        by_z = up * (is_open + by_up * (1.0 - is_open))
    else:
        below, density = _normal(z)
        h = z * below
        by_z = z * density + below
        by_up = 0.0
    return h, by_z, by_up


@gluon.jit
def _load_weights(weights, first, end, row_R, M: gl.constexpr):
    """Return the weights of the rows from `first` on, or 1."""
    weight_R = 1.0
    if weights is not None:
        inside_R = (first + row_R < end) & (first + row_R < M)
        weight_R = gl.load(weights + first + row_R, mask=inside_R, other=0.0).to(gl.float32)
    return weight_R


@gluon.jit
def _wait_for_z(z_parts, z_loaded, step, layout: gl.constexpr, GATED: gl.constexpr):
    """Return the place of a part of z, and the part: z and, where z is a gate, what it gates."""
    places: gl.constexpr = z_loaded.type.shape[0]
    kinds: gl.constexpr = 2 if GATED else 1
    place = step % places
    mbarrier.wait(z_loaded.index(place), step // places & 1)
    z_RC = z_parts.index(kinds * place).load(layout)
    up_RC = 0.0
    if GATED:
        up_RC = z_parts.index(kinds * place + 1).load(layout)
    return place, z_RC, up_RC


@gluon.jit
def _forward_part(
    finished, weight_R, z, h, first, end, row_R, column_C, layout: gl.constexpr, F: gl.constexpr,
    GATED: gl.constexpr, WEIGHTED: gl.constexpr,
):
    """Write z, which is the product, and h."""
    C: gl.constexpr = column_C.shape[0]
    wide: gl.constexpr = 2 * F if GATED else F
    inside_RC = (first + row_R < end)[:, None]
    at_wide = first * wide + row_R[:, None] * wide + column_C[None, :]
    up_RC = 0.0
    z_RC = finished.slice(0, C, 1).load(layout) if GATED else finished.load(layout)
    gl.store(z + at_wide, z_RC, mask=inside_RC)
    if GATED:
        up_RC = finished.slice(C, C, 1).load(layout)
        gl.store(z + F + at_wide, up_RC, mask=inside_RC)
        up_RC = up_RC.to(gl.float32)
    h_RC, _by_z, _by_up = _activate(z_RC.to(gl.float32), up_RC, GATED)
    if WEIGHTED:
        h_RC *= weight_R[:, None]
    at = first * F + row_R[:, None] * F + column_C[None, :]
    gl.store(h + at, h_RC.to(h.dtype.element_ty), mask=inside_RC)


@gluon.jit
def _backward_part(
    finished, z_RC, up_RC, weight_R, dz, h, dots, first, end, row_R, column_C,
    layout: gl.constexpr, F: gl.constexpr, GATED: gl.constexpr, WEIGHTED: gl.constexpr,
):
    """Write dz, the dots and, unless it is None, h; the product is dh."""
    wide: gl.constexpr = 2 * F if GATED else F
    dtype: gl.constexpr = dz.dtype.element_ty
    inside_R = first + row_R < end
    inside_RC = inside_R[:, None]
    at_wide = first * wide + row_R[:, None] * wide + column_C[None, :]
    dh_RC = finished.load(layout).to(gl.float32)
    if GATED:
        up_RC = up_RC.to(gl.float32)
    h_RC, by_z_RC, by_up_RC = _activate(z_RC.to(gl.float32), up_RC, GATED)
    if WEIGHTED:
        gl.store(dots + first + row_R, gl.sum(dh_RC * h_RC, 1), mask=inside_R)
        h_RC *= weight_R[:, None]
        dh_RC *= weight_R[:, None]
    gl.store(dz + at_wide, (dh_RC * by_z_RC).to(dtype), mask=inside_RC)
    if GATED:
        gl.store(dz + F + at_wide, (dh_RC * by_up_RC).to(dtype), mask=inside_RC)
    if h is not None:
        at = first * F + row_R[:, None] * F + column_C[None, :]
        gl.store(h + at, h_RC.to(dtype), mask=inside_RC)


@gluon.jit
def _activate_tiles(
    offsets, weights, z, dz, h, dots, R, parts, full, empty, z_parts, z_loaded, z_free,
    F: gl.constexpr, E: gl.constexpr, GATED: gl.constexpr, FORWARD: gl.constexpr,
):
    """Apply the activation to finished tiles, part by part."""
    count: gl.constexpr = parts.type.shape[0]
    rows: gl.constexpr = parts.type.shape[1]
    M: gl.constexpr = count * rows
    C: gl.constexpr = parts.type.shape[2] // (2 if GATED and FORWARD else 1)
    across: gl.constexpr = F // C
    wide: gl.constexpr = 2 * F if GATED else F
    lanes: gl.constexpr = C // VECTOR
    warps: gl.constexpr = [gl.num_warps(), 1]
    layout: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // lanes, lanes], warps, [1, 0])
    row_R = gl.arange(0, rows, gl.SliceLayout(1, layout))
    column_C = gl.arange(0, C, gl.SliceLayout(0, layout))
    weighted: gl.constexpr = weights is not None
    tiles = _count_blocks(offsets, R, E, M) * across
    turn = 0
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _group, row, stop = _find_rows(offsets, R, tile // across, E, M)
        corner = row.to(gl.int64) * F + tile % across * C
        corner_wide = row.to(gl.int64) * wide + tile % across * C
        end = stop - row
        weights_, dots_, h_ = weights, dots, h
        if h is not None:
            h_ = h + corner
        if weighted:
            weights_ = weights + row
            if not FORWARD:
                dots_ = dots + tile % across * R + row
        weight_R = _load_weights(weights_, 0, end, row_R, M)
        second_R = _load_weights(weights_, rows, end, row_R, M)
        third_R = _load_weights(weights_, 2 * rows, end, row_R, M)
        mbarrier.wait(full, turn)
        for part in range(count):
            first = part * rows
            fourth_R = _load_weights(weights_, first + 3 * rows, end, row_R, M)
            if FORWARD:
                _forward_part(
                    parts.index(part), weight_R, z + corner_wide, h_, first, end, row_R,
                    column_C, layout, F, GATED, weighted,
                )
            else:
                place, z_RC, up_RC = _wait_for_z(z_parts, z_loaded, step, layout, GATED)
                _backward_part(
                    parts.index(part), z_RC, up_RC, weight_R, dz + corner_wide, h_, dots_,
                    first, end, row_R, column_C, layout, F, GATED, weighted,
                )
                # Not before z has been used. Behind the loads alone it let the next part overwrite
                # what some of them, kept waiting by the product, had not read yet.
                mbarrier.arrive(z_free.index(place))
                step += 1
            weight_R, second_R, third_R = second_R, third_R, fourth_R
        mbarrier.arrive(empty)
        turn ^= 1


@gluon.jit
def matmul_activation_kernel(
    x, w, offsets, weights, z, dz, h, dots, R, D: gl.constexpr, F: gl.constexpr, E: gl.constexpr,
    GATED: gl.constexpr, FORWARD: gl.constexpr, STAGES: gl.constexpr, FINISHED: gl.constexpr,
    AHEAD: gl.constexpr, WARPS: gl.constexpr, REGISTERS: gl.constexpr,
):
    """Write z and h of x w^T; or, given z, dz and h of x w, and for each tile <dh, act(z)> of rows.

    Grid: as many programs as stay resident; they take tiles in turn, those of the same rows first.
    """
    M: gl.constexpr = x.block_type.shape[0]
    K: gl.constexpr = x.block_type.shape[1]
    H: gl.constexpr = w.block_type.shape[0 if FORWARD else 1]
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, M, K], x.layout)
    of_w: gl.constexpr = [2 * STAGES, H, K] if FORWARD else [2 * STAGES, K, H]
    w_halves = gl.allocate_shared_memory(w.dtype, of_w, w.layout)
    # Rows of 16-byte vectors, of which eight rows' places differ: no bank is asked twice at once.
    layout: gl.constexpr = gl.SwizzledSharedLayout(VECTOR, 1, 8, [1, 0])
    parts = gl.allocate_shared_memory(x.dtype, [M // FINISHED, FINISHED, 2 * H], layout)
    loaded = _barriers(STAGES)
    free = _barriers(STAGES)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    if FORWARD:
        hopper.fence_async_shared()
        gl.warp_specialize([
            (_multiply_tiles, (
                offsets, R, x_tiles, w_halves, parts, loaded, free, full, empty, layout, D, F, E,
                GATED, FORWARD,
            )),
            (_activate_tiles, (
                offsets, weights, z, dz, h, dots, R, parts, full, empty, None, None, None, F, E,
                GATED, FORWARD,
            )),
            (_load_tiles, (
                x, w, offsets, R, x_tiles, w_halves, loaded, free, D, F, E, GATED, FORWARD,
            )),
        ], [WARPS, 1], [REGISTERS, 24])
    else:
        kinds: gl.constexpr = 2 if GATED else 1
        of_z: gl.constexpr = [kinds * AHEAD, FINISHED, 2 * H]
        z_parts = gl.allocate_shared_memory(z.dtype, of_z, z.layout)
        z_loaded = _barriers(AHEAD)
        z_free = _barriers(AHEAD)
        hopper.fence_async_shared()
        gl.warp_specialize([
            (_multiply_tiles, (
                offsets, R, x_tiles, w_halves, parts, loaded, free, full, empty, layout, D, F, E,
                GATED, FORWARD,
            )),
            (_activate_tiles, (
                offsets, weights, None, dz, h, dots, R, parts, full, empty, z_parts, z_loaded,
                z_free, F, E, GATED, FORWARD,
            )),
            (_load_tiles, (
                x, w, offsets, R, x_tiles, w_halves, loaded, free, D, F, E, GATED, FORWARD,
            )),
            (_load_parts_of_z, (z, offsets, R, z_parts, z_loaded, z_free, M, F, E, GATED)),
        ], [WARPS, 1, 1], [REGISTERS, 24, 24])


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
