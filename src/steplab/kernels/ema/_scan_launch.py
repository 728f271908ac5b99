"""Launches the kernels of the scan: tables, chunk sums and outputs; and those of the gradients."""

# B batch, L steps of time, D channels, N modes, C chunks
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from steplab.kernels._triton import INTERPRETED, on_device_of
from steplab.kernels.ema._scan_backward import ema_gradients_kernel
from steplab.kernels.ema._scan_config import Cut, cut_for
from steplab.kernels.ema._scan_forward import (
    ema_carry_kernel,
    ema_outputs_kernel,
    ema_sums_kernel,
)
from steplab.kernels.ema._scan_tables import ema_chain_kernel, ema_tables_kernel

TABLE_LANES = 32
CARRY_LANES = 128


class Kept(NamedTuple):
    """What a forward leaves for its backward."""

    tables_K2ND: Tensor
    entering_BC2ND: Tensor  # the state before each chunk


def _chunks(cut: Cut, length: int) -> tuple[int, int, int]:
    """Return the length of a chunk, the length of the last one, and how many there are."""
    chunk = cut.chunk_length(length)
    chunks = triton.cdiv(length, chunk)
    return chunk, length - (chunks - 1) * chunk, chunks


def tables_by(cut: Cut, length: int, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the complex rows (K, 2, N, D) and the near lags (steps, D); see the kernel."""
    D, N = parameters[0].shape
    rows = cut.sum_steps + cut.output_steps + 3
    tables_K2ND = parameters[0].new_empty(rows, 2, N, D)
    near_RD = parameters[0].new_empty(cut.output_steps, D)
    chunk, tail, _ = _chunks(cut, length)
    ema_tables_kernel[(triton.cdiv(D, TABLE_LANES),)](
        *(*parameters, tables_K2ND, near_RD, chunk, tail),
        D=D,
        N=N,
        M=triton.next_power_of_2(N),
        POWERS=cut.sum_steps,
        READS=cut.output_steps,
        LANES=TABLE_LANES,
        num_warps=4,
    )
    return tables_K2ND, near_RD


def sums_by(cut: Cut, x_BLD: Tensor, tables_K2ND: Tensor, backwards: bool) -> Tensor:
    """Return the sum of each chunk (B, C, 2, N, D); of a single chunk nobody reads it."""
    (B, L, D), N = x_BLD.shape, tables_K2ND.shape[2]
    chunk, _, chunks = _chunks(cut, L)
    sums_BC2ND = tables_K2ND.new_empty(B, chunks, 2, N, D)
    if chunks > 1:
        ema_sums_kernel[(triton.cdiv(D, cut.lanes), chunks, B)](
            *(x_BLD, tables_K2ND, sums_BC2ND, L, chunk),
            D=D,
            N=N,
            R=cut.sum_steps,
            U=cut.sum_block,
            LANES=cut.lanes,
            REVERSED=backwards,
            num_warps=cut.warps,
        )
    return sums_BC2ND


def carry(
    sums_BC2ND: Tensor, start_B2ND: Tensor | None, tables_K2ND: Tensor, backwards: bool
) -> Tensor:
    """Turn the sums, in place, into the state that each chunk begins with."""
    B, chunks, _, N, D = sums_BC2ND.shape
    ema_carry_kernel[(triton.cdiv(N * D, CARRY_LANES), B)](
        *(sums_BC2ND, start_B2ND, tables_K2ND[-2:], chunks),
        SIZE=N * D,
        LANES=CARRY_LANES,
        GROUP=8,
        REVERSED=backwards,
        HAS_START=start_B2ND is not None,
        num_warps=4,
    )
    return sums_BC2ND


def outputs_by(
    cut: Cut,
    x_BLD: Tensor,
    tables: tuple[Tensor, Tensor],
    entering_BC2ND: Tensor,
    wants_last: bool,
) -> tuple[Tensor, Tensor]:
    """Return the outputs and the last state, empty unless wanted."""
    (B, L, D), N = x_BLD.shape, entering_BC2ND.shape[3]
    chunk, _, chunks = _chunks(cut, L)
    y_BLD = torch.empty_like(x_BLD)
    last_B2ND = entering_BC2ND.new_empty(B if wants_last else 0, 2, N, D)
    ema_outputs_kernel[(triton.cdiv(D, cut.lanes), chunks, B)](
        *(x_BLD, *tables, entering_BC2ND, y_BLD, last_B2ND, L, chunk),
        D=D,
        N=N,
        POWERS=cut.sum_steps,
        R=cut.output_steps,
        U=cut.output_block,
        SUMS=cut.sums,
        LANES=cut.lanes,
        HAS_LAST=wants_last,
        num_warps=cut.warps,
    )
    return y_BLD, last_B2ND


def forward_by(
    cut: Cut,
    x_BLD: Tensor,
    parameters: Sequence[Tensor],
    state_B2ND: Tensor | None,
    wants_last: bool,
) -> tuple[Tensor, Tensor, Kept]:
    """Return the outputs, the last state (empty unless wanted) and what the backward needs.

    `parameters` are alpha, delta, theta, gamma and omega; everything is contiguous.
    """
    tables = tables_by(cut, x_BLD.shape[1], parameters)
    sums_BC2ND = sums_by(cut, x_BLD, tables[0], backwards=False)
    entering_BC2ND = carry(sums_BC2ND, state_B2ND, tables[0], backwards=False)
    y_BLD, last_B2ND = outputs_by(cut, x_BLD, tables, entering_BC2ND, wants_last)
    return y_BLD, last_B2ND, Kept(tables[0], entering_BC2ND)


def gradients_by(
    cut: Cut,
    dy_BLD: Tensor,
    x_BLD: Tensor,
    omega_D: Tensor,
    kept: Kept,
    weights_2ND: Tensor,
    after_B2ND: Tensor | None,
    has_start: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, the sums over everything (4 N + 1, D) and the gradient of the first state.

    `weights_2ND` is c, or whatever the reversed states are read out by; `after_B2ND` is added to
    them at the last step.
    """
    B, L, D = x_BLD.shape
    tables_K2ND, entering_BC2ND = kept
    N = tables_K2ND.shape[2]
    chunk, _, chunks = _chunks(cut, L)
    sums_BC2ND = sums_by(cut, dy_BLD, tables_K2ND, backwards=True)
    arriving_BC2ND = carry(sums_BC2ND, after_B2ND, tables_K2ND, backwards=True)
    dx_BLD = torch.empty_like(x_BLD)
    partial_PRD = tables_K2ND.new_empty(B * chunks, 4 * N + 1, D)
    dstate_B2ND = tables_K2ND.new_empty(B if has_start else 0, 2, N, D)
    ema_gradients_kernel[(triton.cdiv(D, cut.lanes), chunks, B)](
        *(x_BLD, dy_BLD, tables_K2ND, weights_2ND, omega_D, entering_BC2ND, arriving_BC2ND),
        *(dx_BLD, partial_PRD, dstate_B2ND, L, chunk),
        D=D,
        N=N,
        U=cut.gradient_block,
        SUMS=cut.sums,
        LANES=cut.lanes,
        HAS_START=has_start,
        HAS_AFTER=after_B2ND is not None,
        num_warps=cut.warps,
    )
    return dx_BLD, partial_PRD.sum(0), dstate_B2ND


def _chain(parameters: Sequence[Tensor], sums_RD: Tensor) -> list[Tensor]:
    """Return the gradients of alpha, delta, theta and gamma."""
    D, N = parameters[0].shape
    gradients = [torch.empty_like(p) for p in parameters[:4]]
    ema_chain_kernel[(triton.cdiv(D, TABLE_LANES),)](
        *(*parameters[:4], sums_RD, *gradients),
        D=D,
        N=N,
        M=triton.next_power_of_2(N),
        LANES=TABLE_LANES,
        num_warps=4,
    )
    return gradients


def kept_sizes(modes: int, length: int) -> tuple[int, int]:
    """Return how many complex rows the tables have, and how many chunks `length` steps make."""
    cut = cut_for(modes, INTERPRETED)
    return cut.sum_steps + cut.output_steps + 3, _chunks(cut, length)[2]


def cut_of(parameters: Sequence[Tensor]) -> Cut:
    """Return the cut for these parameters."""
    return cut_for(parameters[0].shape[1], INTERPRETED)


def forward(
    x_BLD: Tensor,
    parameters: Sequence[Tensor],
    state_B2ND: Tensor | None,
    wants_last: bool,
) -> tuple[Tensor, Tensor, Kept]:
    """Return outputs, last state and what the backward needs, by the cut of the table."""
    with on_device_of(x_BLD):
        return forward_by(cut_of(parameters), x_BLD, parameters, state_B2ND, wants_last)


def backward_by(
    cut: Cut,
    dy_BLD: Tensor | None,
    dlast_B2ND: Tensor | None,
    x_BLD: Tensor,
    parameters: Sequence[Tensor],
    kept: Kept,
    has_start: bool,
) -> tuple[Tensor, ...]:
    """Return the gradients of x, alpha, delta, theta, gamma, omega and the first state.

    The scan is linear in what arrives from the outputs and from the last state, and each has its
    own read-out; so a gradient of the last state is a second run, with nothing but that.
    """
    omega_D, N = parameters[4], parameters[0].shape[1]
    weights_2ND = kept.tables_K2ND[cut.sum_steps + cut.output_steps]
    rest = (x_BLD, omega_D, kept)
    dy_BLD = torch.zeros_like(x_BLD) if dy_BLD is None else dy_BLD
    dx_BLD, sums_RD, dstate_B2ND = gradients_by(cut, dy_BLD, *rest, weights_2ND, None, has_start)
    if dlast_B2ND is not None:
        after_B2ND = torch.stack([dlast_B2ND[:, 0], -dlast_B2ND[:, 1]], 1)
        ones_2ND = torch.stack([torch.ones_like(weights_2ND[0]), torch.zeros_like(weights_2ND[0])])
        more = gradients_by(cut, torch.zeros_like(x_BLD), *rest, ones_2ND, after_B2ND, has_start)
        dx_BLD, dstate_B2ND = dx_BLD + more[0], dstate_B2ND + more[2]
        sums_RD[: 2 * N] += more[1][: 2 * N]
    d_omega = sums_RD[4 * N].to(omega_D.dtype)
    return dx_BLD, *_chain(parameters, sums_RD), d_omega, dstate_B2ND


def backward(
    dy_BLD: Tensor | None,
    dlast_B2ND: Tensor | None,
    x_BLD: Tensor,
    parameters: Sequence[Tensor],
    kept: Kept,
    has_start: bool,
) -> tuple[Tensor, ...]:
    """Return all gradients, by the cut of the table."""
    with on_device_of(x_BLD):
        inputs = (dy_BLD, dlast_B2ND, x_BLD, parameters, kept, has_start)
        return backward_by(cut_of(parameters), *inputs)
