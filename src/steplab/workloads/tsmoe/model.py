"""The network: gated embedding, decoder blocks with experts, one head per horizon."""

# B batch, T points, P points per token, N tokens, S tokens with the cached ones, D width,
# H points of all horizons, Q quantiles, L mixture layers, E experts
from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steplab.core.errors import UserError
from steplab.modules.attention import Attention, document_positions
from steplab.modules.experts import MixtureOfExperts, RoutedExperts, Router, Routing
from steplab.modules.kv_cache import KVCache, LayerCache, StaticCache
from steplab.modules.norms import RMSNorm
from steplab.modules.rotary import Angles, Rotary, RotaryHeads
from steplab.workloads.tsmoe.config import TsmoeConfig
from steplab.workloads.tsmoe.loss import HorizonLoss, QuantileLoss, balance, balance_across_layers

EPS = 1e-6


class Positions(NamedTuple):
    """Where tokens are in their sequences, and which sequences they belong to."""

    angles: Angles | None = None  # None: at positions 0 to N - 1
    documents_BS: Tensor | None = None  # of all keys; None: each row is one document
    counted_BN: Tensor | None = None  # tokens that the balancing loss counts; None: all


ONE_DOCUMENT = Positions()


class PointLinear(nn.Linear):
    """A product in the dtype of its input, not of its weight, so that points keep their digits."""

    def forward(self, points: Tensor) -> Tensor:
        """Map (..., P) to (..., D)."""
        return F.linear(points, self.weight.to(points.dtype))


class Embedding(nn.Module):
    """silu(gate(x)) * value(x) of one point or patch."""

    def __init__(self, patch_length: int, width: int) -> None:
        super().__init__()
        self.value = PointLinear(patch_length, width, bias=False)
        self.gate = PointLinear(patch_length, width, bias=False)

    def forward(self, patches_BNP: Tensor) -> Tensor:
        """Map (B, N, P) to (B, N, D) without autocast, then round to the dtype of the weights.

        The residual stream keeps the dtype of the norms' weights, without which torch has no fused
        RMSNorm; and one point times one weight gains nothing from tensor cores.
        """
        with torch.autocast(patches_BNP.device.type, enabled=False):
            x_BND = F.silu(self.gate(patches_BNP)) * self.value(patches_BNP)
            return x_BND.to(self.value.weight.dtype)


class SelfAttention(nn.Module):
    """Causal attention with rotary positions; biased q, k, v in one product."""

    def __init__(self, config: TsmoeConfig, rotary: Rotary) -> None:
        super().__init__()
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.rotary = RotaryHeads(rotary, config.n_head)
        self.attention = Attention(causal=True)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self, x_BND: Tensor, positions: Positions = ONE_DOCUMENT, cache: LayerCache | None = None
    ) -> Tensor:
        """Map (B, N, D) to (B, N, D); keys in `cache` are attended to, and the new ones added."""
        q, k, v = self.rotary(self.qkv(x_BND), positions.angles)
        attend = self.attention if cache is None else partial(cache.attend, self.attention)
        mixed = attend(q, k, v, positions.documents_BS)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention, then the mixture layers, each with a norm before it and a residual around it."""

    def __init__(self, config: TsmoeConfig, rotary: Rotary) -> None:
        super().__init__()
        width = config.hidden_size
        self.attention_norm = RMSNorm(width, EPS)
        self.attention = SelfAttention(config, rotary)
        layers = range(config.num_expert_layers)
        self.norms = nn.ModuleList(RMSNorm(width, EPS) for _ in layers)
        shape = (config.d_expert, config.d_ff, config.num_experts, config.k, config.activation)
        self.mixtures = nn.ModuleList(MixtureOfExperts(width, *shape) for _ in layers)

    def forward(
        self, x_BND: Tensor, positions: Positions = ONE_DOCUMENT, cache: LayerCache | None = None
    ) -> tuple[Tensor, list[Routing]]:
        """Return (x_BND, the routing of each mixture layer)."""
        normed_BND, x_BND = self.attention_norm(x_BND)
        out_BND = self.attention(normed_BND, positions, cache)
        routings = []
        for norm, mixture in zip(self.norms, self.mixtures, strict=True):
            normed_BND, x_BND = norm(x_BND, out_BND)
            out_BND, routing = mixture(normed_BND, positions.counted_BN)
            routings.append(routing)
        return x_BND + out_BND, routings


class Forecast(NamedTuple):
    """Predictions of all horizons side by side, and every mixture layer's routing."""

    outputs_BNH: Tensor
    load_LE: Tensor
    importance_LE: Tensor
    dropped: Tensor
    quantiles_BNHQ: Tensor | None = None  # of each predicted point, from low to high


def in_order(forecast: Forecast) -> Forecast:
    """Return it with crossing quantiles sorted.

    A function, not a method: dynamo of torch 2.11 cannot trace methods of a named tuple.
    """
    outputs_BNH, load_LE, importance_LE, dropped, quantiles_BNHQ = forecast
    if quantiles_BNHQ is None:
        return forecast
    return Forecast(outputs_BNH, load_LE, importance_LE, dropped, quantiles_BNHQ.sort(-1).values)


