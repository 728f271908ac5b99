"""Products with gelu, or its derivative, in the same kernel (Gluon, Hopper), by warps of its own.

A pass over (131,072, 3072) rows after a product waits for memory as long as the product took; in
one kernel the two overlap: `benchmarks/in_product_h200.md`.
"""

# R rows, E groups, D width, F inner width, N tiles of a row
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from steplab.kernels.activation import Gradients, RowWeights
from steplab.kernels.activation._in_product_kernels import matmul_gelu_kernel, sum_dots_kernel
from steplab.kernels.triton_runtime import gl, multiprocessors, on_device_of, triton

IN_PRODUCT = "gelu in the product"  # the activation by which fused layers ask for these kernels


class Tiling(NamedTuple):
    """How a product is cut, and what its warps get."""

    rows: int = 128
    columns: int = 256
    inner: int = 64  # of one step along the sum
    stages: int = 3
    finished: int = 8  # rows that the activation takes at a time; two such parts are under way
    warps: int = 8  # of the activation
    registers: int = 64  # of each of their threads; what is left is for those that multiply


TILING = Tiling()
SUM_BLOCK = 256


def refuse_layer(D: int, F: int, activation: str) -> str:
    """Return why these kernels cannot compute a layer of such widths, or ""."""
    if activation != "gelu":
        return f"needs gelu, not {activation}"
    if D % TILING.inner or F % TILING.columns:
        widths = f"{TILING.inner} and inner ones of {TILING.columns}"
        return f"needs widths in multiples of {widths}, not {D} and {F}"
    return ""


def product_gelu(
    x_RD: Tensor,
    w_EFD: Tensor,
    offsets_E: Tensor,
    weights: RowWeights | None,
    tiling: Tiling = TILING,
) -> tuple[Tensor, Tensor]:
    """Return (z_RF, h_RF): x w^T of each group, and weight times gelu of it."""
    R, F = x_RD.shape[0], w_EFD.shape[1]
    z_RF, h_RF = x_RD.new_empty(R, F), x_RD.new_empty(R, F)
    _launch(x_RD, w_EFD, offsets_E, weights, z_RF, None, h_RF, None, True, tiling)
    return z_RF, h_RF


def product_slope(
    dout_RD: Tensor,
    w_EDF: Tensor,
    offsets_E: Tensor,
    z_RF: Tensor,
    weights: RowWeights | None,
    tiling: Tiling = TILING,
) -> Gradients:
    """Like `activation.backward`, with dh = dout w of each group."""
    (R, F), dweights_R, dots_NR = z_RF.shape, None, None
    dz_RF, h_RF = torch.empty_like(z_RF), torch.empty_like(z_RF)
    if weights is not None:
        dots_NR = z_RF.new_empty(F // tiling.columns, R, dtype=torch.float32)
        dweights_R = dots_NR.new_empty(R)
    _launch(dout_RD, w_EDF, offsets_E, weights, z_RF, dz_RF, h_RF, dots_NR, False, tiling)
    if weights is not None and R:
        with on_device_of(z_RF):
            sum_dots_kernel[(triton.cdiv(R, SUM_BLOCK),)](
                dots_NR, weights.source_R, dweights_R, R, F // tiling.columns, SUM_BLOCK
            )
    return Gradients(dz_RF, h_RF, dweights_R)


def _launch(
    x_RD: Tensor,
    w: Tensor,
    offsets_E: Tensor,
    weights: RowWeights | None,
    z_RF: Tensor,
    dz_RF: Tensor | None,
    h_RF: Tensor,
    dots_NR: Tensor | None,
    forward: bool,
    tiling: Tiling,
) -> None:
    """Run the kernel; `w` is (E, F, D) forward and (E, D, F) backward."""
    (R, D), F = x_RD.shape, z_RF.shape[1]
    if not R:
        return
    of_w = (tiling.columns, tiling.inner) if forward else (tiling.inner, tiling.columns)
    with on_device_of(x_RD):
        matmul_gelu_kernel[(multiprocessors(x_RD),)](
            _describe(x_RD, tiling.rows, tiling.inner), _describe(w.flatten(0, 1), *of_w),
            offsets_E, _of_rows(weights), z_RF, dz_RF, h_RF, dots_NR, R, D, F, w.shape[0], forward,
            tiling.stages, tiling.finished, tiling.warps, tiling.registers, num_warps=8,
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
