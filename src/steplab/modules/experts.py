"""A mixture of experts: router, routed experts and a gated shared expert."""

# B batch, T tokens (of the whole batch), D width, E experts, K chosen, F inner width
from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steplab.kernels import experts as experts_op
from steplab.kernels import grouped_mm as grouped_mm_op
from steplab.kernels.impl import AUTO


class Routing(NamedTuple):
    """What a layer's router did: all on the device, so that nobody has to wait for it."""

    load_E: Tensor  # share of the assignments that each expert got; no gradient
    importance_E: Tensor  # mean router probability of each expert
    dropped: Tensor  # share of the assignments that no expert took


class GroupedMatmul(nn.Module):
    """Rows in groups, one matrix per group; no parameters of its own."""

    op = "grouped_mm"

    def __init__(self) -> None:
        super().__init__()
        self.impl = AUTO
        self.ran = ""

    def forward(self, x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
        """Return (R, N)."""
        self.ran = grouped_mm_op.choose(self.impl, x_RK, w_EKN)
        return grouped_mm_op.grouped_mm(self.ran, x_RK, w_EKN, offsets_E)


class RoutedExperts(nn.Module):
    """E two-matrix networks with stacked weights; swiglu has a gate beside the first matrix."""

    op = "experts"

    def __init__(self, experts: int, width: int, inner: int, activation: str) -> None:
        super().__init__()
        rows = 2 * inner if activation == "swiglu" else inner
        self.w_in_EFD = nn.Parameter(torch.empty(experts, rows, width))
        self.w_out_EDF = nn.Parameter(torch.empty(experts, width, inner))
        self.activation = activation
        self.grouped_mm = GroupedMatmul()
        self.impl = AUTO
        self.ran = ""

    def forward(
        self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (output_TD, share of dropped assignments)."""
        self.ran = experts_op.choose(self.impl)
        dtype = matmul_dtype(x_TD)
        weights = experts_op.ExpertWeights(
            self.w_in_EFD.to(dtype), self.w_out_EDF.to(dtype), self.activation
        )
        # torch's grouped product is not known to autocast, so the casts are ours.
        with torch.autocast(x_TD.device.type, enabled=False):
            return experts_op.experts(
                self.ran, x_TD.to(dtype), weights_TK, experts_TK, weights, self.grouped_mm
            )


class Router(nn.Module):
    """Chooses K of E experts per token by softmax probability, in fp32 or better."""

    def __init__(self, width: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, width))
        self.chosen = chosen

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (probabilities_TE, weights_TK, experts_TK); weights are not renormalised."""
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE = F.linear(x_TD.to(dtype), self.weight.to(dtype))
            probabilities_TE = logits_TE.softmax(-1)
            weights_TK, experts_TK = probabilities_TE.topk(self.chosen, dim=-1)
        return probabilities_TE, weights_TK, experts_TK


class FeedForward(nn.Module):
    """The shared expert: the same two-matrix network, for every token."""

    def __init__(self, width: int, inner: int, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.w_in = nn.Linear(width, 2 * inner if activation == "swiglu" else inner, bias=False)
        self.w_out = nn.Linear(inner, width, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Map (T, D) to (T, D)."""
        z_TF = self.w_in(x_TD)
        if self.activation == "gelu":
            return self.w_out(F.gelu(z_TF))
        gate_TF, up_TF = z_TF.chunk(2, dim=-1)
        return self.w_out(F.silu(gate_TF) * up_TF)


class MixtureOfExperts(nn.Module):
    """Routed experts plus sigmoid(gate) times the shared expert."""

    def __init__(
        self, width: int, inner: int, shared_inner: int, experts: int, chosen: int, activation: str
    ) -> None:
        super().__init__()
        self.router = Router(width, experts, chosen)
        self.experts = RoutedExperts(experts, width, inner, activation)
        self.shared = FeedForward(width, shared_inner, activation)
        self.shared_gate = nn.Linear(width, 1, bias=False)

    def forward(self, x_BTD: Tensor, counted_BT: Tensor | None = None) -> tuple[Tensor, Routing]:
        """Return (output_BTD, what the router did); load and importance of the counted tokens."""
        x_TD = x_BTD.flatten(0, -2)
        probabilities_TE, weights_TK, experts_TK = self.router(x_TD)
        routed_TD, dropped = self.experts(x_TD, weights_TK, experts_TK)
        shared_TD = self.shared(x_TD) * self.shared_gate(x_TD).sigmoid()
        experts = torch.arange(probabilities_TE.shape[-1], device=x_TD.device)
        is_hit_TKE = experts_TK[..., None] == experts
        if counted_BT is None:
            load_E = is_hit_TKE.sum((0, 1)).to(probabilities_TE.dtype) / experts_TK.numel()
            importance_E = probabilities_TE.mean(0)
        else:
            counted_T1 = counted_BT.reshape(-1, 1).to(probabilities_TE.dtype)
            share_T1 = counted_T1 / counted_T1.sum().clamp_min(1)
            load_E = (share_T1 * is_hit_TKE.sum(1)).sum(0) / experts_TK.shape[1]
            importance_E = (share_T1 * probabilities_TE).sum(0)
        routing = Routing(load_E, importance_E, dropped)
        return (routed_TD + shared_TD).view_as(x_BTD), routing


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype a matrix product of `x` runs in: autocast's where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
