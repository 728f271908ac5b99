"""Pieces of the scan kernels: one lane per channel, all N modes of it in registers.

A tuple of N vectors over the lanes stands for N modes. Tensors of two axes would let Triton spread
the modes over lanes and warps: an earlier kernel of that kind took 306 us where this took 212.
"""

# N modes of a channel, D channels, R steps taken at once
# mypy: disable-error-code="no-untyped-def, assignment, operator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_modes(source, lane, D: tl.constexpr, N: tl.constexpr):
    """Return N rows of (N, D) as a tuple."""
    modes_N = ()
    for n in tl.static_range(N):
        modes_N += (tl.load(source + n * D + lane),)
    return modes_N


@triton.jit
def load_complex(source, lane, D: tl.constexpr, N: tl.constexpr):
    """Return real and imaginary parts of (2, N, D) as two tuples."""
    return load_modes(source, lane, D, N), load_modes(source + N * D, lane, D, N)


@triton.jit
def store_complex(target, re_N, im_N, lane, inside, D: tl.constexpr, N: tl.constexpr):
    """Write (2, N, D)."""
    for n in tl.static_range(N):
        tl.store(target + n * D + lane, re_N[n], mask=inside)
        tl.store(target + (N + n) * D + lane, im_N[n], mask=inside)


@triton.jit
def zero_modes(LANES: tl.constexpr, N: tl.constexpr):
    """Return N zeros per lane."""
    return (tl.zeros([LANES], tl.float32),) * N


@triton.jit
def load_powers(source, lane, D: tl.constexpr, N: tl.constexpr, R: tl.constexpr):
    """Return R complex rows of (R, 2, N, D): a tuple of real parts, one of imaginary parts."""
    re_RN = ()
    im_RN = ()
    for r in tl.static_range(R):
        re_N, im_N = load_complex(source + r * 2 * N * D, lane, D, N)
        re_RN += (re_N,)
        im_RN += (im_N,)
    return re_RN, im_RN


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
def advance(re_N, im_N, x_U, powers, FIRST: tl.constexpr, N: tl.constexpr, R: tl.constexpr):
    """Return the states R steps later: q^R state + sum over j of q^(R-1-j) x_j.

    `powers` are q to q^R. Two real multiply-adds per mode and step for the inputs and four per R
    steps for the state: step by step it would be four per step.
    """
    powers_re, powers_im = powers
    new_re = ()
    new_im = ()
    for n in tl.static_range(N):
        a = x_U[FIRST + R - 1]
        b = powers_re[R - 1][n] * im_N[n]
        for j in tl.static_range(R - 1):
            a = a + powers_re[R - 2 - j][n] * x_U[FIRST + j]
            b = b + powers_im[R - 2 - j][n] * x_U[FIRST + j]
        a = a + powers_re[R - 1][n] * re_N[n]
        new_re += (a - powers_im[R - 1][n] * im_N[n],)
        new_im += (b + powers_im[R - 1][n] * re_N[n],)
    return new_re, new_im


@triton.jit
def read_out(start, re_N, im_N, weights_re_N, weights_im_N, N: tl.constexpr, SUMS: tl.constexpr):
    """Return start + Re(sum over n of weight state), in `SUMS` sums that can run side by side."""
    total = start
    for s in tl.static_range(SUMS):
        # The first sum goes on from `start`.
        part = weights_re_N[s] * re_N[s] + total if s == 0 else weights_re_N[s] * re_N[s]
        part = part - weights_im_N[s] * im_N[s]
        for n in tl.static_range(s + SUMS, N, SUMS):
            part = part + weights_re_N[n] * re_N[n]
            part = part - weights_im_N[n] * im_N[n]
        total = part if s == 0 else total + part
    return total
