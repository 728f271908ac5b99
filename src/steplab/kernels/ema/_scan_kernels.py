"""The kernels of the scan: sums of each chunk, the carry between chunks, outputs, and gradients.

Every chunk of time is first summed up as if it began with nothing; a small kernel carries these
sums from chunk to chunk; then every chunk is passed once more, from the state before it. Two passes
over the inputs, but no program waits for another.

One lane holds one channel, with all of its modes in registers. A tuple of G tensors (LANES, P)
stands for G P modes: P = 4 modes of a lane are 16 bytes of memory, which Triton leaves to one
thread. Wider tensors it would spread over lanes and warps: an earlier kernel of that kind took
306 us where this took 212. Narrower ones are more operations, and the time to compile grows with
the cube of their number: one mode each took 21 s where these take 3.

The gradients are one pass, reversed in time. With r_t = dy_t + q r_{t+1} the gradient of x_t is
Re(sum of c r_t) + omega dy_t. The products with the forward states g are turned over to the inputs,
so that no g is computed again: the sum of dy_t g_t is that of x_t r_t, and the sum of r_t g_{t-1}
is that of x_t w_t, where w_{t-1} = r_t + q w_t. Beyond that, only the states before each chunk
enter, which the forward has kept.
"""

# G groups of P modes of a channel, D channels, L steps of time, C chunks, U steps loaded at once,
# R steps taken at once
# mypy: disable-error-code="assignment, no-untyped-def, operator"
from __future__ import annotations

from steplab.kernels.triton_runtime import tl, triton

# Lengths are not specialized: the value 1 would become a constant, and whether one is a multiple
# of 16 changes nothing but which of two equal kernels is compiled.
LENGTHS = ["L", "chunk_length"]


# fmt: off
@triton.jit
def load_modes(source, offset, SIZE: tl.constexpr, G: tl.constexpr):
    """Return G rows of `SIZE` elements each as a tuple."""
    modes_G = ()
    for g in tl.static_range(G):
        modes_G += (tl.load(source + g * SIZE + offset),)
    return modes_G


@triton.jit
def load_complex(source, offset, SIZE: tl.constexpr, G: tl.constexpr):
    """Return real and imaginary parts of (2, G, D, P) as two tuples."""
    return load_modes(source, offset, SIZE, G), load_modes(source + G * SIZE, offset, SIZE, G)


@triton.jit
def store_complex(target, re_G, im_G, offset, inside, SIZE: tl.constexpr, G: tl.constexpr):
    """Write (2, G, D, P)."""
    for g in tl.static_range(G):
        tl.store(target + g * SIZE + offset, re_G[g], mask=inside)
        tl.store(target + (G + g) * SIZE + offset, im_G[g], mask=inside)


@triton.jit
def zero_modes(LANES: tl.constexpr, P: tl.constexpr, G: tl.constexpr):
    """Return zeros for all modes of every lane."""
    return (tl.zeros([LANES, P], tl.float32),) * G


@triton.jit
def load_powers(source, offset, SIZE: tl.constexpr, G: tl.constexpr, R: tl.constexpr):
    """Return R complex rows of (R, 2, G, D, P): a tuple of real parts, one of imaginary parts."""
    re_RG = ()
    im_RG = ()
    for r in tl.static_range(R):
        re_G, im_G = load_complex(source + r * 2 * G * SIZE, offset, SIZE, G)
        re_RG += (re_G,)
        im_RG += (im_G,)
    return re_RG, im_RG


@triton.jit
def load_steps(source, lane, rows, STRIDE: tl.constexpr, COUNT: tl.constexpr):
    """Return `COUNT` rows in fp32, `STRIDE` elements apart; beyond `rows` the last one again."""
    x_U = ()
    for step in tl.static_range(COUNT):
        row = tl.minimum(step, rows - 1)
        x_U += (tl.load(source + row * STRIDE + lane).to(tl.float32),)
    return x_U


@triton.jit
def load_block(source, lane, STRIDE: tl.constexpr, COUNT: tl.constexpr):
    """Return `COUNT` rows in fp32, `STRIDE` elements apart."""
    x_U = ()
    for step in tl.static_range(COUNT):
        x_U += (tl.load(source + step * STRIDE + lane).to(tl.float32),)
    return x_U


