"""ComplexEMA as a scan in Triton: any length, states in fp32, coefficients from fp64.

Forward and backward are one op each, `steplab::ema_scan` and its gradient, which torch.compile does
not look into. How the kernels are cut is a fixed table, so that the same input always runs the same
way; `benchmarks/ema_kernels.py` measures others.
"""

# B batch, L steps of time, D channels, N modes in G groups of P, C chunks
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from steplab.kernels.ema import EMAParameters
from steplab.kernels.ema._scan_kernels import (
    ema_carry_kernel,
    ema_gradients_kernel,
    ema_outputs_kernel,
    ema_sums_kernel,
)
from steplab.kernels.ema._scan_tables import ema_chain_kernel, ema_tables_kernel
from steplab.kernels.triton_runtime import (
    INTERPRETED,
    on_device_of,
    refuse_batch,
    refuse_device,
    refuse_dtype,
    triton,
)

NEEDS_GPU = True
MAX_MODES = 32  # twice as many would spill their states from registers at every step
MAX_CHUNKS = 32  # their states are carried one after another
TABLE_LANES = 8
CARRY_LANES = 128
T = TypeVar("T")


@dataclass(frozen=True)
class ScanTiling:
    """The shape of the three kernels."""

    chunk: int = 256  # steps of time per program, at least
    lanes: int = 32  # channels per program
    warps: int = 1
    sum_steps: int = 4  # steps that the chunk sums advance at once
    sum_block: int = 16  # steps that the chunk sums load at once; a multiple of `sum_steps`
    output_steps: int = 2  # likewise for the outputs
    output_block: int = 8
    gradient_block: int = 4

    def chunk_length(self, length: int) -> int:
        """Return the steps of a chunk for a sequence of `length` steps."""
        chunk = self.chunk
        while chunk * MAX_CHUNKS < length:
            chunk *= 2
        return chunk


# Small enough that short tests have several chunks, and blocks with a remainder.
INTERPRETED_TILING = ScanTiling(chunk=8, lanes=4, sum_block=4, output_block=4, gradient_block=2)
GPU_TILING = ScanTiling()


def tiling_for(modes: int, interpreted: bool) -> ScanTiling:
    """Return the tiling for a number of modes. Beyond 16 the powers do not fit into registers."""
    chosen = INTERPRETED_TILING if interpreted else GPU_TILING
    if modes > 16:
        chosen = replace(chosen, sum_steps=1, output_steps=1)
    return chosen


