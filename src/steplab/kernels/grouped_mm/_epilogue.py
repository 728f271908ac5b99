"""Grouped products with gelu, or its derivative, in the same kernel: tilings and launches."""

# R rows, E groups, D width, F inner width
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from steplab.kernels.activation import Gradients, RowWeights
from steplab.kernels.grouped_mm._epilogue_kernels import (
    block_table_kernel,
    matmul_gelu_kernel,
    matmul_slope_kernel,
    shadow_matmul_gelu_kernel,
    shadow_matmul_slope_kernel,
)
from steplab.kernels.triton_runtime import (
    INTERPRETED,
    multiprocessors,
    on_device_of,
    tensor_descriptor,
    triton,
)

IN_PRODUCT = "gelu in the product"  # the activation by which fused layers ask for these kernels
FOUND = 32  # blocks of rows of one program: compared with all of 255 groups in 128 registers


class Tiling(NamedTuple):
    """One way to cut a product.

    `form` says when the activation of a tile runs. plain: after its product. flat: the same, but
    the loads of the next tile have begun. warps: the same, by other warps than those that load.
    shadow: while the next tile is multiplied.
    """

    rows: int
    columns: int
    inner: int  # of one step along the sum
    finished: int  # columns (shadow: rows) that the activation takes at a time
    warps: int
    stages: int
    programs: int  # that share a multiprocessor
    form: str


FORWARD = Tiling(128, 256, 64, 16, 8, 3, 1, "shadow")
BACKWARD = FORWARD
if INTERPRETED:  # several tiles in short inputs
    FORWARD = BACKWARD = Tiling(16, 32, 16, 8, 4, 1, 1, "shadow")


def refuse_shape(x: Tensor, D: int, F: int) -> str:
    """Return why it cannot run on these rows and widths, or ""."""
    if x.is_cuda and torch.cuda.get_device_capability(x.device)[0] != 9:
        return "needs compute capability 9.0, which it is tuned for"
    least = FORWARD.inner * (FORWARD.rows // FORWARD.finished + 1)  # a part of the tile in a step
    if D % FORWARD.inner or least > D or F % FORWARD.columns:
        widths = f"a multiple of {FORWARD.inner} from {least} on, and inner of {FORWARD.columns}"
        return f"needs as width {widths}, not {D} and {F}"
    return ""


def product_gelu(
    x_RD: Tensor,
    w_EFD: Tensor,
    offsets_E: Tensor,
    weights: RowWeights | None,
    tiling: Tiling = FORWARD,
) -> tuple[Tensor, Tensor]:
    """Return (z_RF, h_RF): x w^T of each group, and weight times gelu of it."""
    (R, D), F = x_RD.shape, w_EFD.shape[1]
    z_RF, h_RF = x_RD.new_empty(R, F), x_RD.new_empty(R, F)
    if not R:
        return z_RF, h_RF
    table, blocks = find_blocks(offsets_E, R, tiling.rows)
    x = describe(x_RD, tiling.rows, tiling.inner)
    w = describe(w_EFD.flatten(0, 1), tiling.columns, tiling.inner)
    inputs = (x, w, table, _of_rows(weights), z_RF, h_RF, blocks, D, F)
    grid = (programs(x_RD, tiling),)
    with on_device_of(x_RD):
        if tiling.form == "shadow":
            shadow_matmul_gelu_kernel[grid](*inputs, P=tiling.finished, **options(tiling))
        else:
            matmul_gelu_kernel[grid](
                *inputs, C=tiling.finished, FLATTEN=tiling.form == "flat",
                SPECIALIZE=tiling.form == "warps", **options(tiling),
            )  # fmt: skip
    return z_RF, h_RF


def product_slope(
    dout_RD: Tensor,
    w_EDF: Tensor,
    offsets_E: Tensor,
    z_RF: Tensor,
    weights: RowWeights | None,
    tiling: Tiling = BACKWARD,
) -> Gradients:
    """Like `activation.backward`, with dh = dout w of each group."""
    (R, F), D = z_RF.shape, dout_RD.shape[1]
    dz_RF, h_RF, dots_RN = torch.empty_like(z_RF), torch.empty_like(z_RF), None
    if weights is not None:
        dots_RN = z_RF.new_empty(R, F // tiling.columns, dtype=torch.float32)
    if not R:
        return Gradients(dz_RF, h_RF, _of_assignments(dots_RN, weights))
    table, blocks = find_blocks(offsets_E, R, tiling.rows)
    dout = describe(dout_RD, tiling.rows, tiling.inner)
    w = describe(w_EDF.flatten(0, 1), tiling.inner, tiling.columns)
    inputs, outputs = (dout, w, table, _of_rows(weights), z_RF), (dz_RF, h_RF, dots_RN)
    grid = (programs(z_RF, tiling),)
    with on_device_of(z_RF):
        if tiling.form == "shadow":
            shadow_matmul_slope_kernel[grid](
                *inputs, *outputs, R, blocks, D, F, P=tiling.finished, **options(tiling)
            )
        else:
            tiles_of_z = describe(z_RF, tiling.rows, tiling.finished)
            matmul_slope_kernel[grid](
                *inputs, tiles_of_z, *outputs, R, blocks, D, F, C=tiling.finished,
                FLATTEN=tiling.form == "flat", **options(tiling),
            )  # fmt: skip
    return Gradients(dz_RF, h_RF, _of_assignments(dots_RN, weights))


def find_blocks(offsets_E: Tensor, rows: int, block: int) -> tuple[Tensor, int]:
    """Return a table of the groups' blocks of rows, and how many it has room for."""
    groups = offsets_E.shape[0]
    blocks = triton.cdiv(rows, block) + groups
    table = offsets_E.new_empty(3 * blocks + 1)
    with on_device_of(offsets_E):
        block_table_kernel[(triton.cdiv(blocks, FOUND),)](
            offsets_E, table, rows, blocks, groups, triton.next_power_of_2(groups), block,
            FOUND=FOUND,
        )  # fmt: skip
    return table, blocks


def describe(x: Tensor, rows: int, columns: int) -> Any:
    """Return a descriptor of a matrix that is read in tiles of `rows` by `columns`."""
    return tensor_descriptor(x.contiguous(), [rows, columns])


def programs(x: Tensor, tiling: Tiling) -> int:
    """Return how many programs stay resident on the GPU of `x`; on a CPU a few."""
    return tiling.programs * multiprocessors(x) if x.is_cuda else 3


def options(tiling: Tiling) -> dict[str, Any]:
    """Return what all kernels are told about a tiling."""
    return {
        "M": tiling.rows,
        "N": tiling.columns,
        "K": tiling.inner,
        "UPCAST": INTERPRETED,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }


def _of_rows(weights: RowWeights | None) -> Tensor | None:
    """Return the weights in the order of the rows, so that a kernel waits for one load, not two."""
    if weights is None or weights.source_R is None:
        return None if weights is None else weights.values_R.contiguous()
    return weights.values_R[weights.source_R]


def _of_assignments(dots_RN: Tensor | None, weights: RowWeights | None) -> Tensor | None:
    """Return the sum over the tiles of a row, in the order of the assignments."""
    if dots_RN is None or weights is None:
        return None
    dweights_R = dots_RN.sum(1)
    if weights.source_R is None:
        return dweights_R
    return torch.empty_like(dweights_R).index_put_((weights.source_R,), dweights_R)