@triton.jit
def advance(re_G, im_G, x_U, powers, FIRST: tl.constexpr, G: tl.constexpr, R: tl.constexpr):
    """Return the states R steps later: q^R state + sum over j of q^(R-1-j) x_j.

    `powers` are q to q^R. Two real multiply-adds per mode and step for the inputs and four per R
    steps for the state: step by step it would be four per step.
    """
    powers_re, powers_im = powers
    new_re = ()
    new_im = ()
    for g in tl.static_range(G):
        a = x_U[FIRST + R - 1][:, None]
        b = powers_re[R - 1][g] * im_G[g]
        for j in tl.static_range(R - 1):
            a = a + powers_re[R - 2 - j][g] * x_U[FIRST + j][:, None]
            b = b + powers_im[R - 2 - j][g] * x_U[FIRST + j][:, None]
        a = a + powers_re[R - 1][g] * re_G[g]
        new_re += (a - powers_im[R - 1][g] * im_G[g],)
        new_im += (b + powers_im[R - 1][g] * re_G[g],)
    return new_re, new_im


@triton.jit
def read_out(start, re_G, im_G, weights_re_G, weights_im_G, G: tl.constexpr):
    """Return start + Re(sum over modes of weight state), in P sums that run side by side."""
    part = weights_re_G[0] * re_G[0]
    part = part - weights_im_G[0] * im_G[0]
    for g in tl.static_range(1, G):
        part = part + weights_re_G[g] * re_G[g]
        part = part - weights_im_G[g] * im_G[g]
    return start + tl.sum(part, 1)


@triton.jit
def chunk_bounds(L, chunk_length):
    """Return the first step of this program's chunk and their number. Grid: lanes, chunks, batch.
    """
    first = tl.program_id(1) * chunk_length
    return first, tl.minimum(chunk_length, L - first)


@triton.jit
def begin_row(first, count, L, D: tl.constexpr, REVERSED: tl.constexpr):
    """Return the offset of the row that comes first in the order of the scan."""
    row = first + count - 1 if REVERSED else first
    return (tl.program_id(2).to(tl.int64) * L + row) * D


@triton.jit
def own_lanes(D: tl.constexpr, P: tl.constexpr, LANES: tl.constexpr):
    """Return this program's channels, where each has its P modes, and which are inside."""
    channel = tl.program_id(0) * LANES + tl.arange(0, LANES)
    lane = tl.minimum(channel, D - 1)
    return lane, lane[:, None] * P + tl.arange(0, P)[None, :], channel < D


@triton.jit
def own_chunk(target, SIZE: tl.constexpr):
    """Return a pointer to this program's states in (B, C, 2, G, D, P), `SIZE` of each chunk."""
    chunk = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    return target + chunk * SIZE


@triton.jit(do_not_specialize=LENGTHS)
def ema_sums_kernel(
    x, tables, sums, L, chunk_length, D: tl.constexpr, G: tl.constexpr, P: tl.constexpr,
    R: tl.constexpr, U: tl.constexpr, LANES: tl.constexpr, REVERSED: tl.constexpr,
):
    """Write the state that each chunk ends with when it begins with nothing: (B, C, 2, G, D, P)."""
    lane, offset, inside = own_lanes(D, P, LANES)
    first, count = chunk_bounds(L, chunk_length)
    STRIDE: tl.constexpr = -D if REVERSED else D
    row = x + begin_row(first, count, L, D, REVERSED)
    powers = load_powers(tables, offset, D * P, G, R)
    re_G, im_G = zero_modes(LANES, P, G), zero_modes(LANES, P, G)
    blocks = count // U
    # The next block is on its way while this one is worked on.
    ahead_U = load_steps(row, lane, count, STRIDE, U)
    for block in range(blocks):
        x_U = ahead_U
        if block + 1 < blocks:
            row += U * STRIDE
        ahead_U = load_block(row, lane, STRIDE, U)
        for u in tl.static_range(0, U, R):
            re_G, im_G = advance(re_G, im_G, x_U, powers, u, G, R)
    if blocks > 0:
        row += U * STRIDE
    for _ in range(blocks * U, count):
        re_G, im_G = advance(re_G, im_G, load_block(row, lane, STRIDE, 1), powers, 0, G, 1)
        row += STRIDE
    target = own_chunk(sums, 2 * G * D * P)
    store_complex(target, re_G, im_G, offset, inside[:, None], D * P, G)


@triton.jit
def _outside_offset(state, D: tl.constexpr, P: tl.constexpr):
    """Return where (N, D) has what (G, D, P) has at `state`, and its mode."""
    mode = state // (D * P) * P + state % P
    return mode * D + state // P % D, mode


