"""Product, softmax, choice and gate in one kernel, all gradients in another.

Both are exact to fp32 on bf16 tensor cores: an fp32 number is the sum of three bf16 numbers, and
the product of two bf16 numbers is exact in the fp32 that tensor cores add up in. UPCAST: Triton's
interpreter multiplies bf16 wrongly, so there the products are in fp32.
"""

# T tokens, D width, E experts, K chosen, B tiles of tokens; in the kernels R tokens of the tile,
# C columns of one step, E experts and then the gate, padded to a power of two
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from steplab.kernels.triton_blocks import narrow
from steplab.kernels.triton_runtime import (
    INTERPRETED,
    on_device_of,
    refuse_device,
    tl,
    triton,
)

NEEDS_GPU = True
MAX_EXPERTS = 255  # with the gate one tile: more would not fit into a program's registers


# fmt: off
@triton.jit
def _load(begin_R, inside_R, column, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Return columns [column, column + COLUMNS) of the rows that begin there, 0 beyond all ends."""
    column_C = column + tl.arange(0, COLUMNS)
    inside_RC = inside_R[:, None]
    if WIDTH % COLUMNS:
        inside_RC = inside_RC & (column_C < WIDTH)[None, :]
    return tl.load(begin_R[:, None] + column_C[None, :], mask=inside_RC, other=0.0)


@triton.jit
def _parts(x):
    """Return three bf16 numbers whose sum is the fp32 `x`, the largest first."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _product(x, y, total, UPCAST: tl.constexpr):
    """Return total + x y, with `x` in bf16 and `y` in fp32."""
    if UPCAST:
        return tl.dot(x.to(tl.float32), y, total, input_precision="ieee")
    high, middle, low = _parts(y)
    total = tl.dot(x, low, total)
    total = tl.dot(x, middle, total)
    return tl.dot(x, high, total)


@triton.jit
def _rough_product(x, y, total, UPCAST: tl.constexpr):
    """Return total + x y, both in fp32, to 16 bits: twice what the bf16 it is stored in has."""
    if UPCAST:
        return tl.dot(x, y, total, input_precision="ieee")
    x_high, x_middle, _ = _parts(x)
    y_high, y_middle, _ = _parts(y)
    total = tl.dot(x_high, y_middle, total)
    total = tl.dot(x_middle, y_high, total)
    return tl.dot(x_high, y_high, total)


@triton.jit
def router_softmax_kernel(
    x, weight, gate, probabilities, weights, experts, gates, tokens, EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, UPCAST: tl.constexpr,
):
    """Route one tile of tokens. Of equal probabilities the first expert's comes first."""
    row_R, expert_E = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    inside_R = row_R < tokens
    x_R = x + row_R.to(tl.int64) * WIDTH
    w_E = tl.where(expert_E < EXPERTS, weight + expert_E * WIDTH, gate)
    logits_RE = tl.zeros([ROWS, PADDED], tl.float32)
    for column in tl.range(0, WIDTH, COLUMNS):
        x_RC = _load(x_R, inside_R, column, WIDTH, COLUMNS)
        w_EC = _load(w_E, expert_E <= EXPERTS, column, WIDTH, COLUMNS).to(tl.float32)
        logits_RE = _product(x_RC, tl.trans(w_EC), logits_RE, UPCAST)
    gate_R = tl.sum(tl.where((expert_E == EXPERTS)[None, :], logits_RE, 0.0), 1)
    tl.store(gates + row_R, tl.sigmoid(gate_R), mask=inside_R)
    known_1E = (expert_E < EXPERTS)[None, :]
    logits_RE = tl.where(known_1E, logits_RE, float("-inf"))
    powers_RE = tl.exp(logits_RE - tl.max(logits_RE, 1)[:, None])
    left_RE = powers_RE / tl.sum(powers_RE, 1)[:, None]
    offset_RE = row_R.to(tl.int64)[:, None] * EXPERTS + expert_E[None, :]
    tl.store(probabilities + offset_RE, left_RE, mask=inside_R[:, None] & known_1E)
    left_RE = tl.where(known_1E, left_RE, -1.0)
    for chosen in tl.static_range(CHOSEN):
        most_R, best_R = tl.max(left_RE, 1, return_indices=True)
        best_R = tl.minimum(best_R, EXPERTS - 1)  # also with NaN it must be an expert
        offset_R = row_R.to(tl.int64) * CHOSEN + chosen
        tl.store(weights + offset_R, most_R, mask=inside_R)
        tl.store(experts + offset_R, best_R.to(tl.int64), mask=inside_R)
        left_RE = tl.where(expert_E[None, :] == best_R[:, None], -1.0, left_RE)


@triton.jit
def _dlogits(
    dprobabilities, dweights, dgates, probabilities, experts, gates, row_R, inside_R, expert_E,
    EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
):
    """Return the gradient of the logits; the weights are a choice of the probabilities."""
    inside_RE = inside_R[:, None] & (expert_E < EXPERTS)[None, :]
    offset_RE = row_R.to(tl.int64)[:, None] * EXPERTS + expert_E[None, :]
    p_RE = tl.load(probabilities + offset_RE, mask=inside_RE, other=0.0)
    dp_RE = tl.load(dprobabilities + offset_RE, mask=inside_RE, other=0.0)
    for chosen in tl.static_range(CHOSEN):
        offset_R = row_R.to(tl.int64) * CHOSEN + chosen
        expert_R = tl.load(experts + offset_R, mask=inside_R, other=-1).to(tl.int32)
        dweight_R = tl.load(dweights + offset_R, mask=inside_R, other=0.0)
        dp_RE += tl.where(expert_E[None, :] == expert_R[:, None], dweight_R[:, None], 0.0)
    dlogits_RE = p_RE * (dp_RE - tl.sum(p_RE * dp_RE, 1)[:, None])
    gate_R = tl.load(gates + row_R, mask=inside_R, other=0.0)
    dgate_R = tl.load(dgates + row_R, mask=inside_R, other=0.0) * gate_R * (1 - gate_R)
    return tl.where((expert_E == EXPERTS)[None, :], dgate_R[:, None], dlogits_RE)


@triton.jit
def router_softmax_backward_kernel(
    dprobabilities, dweights, dgates, x, weight, gate, probabilities, experts, gates, dx,
    drow_parts, tokens, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UPCAST: tl.constexpr,
):
    """Write dx of one tile of tokens, and its part of the gradient of the weight's rows and the
    gate's: (EXPERTS + 1, WIDTH)."""
    row_R, expert_E = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    inside_R, inside_E = row_R < tokens, expert_E <= EXPERTS
    dlogits_RE = _dlogits(
        dprobabilities, dweights, dgates, probabilities, experts, gates, row_R, inside_R, expert_E,
        EXPERTS, CHOSEN,
    )
    x_R = x + row_R.to(tl.int64) * WIDTH
    w_E = tl.where(expert_E < EXPERTS, weight + expert_E * WIDTH, gate)
    own = drow_parts + tl.program_id(0).to(tl.int64) * ((EXPERTS + 1) * WIDTH)
    for column in tl.range(0, WIDTH, COLUMNS):
        w_EC = _load(w_E, inside_E, column, WIDTH, COLUMNS).to(tl.float32)
        x_RC = _load(x_R, inside_R, column, WIDTH, COLUMNS)
        dx_RC = tl.zeros([ROWS, COLUMNS], tl.float32)
        dx_RC = _rough_product(dlogits_RE, w_EC, dx_RC, UPCAST)
        dw_CE = tl.zeros([COLUMNS, PADDED], tl.float32)
        dw_CE = _product(tl.trans(x_RC), dlogits_RE, dw_CE, UPCAST)
        column_C = column + tl.arange(0, COLUMNS)
        targets_RC = dx + row_R.to(tl.int64)[:, None] * WIDTH + column_C[None, :]
        inside_RC = inside_R[:, None] & (column_C < WIDTH)[None, :]
        tl.store(targets_RC, narrow(dx_RC, dx.dtype.element_ty, UPCAST), mask=inside_RC)
        targets_CE = own + expert_E[None, :] * WIDTH + column_C[:, None]
        inside_CE = (column_C < WIDTH)[:, None] & inside_E[None, :]
        tl.store(targets_CE, dw_CE, mask=inside_CE)
# fmt: on


class Tiling(NamedTuple):
    """How a kernel is cut."""

    rows: int  # tokens of one program
    columns: int  # of one step of its loop
    warps: int
    stages: int


# Forward and backward, by the largest padded number of experts that they serve.
# `benchmarks/experts_kernels.py` measures others.
TILINGS = {
    32: (Tiling(64, 128, 4, 2), Tiling(64, 128, 4, 3)),  # 8 experts: the fastest on an H200
    64: (Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 2)),
    256: (Tiling(64, 32, 8, 2), Tiling(64, 32, 8, 1)),
}


