"""The gradients of the scan: one pass, reversed in time, for the inputs and the parameters.

With r_t = dy_t + q r_{t+1} the gradient of x_t is Re(sum of c r_t) + omega dy_t. The products with
the forward states g are turned over to the inputs, so that no g is computed again: the sum of
dy_t g_t is that of x_t r_t, and the sum of r_t g_{t-1} is that of x_t w_t, where w_{t-1} = r_t +
q w_t. Only the states before each chunk, kept by the forward, enter besides.
"""

# N modes of a channel, D channels, L steps of time, C chunks, U steps loaded at once
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
from steplab.kernels.ema._scan_forward import begin_row, chunk_bounds, own_chunk


# fmt: off
@triton.jit
def _step_back(
    x, dy, state, q, c, skip, dx_row, inside, N: tl.constexpr, SUMS: tl.constexpr
):
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
    for n in tl.static_range(N):
        new_dq_re += (dq_re[n] + x * w_re[n],)
        new_dq_im += (dq_im[n] + x * w_im[n],)
        a = dy + q_re[n] * r_re[n]
        a = a - q_im[n] * r_im[n]
        b = q_re[n] * r_im[n]
        b = b + q_im[n] * r_re[n]
        new_r_re += (a,)
        new_r_im += (b,)
        new_dc_re += (dc_re[n] + x * a,)
        new_dc_im += (dc_im[n] + x * b,)
        e = a + q_re[n] * w_re[n]
        f = b + q_re[n] * w_im[n]
        new_w_re += (e - q_im[n] * w_im[n],)
        new_w_im += (f + q_im[n] * w_re[n],)
    total = read_out(skip * dy, new_r_re, new_r_im, c_re, c_im, N, SUMS)
    tl.store(dx_row, total.to(dx_row.dtype.element_ty), mask=inside)
    return (
        new_r_re, new_r_im, new_w_re, new_w_im, new_dq_re, new_dq_im, new_dc_re, new_dc_im,
        d_omega + x * dy,
    )


@triton.jit
def _load_and_step_back(
    row, dy_row, dx_row, lane, state, q, c, skip, inside, N: tl.constexpr, SUMS: tl.constexpr
):
    """`_step_back` for a step that nobody has loaded ahead."""
    x, dy = tl.load(row + lane).to(tl.float32), tl.load(dy_row + lane).to(tl.float32)
    return _step_back(x, dy, state, q, c, skip, dx_row + lane, inside, N, SUMS)


@triton.jit
def _one_if(is_one, q, N: tl.constexpr):
    """Return 1 where `is_one`, else q."""
    one_re = ()
    one_im = ()
    for n in tl.static_range(N):
        one_re += (tl.where(is_one, 1.0, q[0][n]),)
        one_im += (tl.where(is_one, 0.0, q[1][n]),)
    return one_re, one_im


@triton.jit
def _finish(
    partial, d_start, entering, state, q, c, lane, inside, D: tl.constexpr, N: tl.constexpr,
    HAS_START: tl.constexpr,
):
    """Add what the state before the chunk contributes; write the sums and the state's gradient."""
    q_re, q_im = q
    c_re, c_im = c
    r_re, r_im, w_re, w_im, dq_re, dq_im, dc_re, dc_im, d_omega = state
    is_first = tl.program_id(1) == 0
    start = d_start + tl.program_id(2).to(tl.int64) * (2 * N * D)
    for n in tl.static_range(N):
        g_re = tl.load(entering + n * D + lane)
        g_im = tl.load(entering + (N + n) * D + lane)
        s_re = dq_re[n] + g_re * w_re[n] - g_im * w_im[n]
        s_im = dq_im[n] + g_re * w_im[n] + g_im * w_re[n]
        tl.store(partial + n * D + lane, c_re[n] * s_re - c_im[n] * s_im, mask=inside)
        tl.store(partial + (N + n) * D + lane, c_re[n] * s_im + c_im[n] * s_re, mask=inside)
        t_re, t_im = dc_re[n], dc_im[n]
        if HAS_START:
            # The outputs see the first state as an input one step before all others.
            b_re = q_re[n] * r_re[n] - q_im[n] * r_im[n]
            b_im = q_re[n] * r_im[n] + q_im[n] * r_re[n]
            t_re += tl.where(is_first, b_re * g_re - b_im * g_im, 0.0)
            t_im += tl.where(is_first, b_re * g_im + b_im * g_re, 0.0)
            re = c_re[n] * b_re - c_im[n] * b_im
            im = c_re[n] * b_im + c_im[n] * b_re
            tl.store(start + n * D + lane, re, mask=inside & is_first)
            tl.store(start + (N + n) * D + lane, -im, mask=inside & is_first)
        tl.store(partial + (2 * N + n) * D + lane, t_re, mask=inside)
        tl.store(partial + (3 * N + n) * D + lane, t_im, mask=inside)
    tl.store(partial + 4 * N * D + lane, d_omega, mask=inside)


@triton.jit
def ema_gradients_kernel(
    x, dy, tables, weights, omega, entering, arriving, d_x, partial, d_start, L, chunk_length,
    D: tl.constexpr, N: tl.constexpr, U: tl.constexpr, SUMS: tl.constexpr, LANES: tl.constexpr,
    HAS_START: tl.constexpr, HAS_AFTER: tl.constexpr,
):
    """Write dx (B, L, D), the sums of each chunk (B, C, 4 N + 1, D) and, if `HAS_START`, the
    gradient of the first state (B, 2, N, D). Grid: lanes, chunks, batch.

    `weights` (2, N, D) is c; `entering` are the states g before each chunk and `arriving` the r
    behind it, both (B, C, 2, N, D). The rows of a chunk are the sums for q and for c, real and
    imaginary parts, and the one for omega.
    """
    channel = tl.program_id(0) * LANES + tl.arange(0, LANES)
    lane, inside = tl.minimum(channel, D - 1), channel < D
    first, count = chunk_bounds(L, chunk_length)
    begin = begin_row(first, count, L, D, True)
    row, dy_row, dx_row = x + begin, dy + begin, d_x + begin
    r_re, r_im = load_complex(own_chunk(arriving, N, D), lane, D, N)
    q, c = load_complex(tables, lane, D, N), load_complex(weights, lane, D, N)
    skip = tl.load(omega + lane).to(tl.float32)
    none_N = zero_modes(LANES, N)
    state = (
        r_re, r_im, none_N, none_N, none_N, none_N, none_N, none_N, tl.zeros([LANES], tl.float32)
    )
    if HAS_AFTER:
        # What arrives at the very last step comes as it is; q shrinks what is of a later step.
        one = _one_if(first + count == L, q, N)
        state = _load_and_step_back(
            row, dy_row, dx_row, lane, state, one, c, skip, inside, N, SUMS
        )
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
            state = _step_back(x_U[u], dy_U[u], state, q, c, skip, here, inside, N, SUMS)
        dx_row -= U * D
    if blocks > 0:
        row -= U * D
        dy_row -= U * D
    for _ in range(blocks * U, count):
        state = _load_and_step_back(row, dy_row, dx_row, lane, state, q, c, skip, inside, N, SUMS)
        row, dy_row, dx_row = row - D, dy_row - D, dx_row - D

    chunk = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    own = partial + chunk * ((4 * N + 1) * D)
    before = own_chunk(entering, N, D)
    _finish(own, d_start, before, state, q, c, lane, inside, D, N, HAS_START)
