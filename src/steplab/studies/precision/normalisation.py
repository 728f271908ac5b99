"""RMSNorm, LayerNorm and softmax of 16-bit inputs: their error against fp64."""

# N rows, D width
from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING

from steplab.record import Column, Table
from steplab.techniques.precision import TORCH_NAMES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ROWS, WIDTH = 64, 1024
MEANS = (0, 10, 100)
SCALES = (1, 300)  # 300 squared is 90,000; the largest fp16 number is 65,504
EPS = 1e-5

NON_FINITE = "non-finite"
COLUMNS = (
    *map(Column, ("op", "dtype", "mean", "scale", "rounding floor", "low statistics")),
    *map(Column, ("fp32 statistics", "torch op", "status")),
)
NOTE = (
    "Numbers are norm(result - truth) / norm(truth); truth is fp64 on the same 16-bit inputs, so "
    "what rounding\nthe inputs cost is not in them. rounding floor: the fp64 answer, only cast to "
    "the dtype. low statistics: every\nintermediate tensor has the dtype (torch's reductions "
    "still add in fp32 inside). fp32 statistics: cast in, cast out.\nstatistics overflow: a mean "
    "square or variance became infinite, its 1/sqrt is 0 and the row is all zeros (error 1)."
)


def normalisation(device: torch.device, dtypes: Sequence[str]) -> Table:
    """Return one row per op, dtype, mean and scale; inputs are (normal + mean) * scale."""
    import torch

    generator = torch.Generator().manual_seed(0)
    normal_ND = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(device)
    rows = []
    for op, dtype, mean, scale in product(FORMULAS, dtypes, MEANS, SCALES):
        x_ND = ((normal_ND + mean) * scale).to(getattr(torch, TORCH_NAMES[dtype]))
        rows.append((op, dtype, mean, scale, *compare(op, x_ND)))
    title = f"normalisation: relative error against fp64 ({ROWS} rows of {WIDTH:,}, std 1 x scale)"
    return Table(title, COLUMNS, tuple(rows), NOTE)


def compare(op: str, x_ND: Tensor) -> tuple[float | str, ...]:
    """Return floor, low, fp32 and torch errors of `op` on a 16-bit tensor, and a status."""
    formula = FORMULAS[op]
    truth_ND, _ = formula(x_ND.double())
    low_ND, statistic_N1 = formula(x_ND)
    results = (truth_ND, low_ND, formula(x_ND.float())[0], torch_op(op, x_ND))
    errors = tuple(relative_error(result_ND.to(x_ND.dtype), truth_ND) for result_ND in results)
    status = "ok"
    if NON_FINITE in errors:
        status = "non-finite result"
    elif not statistic_N1.isfinite().all():
        status = "statistics overflow"
    return *errors, status


def relative_error(result_ND: Tensor, truth_ND: Tensor) -> float | str:
    """Return norm(result - truth) / norm(truth), or the word for infinities and NaNs."""
    if not result_ND.isfinite().all():
        return NON_FINITE
    return float((result_ND.double() - truth_ND).norm() / truth_ND.norm())


def rms_norm(x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Return x / sqrt(mean square) and the mean square, all in the dtype of x."""
    mean_square_N1 = x_ND.square().mean(-1, keepdim=True)
    return x_ND * (mean_square_N1 + EPS).rsqrt(), mean_square_N1


def layer_norm(x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Return (x - mean) / std and the variance, all in the dtype of x."""
    centred_ND = x_ND - x_ND.mean(-1, keepdim=True)
    variance_N1 = centred_ND.square().mean(-1, keepdim=True)
    return centred_ND * (variance_N1 + EPS).rsqrt(), variance_N1


def softmax(x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp(x - max) / sum and the sum, all in the dtype of x."""
    powers_ND = (x_ND - x_ND.amax(-1, keepdim=True)).exp()
    total_N1 = powers_ND.sum(-1, keepdim=True)
    return powers_ND / total_N1, total_N1


FORMULAS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "RMSNorm": rms_norm,
    "LayerNorm": layer_norm,
    "softmax": softmax,
}


def torch_op(op: str, x_ND: Tensor) -> Tensor:
    """Return torch's own operation on the tensor as it is."""
    from torch.nn import functional

    if op == "RMSNorm":
        return functional.rms_norm(x_ND, x_ND.shape[-1:], eps=EPS)
    if op == "LayerNorm":
        return functional.layer_norm(x_ND, x_ND.shape[-1:], eps=EPS)
    return x_ND.softmax(-1)
