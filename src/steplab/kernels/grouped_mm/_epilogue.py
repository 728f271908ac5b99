"""Launches the grouped products with gelu behind them in the same kernel."""

# R rows, E groups, D width, F inner width
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from steplab.kernels._triton import INTERPRETED, on_device_of
from steplab.kernels.activation import Gradients, Weights
from steplab.kernels.activation.triton_rows import pointers

FOUND = 32  # blocks of rows that a program finds: against all of 255 groups in 128 registers


class Tiling(NamedTuple):
    """One way to cut a product."""

    rows: int
    columns: int
    inner: int  # of one step along the sum
    finished: int  # columns that the activation takes at a time
    warps: int
    stages: int
    programs: int  # that share a multiprocessor
    flatten: bool = False  # loads of a program's next tile begin before this one is finished
    specialize: bool = False  # warps of their own for the loads
    ahead: bool = False  # the backward's z is fetched to the second-level cache before the product


SMALL = Tiling(16, 32, 16, 16, 4, 1, 1)  # several tiles in short inputs
FORWARD = Tiling(128, 256, 64, 64, 8, 3, 1, flatten=True)
BACKWARD = Tiling(128, 256, 64, 32, 8, 3, 1, flatten=True, ahead=True)
if INTERPRETED:
    FORWARD = BACKWARD = SMALL


def refuse_shape(x: Tensor, D: int, F: int) -> str:
    """Return why it cannot run on these rows and widths, or ""."""
    if x.is_cuda and torch.cuda.get_device_capability(x.device)[0] != 9:
        return "needs compute capability 9.0, whose tiles these are"
    inner, columns = max(FORWARD.inner, BACKWARD.inner), max(FORWARD.columns, BACKWARD.columns)
    if D % inner or F % columns:
        return f"needs multiples of {inner} as width and {columns} as inner width, not {D} and {F}"
    return ""


def product_gelu(
    x_RD: Tensor,
    w_EFD: Tensor,
    offsets_E: Tensor,
    weights: Weights | None,
    tiling: Tiling = FORWARD,
) -> tuple[Tensor, Tensor]:
    """Return (z_RF, h_RF): x w^T of each group, and weight times gelu of it."""
    from steplab.kernels.grouped_mm._epilogue_kernels import product_gelu_kernel

    (R, D), F = x_RD.shape, w_EFD.shape[1]
    z_RF, h_RF = x_RD.new_empty(R, F), x_RD.new_empty(R, F)
    if not R:
        return z_RF, h_RF
    table, blocks = find_blocks(offsets_E, R, tiling.rows)
    x = describe(x_RD, tiling.rows, tiling.inner)
    w = describe(w_EFD.flatten(0, 1), tiling.columns, tiling.inner)
    with on_device_of(x_RD):
        product_gelu_kernel[(programs(x_RD, tiling),)](
            *(x, w, table, *pointers(weights), z_RF, h_RF, blocks, D, F), **options(tiling)
        )
    return z_RF, h_RF


def product_slope(
    dout_RD: Tensor,
    w_EDF: Tensor,
    offsets_E: Tensor,
    z_RF: Tensor,
    weights: Weights | None,
    tiling: Tiling = BACKWARD,
) -> Gradients:
    """As `activation.backward`, where dh = dout w of each group."""
    from steplab.kernels.grouped_mm._epilogue_kernels import product_slope_kernel

    (R, F), D = z_RF.shape, dout_RD.shape[1]
    dz_RF, h_RF, dots_NR = torch.empty_like(z_RF), torch.empty_like(z_RF), None
    if weights is not None:
        dots_NR = z_RF.new_empty(F // tiling.columns, R, dtype=torch.float32)
    if R:
        table, blocks = find_blocks(offsets_E, R, tiling.rows)
        dout = describe(dout_RD, tiling.rows, tiling.inner)
        w = describe(w_EDF.flatten(0, 1), tiling.inner, tiling.columns)
        z = describe(z_RF, tiling.rows, tiling.finished)
        with on_device_of(z_RF):
            product_slope_kernel[(programs(z_RF, tiling),)](
                *(
                    dout,
                    w,
                    table,
                    *pointers(weights),
                    z,
                    z_RF,
                    dz_RF,
                    h_RF,
                    dots_NR,
                    R,
                    blocks,
                    D,
                    F,
                ),
                **options(tiling),
                AHEAD=tiling.ahead,
            )
    return Gradients(dz_RF, h_RF, None if dots_NR is None else dots_NR.sum(0))


def find_blocks(offsets_E: Tensor, rows: int, block: int) -> tuple[Tensor, int]:
    """Return a table of the groups' blocks of rows, and how many it has room for."""
    import triton

    from steplab.kernels.grouped_mm._epilogue_kernels import block_table_kernel

    groups = offsets_E.shape[0]
    blocks = triton.cdiv(rows, block) + groups
    table = offsets_E.new_empty(3 * blocks + 1)
    with on_device_of(offsets_E):
        block_table_kernel[(triton.cdiv(blocks, FOUND),)](
            *(offsets_E, table, rows, blocks, groups, triton.next_power_of_2(groups), block),
            FOUND=FOUND,
        )
    return table, blocks


def describe(x: Tensor, rows: int, columns: int) -> Any:
    """Return a descriptor by which the copy engine reads tiles of a matrix."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(x.contiguous(), [rows, columns])


def programs(x: Tensor, tiling: Tiling) -> int:
    """Return how many programs stay on the GPU of `x`; elsewhere a few."""
    if not x.is_cuda:
        return 3
    return tiling.programs * torch.cuda.get_device_properties(x.device).multi_processor_count


def options(tiling: Tiling) -> dict[str, Any]:
    """Return the kernels' options."""
    return {
        "M": tiling.rows,
        "N": tiling.columns,
        "K": tiling.inner,
        "C": tiling.finished,
        "FLATTEN": tiling.flatten,
        "SPECIALIZE": tiling.specialize,
        "UPCAST": INTERPRETED,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }
