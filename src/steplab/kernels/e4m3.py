"""Numbers of eight bits: how rows are rounded to e4m3, and products of what came out.

e4m3 has three bits after the point, a largest number of 448 and a smallest of 2^-9. Every row has a
scale of its own, a power of two, so that scaling rounds nothing. A scale needs to be no smaller
than fits; a few octaves larger cost nothing but the smallest of 17 octaves. So where a bound of a
row is known before the row is, as after a product, the scale comes from the bound and not from a
pass over the row.
"""

# R rows, K inner width, E groups of rows, M and N widths
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# |x w| <= |x| |w|, and each of the factors has been rounded by at most a 16th.
PRODUCT_SLACK = (1 + 2**-4) ** 2
STEEPEST = 1.13  # gelu's largest slope, 1.1289, at the root of 2
# As fp32 holds them: 2^-100, for rows of zeros, and 2^123, whose reciprocal is a normal number too.
LEAST_EXPONENT, LARGEST_EXPONENT = 27, 250
# A product of two scales is kept within these, the least and the largest power of two that fp32
# holds as a normal number: what is below has no exponent to share, and times infinity 0 is NaN.
LEAST_PRODUCT, LARGEST_PRODUCT = 2.0**-126, 2.0**127


class Rounded(NamedTuple):
    """Rows in e4m3; a row is about `values * scale`."""

    values: Tensor  # (..., R, K)
    scale: Tensor  # (..., R) fp32: powers of two


class Rows(NamedTuple):
    """The same of rows that were read as a whole, with their norms."""

    values: Tensor
    scale: Tensor
    norm: Tensor  # (..., R) fp32: of what is finite in the row, before it was rounded