@triton.jit(do_not_specialize=["chunks"])
def ema_carry_kernel(
    sums, start, factors, last, chunks, D: tl.constexpr, N: tl.constexpr, G: tl.constexpr,
    P: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, REVERSED: tl.constexpr,
    HAS_START: tl.constexpr, HAS_LAST: tl.constexpr,
):
    """Replace the sum of each chunk (B, C, 2, G, D, P) by the state that the chunk begins with.

    `start` and `last` are (B, 2, N, D). `factors` (3, 2, G, D, P) are q^chunk, and of the last
    chunk q^(length - 1) and q^length: what comes reversed in time from beyond the end is added at
    the last step as it is. Grid: states, batch.
    """
    SIZE: tl.constexpr = G * D * P
    state = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = state < SIZE
    batch = tl.program_id(1).to(tl.int64)
    outside, mode = _outside_offset(state, D, P)
    outside += batch * (2 * N * D)
    exists = inside & (mode < N)
    re, im = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    if HAS_START:
        re = tl.load(start + outside, mask=exists, other=0.0)
        im = tl.load(start + N * D + outside, mask=exists, other=0.0)
    q_re = tl.load(factors + state, mask=inside, other=0.0)
    q_im = tl.load(factors + SIZE + state, mask=inside, other=0.0)
    rest = factors + (2 if REVERSED else 4) * SIZE + state
    end_re = tl.load(rest, mask=inside, other=0.0)
    end_im = tl.load(rest + SIZE, mask=inside, other=0.0)
    row = sums + batch * chunks * 2 * SIZE + state
    for group in range(0, chunks, GROUP):
        # All loads of a group before its stores, which the compiler would not let them pass.
        sum_re = ()
        sum_im = ()
        for i in tl.static_range(GROUP):
            step = tl.minimum(group + i, chunks - 1)
            pointer = row + 2 * SIZE * (chunks - 1 - step if REVERSED else step)
            sum_re += (tl.load(pointer, mask=inside, other=0.0),)
            sum_im += (tl.load(pointer + SIZE, mask=inside, other=0.0),)
        for i in tl.static_range(GROUP):
            step = group + i
            # Not `inside & (step < chunks)`: Triton 3.9's interpreter makes that an int32.
            here = tl.where(step < chunks, inside, False)
            pointer = row + 2 * SIZE * (chunks - 1 - step if REVERSED else step)
            tl.store(pointer, re, mask=here)
            tl.store(pointer + SIZE, im, mask=here)
            at_end = step == 0 if REVERSED else step == chunks - 1
            f_re, f_im = tl.where(at_end, end_re, q_re), tl.where(at_end, end_im, q_im)
            next_re = sum_re[i] + f_re * re - f_im * im
            next_im = sum_im[i] + f_re * im + f_im * re
            re, im = tl.where(here, next_re, re), tl.where(here, next_im, im)
    if HAS_LAST:
        tl.store(last + outside, re, mask=exists)
        tl.store(last + N * D + outside, im, mask=exists)


@triton.jit
def _outputs(
    y, re_G, im_G, x_U, reads, near_R, lane, inside, FIRST: tl.constexpr, D: tl.constexpr,
    G: tl.constexpr, R: tl.constexpr,
):
    """Write R outputs: the state before them, and the inputs among them through their lags."""
    reads_re, reads_im = reads
    for j in tl.static_range(R):
        total = near_R[0] * x_U[FIRST + j]
        for i in tl.static_range(j):
            total = total + near_R[j - i] * x_U[FIRST + i]
        total = read_out(total, re_G, im_G, reads_re[j], reads_im[j], G)
        tl.store(y + (FIRST + j) * D + lane, total.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=LENGTHS)
