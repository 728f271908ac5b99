"""The network: gated embedding, decoder blocks with experts, one head per horizon."""

# B batch, T points, N tokens, P points per token, D width, H points of all horizons, E experts
from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steplab.modules.attention import Attention
from steplab.modules.experts import MixtureOfExperts, RoutedExperts, Router, Routing
from steplab.modules.rotary import Rotary
from steplab.workloads.tsmoe.config import TsmoeConfig
from steplab.workloads.tsmoe.loss import HorizonLoss, balance, balance_across_layers

EPS = 1e-6


class Forecast(NamedTuple):
    """Predictions of all horizons side by side, and every mixture layer's routing."""

    outputs_BNH: Tensor
    load_LE: Tensor
    importance_LE: Tensor
    dropped: Tensor


class TrainingLoss(NamedTuple):
    """The loss that is minimised and the two it consists of."""

    total: Tensor
    prediction: Tensor
    balance: Tensor
    dropped: Tensor
    load_LE: Tensor


class Embedding(nn.Module):
    """silu(gate(x)) * value(x) of one point or patch."""

    def __init__(self, patch_length: int, width: int) -> None:
        super().__init__()
        self.value = nn.Linear(patch_length, width, bias=False)
        self.gate = nn.Linear(patch_length, width, bias=False)

    def forward(self, patches_BNP: Tensor) -> Tensor:
        """Map (B, N, P) to (B, N, D), never in autocast's dtype.

        So the residual stream keeps the dtype of the norms' weights, without which torch has no
        fused RMSNorm; and one point times one weight gains nothing from tensor cores.
        """
        with torch.autocast(patches_BNP.device.type, enabled=False):
            return F.silu(self.gate(patches_BNP)) * self.value(patches_BNP)


class SelfAttention(nn.Module):
    """Causal attention with rotary positions; biased q, k, v in one product."""

    def __init__(self, config: TsmoeConfig, rotary: Rotary) -> None:
        super().__init__()
        self.heads = config.n_head
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.rotary = rotary
        self.attention = Attention(causal=True)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x_BND: Tensor) -> Tensor:
        """Map (B, N, D) to (B, N, D)."""
        parts = self.qkv(x_BND).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = self.attention(self.rotary(q), self.rotary(k), v)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention, then the mixture layers, each behind its norm and beside its residual."""

    def __init__(self, config: TsmoeConfig, rotary: Rotary) -> None:
        super().__init__()
        width = config.hidden_size
        self.attention_norm = nn.RMSNorm(width, eps=EPS)
        self.attention = SelfAttention(config, rotary)
        layers = range(config.num_expert_layers)
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=EPS) for _ in layers)
        shape = (config.d_expert, config.d_ff, config.num_experts, config.k, config.activation)
        self.mixtures = nn.ModuleList(MixtureOfExperts(width, *shape) for _ in layers)

    def forward(self, x_BND: Tensor) -> tuple[Tensor, list[Routing]]:
        """Return (x_BND, the routing of each mixture layer)."""
        x_BND = x_BND + self.attention(self.attention_norm(x_BND))
        routings = []
        for norm, mixture in zip(self.norms, self.mixtures, strict=True):
            out_BND, routing = mixture(norm(x_BND))
            x_BND = x_BND + out_BND
            routings.append(routing)
        return x_BND, routings


class Tsmoe(nn.Module):
    """The whole model; called with a mask it returns the training loss."""

    def __init__(self, config: TsmoeConfig) -> None:
        super().__init__()
        self.config = config
        rotary = Rotary(config.head_width, config.tokens, config.rope_theta)
        self.embedding = Embedding(config.patch_length, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, rotary) for _ in range(config.n_decoder_layers))
        final = config.layout == "time-moe"
        self.norm = nn.RMSNorm(config.hidden_size, eps=EPS) if final else nn.Identity()
        self.heads = nn.Linear(config.hidden_size, sum(config.horizon_lengths), bias=not final)
        self.loss = HorizonLoss(config.horizon_lengths, config.patch_length, config.huber_delta)
        self.apply(_initialise)

    def forward(self, values_BT: Tensor, mask_BT: Tensor | None = None) -> Forecast | TrainingLoss:
        """Return predictions after every token; with `mask_BT`, the loss of predicting `values_BT`.

        For the loss, `values_BT` has one point more than the tokens cover: the last is only a
        target.
        """
        if mask_BT is None:
            return self._forecast(values_BT)
        forecast = self._forecast(values_BT[:, :-1])
        prediction = self.loss(forecast.outputs_BNH, values_BT, mask_BT)
        if self.config.layout == "time-moe":
            even = balance_across_layers(forecast.load_LE, forecast.importance_LE, self.config.k)
        else:
            even = balance(forecast.load_LE, forecast.importance_LE)
        total = prediction + self.config.aux_factor * even
        return TrainingLoss(total, prediction, even, forecast.dropped, forecast.load_LE)

    def _forecast(self, values_BT: Tensor) -> Forecast:
        x_BND = self.embedding(values_BT.unflatten(1, (-1, self.config.patch_length)))
        routings: list[Routing] = []
        for block in self.blocks:
            x_BND, own = block(x_BND)
            routings += own
        outputs_BNH = self.heads(self.norm(x_BND))
        load_LE, importance_LE, dropped_L = (
            torch.stack(parts) for parts in zip(*routings, strict=True)
        )
        return Forecast(outputs_BNH, load_LE, importance_LE, dropped_L.mean())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    # Stacked experts by the same rule as single ones: a default init of a 3-D tensor would take
    # the wrong fan and start the loss hundreds of times too high.
    if isinstance(module, RoutedExperts):
        nn.init.normal_(module.w_in_EFD, std=0.02)
        nn.init.normal_(module.w_out_EDF, std=0.02)
    if isinstance(module, Router):
        nn.init.normal_(module.weight, std=0.02)
    # By fan-in, which is one point: with 0.02 the gated product is 2e-4 x^2, which has lost the
    # sign of x. After 300 steps of the tiny model (one seed): loss 0.304, with 0.02 still 0.472.
    if isinstance(module, Embedding):
        for linear in (module.value, module.gate):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
