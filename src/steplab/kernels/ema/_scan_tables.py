"""From the stored parameters to the tables of the scan, and from their gradients back; in fp64.

q^256 from a q rounded to fp32 would be off by 1e-5, and at a memory of 4096 steps by 1e-3.
"""

# N modes of a channel (M: padded to a power of two) in G groups of P, D channels
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from steplab.kernels.triton_runtime import tl, triton


# fmt: off
@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))



@triton.jit
def _coefficients(alpha, delta, theta, gamma, offset, lane, mode, inside, N: tl.constexpr):
    """Return sigmoids of alpha, delta and theta, |q|, cos and sin of its angle, gamma / sqrt(N)."""
    al = _sigmoid(tl.load(alpha + offset, mask=inside, other=0.0).to(tl.float64))
    de = _sigmoid(tl.load(delta + offset, mask=inside, other=0.0).to(tl.float64))
    turn = _sigmoid(tl.load(theta + lane).to(tl.float64))
    per_mode = (mode + 1).to(tl.float64) * (6.283185307179586 / N)
    phi = per_mode * turn
    root = tl.sqrt(tl.full([1, 1], N, tl.float64))
    gamma_re = tl.load(gamma + 2 * offset, mask=inside, other=0.0).to(tl.float64) / root
    gamma_im = tl.load(gamma + 2 * offset + 1, mask=inside, other=0.0).to(tl.float64) / root
    return al, de, turn, per_mode, 1.0 - al * de, tl.cos(phi), tl.sin(phi), gamma_re, gamma_im


@triton.jit
def _power(re, im, exponent):
    """Return (re + i im)^exponent by squaring; to the power of 0 it is 1, for 0 too."""
    out_re = tl.full(re.shape, 1.0, tl.float64)
    out_im = tl.zeros(re.shape, tl.float64)
    while exponent > 0:
        odd = (exponent & 1) == 1
        next_re = tl.where(odd, out_re * re - out_im * im, out_re)
        out_im = tl.where(odd, out_re * im + out_im * re, out_im)
        out_re = next_re
        square = re * re - im * im
        im = 2.0 * re * im
        re = square
        exponent = exponent >> 1
    return out_re, out_im


@triton.jit
def _store_pair(target, re, im, here, inside, SIZE: tl.constexpr):
    tl.store(target + here, re.to(tl.float32), mask=inside)
    tl.store(target + SIZE + here, im.to(tl.float32), mask=inside)


