"""Four kernels: the sums of each chunk of time, then the norm; and the same for the gradients.

After c tokens, mean and variance are sums of the tokens' moments divided by c. So a token's moments
get the gradients of all later means and variances: sums that run backward in time.
"""

# T tokens of a tile, G groups of a tile, S channels of a group padded to a power of two
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from steplab.kernels.triton_blocks import narrow
from steplab.kernels.triton_runtime import tl, triton

# Not specialized: the value 1 would become a constant.
LENGTHS = ["L", "chunk_length"]


# fmt: off
@triton.jit
def _own(GROUPS: tl.constexpr, WIDTH: tl.constexpr, G: tl.constexpr, S: tl.constexpr):
    """Return this program's groups, their channels (G, S) and which of these exist."""
    group_G = tl.program_id(0) * G + tl.arange(0, G)
    s_S = tl.arange(0, S)
    inside_GS = (group_G[:, None] < GROUPS) & (s_S[None, :] < WIDTH)
    return group_G, group_G[:, None] * WIDTH + s_S[None, :], inside_GS


@triton.jit
def _tile(source, row, rows, offset_GS, inside_GS, D: tl.constexpr, T: tl.constexpr):
    """Return T rows of these channels in fp32, 0 outside, and where they are from the first on."""
    t_T = tl.arange(0, T)
    offset_TGS = t_T[:, None, None] * D + offset_GS[None, :, :]
    inside_TGS = (t_T < rows)[:, None, None] & inside_GS[None, :, :]
    x_TGS = tl.load(source + row * D + offset_TGS, mask=inside_TGS, other=0.0).to(tl.float32)
    return x_TGS, offset_TGS, inside_TGS


@triton.jit
def _moments(x_TGS, inside_TGS, WIDTH: tl.constexpr):
    """Return each token's mean and its mean square, in fp64; of tokens outside, 0."""
    mean_TG = tl.sum(x_TGS, 2) / WIDTH
    away_TGS = tl.where(inside_TGS, x_TGS - mean_TG[:, :, None], 0.0)
    variance_TG = tl.sum(away_TGS * away_TGS, 2) / WIDTH
    first_TG = mean_TG.to(tl.float64)
    return first_TG, variance_TG.to(tl.float64) + first_TG * first_TG


@triton.jit
def _other_chunks(totals, group_G, GROUPS: tl.constexpr, CHUNKS: tl.constexpr,
                  LATER: tl.constexpr):
    """Return both sums over all chunks before this program's, or after it if LATER."""
    chunk, chunks = tl.program_id(1), tl.num_programs(1)
    c_C = tl.arange(0, CHUNKS)[:, None]
    wanted = (c_C > chunk) & (c_C < chunks) if LATER else c_C < chunk
    wanted = wanted & (group_G[None, :] < GROUPS)
    pointer_CG = totals + (tl.program_id(2) * chunks + c_C) * (2 * GROUPS) + group_G[None, :]
    first_CG = tl.load(pointer_CG, mask=wanted, other=0.0)
    second_CG = tl.load(pointer_CG + GROUPS, mask=wanted, other=0.0)
    return tl.sum(first_CG, 0), tl.sum(second_CG, 0)


@triton.jit
def _store_totals(totals, first_G, second_G, group_G, GROUPS: tl.constexpr):
    chunk = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    pointer_G = totals + chunk * (2 * GROUPS) + group_G
    tl.store(pointer_G, first_G, mask=group_G < GROUPS)
    tl.store(pointer_G + GROUPS, second_G, mask=group_G < GROUPS)