class TrainingLoss(NamedTuple):
    """The loss that is minimized and those it consists of."""

    total: Tensor
    prediction: Tensor
    balance: Tensor
    dropped: Tensor
    load_LE: Tensor
    quantile: Tensor | None = None


class Tsmoe(nn.Module):
    """The whole model; called with a mask it returns the training loss."""

    def __init__(self, config: TsmoeConfig) -> None:
        super().__init__()
        self.config = config
        self.rotary = Rotary(config.head_width, config.tokens, config.rope_theta)
        self.embedding = Embedding(config.patch_length, config.hidden_size)
        layers = range(config.n_decoder_layers)
        self.blocks = nn.ModuleList(Block(config, self.rotary) for _ in layers)
        time_moe = config.layout == "time-moe"
        self.norm = RMSNorm(config.hidden_size, EPS) if time_moe else None
        horizons, levels = config.horizon_lengths, config.quantile_levels
        self.heads = nn.Linear(config.hidden_size, sum(horizons), bias=not time_moe)
        self.loss = HorizonLoss(horizons, config.patch_length, config.huber_delta)
        self.quantile_heads = self.quantile_loss = None
        if levels:
            numbers = sum(horizons) * len(levels)
            self.quantile_heads = nn.Linear(config.hidden_size, numbers, bias=not time_moe)
            self.quantile_loss = QuantileLoss(horizons, config.patch_length, levels)
        self.apply(_initialize)

    def forward(
        self,
        values_BT: Tensor,
        mask_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
    ) -> Forecast | TrainingLoss:
        """Return predictions after every token; with `mask_BT`, the loss of predicting `values_BT`.

        For the loss, `values_BT` has one point more than the tokens cover: the last is only a
        target. `documents_BT` are ids, the same for all points of a token; each run of equal ids
        is treated as if it were alone in a row. The balancing loss does not count
        negative ids: they are padding.
        """
        if mask_BT is None:
            return in_order(self._forecast(values_BT, self._positions(documents_BT)))
        inner_BT = None if documents_BT is None else documents_BT[:, :-1]
        forecast = self._forecast(values_BT[:, :-1], self._positions(inner_BT))
        truth = (values_BT, mask_BT, documents_BT)
        prediction = self.loss(forecast.outputs_BNH, *truth)
        if self.config.layout == "time-moe":
            balance_loss = balance_across_layers(
                forecast.load_LE, forecast.importance_LE, self.config.k
            )
        else:
            balance_loss = balance(forecast.load_LE, forecast.importance_LE)
        total = prediction + self.config.aux_factor * balance_loss
        quantile = None
        if self.quantile_loss is not None:
            quantile = self.quantile_loss(forecast.quantiles_BNHQ, *truth)
            total = total + quantile
        return TrainingLoss(
            total, prediction, balance_loss, forecast.dropped, forecast.load_LE, quantile
        )

    @torch.no_grad()
    def extend(
        self, values_BT: Tensor, cache: KVCache | StaticCache, documents_BT: Tensor | None = None
    ) -> Forecast:
        """Return predictions after every token of `values_BT`, which follow those in `cache`.

        The new tokens are added to `cache`. Pieces of any size give what the whole would have
        given. `documents_BT` is as in `forward`; without it, each row continues the document
        that it ended in, so rows are padded on the left, once, under an id of their own.
        """
        batch, points = values_BT.shape
        patch = self.config.patch_length
        if points % patch or not points:
            raise UserError(f"{points} points do not make whole tokens of {patch} points.")
        documents_BN = None if documents_BT is None else documents_BT[:, ::patch]
        positions_BN, documents_BS = cache.add_tokens(batch, points // patch, documents_BN)
        positions = Positions(self.rotary.angles(positions_BN), documents_BS)
        forecast = self._forecast(values_BT, positions, cache)
        cache.advance(points // patch)
        return in_order(forecast)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Layers, heads and head width of a KVCache."""
        return self.config.n_decoder_layers, self.config.n_head, self.config.head_width

    def _positions(self, documents_BT: Tensor | None) -> Positions:
        if documents_BT is None:
            return ONE_DOCUMENT
        documents_BN = documents_BT[:, :: self.config.patch_length]
        angles = self.rotary.angles(document_positions(documents_BN))
        return Positions(angles, documents_BN, documents_BN >= 0)

    def _forecast(
        self,
        values_BT: Tensor,
        positions: Positions,
        cache: KVCache | StaticCache | None = None,
    ) -> Forecast:
        x_BND = self.embedding(values_BT.unflatten(1, (-1, self.config.patch_length)))
        routings: list[Routing] = []
        for index, block in enumerate(self.blocks):
            x_BND, own = block(x_BND, positions, None if cache is None else cache.layer(index))
            routings += own
        if self.norm is not None:
            x_BND, _ = self.norm(x_BND)
        outputs_BNH, quantiles_BNHQ = self.heads(x_BND), None
        if self.quantile_heads is not None:
            shape = (outputs_BNH.shape[-1], -1)
            quantiles_BNHQ = self.quantile_heads(x_BND).unflatten(-1, shape)
        load_LE, importance_LE, dropped_L = (
            torch.stack(parts) for parts in zip(*routings, strict=True)
        )
        routing = (load_LE, importance_LE, dropped_L.mean())
        return Forecast(outputs_BNH, *routing, quantiles_BNHQ)


def _initialize(module: nn.Module) -> None:
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