def packed(modes: int) -> tuple[int, int]:
    """Return how many groups of how many modes the kernels use: `modes` in all, or a few more."""
    per_group = min(4, 1 << (modes - 1).bit_length())
    return -(-modes // per_group), per_group


class Kept(NamedTuple, Generic[T]):
    """What a forward leaves for its backward."""

    tables_K2GDP: T
    entering_BC2GDP: T  # the state before each chunk


def _chunks(tiling: ScanTiling, length: int) -> tuple[int, int, int]:
    """Return the length of a chunk, the length of the last one, and how many there are."""
    chunk = tiling.chunk_length(length)
    chunks = triton.cdiv(length, chunk)
    return chunk, length - (chunks - 1) * chunk, chunks


def _table_rows(tiling: ScanTiling) -> int:
    return tiling.sum_steps + tiling.output_steps + 4


def tables_by(
    tiling: ScanTiling, length: int, parameters: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the complex rows (K, 2, G, D, P) and the near lags (steps, D); see the kernel."""
    D, N = parameters[0].shape
    G, P = packed(N)
    tables_K2GDP = parameters[0].new_empty(_table_rows(tiling), 2, G, D, P)
    near_RD = parameters[0].new_empty(tiling.output_steps, D)
    chunk, tail, _ = _chunks(tiling, length)
    ema_tables_kernel[(triton.cdiv(D, TABLE_LANES),)](
        *parameters, tables_K2GDP, near_RD, chunk, tail, D=D, N=N, G=G, P=P,
        M=triton.next_power_of_2(G * P), POWERS=tiling.sum_steps, READS=tiling.output_steps,
        LANES=TABLE_LANES, num_warps=1,
    )  # fmt: skip
    return tables_K2GDP, near_RD


def sums_by(
    tiling: ScanTiling,
    x_BLD: Tensor,
    tables_K2GDP: Tensor,
    backwards: bool,
    wants_last: bool = False,
) -> Tensor:
    """Return the sum of each chunk (B, C, 2, G, D, P); of a single one only the end reads it."""
    (B, L, D), (G, _, P) = x_BLD.shape, tables_K2GDP.shape[2:]
    chunk, _, chunks = _chunks(tiling, L)
    shape = (B, chunks, 2, G, D, P)
    is_read = chunks > 1 or wants_last
    # The carry computes with what is never read, too: zeros there, not whatever lay in memory.
    sums_BC2GDP = tables_K2GDP.new_empty(shape) if is_read else tables_K2GDP.new_zeros(shape)
    if is_read:
        ema_sums_kernel[(triton.cdiv(D, tiling.lanes), chunks, B)](
            x_BLD, tables_K2GDP, sums_BC2GDP, L, chunk, D=D, G=G, P=P, R=tiling.sum_steps,
            U=tiling.sum_block, LANES=tiling.lanes, REVERSED=backwards, num_warps=tiling.warps,
        )  # fmt: skip
    return sums_BC2GDP


def carry(
    sums_BC2GDP: Tensor,
    start_B2ND: Tensor | None,
    tables_K2GDP: Tensor,
    backwards: bool,
    last_B2ND: Tensor | None = None,
) -> Tensor:
    """Turn the sums, in place, into the state that each chunk begins with; write the last one."""
    B, chunks, _, G, D, P = sums_BC2GDP.shape
    outside = start_B2ND if last_B2ND is None else last_B2ND
    ema_carry_kernel[(triton.cdiv(G * D * P, CARRY_LANES), B)](
        sums_BC2GDP, start_B2ND, tables_K2GDP[-3:], last_B2ND, chunks, D=D,
        N=G * P if outside is None else outside.shape[2], G=G, P=P, LANES=CARRY_LANES, GROUP=8,
        REVERSED=backwards, HAS_START=start_B2ND is not None, HAS_LAST=last_B2ND is not None,
        num_warps=4,
    )  # fmt: skip
    return sums_BC2GDP


def outputs_by(
    tiling: ScanTiling, x_BLD: Tensor, tables: tuple[Tensor, Tensor], entering_BC2GDP: Tensor
) -> Tensor:
    """Return the outputs."""
    (B, L, D), (G, _, P) = x_BLD.shape, entering_BC2GDP.shape[3:]
    chunk, _, chunks = _chunks(tiling, L)
    y_BLD = torch.empty_like(x_BLD)
    ema_outputs_kernel[(triton.cdiv(D, tiling.lanes), chunks, B)](
        x_BLD, *tables, entering_BC2GDP, y_BLD, L, chunk, D=D, G=G, P=P, POWERS=tiling.sum_steps,
        R=tiling.output_steps, U=tiling.output_block, LANES=tiling.lanes, num_warps=tiling.warps,
    )  # fmt: skip
    return y_BLD


def forward_by(
    tiling: ScanTiling,
    x_BLD: Tensor,
    parameters: Sequence[Tensor],
    state_B2ND: Tensor | None,
    wants_last: bool,
) -> tuple[Tensor, Tensor, Kept[Tensor]]:
    """Return the outputs, the last state (empty unless wanted) and what the backward needs.

    `parameters` are alpha, delta, theta, gamma and omega; everything is contiguous.
    """
    (B, L, D), N = x_BLD.shape, parameters[0].shape[1]
    tables = tables_by(tiling, L, parameters)
    last_B2ND = tables[0].new_empty(B if wants_last else 0, 2, N, D)
    sums_BC2GDP = sums_by(tiling, x_BLD, tables[0], backwards=False, wants_last=wants_last)
    wanted = last_B2ND if wants_last else None
    entering_BC2GDP = carry(sums_BC2GDP, state_B2ND, tables[0], backwards=False, last_B2ND=wanted)
    y_BLD = outputs_by(tiling, x_BLD, tables, entering_BC2GDP)
    return y_BLD, last_B2ND, Kept(tables[0], entering_BC2GDP)


def gradients_by(
    tiling: ScanTiling,
    dy_BLD: Tensor,
    x_BLD: Tensor,
    omega_D: Tensor,
    kept: Kept[Tensor],
    weights_2GDP: Tensor,
    after_B2ND: Tensor | None,
    has_start: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, the sums over everything (4 G P + 1, D) and the gradient of the first state.

    `weights_2GDP` is c, or whatever the reversed states are read out by; `after_B2ND` is added to
    them at the last step.
    """
    B, L, D = x_BLD.shape
    tables_K2GDP, entering_BC2GDP = kept
    G, _, P = tables_K2GDP.shape[2:]
    chunk, _, chunks = _chunks(tiling, L)
    sums_BC2GDP = sums_by(tiling, dy_BLD, tables_K2GDP, backwards=True)
    arriving_BC2GDP = carry(sums_BC2GDP, after_B2ND, tables_K2GDP, backwards=True)
    dx_BLD = torch.empty_like(x_BLD)
    partial_CRD = tables_K2GDP.new_empty(B * chunks, 4 * G * P + 1, D)
    dstate_B2GDP = tables_K2GDP.new_empty(B if has_start else 0, 2, G, D, P)
    ema_gradients_kernel[(triton.cdiv(D, tiling.lanes), chunks, B)](
        x_BLD, dy_BLD, tables_K2GDP, weights_2GDP, omega_D, entering_BC2GDP, arriving_BC2GDP,
        dx_BLD, partial_CRD, dstate_B2GDP, L, chunk, D=D, G=G, P=P, U=tiling.gradient_block,
        LANES=tiling.lanes, HAS_START=has_start, HAS_AFTER=after_B2ND is not None,
        num_warps=tiling.warps,
    )  # fmt: skip
    return dx_BLD, partial_CRD.sum(0), dstate_B2GDP


def _chain(parameters: Sequence[Tensor], sums_RD: Tensor) -> list[Tensor]:
    """Return the gradients of alpha, delta, theta and gamma."""
    D, N = parameters[0].shape
    G, P = packed(N)
    gradients = [torch.empty_like(p) for p in parameters[:4]]
    ema_chain_kernel[(triton.cdiv(D, TABLE_LANES),)](
        *parameters[:4], sums_RD, *gradients, D=D, N=N, G=G, P=P, M=triton.next_power_of_2(G * P),
        LANES=TABLE_LANES, num_warps=1,
    )  # fmt: skip
    return gradients


def kept_shapes(batch: int, length: int, width: int, modes: int) -> Kept[tuple[int, ...]]:
    """Return the shapes of what a forward leaves."""
    tiling, (G, P) = tiling_for(modes, INTERPRETED), packed(modes)
    states = (2, G, width, P)
    return Kept((_table_rows(tiling), *states), (batch, _chunks(tiling, length)[2], *states))


def tiling_of(parameters: Sequence[Tensor]) -> ScanTiling:
    """Return the tiling for these parameters."""
    return tiling_for(parameters[0].shape[1], INTERPRETED)


def backward_by(
    tiling: ScanTiling,
    dy_BLD: Tensor | None,
    dlast_B2ND: Tensor | None,
    x_BLD: Tensor,
    parameters: Sequence[Tensor],
    kept: Kept[Tensor],
    has_start: bool,
) -> tuple[Tensor, ...]:
    """Return the gradients of x, alpha, delta, theta, gamma, omega and the first state.

    The scan is linear in what arrives from the outputs and from the last state, and each has its
    own read-out. So a gradient of the last state is a second run, of that alone.
    """
    omega_D, N = parameters[4], parameters[0].shape[1]
    G, P = packed(N)
    weights_2GDP = kept.tables_K2GDP[tiling.sum_steps + tiling.output_steps]
    rest = (x_BLD, omega_D, kept)
    dy_BLD = torch.zeros_like(x_BLD) if dy_BLD is None else dy_BLD
    dx_BLD, sums_RD, dstate_B2GDP = gradients_by(
        tiling, dy_BLD, *rest, weights_2GDP, None, has_start
    )
    if dlast_B2ND is not None:
        after_B2ND = torch.stack([dlast_B2ND[:, 0], -dlast_B2ND[:, 1]], 1)
        ones_2GDP = torch.zeros_like(weights_2GDP)
        ones_2GDP[0] = 1.0
        more = gradients_by(
            tiling, torch.zeros_like(x_BLD), *rest, ones_2GDP, after_B2ND, has_start
        )
        dx_BLD, dstate_B2GDP = dx_BLD + more[0], dstate_B2GDP + more[2]
        sums_RD[: 2 * G * P] += more[1][: 2 * G * P]
    d_omega = sums_RD[4 * G * P].to(omega_D.dtype)
    dstate_B2ND = dstate_B2GDP.transpose(3, 4).flatten(2, 3)[:, :, :N].contiguous()
    return dx_BLD, *_chain(parameters, sums_RD), d_omega, dstate_B2ND


def _fp32(x: Tensor) -> Tensor:
    return x.detach().float().contiguous()


@torch.library.custom_op("steplab::ema_scan", mutates_args=())
def ema_scan(
    x: Tensor,
    alpha: Tensor,
    delta: Tensor,
    theta: Tensor,
    gamma: Tensor,
    omega: Tensor,
    state: Tensor | None,
    wants_last: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y, the last state, and the tables and states that a backward needs.

    Tensors nobody wants have no elements.
    """

    parameters = [_fp32(p) for p in (alpha, delta, theta, gamma, omega)]
    first = None if state is None else _fp32(state)
    tiling = tiling_of(parameters)
    with on_device_of(x):
        y, last, kept = forward_by(tiling, x.contiguous(), parameters, first, wants_last)
    return y, last, *kept


@ema_scan.register_fake
def _(x: Tensor, alpha: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wants_last = rest[-1]
    (B, L, D), N = x.shape, alpha.shape[1]
    last = alpha.new_empty(B if wants_last else 0, 2, N, D, dtype=torch.float32)
    shapes = kept_shapes(B, L, D, N)
    tables, entering = (alpha.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return x.new_empty(B, L, D), last, tables, entering


@torch.library.custom_op("steplab::ema_scan_backward", mutates_args=())
def ema_scan_backward(
    dy: Tensor | None,
    dlast: Tensor | None,
    x: Tensor,
    alpha: Tensor,
    delta: Tensor,
    theta: Tensor,
    gamma: Tensor,
    omega: Tensor,
    tables: Tensor,
    entering: Tensor,
    has_start: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, the five parameters and the first state (maybe empty)."""
    stored = (alpha, delta, theta, gamma, omega)
    parameters = [_fp32(p) for p in stored]
    with on_device_of(x):
        dx, *gradients, dstate = backward_by(
            tiling_of(parameters),
            None if dy is None else dy.contiguous(),
            None if dlast is None else _fp32(dlast),
            x.contiguous(),
            parameters,
            Kept(tables, entering),
            has_start,
        )
    cast = [g.to(p.dtype) for g, p in zip(gradients, stored, strict=True)]
    return dx, cast[0], cast[1], cast[2], cast[3], cast[4], dstate


@ema_scan_backward.register_fake
def _(dy: Tensor | None, dlast: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
    x, alpha, *_, tables, _, has_start = inputs
    B, (D, N) = x.shape[0], alpha.shape
    state = tables.new_empty(B if has_start else 0, 2, N, D)
    return *(p.new_empty(p.shape) for p in inputs[:6]), state


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, state, wants_last = inputs
    ctx.has_start, ctx.wants_last = state is not None, wants_last
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(*tensors, *output[2:])


def _differentiate(
    ctx: Any, dy: Tensor | None, dlast: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    if not ctx.wants_last:
        dlast = None
    *gradients, dstate = ema_scan_backward(dy, dlast, *ctx.saved_tensors, ctx.has_start)
    return *gradients, dstate if ctx.has_start else None, None


ema_scan.register_autograd(_differentiate, setup_context=_keep)


def ema(
    x_BLD: Tensor, parameters: EMAParameters, state_B2ND: Tensor | None, wants_last: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs and, if wanted, the last state."""
    y_BLD, last_B2ND, *_ = ema_scan(x_BLD, *parameters, state_B2ND, wants_last)
    return y_BLD, last_B2ND if wants_last else None


def refuse(x_BLD: Tensor, parameters: EMAParameters) -> str:
    """Return why it cannot run, or ""."""
    reason = refuse_device(x_BLD) or refuse_batch(x_BLD) or refuse_dtype(x_BLD)
    if reason:
        return reason
    if parameters.alpha_DN.shape[1] > MAX_MODES:
        return f"needs at most {MAX_MODES} modes, not {parameters.alpha_DN.shape[1]}"
    return ""