@triton.jit(do_not_specialize=LENGTHS)
def timestep_sums_kernel(
    x, totals, L, chunk_length, D: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    T: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
):
    """Write both sums of each chunk (B, C, 2, GROUPS), in fp64. Grid: groups, chunks, batch."""
    group_G, offset_GS, inside_GS = _own(GROUPS, WIDTH, G, S)
    begin = tl.program_id(1) * chunk_length
    end = tl.minimum(begin + chunk_length, L)
    origin = tl.program_id(2).to(tl.int64) * L
    first_sum_TG, second_sum_TG = tl.zeros([T, G], tl.float64), tl.zeros([T, G], tl.float64)
    for row in range(begin, end, T):
        x_TGS, _place, inside_TGS = _tile(x, origin + row, end - row, offset_GS, inside_GS, D, T)
        first_TG, second_TG = _moments(x_TGS, inside_TGS, WIDTH)
        first_sum_TG += first_TG
        second_sum_TG += second_TG
    _store_totals(totals, tl.sum(first_sum_TG, 0), tl.sum(second_sum_TG, 0), group_G, GROUPS)


@triton.jit(do_not_specialize=LENGTHS)
def timestep_norm_kernel(
    x, weight, bias, totals, count, prior_mean, prior_variance, y, means, rstds, last_mean,
    last_variance, L, chunk_length, eps, D: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, T: tl.constexpr, G: tl.constexpr, S: tl.constexpr, CHUNKS: tl.constexpr,
    HAS_PRIOR: tl.constexpr, KEEPS: tl.constexpr, UPCAST: tl.constexpr,
):
    """Write y (B, L, D), mean and 1 / std (B, L, GROUPS) of all tokens up to each and, if KEEPS,
    mean and variance of all (B, GROUPS). Grid: groups, chunks, batch."""
    group_G, offset_GS, inside_GS = _own(GROUPS, WIDTH, G, S)
    batch = tl.program_id(2).to(tl.int64)
    begin = tl.program_id(1) * chunk_length
    end = tl.minimum(begin + chunk_length, L)
    t_T = tl.arange(0, T)
    first_G, second_G = _other_chunks(totals, group_G, GROUPS, CHUNKS, False)
    seen = begin.to(tl.int64)
    in_row = group_G < GROUPS
    if HAS_PRIOR:
        tokens = tl.load(count + batch)
        seen += tokens
        here = batch * GROUPS + group_G
        mean_G = tl.load(prior_mean + here, mask=in_row, other=0.0).to(tl.float64)
        variance_G = tl.load(prior_variance + here, mask=in_row, other=0.0).to(tl.float64)
        first_G += tokens.to(tl.float64) * mean_G
        second_G += tokens.to(tl.float64) * (variance_G + mean_G * mean_G)
    scale_GS = 1.0 + tl.load(weight + offset_GS, mask=inside_GS, other=0.0).to(tl.float32)
    shift_GS = tl.load(bias + offset_GS, mask=inside_GS, other=0.0).to(tl.float32)
    for row in range(begin, end, T):
        at_row = batch * L + row
        x_TGS, offset_TGS, inside_TGS = _tile(x, at_row, end - row, offset_GS, inside_GS, D, T)
        first_TG, second_TG = _moments(x_TGS, inside_TGS, WIDTH)
        tokens_T1 = (seen + (row - begin) + 1 + t_T).to(tl.float64)[:, None]
        mean_TG = (first_G[None, :] + tl.cumsum(first_TG, 0)) / tokens_T1
        square_TG = (second_G[None, :] + tl.cumsum(second_TG, 0)) / tokens_T1
        variance_TG = tl.maximum(square_TG - mean_TG * mean_TG, 0.0)
        rstd_TG = (1.0 / tl.sqrt(variance_TG + eps)).to(tl.float32)
        at, at_TG = at_row * GROUPS, t_T[:, None] * GROUPS + group_G[None, :]
        inside_TG = (t_T < end - row)[:, None] & in_row[None, :]
        tl.store(means + at + at_TG, mean_TG.to(tl.float32), mask=inside_TG)
        tl.store(rstds + at + at_TG, rstd_TG, mask=inside_TG)
        if KEEPS:
            end_TG = tl.zeros([T], tl.int32)[:, None] + group_G[None, :]
            is_last = inside_TG & (row + t_T == L - 1)[:, None]
            own = batch * GROUPS
            tl.store(last_mean + own + end_TG, mean_TG.to(tl.float32), mask=is_last)
            tl.store(last_variance + own + end_TG, variance_TG.to(tl.float32), mask=is_last)
        y_TGS = (x_TGS - mean_TG.to(tl.float32)[:, :, None]) * rstd_TG[:, :, None]
        y_TGS = y_TGS * scale_GS[None, :, :] + shift_GS[None, :, :]
        rounded_TGS = narrow(y_TGS, y.dtype.element_ty, UPCAST)
        tl.store(y + at_row * D + offset_TGS, rounded_TGS, mask=inside_TGS)
        first_G += tl.sum(first_TG, 0)
        second_G += tl.sum(second_TG, 0)


@triton.jit
def _moment_gradients(
    dy_TGS, x_TGS, scale_GS, means, rstds, d_mean, d_variance, seen, batch, row, rows, group_G, L,
    GROUPS: tl.constexpr, T: tl.constexpr, HAS_LAST: tl.constexpr,
):
    """Return the normed tile, its gradient, mean and 1 / std, and what each token adds to the two
    sums that run backward: of the gradients of mean and mean square over the tokens seen, in fp64.
    """
    t_T = tl.arange(0, T)
    in_row = group_G < GROUPS
    at, at_TG = (batch * L + row) * GROUPS, t_T[:, None] * GROUPS + group_G[None, :]
    inside_TG = (t_T < rows)[:, None] & in_row[None, :]
    mean_TG = tl.load(means + at + at_TG, mask=inside_TG, other=0.0)
    rstd_TG = tl.load(rstds + at + at_TG, mask=inside_TG, other=0.0)
    z_TGS = (x_TGS - mean_TG[:, :, None]) * rstd_TG[:, :, None]
    dz_TGS = dy_TGS * scale_GS[None, :, :]
    d_mean_TG = (-rstd_TG * tl.sum(dz_TGS, 2)).to(tl.float64)
    d_variance_TG = (-0.5 * rstd_TG * rstd_TG * tl.sum(dz_TGS * z_TGS, 2)).to(tl.float64)
    if HAS_LAST:
        here = batch * GROUPS + group_G
        more_G = tl.load(d_mean + here, mask=in_row, other=0.0).to(tl.float64)
        most_G = tl.load(d_variance + here, mask=in_row, other=0.0).to(tl.float64)
        is_last = (row + t_T == L - 1)[:, None]
        d_mean_TG += tl.where(is_last, more_G[None, :], 0.0)
        d_variance_TG += tl.where(is_last, most_G[None, :], 0.0)
    tokens_T1 = (seen + row + 1 + t_T).to(tl.float64)[:, None]
    first_TG = (d_mean_TG - 2.0 * mean_TG.to(tl.float64) * d_variance_TG) / tokens_T1
    return z_TGS, dz_TGS, mean_TG, rstd_TG, first_TG, d_variance_TG / tokens_T1


@triton.jit(do_not_specialize=LENGTHS)
def timestep_gradient_sums_kernel(
    dy, x, weight, means, rstds, count, d_mean, d_variance, totals, partial, L, chunk_length,
    D: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, T: tl.constexpr, G: tl.constexpr,
    S: tl.constexpr, HAS_PRIOR: tl.constexpr, HAS_LAST: tl.constexpr,
):
    """Write both sums of each chunk (B, C, 2, GROUPS) in fp64, and its part of the gradients of
    weight and bias (B, C, 2, D) in fp32. Grid: groups, chunks, batch."""
    group_G, offset_GS, inside_GS = _own(GROUPS, WIDTH, G, S)
    batch = tl.program_id(2).to(tl.int64)
    begin = tl.program_id(1) * chunk_length
    end = tl.minimum(begin + chunk_length, L)
    seen = tl.load(count + batch) if HAS_PRIOR else tl.zeros([], tl.int64)
    scale_GS = 1.0 + tl.load(weight + offset_GS, mask=inside_GS, other=0.0).to(tl.float32)
    first_sum_TG, second_sum_TG = tl.zeros([T, G], tl.float64), tl.zeros([T, G], tl.float64)
    d_scale_TGS, d_shift_TGS = tl.zeros([T, G, S], tl.float32), tl.zeros([T, G, S], tl.float32)
    for row in range(begin, end, T):
        at, rows = batch * L + row, end - row
        x_TGS, _place, _inside = _tile(x, at, rows, offset_GS, inside_GS, D, T)
        dy_TGS, _place, _inside = _tile(dy, at, rows, offset_GS, inside_GS, D, T)
        z_TGS, _dz, _mean, _rstd, first_TG, second_TG = _moment_gradients(
            dy_TGS, x_TGS, scale_GS, means, rstds, d_mean, d_variance, seen, batch, row, rows,
            group_G, L, GROUPS, T, HAS_LAST
        )
        first_sum_TG += first_TG
        second_sum_TG += second_TG
        d_scale_TGS += dy_TGS * z_TGS
        d_shift_TGS += dy_TGS
    _store_totals(totals, tl.sum(first_sum_TG, 0), tl.sum(second_sum_TG, 0), group_G, GROUPS)
    own = partial + (batch * tl.num_programs(1) + tl.program_id(1)) * (2 * D)
    tl.store(own + offset_GS, tl.sum(d_scale_TGS, 0), mask=inside_GS)
    tl.store(own + D + offset_GS, tl.sum(d_shift_TGS, 0), mask=inside_GS)


