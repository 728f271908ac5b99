"""A mixture of experts: router, routed experts and a gated shared expert."""

# B batch, T tokens (of the whole batch), D width, E experts, K chosen, F inner width
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from steplab.kernels import experts as experts_op
from steplab.kernels import feed_forward as feed_forward_op
from steplab.kernels import grouped_mm as grouped_mm_op
from steplab.kernels import router as router_op
from steplab.kernels.dispatch import AUTO
from steplab.modules.precision import matmul_dtype, without_autocast


class Routing(NamedTuple):
    """What a layer's router did, all on the device, so that nothing waits for it."""

    load_E: Tensor  # share of the assignments that each expert got; without gradient
    importance_E: Tensor  # mean router probability of each expert
    dropped: Tensor  # share of the assignments that no expert took


class GroupedMatmul(nn.Module):
    """Rows in groups, one matrix per group; no parameters of its own."""

    op = "grouped_mm"

    def __init__(self) -> None:
        super().__init__()
        self.impl = AUTO
        self.ran = ""

    def choose(self, x_RK: Tensor, w_EKN: Tensor) -> str:
        """Return the implementation that multiplies these, and note that it ran."""
        self.ran = grouped_mm_op.choose(self.impl, x_RK, w_EKN)
        return self.ran

    def forward(self, x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
        """Return (R, N)."""
        return grouped_mm_op.grouped_mm(self.choose(x_RK, w_EKN), x_RK, w_EKN, offsets_E)


# Rows through their experts: (output, share of dropped assignments).
ComputeExperts = Callable[
    [experts_op.RoutedTokens, experts_op.ExpertWeights], tuple[Tensor, Tensor]
]


class Exchange(Protocol):
    """Where the experts are spread over several ranks: brings rows to them, and results back."""

    def __call__(
        self,
        tokens: experts_op.RoutedTokens,
        weights: experts_op.ExpertWeights,
        compute: ComputeExperts,
    ) -> Tensor:
        """Return output_TD; `compute` runs the experts of this rank."""
        ...


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
        self.exchange: Exchange | None = None
        self.impl = AUTO
        self.ran = ""

    def forward(
        self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (output_TD, share of dropped assignments)."""
        dtype = matmul_dtype(x_TD)
        tokens = experts_op.RoutedTokens(x_TD.to(dtype), weights_TK, experts_TK)
        weights = experts_op.ExpertWeights(self.w_in_EFD, self.w_out_EDF, self.activation)
        # torch's grouped product is not known to autocast, so the casts are ours.
        with without_autocast(x_TD):
            if self.exchange is not None:
                return self.exchange(tokens, weights, self.compute), weights_TK.new_zeros(())
            return self.compute(tokens, weights.to(dtype))

    def compute(
        self, tokens: experts_op.RoutedTokens, weights: experts_op.ExpertWeights
    ) -> tuple[Tensor, Tensor]:
        """Return (output, share of dropped assignments) of experts that are all here."""
        self.ran = experts_op.choose(self.impl, tokens.x_TD, weights)
        return experts_op.experts(self.ran, *tokens, weights, self.grouped_mm)


class Router(nn.Module):
    """Chooses K of E experts per token by softmax probability, in fp32 or better.

    The shared expert's gate reads the same tokens, so it is computed here too.
    """

    op = "router"

    def __init__(self, width: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, width))
        self.chosen = chosen
        self.impl = AUTO
        self.ran = ""

    def forward(self, x_TD: Tensor, gate_1D: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (probabilities_TE, weights_TK, experts_TK, gate_T1); weights not renormalized."""
        self.ran = router_op.choose(self.impl, x_TD, self.weight)
        with without_autocast(x_TD):
            return router_op.router(self.ran, x_TD, self.weight, gate_1D, self.chosen)


class FeedForward(nn.Module):
    """The shared expert: the same two-matrix network, for every token."""

    op = "feed_forward"

    def __init__(self, width: int, inner: int, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.w_in = nn.Linear(width, 2 * inner if activation == "swiglu" else inner, bias=False)
        self.w_out = nn.Linear(inner, width, bias=False)
        self.impl = AUTO
        self.ran = ""

    def forward(self, x_TD: Tensor, weights_T1: Tensor | None = None) -> Tensor:
        """Map (T, D) to (T, D), times a weight per token if given."""
        dtype = matmul_dtype(x_TD)
        inputs = (x_TD.to(dtype), self.w_in.weight.to(dtype), self.w_out.weight.to(dtype))
        self.ran = feed_forward_op.choose(self.impl, *inputs)
        # Not every implementation is known to autocast, so the casts are ours.
        with without_autocast(x_TD):
            return feed_forward_op.feed_forward(self.ran, *inputs, self.activation, weights_T1)


class MixtureOfExperts(nn.Module):
    """Routed experts plus sigmoid(gate) times the shared expert."""

    def __init__(
        self, width: int, inner: int, shared_inner: int, experts: int, chosen: int, activation: str
    ) -> None:
        super().__init__()
        self.router = Router(width, experts, chosen)
        self.experts = RoutedExperts(experts, width, inner, activation)
        self.shared = FeedForward(width, shared_inner, activation)
        self.shared_gate = nn.Linear(width, 1, bias=False)  # the router multiplies by its weight

    def forward(self, x_BTD: Tensor, counted_BT: Tensor | None = None) -> tuple[Tensor, Routing]:
        """Return (output_BTD, what the router did); load and importance of the counted tokens."""
        x_TD = x_BTD.flatten(0, -2)
        routed = self.router(x_TD, self.shared_gate.weight)
        probabilities_TE, weights_TK, experts_TK, gate_T1 = routed
        routed_TD, dropped = self.experts(x_TD, weights_TK, experts_TK)
        shared_TD = self.shared(x_TD, gate_T1)
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
