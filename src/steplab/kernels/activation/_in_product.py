"""Products with the activation, or its derivative, in the same kernel (Gluon, Hopper).

A pass over (131,072, 3072) rows after a product waits for memory as long as the product took; in
one kernel the two overlap: `benchmarks/in_product_h200.md`.
"""

# R rows, E groups, D width, F inner width, N tiles of a row
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from steplab.kernels.activation import Gradients, RowWeights
from steplab.kernels.activation._in_product_kernels import (
    matmul_activation_kernel,
    sum_dots_kernel,
)
from steplab.kernels.triton_runtime import gl, multiprocessors, on_device_of, triton

# By these fused layers ask for these kernels, in place of the name of the activation.
IN_PRODUCT = {"gelu": "gelu in the product", "swiglu": "swiglu in the product"}
GATED = IN_PRODUCT["swiglu"]


class Tiling(NamedTuple):
    """How a product is cut, and what its warps get."""

    rows: int = 128
    columns: int = 256  # of the product; for swiglu, half of them are the gate's
    inner: int = 64  # of one step along the sum
    stages: int = 3
    finished: int = 8  # rows that the activation takes at a time
    ahead: int = 3  # such parts of z that are under way in the backward
    warps: int = 8  # of the activation
    registers: int = 64  # of each of their threads; what is left is for those that multiply


FORWARD = Tiling()
# The backward of swiglu has twice as much of z under way, which leaves room for shorter steps of
# the product: five of 32 take 132 us, four 145 (16,384 rows, inner width 2304).
BACKWARD = {IN_PRODUCT["gelu"]: Tiling(), GATED: Tiling(inner=32, stages=5, ahead=4)}
# Without h to write, one more part of z under way takes 136 us instead of 139 (and with it 150).
BACKWARD_WITH_H = {**BACKWARD, IN_PRODUCT["gelu"]: Tiling(ahead=4)}
SUM_BLOCK = 256


def refuse_layer(D: int, F: int) -> str:
    """Return why these kernels cannot compute a layer of such widths, or ""."""
    if D % FORWARD.inner or F % FORWARD.columns:
        widths = f"{FORWARD.inner} and inner ones of {FORWARD.columns}"
        return f"needs widths in multiples of {widths}, not {D} and {F}"
    return ""


def forward_in_product(
    x_RD: Tensor,
    w: Tensor,
    offsets_E: Tensor | None,
    activation: str,
    weights: RowWeights | None,
    tiling: Tiling = FORWARD,
) -> tuple[Tensor, Tensor]:
    """Return (z, h_RF): z = x w^T of each group, and weight times the activation of it.

    `w` is (E, F, D), or (E, 2F, D) for swiglu, whose gate's rows come first; `offsets_E` holds the
    ends of the groups, None where there is one. `activation` is one of IN_PRODUCT.
    """
    R, wide = x_RD.shape[0], w.shape[1]
    z = x_RD.new_empty(R, wide)
    h_RF = x_RD.new_empty(R, wide // 2 if activation == GATED else wide)
    _launch(x_RD, w, offsets_E, activation, weights, z, None, h_RF, None, True, tiling)
    return z, h_RF


def backward_in_product(
    dout_RD: Tensor,
    w_EDF: Tensor,
    offsets_E: Tensor | None,
    z: Tensor,
    activation: str,
    weights: RowWeights | None,
    kept_RF: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Gradients:
    """Like `activation.backward`, with dh = dout w of each group.

    `kept_RF` is h where the forward has kept it; it is not written again then.
    """
    tiling = tiling or (BACKWARD if kept_RF is None else BACKWARD_WITH_H)[activation]
    R, F = z.shape[0], w_EDF.shape[2]
    dz, dweights_R, dots_NR = torch.empty_like(z), None, None
    h_RF = z.new_empty(R, F) if kept_RF is None else kept_RF
    written_RF = h_RF if kept_RF is None else None
    if weights is not None:
        dots_NR = z.new_empty(F // tiling.columns, R, dtype=torch.float32)
        dweights_R = dots_NR.new_empty(R)
    matrices = (z, dz, written_RF, dots_NR)
    _launch(dout_RD, w_EDF, offsets_E, activation, weights, *matrices, False, tiling)
    if weights is not None and R:
        with on_device_of(z):
            sum_dots_kernel[(triton.cdiv(R, SUM_BLOCK),)](
                dots_NR, weights.source_R, dweights_R, R, F // tiling.columns, SUM_BLOCK
            )
    return Gradients(dz, h_RF, dweights_R)


def _launch(
    x_RD: Tensor,
    w: Tensor,
    offsets_E: Tensor | None,
    activation: str,
    weights: RowWeights | None,
    z: Tensor,
    dz: Tensor | None,
    h_RF: Tensor | None,
    dots_NR: Tensor | None,
    forward: bool,
    tiling: Tiling,
) -> None:
    """Run the kernel; `w` is (E, F, D) forward, or (E, 2F, D), and (E, D, F) backward."""
    (R, D), gated = x_RD.shape, activation == GATED
    F = z.shape[1] // 2 if gated else z.shape[1]
    if not R:
        return
    half = tiling.columns // 2
    # Before swiglu a thread takes its columns of both halves, so of twice the rows.
    finished = 2 * tiling.finished if gated and forward else tiling.finished
    of_w = (half, tiling.inner) if forward else (tiling.inner, half)
    with on_device_of(x_RD):
        matmul_activation_kernel[(multiprocessors(x_RD),)](
            _describe(x_RD, tiling.rows, tiling.inner), _describe(w.flatten(0, 1), *of_w),
            offsets_E, _of_rows(weights),
            z if forward else _describe(z, finished, tiling.columns), dz, h_RF, dots_NR, R, D, F,
            w.shape[0], gated, forward, tiling.stages, finished, tiling.ahead, tiling.warps,
            tiling.registers, num_warps=8,
        )  # fmt: skip


def _describe(x: Tensor, *block: int) -> Any:
    """Return a descriptor by which the copy engine (TMA) reads blocks of a matrix."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16)
    return TensorDescriptor.from_tensor(x.contiguous(), list(block), layout)


def _of_rows(weights: RowWeights | None) -> Tensor | None:
    """Return the weights in the order of the rows, so that a kernel waits for one load, not two."""
    if weights is None or weights.source_R is None:
        return None if weights is None else weights.values_R.contiguous()
    return weights.values_R.index_select(0, weights.source_R)
