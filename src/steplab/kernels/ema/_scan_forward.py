"""The scan, forward or reversed in time: sums of each chunk, what passes between them, outputs.

Every chunk of time is first summed up as if it began with nothing; a small kernel carries these
sums from chunk to chunk; then every chunk is gone through once more, from the state before it. Two
passes over the inputs, but no program waits for another.
"""

# N modes of a channel, D channels, L steps of time, C chunks, U steps loaded at once
# mypy: disable-error-code="no-untyped-def, assignment, operator"
from __future__ import annotations

import triton
import triton.language as tl

from steplab.kernels.ema._modes import (
    advance,
    load_block,
    load_complex,
    load_modes,
    load_powers,
    load_steps,
    read_out,
    store_complex,
    zero_modes,
)


# fmt: off
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
def own_chunk(target, N: tl.constexpr, D: tl.constexpr):
    """Return the place of this program's states in (B, C, 2, N, D)."""
    chunk = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    return target + chunk * (2 * N * D)


@triton.jit
def ema_sums_kernel(
    x, tables, sums, L, chunk_length, D: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    U: tl.constexpr, LANES: tl.constexpr, REVERSED: tl.constexpr,
):
    """Write the state that each chunk ends with when it begins with nothing: (B, C, 2, N, D)."""
    channel = tl.program_id(0) * LANES + tl.arange(0, LANES)
    lane = tl.minimum(channel, D - 1)
    first, count = chunk_bounds(L, chunk_length)
    STRIDE: tl.constexpr = -D if REVERSED else D
    row = x + begin_row(first, count, L, D, REVERSED)
    powers = load_powers(tables, lane, D, N, R)
    re_N, im_N = zero_modes(LANES, N), zero_modes(LANES, N)
    blocks = count // U
    # The next block is on its way while this one is worked on.
    ahead_U = load_steps(row, lane, count, STRIDE, U)
    for block in range(blocks):
        x_U = ahead_U
        if block + 1 < blocks:
            row += U * STRIDE
        ahead_U = load_block(row, lane, STRIDE, U)
        for u in tl.static_range(0, U, R):
            re_N, im_N = advance(re_N, im_N, x_U, powers, u, N, R)
    if blocks > 0:
        row += U * STRIDE
    for _ in range(blocks * U, count):
        re_N, im_N = advance(re_N, im_N, load_block(row, lane, STRIDE, 1), powers, 0, N, 1)
        row += STRIDE
    store_complex(own_chunk(sums, N, D), re_N, im_N, lane, channel < D, D, N)


@triton.jit
def ema_carry_kernel(
    sums, start, factors, chunks, SIZE: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
    REVERSED: tl.constexpr, HAS_START: tl.constexpr,
):
    """Replace the sum of each chunk (B, C, 2, SIZE) by the state that the chunk begins with.

    `factors` (2, 2, SIZE) are q^chunk and q^(length - 1) of the last chunk: what comes reversed in
    time from beyond the end is added at the last step as it is. Grid: states, batch.
    """
    state = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = state < SIZE
    batch = tl.program_id(1).to(tl.int64)
    re, im = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    if HAS_START:
        re = tl.load(start + batch * 2 * SIZE + state, mask=inside, other=0.0)
        im = tl.load(start + (batch * 2 + 1) * SIZE + state, mask=inside, other=0.0)
    q_re = tl.load(factors + state, mask=inside, other=0.0)
    q_im = tl.load(factors + SIZE + state, mask=inside, other=0.0)
    tail_re = tl.load(factors + 2 * SIZE + state, mask=inside, other=0.0)
    tail_im = tl.load(factors + 3 * SIZE + state, mask=inside, other=0.0)
    row = sums + batch * chunks * 2 * SIZE + state
    for group in range(0, chunks, GROUP):
        # All loads of a group before its stores, which the compiler would not let them pass.
        sum_re = ()
        sum_im = ()
        for i in tl.static_range(GROUP):
            step = tl.minimum(group + i, chunks - 1)
            place = row + 2 * SIZE * (chunks - 1 - step if REVERSED else step)
            sum_re += (tl.load(place, mask=inside, other=0.0),)
            sum_im += (tl.load(place + SIZE, mask=inside, other=0.0),)
        for i in tl.static_range(GROUP):
            step = group + i
            here = inside & (step < chunks)
            place = row + 2 * SIZE * (chunks - 1 - step if REVERSED else step)
            tl.store(place, re, mask=here)
            tl.store(place + SIZE, im, mask=here)
            at_end = REVERSED and step == 0
            f_re, f_im = tl.where(at_end, tail_re, q_re), tl.where(at_end, tail_im, q_im)
            next_re = sum_re[i] + f_re * re - f_im * im
            im = sum_im[i] + f_re * im + f_im * re
            re = next_re


@triton.jit
def _outputs(
    y, re_N, im_N, x_U, reads, near_R, lane, inside, FIRST: tl.constexpr, STRIDE: tl.constexpr,
    N: tl.constexpr, R: tl.constexpr, SUMS: tl.constexpr,
):
    """Write R outputs: the state before them, and the inputs among them through their lags."""
    reads_re, reads_im = reads
    for j in tl.static_range(R):
        total = near_R[0] * x_U[FIRST + j]
        for i in tl.static_range(j):
            total = total + near_R[j - i] * x_U[FIRST + i]
        total = read_out(total, re_N, im_N, reads_re[j], reads_im[j], N, SUMS)
        tl.store(y + (FIRST + j) * STRIDE + lane, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def ema_outputs_kernel(
    x, tables, near, entering, y, last, L, chunk_length, D: tl.constexpr, N: tl.constexpr,
    POWERS: tl.constexpr, R: tl.constexpr, U: tl.constexpr, SUMS: tl.constexpr,
    LANES: tl.constexpr, HAS_LAST: tl.constexpr,
):
    """Write the outputs (B, L, D) and, if `HAS_LAST`, the state after all steps (B, 2, N, D).

    `entering` (B, C, 2, N, D) are the states before each chunk.
    """
    channel = tl.program_id(0) * LANES + tl.arange(0, LANES)
    lane, inside = tl.minimum(channel, D - 1), channel < D
    first, count = chunk_bounds(L, chunk_length)
    begin = begin_row(first, count, L, D, False)
    row, out = x + begin, y + begin
    powers = load_powers(tables, lane, D, N, R)
    reads = load_powers(tables + POWERS * (2 * N * D), lane, D, N, R)
    near_R = load_modes(near, lane, D, R)
    re_N, im_N = load_complex(own_chunk(entering, N, D), lane, D, N)
    blocks = count // U
    ahead_U = load_steps(row, lane, count, D, U)
    for block in range(blocks):
        x_U = ahead_U
        if block + 1 < blocks:
            row += U * D
        ahead_U = load_block(row, lane, D, U)
        for u in tl.static_range(0, U, R):
            _outputs(out, re_N, im_N, x_U, reads, near_R, lane, inside, u, D, N, R, SUMS)
            re_N, im_N = advance(re_N, im_N, x_U, powers, u, N, R)
        out += U * D
    if blocks > 0:
        row += U * D
    for _ in range(blocks * U, count):
        x_1 = load_block(row, lane, D, 1)
        _outputs(out, re_N, im_N, x_1, reads, near_R, lane, inside, 0, D, N, 1, SUMS)
        re_N, im_N = advance(re_N, im_N, x_1, powers, 0, N, 1)
        row += D
        out += D
    if HAS_LAST:
        place = last + tl.program_id(2).to(tl.int64) * (2 * N * D)
        ends = inside & (first + count == L)
        store_complex(place, re_N, im_N, lane, ends, D, N)
