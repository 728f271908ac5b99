"""Lookup and product in one kernel; in the backward one program for each row of the table.

The backward sorts the ids, so that what a row of the table was looked up by lies side by side: its
program adds those gradients up in fp32, in the order of the ids, rounds once and writes the row, or
zeros. 16,384 ids of a table of 50,257 x 768 take 76 us on an H200, 31 of them the sort. torch's own
backward sorts all 64 bits of an id, fills the table and adds up in two more passes: 331 us. The
lookup takes 12 us, and 26 as a lookup and a product.
"""

# T ids, V rows of the table, D width; in the kernels R rows, C columns of a tile
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steplab.kernels.triton_blocks import narrow
from steplab.kernels.triton_runtime import (
    INTERPRETED,
    on_device_of,
    refuse_device,
    refuse_dtype,
    tl,
    triton,
)

NEEDS_GPU = True
ROWS, COLUMNS = (4, 16) if INTERPRETED else (4, 1024)
POSITIONS = 16 if INTERPRETED else 1024  # that a program of the bounds looks at
SHORT = 2**15  # ids below twice that many are sorted as 16 bits, which takes two rounds, not eight


# fmt: off
@triton.jit
def lookup_kernel(
    weight, ids, out, scale, T, V, D, R: tl.constexpr, C: tl.constexpr, UPCAST: tl.constexpr
):
    """Write scale times rows of the table; an id outside of it makes NaN. Grid: tiles."""
    row_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column_1C = (tl.program_id(1) * C + tl.arange(0, C))[None, :]
    id_R = tl.load(ids + row_R, mask=row_R < T, other=0)
    inside_R1 = ((id_R >= 0) & (id_R < V))[:, None]
    mask_RC = (row_R < T)[:, None] & (column_1C < D)
    at_RC = id_R.to(tl.int64)[:, None] * D + column_1C
    found_RC = tl.load(weight + at_RC, mask=mask_RC & inside_R1, other=float("nan"))
    found_RC = narrow(found_RC.to(tl.float32) * scale, out.dtype.element_ty, UPCAST)
    tl.store(out + row_R[:, None] * D + column_1C, found_RC, mask=mask_RC)


@triton.jit
def bounds_kernel(keys, starts, ends, T, V, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """Write where each id begins and ends among the sorted ones, which count from FIRST."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = place < T
    key = tl.load(keys + place, mask=exists, other=0).to(tl.int32) - FIRST
    before = tl.load(keys + place - 1, mask=exists & (place > 0), other=0).to(tl.int32) - FIRST
    after = tl.load(keys + place + 1, mask=place + 1 < T, other=0).to(tl.int32) - FIRST
    known = exists & (key >= 0) & (key < V)
    tl.store(starts + key, place, mask=known & ((place == 0) | (key != before)))
    tl.store(ends + key, place + 1, mask=known & ((place + 1 == T) | (key != after)))


@triton.jit
def row_sums_kernel(
    dout, order, starts, ends, dweight, scale, D, R: tl.constexpr, C: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Write scale times the sum of a row's gradients. Grid: rows of the table, tiles of columns."""
    row = tl.program_id(0).to(tl.int64)
    column_C = tl.program_id(1) * C + tl.arange(0, C)
    start, end = tl.load(starts + row), tl.load(ends + row)
    sum_C = tl.zeros([C], tl.float32)
    for first in tl.range(start, end, R):
        place_R = first + tl.arange(0, R)
        token_R = tl.load(order + place_R, mask=place_R < end, other=0)
        mask_RC = (place_R < end)[:, None] & (column_C < D)[None, :]
        at_RC = token_R.to(tl.int64)[:, None] * D + column_C[None, :]
        sum_C += tl.sum(tl.load(dout + at_RC, mask=mask_RC, other=0.0).to(tl.float32), 0)
    sum_C = narrow(sum_C * scale, dweight.dtype.element_ty, UPCAST)
    tl.store(dweight + row * D + column_C, sum_C, mask=column_C < D)
# fmt: on


def refuse(weight_VD: Tensor, ids: Tensor) -> str:
    """Return why it cannot run, or ""."""
    if ids.dtype not in (torch.int32, torch.int64):  # torch takes no others either
        return f"needs ids of 32 or 64 bits, not {ids.dtype}"
    return refuse_device(weight_VD) or refuse_dtype(weight_VD)


def _tile(width: int) -> tuple[int, int, int]:
    """Return rows and columns of a tile, and its warps."""
    columns = min(triton.next_power_of_2(width), COLUMNS)
    return ROWS, columns, max(1, columns // 512)


@torch.library.custom_op("steplab::embedding_triton_sorted", mutates_args=())
def embedding(weight_VD: Tensor, ids_T: Tensor, scale: float) -> Tensor:
    """Return scale times the rows of the ids, (T, D), multiplied in fp32."""
    weight_VD, ids_T = weight_VD.contiguous(), ids_T.contiguous()
    (V, D), T = weight_VD.shape, ids_T.shape[0]
    out_TD = weight_VD.new_empty(T, D)
    rows, columns, warps = _tile(D)
    if T and D:
        with on_device_of(weight_VD):
            lookup_kernel[(triton.cdiv(T, rows), triton.cdiv(D, columns))](
                weight_VD, ids_T, out_TD, scale, T, V, D, rows, columns, UPCAST=INTERPRETED,
                num_warps=warps,
            )  # fmt: skip
    return out_TD


@embedding.register_fake
def _(weight_VD: Tensor, ids_T: Tensor, scale: float) -> Tensor:
    return weight_VD.new_empty(ids_T.shape[0], weight_VD.shape[1])


@torch.library.custom_op("steplab::embedding_triton_sorted_backward", mutates_args=())
def embedding_backward(dout_TD: Tensor, ids_T: Tensor, scale: float, table: int) -> Tensor:
    """Return the gradient (V, D) of a table of V = `table` rows, summed in fp32, rounded once."""
    dout_TD, (T, D) = dout_TD.contiguous(), dout_TD.shape
    dweight_VD = dout_TD.new_empty(table, D)
    if not table or not D:
        return dweight_VD
    is_short = table <= 2 * SHORT
    first = -SHORT if is_short else 0
    keys_T = (ids_T + first).to(torch.int16 if is_short else torch.int32)
    keys_T, order_T = keys_T.sort(stable=True)
    starts_V, ends_V = torch.zeros(2, table, dtype=torch.int32, device=dout_TD.device)
    rows, columns, warps = _tile(D)
    with on_device_of(dout_TD):
        if T:
            bounds_kernel[(triton.cdiv(T, POSITIONS),)](
                keys_T, starts_V, ends_V, T, table, FIRST=first, BLOCK=POSITIONS, num_warps=4
            )
        row_sums_kernel[(table, triton.cdiv(D, columns))](
            dout_TD, order_T, starts_V, ends_V, dweight_VD, scale, D, rows, columns,
            UPCAST=INTERPRETED, num_warps=warps,
        )  # fmt: skip
    return dweight_VD


@embedding_backward.register_fake
def _(dout_TD: Tensor, ids_T: Tensor, scale: float, table: int) -> Tensor:
    return dout_TD.new_empty(table, dout_TD.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    weight_VD, ids_T, ctx.scale = inputs
    ctx.table = weight_VD.shape[0]
    ctx.save_for_backward(ids_T)


def _differentiate(ctx: Any, dout_TD: Tensor) -> tuple[Tensor, None, None]:
    (ids_T,) = ctx.saved_tensors
    return embedding_backward(dout_TD, ids_T, ctx.scale, ctx.table), None, None


embedding.register_autograd(_differentiate, setup_context=_keep)