def quantize(x: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    """Return x in e4m3 and its scales: x is about `quantized * scale`, one scale along `dim`.

    With None there is one scale for all.

    A scale is the least power of two with which the largest finite value fits. What is infinite
    takes the largest number of the format; a NaN stays one. Neither spoils its neighbors.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    finite = torch.nan_to_num(wide.abs(), nan=0.0, posinf=0.0)
    dims = tuple(range(x.ndim)) if dim is None else (dim,)
    # Of nothing (an expert without tokens) there is no largest value.
    has_some = all(x.shape[d] for d in dims)
    largest = finite.amax(dims, keepdim=True) if has_some else finite.sum(dims, keepdim=True)
    scale = scale_for(largest).to(wide.dtype)
    return to_e4m3(wide / scale), scale


def rounded_to_e4m3(x: Tensor, dim: int | None, stretch: float = 1.0) -> Tensor:
    """Return x as the product sees it: rounded to e4m3 as `quantize` does, in its dtype.

    With scales that are `stretch` times as large, between 1 and 2, other numbers are near a border:
    the errors are as large, but not the same.
    """
    quantized, scale = quantize(x / stretch, dim)
    return (quantized.to(scale.dtype) * scale).to(x.dtype) * stretch


def to_e4m3(x: Tensor) -> Tensor:
    """Round to e4m3; what does not fit saturates, which a cast of torch before 2.12 makes NaN."""
    rounded = x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    if _counts is not None:
        _counts.add(x, rounded)
    return rounded


@dataclass
class RangeCounts:
    """How many numbers were rounded, and how many of them e4m3 could not hold."""

    rounded: int = 0
    not_finite: int = 0
    saturated: int = 0  # an infinite one is among both
    flushed: int = 0  # to zero

    def add(self, x: Tensor, rounded: Tensor) -> None:
        """Count numbers, over their scales, and what they were rounded to."""
        self.rounded += x.numel()
        self.not_finite += int((~x.isfinite()).sum())
        self.saturated += int((x.abs() > E4M3_MAX).sum())
        self.flushed += int(((rounded.float() == 0) & (x != 0)).sum())


_counts: RangeCounts | None = None


@contextlib.contextmanager
def counting() -> Iterator[RangeCounts]:
    """Count what is rounded inside; the passes then run in torch, which is their definition."""
    global _counts
    before, _counts = _counts, RangeCounts()
    try:
        yield _counts
    finally:
        _counts = before


def is_counting() -> bool:
    """Whether somebody counts what is rounded."""
    return _counts is not None


def scale_for(bound: Tensor) -> Tensor:
    """Return the least powers of two with which values up to `bound` fit, in fp32.

    448 is 1.75 * 2^8: what has a larger significand needs one more power. By the bits, because a
    quotient may be rounded across the border.
    """
    bits = bound.float().view(torch.int32)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).int()
    return _power_of_two(exponent)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^(exponent - 127), within the range of the scales."""
    clamped = exponent.clamp(LEAST_EXPONENT, LARGEST_EXPONENT).int()
    return (clamped << 23).view(torch.float32)


def balanced_scales(a_R: Tensor, b_R: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales of two factors that are summed over their rows, whose product is `largest`.

    A sum over rows leaves no room for a scale of each: a row takes what it is smaller than the
    largest one half from one factor and half from the other, so that both stay in range. `largest`
    is the largest a * b within the range of products; all are powers of two.
    """
    a, b, most = (t.float().view(torch.int32) >> 23 for t in (a_R, b_R, largest))
    missing = most + 127 - a - b
    taken = missing >> 1
    return _power_of_two(a + taken), _power_of_two(b + missing - taken)


def product(
    x: Rounded | Rows, w: Rounded | Rows, offsets_E: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return (R, N) in `dtype`: x w^T, of (R, K) and (N, K), or of rows in E groups and (E, N, K).

    In bf16 on a GPU by its fp8 units, whose sums keep 14 bits; else by torch, of the same factors.
    """
    if not _on_units(x.values, dtype):
        x_RK, w_NK = (t.values.to(_wide(dtype)) * t.scale[..., None] for t in (x, w))
        if offsets_E is None:
            return (x_RK @ w_NK.mT).to(dtype)
        out = x_RK.new_zeros(x_RK.shape[0], w_NK.shape[1])
        for e, (a, b) in enumerate(_groups(offsets_E)):
            out[a:b] = x_RK[a:b] @ w_NK[e].T
        return out.to(dtype)
    if offsets_E is None:
        return torch._scaled_mm(
            x.values, w.values.T, x.scale[:, None], w.scale[None], out_dtype=dtype,
            use_fast_accum=True,
        )  # fmt: skip
    return torch._scaled_grouped_mm(
        x.values, w.values.mT, x.scale, w.scale, offs=offsets_E, out_dtype=dtype,
        use_fast_accum=True,
    )  # fmt: skip


def weight_gradient(
    a_MR: Tensor, b_NR: Tensor, scale: Tensor, offsets_E: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return (M, N), or (E, M, N) of rows in groups: scale * a b^T, of e4m3 numbers.

    The sum is as long as there are rows, so here the units add in fp32. They want groups of
    multiples of 16 rows, and none of them empty.
    """
    if not _on_units(a_MR, dtype):
        a, b = a_MR.to(_wide(dtype)), b_NR.to(_wide(dtype))
        if offsets_E is None:
            return (a @ b.T * scale).to(dtype)
        parts = [a[:, i:j] @ b[:, i:j].T for i, j in _groups(offsets_E)]
        return (torch.stack(parts) * scale).to(dtype)
    one = torch.ones_like(scale)
    if offsets_E is None:
        return torch._scaled_mm(a_MR, b_NR.T, scale, one, out_dtype=dtype, use_fast_accum=False)
    groups = offsets_E.shape[0]
    scale_a = scale.expand(groups * a_MR.shape[0]).contiguous()
    scale_b = one.expand(groups * b_NR.shape[0]).contiguous()
    return torch._scaled_grouped_mm(
        a_MR, b_NR.T, scale_a, scale_b, offs=offsets_E, out_dtype=dtype, use_fast_accum=False
    )


def _on_units(values: Tensor, dtype: torch.dtype) -> bool:
    return values.is_cuda and dtype == torch.bfloat16


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _groups(offsets_E: Tensor) -> list[tuple[int, int]]:
    return list(pairwise([0, *offsets_E.tolist()]))