def ema_outputs_kernel(
    x, tables, near, entering, y, L, chunk_length, D: tl.constexpr, G: tl.constexpr,
    P: tl.constexpr, POWERS: tl.constexpr, R: tl.constexpr, U: tl.constexpr, LANES: tl.constexpr,
):
    """Write the outputs (B, L, D); `entering` (B, C, 2, G, D, P) are the states before each chunk.
    """
    lane, offset, inside = own_lanes(D, P, LANES)
    first, count = chunk_bounds(L, chunk_length)
    begin = begin_row(first, count, L, D, False)
    row, out = x + begin, y + begin
    powers = load_powers(tables, offset, D * P, G, R)
    reads = load_powers(tables + POWERS * (2 * G * D * P), offset, D * P, G, R)
    near_R = load_block(near, lane, D, R)
    re_G, im_G = load_complex(own_chunk(entering, 2 * G * D * P), offset, D * P, G)
    blocks = count // U
    ahead_U = load_steps(row, lane, count, D, U)
    for block in range(blocks):
        x_U = ahead_U
        if block + 1 < blocks:
            row += U * D
        ahead_U = load_block(row, lane, D, U)
        for u in tl.static_range(0, U, R):
            _outputs(out, re_G, im_G, x_U, reads, near_R, lane, inside, u, D, G, R)
            re_G, im_G = advance(re_G, im_G, x_U, powers, u, G, R)
        out += U * D
    if blocks > 0:
        row += U * D
    for _ in range(blocks * U, count):
        x_1 = load_block(row, lane, D, 1)
        _outputs(out, re_G, im_G, x_1, reads, near_R, lane, inside, 0, D, G, 1)
        re_G, im_G = advance(re_G, im_G, x_1, powers, 0, G, 1)
        row += D
        out += D


@triton.jit
def _step_back(x, dy, state, q, c, skip, dx_row, inside, G: tl.constexpr):
    """Write one dx; return r, w, the sums for q, c and omega after one more step back in time."""
    q_re, q_im = q
    c_re, c_im = c
    r_re, r_im, w_re, w_im, dq_re, dq_im, dc_re, dc_im, d_omega = state
    new_r_re = ()
    new_r_im = ()
    new_w_re = ()
    new_w_im = ()
    new_dq_re = ()
    new_dq_im = ()
    new_dc_re = ()
    new_dc_im = ()
    x_1, dy_1 = x[:, None], dy[:, None]
    for g in tl.static_range(G):
        new_dq_re += (dq_re[g] + x_1 * w_re[g],)
        new_dq_im += (dq_im[g] + x_1 * w_im[g],)
        a = dy_1 + q_re[g] * r_re[g]
        a = a - q_im[g] * r_im[g]
        b = q_re[g] * r_im[g]
        b = b + q_im[g] * r_re[g]
        new_r_re += (a,)
        new_r_im += (b,)
        new_dc_re += (dc_re[g] + x_1 * a,)
        new_dc_im += (dc_im[g] + x_1 * b,)
        e = a + q_re[g] * w_re[g]
        f = b + q_re[g] * w_im[g]
        new_w_re += (e - q_im[g] * w_im[g],)
        new_w_im += (f + q_im[g] * w_re[g],)
    total = read_out(skip * dy, new_r_re, new_r_im, c_re, c_im, G)
    tl.store(dx_row, total.to(dx_row.dtype.element_ty), mask=inside)
    return (
        new_r_re, new_r_im, new_w_re, new_w_im, new_dq_re, new_dq_im, new_dc_re, new_dc_im,
        d_omega + x * dy,
    )


@triton.jit
def _load_and_step_back(
    row, dy_row, dx_row, lane, state, q, c, skip, inside, G: tl.constexpr
):
    """`_step_back` for a step that nobody has loaded ahead."""
    x, dy = tl.load(row + lane).to(tl.float32), tl.load(dy_row + lane).to(tl.float32)
    return _step_back(x, dy, state, q, c, skip, dx_row + lane, inside, G)


@triton.jit
def _one_if(is_one, q, G: tl.constexpr):
    """Return 1 where `is_one`, else q."""
    one_re = ()
    one_im = ()
    for g in tl.static_range(G):
        one_re += (tl.where(is_one, 1.0, q[0][g]),)
        one_im += (tl.where(is_one, 0.0, q[1][g]),)
    return one_re, one_im


