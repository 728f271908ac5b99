"""Attention's output and gradients in fp64, and those of the definition in the dtype under test.

Heads are independent, so they are taken a few at a time; and a run of queries needs only the keys
that it sees, so the score matrix is never whole. Any shape fits, only time is limited.
"""

# N heads of all sequences, T queries, D head width, C one run of queries
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from steplab.bench.op_accuracy import Accuracy, AccuracyCheck
from steplab.kernels.attention import AttentionInputs, reference

MAX_FLOPS = {"cuda": 6e12, "cpu": 1e10}  # of fp64 products: about a second
MAX_SCORES = {"cuda": 2**26, "cpu": 2**22}  # held at once
PRODUCTS = 6  # two forward, four backward
# Hopper's tensor cores cut fp32 factors to tf32 where cuBLAS, behind the peer, rounds them. A cut
# factor is 2^-11 too small on average, and every result is two products deep: 4 factors.
CUT_TO_TF32 = 4 * 2.0**-11
# out and dq sum over keys, dk and dv over queries, in fp32 whatever the dtype. Whoever adds n terms
# one after another rounds the sum so far n times, to 0.43 u rms each (u = 2^-24, half a unit of the
# last place, over a mantissa of any size). Terms of random signs lose 0.43 / sqrt(2) u sqrt(n) of
# the sum in that way, those of one sign (a softmax's denominator) 0.43 / sqrt(3), and many small
# ones behind a few large 0.43. The peer may lose a tenth: what is behind it adds blocks of terms,
# or pairs. Emulated with 16,384 to 65,536 keys, a chain of fused multiply-adds loses 0.29 to 0.32
# of u sqrt(n), 0.38 to 0.40 with its denominators, blocks of 64 lose 0.04. On an H200 cuBLAS and
# Triton lost 8.4e-7 of a causal out of 16,384 keys, where 7.1e-7 are expected of the chain alone
# and 2.4e-6 are allowed for it; 6.2e-6 of a dk over 65,536 queries, where 1.5e-5 are allowed.
SUM_UNIT = 2.0**-24
SUMMED_OVER_QUERIES = ("dk", "dv")


@dataclass(frozen=True)
class Coverage:
    """How much of a shape is checked: `heads` of all, at `context` positions."""

    heads: int
    context: int


def coverage(heads: int, context: int, width: int, device: str) -> Coverage:
    """Return as many heads as can be checked in time; if not even one can, at a shorter context."""
    limit = MAX_FLOPS[device]

    def cost(length: int) -> float:
        return PRODUCTS * 2.0 * width * length * length / 2

    while cost(context) > limit:
        context = max(1, context // 2)
    return Coverage(max(1, min(heads, int(limit / cost(context)))), context)


def check_heads(
    inputs: Mapping[str, Tensor], actual: Mapping[str, Tensor], causal: bool, heads: int
) -> list[Accuracy]:
    """Compare `actual` (out, dq, dk, dv) with fp64 in `heads` heads spread over all.

    `inputs` are q, k, v and dout, all (B, H, T, D).
    """
    flat_in = {name: x.detach().flatten(0, 1) for name, x in inputs.items()}
    flat_out = {name: x.flatten(0, 1) for name, x in actual.items()}
    N, T, _ = flat_in["q"].shape
    device = flat_in["q"].device
    chosen = torch.linspace(0, N - 1, heads, device=device).round().long()
    at_once = max(1, MAX_SCORES[device.type] // (T * T))
    slack = recompute_slack(flat_in["q"], flat_in["k"])
    tf32 = torch.get_float32_matmul_precision() != "highest"
    cut = CUT_TO_TF32 if tf32 and flat_in["q"].dtype == torch.float32 else 0.0
    checks = {name: AccuracyCheck(name, cut if name == "out" else cut + slack) for name in actual}
    drift = {name: sum_slack(T, causal, name).to(device) for name in actual}
    for index_N in chosen.split(at_once):
        some = {name: x[index_N] for name, x in flat_in.items()}
        peer = gradients(some, causal, flat_in["q"].dtype)
        truth = gradients(some, causal, torch.float64)
        for name, check in checks.items():
            check.add(flat_out[name][index_N], peer[name], truth[name], drift[name])
    return [check.result() for check in checks.values()]


def sum_slack(T: int, causal: bool, name: str) -> Tensor:
    """Return what a chain of additions may lose of every row of a result, as a share (T, 1)."""
    terms_T = torch.arange(1, T + 1) if causal else torch.full((T,), T)
    if name in SUMMED_OVER_QUERIES:
        terms_T = terms_T.flip(0)  # the last key is seen by one query
    return SUM_UNIT * terms_T.double().sqrt()[:, None]


def recompute_slack(q_NTD: Tensor, k_NTD: Tensor) -> float:
    """Return what a backward may lose that computes the weights again, as flash kernels do.

    A weight is exp(score - lse), and lse is kept in fp32: its rounding, half an eps times lse, is a
    relative error of all weights. No lse exceeds log T + |q| |k| / sqrt(D).
    """
    longest_q, longest_k = (float(x.float().norm(dim=-1).max()) for x in (q_NTD, k_NTD))
    _, T, D = k_NTD.shape
    lse = math.log(T) + longest_q * longest_k / math.sqrt(D)
    return torch.finfo(torch.float32).eps / 2 * lse


def gradients(inputs: Mapping[str, Tensor], causal: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return out, dq, dk and dv, each (N, T, D), by the definition in `dtype`."""
    q_NTD, k_NTD, v_NTD, dout_NTD = (inputs[name].to(dtype) for name in ("q", "k", "v", "dout"))
    wide = torch.promote_types(dtype, torch.float32)
    out_NTD, dq_NTD = torch.empty_like(q_NTD), torch.empty_like(q_NTD)
    dk_NTD, dv_NTD = (torch.zeros_like(x, dtype=wide) for x in (k_NTD, v_NTD))
    T = q_NTD.shape[1]
    rows = max(1, MAX_SCORES[q_NTD.device.type] // (T * len(q_NTD)))
    for begin in range(0, T, rows):
        end = min(begin + rows, T)
        keys = end if causal else T
        parts = (q_NTD[None, :, begin:end], k_NTD[None, :, :keys], v_NTD[None, :, :keys])
        q, k, v = (x.detach().requires_grad_() for x in parts)
        out_1NCD = reference.attention(AttentionInputs(q, k, v, causal))
        dq, dk, dv = torch.autograd.grad(out_1NCD, (q, k, v), dout_NTD[None, :, begin:end])
        out_NTD[:, begin:end], dq_NTD[:, begin:end] = out_1NCD.detach()[0], dq[0]
        dk_NTD[:, :keys] += dk[0]
        dv_NTD[:, :keys] += dv[0]
    return {"out": out_NTD, "dq": dq_NTD, "dk": dk_NTD.to(dtype), "dv": dv_NTD.to(dtype)}