@triton.jit(do_not_specialize=LENGTHS)
def timestep_gradient_kernel(
    dy, x, weight, means, rstds, count, d_mean, d_variance, totals, dx, L, chunk_length,
    D: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, T: tl.constexpr, G: tl.constexpr,
    S: tl.constexpr, CHUNKS: tl.constexpr, HAS_PRIOR: tl.constexpr, HAS_LAST: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Write dx (B, L, D): what reaches a token directly, and through its moments. Grid: groups,
    chunks, batch."""
    group_G, offset_GS, inside_GS = _own(GROUPS, WIDTH, G, S)
    batch = tl.program_id(2).to(tl.int64)
    begin = tl.program_id(1) * chunk_length
    end = tl.minimum(begin + chunk_length, L)
    seen = tl.load(count + batch) if HAS_PRIOR else tl.zeros([], tl.int64)
    scale_GS = 1.0 + tl.load(weight + offset_GS, mask=inside_GS, other=0.0).to(tl.float32)
    first_G, second_G = _other_chunks(totals, group_G, GROUPS, CHUNKS, True)
    for tile in range(0, tl.cdiv(end - begin, T)):
        row = begin + (tl.cdiv(end - begin, T) - 1 - tile) * T
        at, rows = batch * L + row, end - row
        x_TGS, offset_TGS, inside_TGS = _tile(x, at, rows, offset_GS, inside_GS, D, T)
        dy_TGS, _place, _inside = _tile(dy, at, rows, offset_GS, inside_GS, D, T)
        _z, dz_TGS, mean_TG, rstd_TG, first_TG, second_TG = _moment_gradients(
            dy_TGS, x_TGS, scale_GS, means, rstds, d_mean, d_variance, seen, batch, row, rows,
            group_G, L, GROUPS, T, HAS_LAST
        )
        second_sum_TG = second_G[None, :] + tl.cumsum(second_TG, 0, reverse=True)
        first_sum_TG = first_G[None, :] + tl.cumsum(first_TG, 0, reverse=True)
        # Against the running mean in fp64: both parts may be large and of opposite sign.
        first_sum_TG += 2.0 * mean_TG.to(tl.float64) * second_sum_TG
        level_TG = (first_sum_TG / WIDTH).to(tl.float32)
        slope_TG = (2.0 * second_sum_TG / WIDTH).to(tl.float32)
        dx_TGS = dz_TGS * rstd_TG[:, :, None] + level_TG[:, :, None]
        dx_TGS += slope_TG[:, :, None] * (x_TGS - mean_TG[:, :, None])
        rounded_TGS = narrow(dx_TGS, dx.dtype.element_ty, UPCAST)
        tl.store(dx + at * D + offset_TGS, rounded_TGS, mask=inside_TGS)
        first_G += tl.sum(first_TG, 0)
        second_G += tl.sum(second_TG, 0)