@triton.jit
def _finish(
    partial, d_start, entering, state, q, c, lane, offset, inside, D: tl.constexpr, G: tl.constexpr,
    P: tl.constexpr, HAS_START: tl.constexpr,
):
    """Add what the state before the chunk contributes; write the sums and the state's gradient."""
    q_re, q_im = q
    c_re, c_im = c
    r_re, r_im, w_re, w_im, dq_re, dq_im, dc_re, dc_im, d_omega = state
    is_first = tl.program_id(1) == 0
    ROW: tl.constexpr = D * P
    start = d_start + tl.program_id(2).to(tl.int64) * (2 * G * ROW)
    inside_1 = inside[:, None]
    inside_first = tl.where(is_first, inside_1, False)
    for g in tl.static_range(G):
        g_re = tl.load(entering + g * ROW + offset)
        g_im = tl.load(entering + (G + g) * ROW + offset)
        s_re = dq_re[g] + g_re * w_re[g] - g_im * w_im[g]
        s_im = dq_im[g] + g_re * w_im[g] + g_im * w_re[g]
        here = partial + g * ROW + offset
        tl.store(here, c_re[g] * s_re - c_im[g] * s_im, mask=inside_1)
        tl.store(here + G * ROW, c_re[g] * s_im + c_im[g] * s_re, mask=inside_1)
        t_re, t_im = dc_re[g], dc_im[g]
        if HAS_START:
            # The outputs see the first state as an input one step before all others.
            b_re = q_re[g] * r_re[g] - q_im[g] * r_im[g]
            b_im = q_re[g] * r_im[g] + q_im[g] * r_re[g]
            t_re += tl.where(is_first, b_re * g_re - b_im * g_im, 0.0)
            t_im += tl.where(is_first, b_re * g_im + b_im * g_re, 0.0)
            re = c_re[g] * b_re - c_im[g] * b_im
            im = c_re[g] * b_im + c_im[g] * b_re
            tl.store(start + g * ROW + offset, re, mask=inside_first)
            tl.store(start + (G + g) * ROW + offset, -im, mask=inside_first)
        tl.store(here + 2 * G * ROW, t_re, mask=inside_1)
        tl.store(here + 3 * G * ROW, t_im, mask=inside_1)
    tl.store(partial + 4 * G * ROW + lane, d_omega, mask=inside)


@triton.jit(do_not_specialize=LENGTHS)
def ema_gradients_kernel(
    x, dy, tables, weights, omega, entering, arriving, d_x, partial, d_start, L, chunk_length,
    D: tl.constexpr, G: tl.constexpr, P: tl.constexpr, U: tl.constexpr, LANES: tl.constexpr,
    HAS_START: tl.constexpr, HAS_AFTER: tl.constexpr,
):
    """Write dx (B, L, D), the sums of each chunk (B, C, 4 G P + 1, D) and, if `HAS_START`, the
    gradient of the first state (B, 2, G, D, P). Grid: lanes, chunks, batch.

    `weights` (2, G, D, P) is c; `entering` are the states g before each chunk and `arriving` the r
    behind it, both (B, C, 2, G, D, P). Of a chunk come first the sums for q and for c, real and
    imaginary parts, each (G, D, P), and then the one for omega.
    """
    lane, offset, inside = own_lanes(D, P, LANES)
    first, count = chunk_bounds(L, chunk_length)
    begin = begin_row(first, count, L, D, True)
    row, dy_row, dx_row = x + begin, dy + begin, d_x + begin
    r_re, r_im = load_complex(own_chunk(arriving, 2 * G * D * P), offset, D * P, G)
    q, c = load_complex(tables, offset, D * P, G), load_complex(weights, offset, D * P, G)
    skip = tl.load(omega + lane).to(tl.float32)
    none_G = zero_modes(LANES, P, G)
    state = (
        r_re, r_im, none_G, none_G, none_G, none_G, none_G, none_G, tl.zeros([LANES], tl.float32)
    )
    if HAS_AFTER:
        # What arrives at the very last step comes as it is; q shrinks what is of a later step.
        one = _one_if(first + count == L, q, G)
        state = _load_and_step_back(row, dy_row, dx_row, lane, state, one, c, skip, inside, G)
        row, dy_row, dx_row, count = row - D, dy_row - D, dx_row - D, count - 1

    blocks = count // U
    x_ahead = load_steps(row, lane, count, -D, U)
    dy_ahead = load_steps(dy_row, lane, count, -D, U)
    for block in range(blocks):
        x_U, dy_U = x_ahead, dy_ahead
        if block + 1 < blocks:
            row -= U * D
            dy_row -= U * D
        x_ahead, dy_ahead = load_block(row, lane, -D, U), load_block(dy_row, lane, -D, U)
        for u in tl.static_range(U):
            here = dx_row - u * D + lane
            state = _step_back(x_U[u], dy_U[u], state, q, c, skip, here, inside, G)
        dx_row -= U * D
    if blocks > 0:
        row -= U * D
        dy_row -= U * D
    for _ in range(blocks * U, count):
        state = _load_and_step_back(row, dy_row, dx_row, lane, state, q, c, skip, inside, G)
        row, dy_row, dx_row = row - D, dy_row - D, dx_row - D

    own = own_chunk(partial, (4 * G * P + 1) * D)
    before = own_chunk(entering, 2 * G * D * P)
    _finish(own, d_start, before, state, q, c, lane, offset, inside, D, G, P, HAS_START)
# fmt: on
