"""The gradients of the scan: one pass, reversed in time, for the inputs and the parameters.

With r_t = dy_t + q r_{t+1} the gradient of x_t is Re(sum of c r_t) + omega dy_t. The products with
the forward states g are turned over to the inputs, so that no g is computed again: the sum of
dy_t g_t is that of x_t r_t, and the sum of r_t g_{t-1} is that of x_t w_t, where w_{t-1} = r_t +
q w_t. Only the states before each chunk, kept by the forward, enter besides.
"""

# G groups of P modes of a channel, D channels, L steps of time, C chunks, U steps loaded at once
# mypy: disable-error-code="no-untyped-def, assignment, operator"
from __future__ import annotations

import triton
import triton.language as tl

from steplab.kernels.ema._modes import (
    load_block,
    load_complex,
    load_steps,
    read_out,
    zero_modes,
)
from steplab.kernels.ema._scan_forward import (
    LENGTHS,
    begin_row,
    chunk_bounds,
    own_chunk,
    own_lanes,
)


# fmt: off
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
    partial, d_start, entering, state, q, c, lane, place, inside, D: tl.constexpr, G: tl.constexpr,
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
    for g in tl.static_range(G):
        g_re = tl.load(entering + g * ROW + place)
        g_im = tl.load(entering + (G + g) * ROW + place)
        s_re = dq_re[g] + g_re * w_re[g] - g_im * w_im[g]
        s_im = dq_im[g] + g_re * w_im[g] + g_im * w_re[g]
        here = partial + g * ROW + place
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
            tl.store(start + g * ROW + place, re, mask=inside_1 & is_first)
            tl.store(start + (G + g) * ROW + place, -im, mask=inside_1 & is_first)
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
    lane, place, inside = own_lanes(D, P, LANES)
    first, count = chunk_bounds(L, chunk_length)
    begin = begin_row(first, count, L, D, True)
    row, dy_row, dx_row = x + begin, dy + begin, d_x + begin
    r_re, r_im = load_complex(own_chunk(arriving, 2 * G * D * P), place, D * P, G)
    q, c = load_complex(tables, place, D * P, G), load_complex(weights, place, D * P, G)
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
    _finish(own, d_start, before, state, q, c, lane, place, inside, D, G, P, HAS_START)