@triton.jit
def _offsets(D: tl.constexpr, N: tl.constexpr, G: tl.constexpr, P: tl.constexpr,
            M: tl.constexpr, LANES: tl.constexpr):
    """Return channels and modes, their offsets in (D, N) and (G, D, P), and which exist there."""
    channel = tl.program_id(0) * LANES + tl.arange(0, LANES)[None, :]
    mode = tl.arange(0, M)[:, None]
    in_row = channel < D
    lane = tl.minimum(channel, D - 1)
    here = (mode // P * D + lane) * P + mode % P
    return lane, mode, lane * N + mode, here, in_row, in_row & (mode < N), in_row & (mode < G * P)


@triton.jit(do_not_specialize=["chunk", "tail"])
def ema_tables_kernel(
    alpha, delta, theta, gamma, omega, tables, near, chunk, tail, D: tl.constexpr, N: tl.constexpr,
    G: tl.constexpr, P: tl.constexpr, M: tl.constexpr, POWERS: tl.constexpr, READS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write the complex rows (2, G, D, P) of `tables` and the (READS, D) of `near`.

    Rows: q to q^POWERS; c q to c q^READS; c; q^chunk; q^(tail - 1); q^tail. `near` is the kernel of
    the convolution at lags 0 to READS - 1, with omega in the first. Modes beyond N are 0. Grid:
    channels.
    """
    lane, mode, offset, here, in_row, inside, stored = _offsets(D, N, G, P, M, LANES)
    al, _de, _turn, _per_mode, rho, cos, sin, gamma_re, gamma_im = _coefficients(
        alpha, delta, theta, gamma, offset, lane, mode, inside, N
    )
    q_re, q_im = tl.where(inside, rho * cos, 0.0), tl.where(inside, rho * sin, 0.0)
    c_re, c_im = tl.where(inside, gamma_re * al, 0.0), tl.where(inside, gamma_im * al, 0.0)
    SIZE: tl.constexpr = G * D * P
    power_re, power_im = q_re, q_im
    for r in tl.static_range(POWERS):
        _store_pair(tables + r * 2 * SIZE, power_re, power_im, here, stored, SIZE)
        next_re = power_re * q_re - power_im * q_im
        power_im = power_re * q_im + power_im * q_re
        power_re = next_re
    read_re, read_im = c_re, c_im
    for r in tl.static_range(READS):
        lag = tl.sum(read_re, 0)[None, :]
        if r == 0:
            lag += tl.load(omega + lane).to(tl.float64)
        tl.store(near + r * D + lane, lag.to(tl.float32), mask=in_row)
        next_re = read_re * q_re - read_im * q_im
        read_im = read_re * q_im + read_im * q_re
        read_re = next_re
        _store_pair(tables + (POWERS + r) * 2 * SIZE, read_re, read_im, here, stored, SIZE)
    rest = tables + (POWERS + READS) * 2 * SIZE
    _store_pair(rest, c_re, c_im, here, stored, SIZE)
    far_re, far_im = _power(q_re, q_im, chunk)
    _store_pair(rest + 2 * SIZE, far_re, far_im, here, stored, SIZE)
    far_re, far_im = _power(q_re, q_im, tail - 1)
    _store_pair(rest + 4 * SIZE, far_re, far_im, here, stored, SIZE)
    next_re = far_re * q_re - far_im * q_im
    far_im = far_re * q_im + far_im * q_re
    _store_pair(rest + 6 * SIZE, next_re, far_im, here, stored, SIZE)


@triton.jit
def ema_chain_kernel(
    alpha, delta, theta, gamma, sums, d_alpha, d_delta, d_theta, d_gamma, D: tl.constexpr,
    N: tl.constexpr, G: tl.constexpr, P: tl.constexpr, M: tl.constexpr, LANES: tl.constexpr,
):
    """Write the gradients of the stored parameters from the two sums (2, 2, G, D, P) of the scan.

    With the sums q' and c', the loss changes by Re(q' dq + c' dc). Grid: channels.
    """
    lane, mode, offset, here, in_row, inside, _stored = _offsets(D, N, G, P, M, LANES)
    al, de, turn, per_mode, rho, cos, sin, gamma_re, gamma_im = _coefficients(
        alpha, delta, theta, gamma, offset, lane, mode, inside, N
    )
    SIZE: tl.constexpr = G * D * P
    q_re = tl.load(sums + here, mask=inside, other=0.0).to(tl.float64)
    q_im = tl.load(sums + SIZE + here, mask=inside, other=0.0).to(tl.float64)
    c_re = tl.load(sums + 2 * SIZE + here, mask=inside, other=0.0).to(tl.float64)
    c_im = tl.load(sums + 3 * SIZE + here, mask=inside, other=0.0).to(tl.float64)
    d_rho = q_re * cos - q_im * sin
    d_phi = -rho * (q_re * sin + q_im * cos)
    d_al = c_re * gamma_re - c_im * gamma_im - d_rho * de
    tl.store(d_alpha + offset, d_al * al * (1.0 - al), mask=inside)
    tl.store(d_delta + offset, -d_rho * al * de * (1.0 - de), mask=inside)
    d_turn = tl.sum(tl.where(inside, d_phi * per_mode, 0.0), 0)[None, :]
    tl.store(d_theta + lane, d_turn * turn * (1.0 - turn), mask=in_row)
    root = tl.sqrt(tl.full([1, 1], N, tl.float64))
    tl.store(d_gamma + 2 * offset, c_re * al / root, mask=inside)
    tl.store(d_gamma + 2 * offset + 1, -c_im * al / root, mask=inside)
