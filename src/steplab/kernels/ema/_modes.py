"""Pieces of the scan kernels: one lane per channel, all modes of it in registers.

A tuple of G tensors (LANES, P) stands for G P modes: P = 4 modes of a lane are 16 bytes of memory,
which Triton leaves to one thread. Wider tensors it would spread over lanes and warps: an earlier
kernel of that kind took 306 us where this took 212. Narrower ones are more operations, and the time
to compile grows with the cube of their number: one mode each took 21 s where these take 3.
"""

# G groups of P modes of a channel, D channels, R steps taken at once
# mypy: disable-error-code="no-untyped-def, assignment, operator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_modes(source, place, SIZE: tl.constexpr, G: tl.constexpr):
    """Return G rows of `SIZE` elements each as a tuple."""
    modes_G = ()
    for g in tl.static_range(G):
        modes_G += (tl.load(source + g * SIZE + place),)
    return modes_G


@triton.jit
def load_complex(source, place, SIZE: tl.constexpr, G: tl.constexpr):
    """Return real and imaginary parts of (2, G, D, P) as two tuples."""
    return load_modes(source, place, SIZE, G), load_modes(source + G * SIZE, place, SIZE, G)


@triton.jit
def store_complex(target, re_G, im_G, place, inside, SIZE: tl.constexpr, G: tl.constexpr):
    """Write (2, G, D, P)."""
    for g in tl.static_range(G):
        tl.store(target + g * SIZE + place, re_G[g], mask=inside)
        tl.store(target + (G + g) * SIZE + place, im_G[g], mask=inside)


@triton.jit
def zero_modes(LANES: tl.constexpr, P: tl.constexpr, G: tl.constexpr):
    """Return zeros for all modes of every lane."""
    return (tl.zeros([LANES, P], tl.float32),) * G


@triton.jit
def load_powers(source, place, SIZE: tl.constexpr, G: tl.constexpr, R: tl.constexpr):
    """Return R complex rows of (R, 2, G, D, P): a tuple of real parts, one of imaginary parts."""
    re_RG = ()
    im_RG = ()
    for r in tl.static_range(R):
        re_G, im_G = load_complex(source + r * 2 * G * SIZE, place, SIZE, G)
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
