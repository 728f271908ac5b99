"""One kernel each way, exact to fp32 on bf16 tensor cores.

A number in fp32 is the sum of three in bf16, and a product of two numbers in bf16 is exact in the
fp32 that tensor cores add up in. UPCAST: Triton's interpreter multiplies bf16 wrongly, so there the
products are fp32's.
"""

# R tokens of the tile, C columns of one step, E experts and then the gate, padded to a power of two
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from steplab.kernels._triton_rounding import narrow


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
    places_RE = row_R.to(tl.int64)[:, None] * EXPERTS + expert_E[None, :]
    tl.store(probabilities + places_RE, left_RE, mask=inside_R[:, None] & known_1E)
    left_RE = tl.where(known_1E, left_RE, -1.0)
    for chosen in tl.static_range(CHOSEN):
        most_R, best_R = tl.max(left_RE, 1, return_indices=True)
        best_R = tl.minimum(best_R, EXPERTS - 1)  # whatever NaN leads to, it is an expert
        place_R = row_R.to(tl.int64) * CHOSEN + chosen
        tl.store(weights + place_R, most_R, mask=inside_R)
        tl.store(experts + place_R, best_R.to(tl.int64), mask=inside_R)
        left_RE = tl.where(expert_E[None, :] == best_R[:, None], -1.0, left_RE)


@triton.jit
def _dlogits(
    dprobabilities, dweights, dgates, probabilities, experts, gates, row_R, inside_R, expert_E,
    EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
):
    """Return the gradient of the logits; the weights are a choice of the probabilities."""
    inside_RE = inside_R[:, None] & (expert_E < EXPERTS)[None, :]
    places_RE = row_R.to(tl.int64)[:, None] * EXPERTS + expert_E[None, :]
    p_RE = tl.load(probabilities + places_RE, mask=inside_RE, other=0.0)
    dp_RE = tl.load(dprobabilities + places_RE, mask=inside_RE, other=0.0)
    for chosen in tl.static_range(CHOSEN):
        place_R = row_R.to(tl.int64) * CHOSEN + chosen
        expert_R = tl.load(experts + place_R, mask=inside_R, other=-1).to(tl.int32)
        dweight_R = tl.load(dweights + place_R, mask=inside_R, other=0.0)
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
