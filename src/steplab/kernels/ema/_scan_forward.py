"""The scan, forward or reversed in time: sums of each chunk, what passes between them, outputs.

Every chunk of time is first summed up as if it began with nothing; a small kernel carries these
sums from chunk to chunk; then every chunk is gone through once more, from the state before it. Two
passes over the inputs, but no program waits for another.
"""

# G groups of P modes of a channel, D channels, L steps of time, C chunks, U steps loaded at once
# mypy: disable-error-code="no-untyped-def, assignment, operator"
from __future__ import annotations

import triton
import triton.language as tl

from steplab.kernels.ema._modes import (
    advance,
    load_block,
    load_complex,
    load_powers,
    load_steps,
    read_out,
    store_complex,
    zero_modes,
)

# Lengths are not specialised: the value 1 would become a constant, and whether one is a multiple
# of 16 changes nothing but which of two equal kernels is compiled.
LENGTHS = ["L", "chunk_length"]


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
def own_lanes(D: tl.constexpr, P: tl.constexpr, LANES: tl.constexpr):
    """Return this program's channels, where each has its P modes, and which are inside."""
    channel = tl.program_id(0) * LANES + tl.arange(0, LANES)
    lane = tl.minimum(channel, D - 1)
    return lane, lane[:, None] * P + tl.arange(0, P)[None, :], channel < D


@triton.jit
def own_chunk(target, SIZE: tl.constexpr):
    """Return the place of this program's states in (B, C, 2, G, D, P), `SIZE` of each chunk."""
    chunk = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    return target + chunk * SIZE


@triton.jit(do_not_specialize=LENGTHS)
def ema_sums_kernel(
    x, tables, sums, L, chunk_length, D: tl.constexpr, G: tl.constexpr, P: tl.constexpr,
    R: tl.constexpr, U: tl.constexpr, LANES: tl.constexpr, REVERSED: tl.constexpr,
):
    """Write the state that each chunk ends with when it begins with nothing: (B, C, 2, G, D, P)."""
    lane, place, inside = own_lanes(D, P, LANES)
    first, count = chunk_bounds(L, chunk_length)
    STRIDE: tl.constexpr = -D if REVERSED else D
    row = x + begin_row(first, count, L, D, REVERSED)
    powers = load_powers(tables, place, D * P, G, R)
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
    store_complex(target, re_G, im_G, place, inside[:, None], D * P, G)


@triton.jit
def _outside_place(state, D: tl.constexpr, P: tl.constexpr):
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
    outside, mode = _outside_place(state, D, P)
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
            place = row + 2 * SIZE * (chunks - 1 - step if REVERSED else step)
            sum_re += (tl.load(place, mask=inside, other=0.0),)
            sum_im += (tl.load(place + SIZE, mask=inside, other=0.0),)
        for i in tl.static_range(GROUP):
            step = group + i
            here = inside & (step < chunks)
            place = row + 2 * SIZE * (chunks - 1 - step if REVERSED else step)
            tl.store(place, re, mask=here)
            tl.store(place + SIZE, im, mask=here)
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
    lane, place, inside = own_lanes(D, P, LANES)
    first, count = chunk_bounds(L, chunk_length)
    begin = begin_row(first, count, L, D, False)
    row, out = x + begin, y + begin
    powers = load_powers(tables, place, D * P, G, R)
    reads = load_powers(tables + POWERS * (2 * G * D * P), place, D * P, G, R)
    near_R = load_block(near, lane, D, R)
    re_G, im_G = load_complex(own_chunk(entering, 2 * G * D * P), place, D * P, G)
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