INTERPRETED_TILING = Tiling(16, 16, 1, 1)


def tilings(weight_ED: Tensor) -> tuple[Tiling, Tiling]:
    """Return the tilings of the forward and of the backward."""
    if INTERPRETED:
        return INTERPRETED_TILING, INTERPRETED_TILING
    return next(found for most, found in TILINGS.items() if _padded(weight_ED) <= most)


def _padded(weight_ED: Tensor) -> int:
    """Return the rows of a tile of the weight: one is the gate's, and tensor cores take 16."""
    return max(16, triton.next_power_of_2(weight_ED.shape[0] + 1))


def _options(tiling: Tiling, weight_ED: Tensor, chosen: int) -> dict[str, Any]:
    return {
        "EXPERTS": weight_ED.shape[0],
        "CHOSEN": chosen,
        "WIDTH": weight_ED.shape[1],
        "PADDED": _padded(weight_ED),
        "ROWS": tiling.rows,
        "COLUMNS": tiling.columns,
        "UPCAST": INTERPRETED,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }


def launch_forward(
    x_TD: Tensor,
    weight_ED: Tensor,
    gate_1D: Tensor,
    chosen: int,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (probabilities_TE, weights_TK, experts_TK, gate_T1)."""
    tiling = tiling or tilings(weight_ED)[0]
    T, E = x_TD.shape[0], weight_ED.shape[0]
    probabilities_TE = x_TD.new_empty(T, E, dtype=torch.float32)
    weights_TK = probabilities_TE.new_empty(T, chosen)
    experts_TK = probabilities_TE.new_empty(T, chosen, dtype=torch.int64)
    gate_T1 = probabilities_TE.new_empty(T, 1)
    with on_device_of(x_TD):
        router_softmax_kernel[(triton.cdiv(T, tiling.rows),)](
            x_TD, weight_ED, gate_1D, probabilities_TE, weights_TK, experts_TK, gate_T1, T,
            **_options(tiling, weight_ED, chosen),
        )  # fmt: skip
    return probabilities_TE, weights_TK, experts_TK, gate_T1


def launch_backward(
    dprobabilities_TE: Tensor,
    dweights_TK: Tensor,
    dgate_T1: Tensor,
    x_TD: Tensor,
    weight_ED: Tensor,
    gate_1D: Tensor,
    probabilities_TE: Tensor,
    experts_TK: Tensor,
    gate_T1: Tensor,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """Return dx and, in fp32, the gradient of the weight's rows followed by the gate's."""
    tiling = tiling or tilings(weight_ED)[1]
    T, tiles = x_TD.shape[0], triton.cdiv(x_TD.shape[0], tiling.rows)
    E, D = weight_ED.shape
    dx_TD = torch.empty_like(x_TD)
    parts_BED = probabilities_TE.new_empty(tiles, E + 1, D)
    with on_device_of(x_TD):
        router_softmax_backward_kernel[(tiles,)](
            dprobabilities_TE, dweights_TK, dgate_T1, x_TD, weight_ED, gate_1D, probabilities_TE,
            experts_TK, gate_T1, dx_TD, parts_BED, T,
            **_options(tiling, weight_ED, experts_TK.shape[1]),
        )  # fmt: skip
    # Added up by torch, always in the same order: the same inputs give the same bits.
    return dx_TD, parts_BED.sum(0)


def refuse(x_TD: Tensor, weight_ED: Tensor) -> str:
    """Return why it cannot run, or ""."""
    reason = refuse_device(x_TD)
    if reason:
        return reason
    if x_TD.dtype != torch.bfloat16:
        return f"needs bf16, not {x_TD.dtype}"
    if weight_ED.shape[0] > MAX_EXPERTS:
        return f"needs at most {MAX_EXPERTS} experts, not {weight_ED.shape[0]}"
    return ""


@torch.library.custom_op("steplab::router", mutates_args=())
def router(
    x_TD: Tensor, weight_ED: Tensor, gate_1D: Tensor, chosen: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (probabilities_TE, weights_TK, experts_TK, gate_T1)."""
    return launch_forward(x_TD.contiguous(), *_rows(weight_ED, gate_1D), chosen)


@router.register_fake
def _(
    x_TD: Tensor, weight_ED: Tensor, gate_1D: Tensor, chosen: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    probabilities_TE = x_TD.new_empty(x_TD.shape[0], weight_ED.shape[0], dtype=torch.float32)
    weights_TK = probabilities_TE.new_empty(x_TD.shape[0], chosen)
    experts_TK = torch.empty_like(weights_TK, dtype=torch.int64)
    return probabilities_TE, weights_TK, experts_TK, probabilities_TE.new_empty(x_TD.shape[0], 1)


@torch.library.custom_op("steplab::router_backward", mutates_args=())
def router_backward(
    dprobabilities_TE: Tensor,
    dweights_TK: Tensor,
    dgate_T1: Tensor,
    x_TD: Tensor,
    weight_ED: Tensor,
    gate_1D: Tensor,
    probabilities_TE: Tensor,
    experts_TK: Tensor,
    gate_T1: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return dx and, in fp32, the gradient of the weight's rows followed by the gate's."""
    weight_ED, gate_1D = _rows(weight_ED, gate_1D)
    return launch_backward(
        dprobabilities_TE.contiguous(),
        dweights_TK.contiguous(),
        dgate_T1.contiguous(),
        x_TD.contiguous(),
        weight_ED,
        gate_1D,
        probabilities_TE,
        experts_TK,
        gate_T1,
    )


@router_backward.register_fake
def _(
    dprobabilities_TE: Tensor,
    dweights_TK: Tensor,
    dgate_T1: Tensor,
    x_TD: Tensor,
    weight_ED: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    E, D = weight_ED.shape
    return x_TD.new_empty(x_TD.shape), x_TD.new_empty(E + 1, D, dtype=torch.float32)


def _rows(weight_ED: Tensor, gate_1D: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in one dtype, since a tile takes rows from either."""
    dtype = torch.promote_types(weight_ED.dtype, gate_1D.dtype)
    return weight_ED.to(dtype).contiguous(), gate_1D.to(dtype).contiguous()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    probabilities_TE, _, experts_TK, gate_T1 = output
    ctx.mark_non_differentiable(experts_TK)
    ctx.save_for_backward(*inputs[:3], probabilities_TE, experts_TK, gate_T1)


def _differentiate(
    ctx: Any, dprobabilities_TE: Tensor, dweights_TK: Tensor, _: Tensor | None, dgate_T1: Tensor
) -> tuple[Tensor, Tensor, Tensor, None]:
    kept = ctx.saved_tensors  # read once: under activation checkpointing they exist only once
    dx_TD, drows_ED = router_backward(dprobabilities_TE, dweights_TK, dgate_T1, *kept)
    weight_ED, gate_1D = kept[1:3]
    return dx_TD, drows_ED[:-1].to(weight_ED.dtype), drows_ED[-1:].to(gate_1D.dtype), None


router.register_autograd(_differentiate, setup_context=_keep)
