"""The network: embedding, blocks of attention and repeated feed-forward, tied head."""

# B batch, S tokens, D width, V vocabulary, N blocks, R tokens and Z channels that attention keeps
from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steplab.kernels.embedding import embedding
from steplab.kernels.stream_norm import Update
from steplab.modules.kv_cache import KVCache, StaticCache
from steplab.modules.loss import LinearCrossEntropy
from steplab.modules.norms import RMSNorm, StreamNorm
from steplab.modules.rotary import Rotary
from steplab.workloads.hydra.attention import (
    CCGQA,
    REACH,
    AttentionState,
    DenseConvolution,
    DepthwiseConvolution,
    HeadConvolution,
)
from steplab.workloads.hydra.config import HydraConfig
from steplab.workloads.hydra.feed_forward import EPS, Recursion, RoutedFeedForward, SwiGLU
from steplab.workloads.hydra.losses import RouterLosses
from steplab.workloads.hydra.routing import (
    BlockRouting,
    DepthRouter,
    Router,
    RunningThresholds,
    Thresholds,
    share_score,
)

ATTENTION_SCALE = 0.5
STD = 0.02  # of initial weights


class GenerationState(NamedTuple):
    """What the model keeps of the tokens it has seen, to generate the next ones."""

    cache: KVCache | StaticCache
    latents_NBRZ: Tensor  # projections of each block's last tokens, zeros before the first

    @classmethod
    def empty(cls, model: Hydra, batch: int, capacity: int) -> GenerationState:
        """Return the state of `batch` rows of up to `capacity` tokens, in attention's dtype."""
        cache = KVCache.empty(model, batch, capacity)
        channels = model.config.latent + 2 * model.config.kv_width
        shape = (model.config.blocks, batch, REACH, channels)
        return cls(cache, cache.keys_LBGSD.new_zeros(shape))

    @property
    def static(self) -> GenerationState:
        """The same memory, for steps of one token per row."""
        assert isinstance(self.cache, KVCache)
        return GenerationState(self.cache.static, self.latents_NBRZ)


class HydraLoss(NamedTuple):
    """The loss that is minimized and those it consists of."""

    total: Tensor
    prediction: Tensor
    routers: dict[str, Tensor]


class Block(nn.Module):
    """Attention once, the feed-forward several times, and a norm over the whole stream."""

    def __init__(self, config: HydraConfig, rotary: Rotary, index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, EPS)
        self.attention = CCGQA(config, rotary)
        self.recursion = Recursion(config, index)
        self.norm = StreamNorm(config.width, EPS)

    def forward(
        self,
        x_BSD: Tensor,
        thresholds: Thresholds | None = None,
        state: AttentionState | None = None,
    ) -> tuple[Tensor, BlockRouting]:
        """Return (x_BSD, what the routers did)."""
        normed_BSD, x_BSD = self.attention_norm(x_BSD)
        mixed = Update(self.attention(normed_BSD, state, ATTENTION_SCALE))
        x_BSD, last, routing = self.recursion(x_BSD, mixed, thresholds)
        return self.norm(x_BSD, last), routing


class Hydra(nn.Module):
    """The whole model; with targets it returns the training loss."""

    def __init__(self, config: HydraConfig) -> None:
        super().__init__()
        self.config = config
        self.rotary = Rotary(config.head_width, config.max_context, config.rope_theta)
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config, self.rotary, i) for i in range(config.blocks))
        self.norm = RMSNorm(config.width, EPS)
        # The loss of each token is for the depth routers; the mean alone is a quarter cheaper.
        self.loss = LinearCrossEntropy("mean" if config.mor == "fixed" else "none")
        self.thresholds = RunningThresholds(config)
        self.router_losses = RouterLosses(config)
        self.compares_with_thresholds = "threshold" in (config.mod, config.mor)
        initialize_weights(self, config)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor | None = None) -> Tensor | HydraLoss:
        """Return logits (B, S, V), or the losses when targets are given; every target counts."""
        y_BSD, routings = self._trunk(tokens_BS)
        if targets_BS is None:
            return F.linear(y_BSD, self.embedding.weight)
        loss = self.loss(y_BSD, self.embedding.weight, targets_BS)
        routers = self.router_losses(routings, loss)
        if self.training:
            self.thresholds.follow(routings)
        prediction = loss.mean()
        total = prediction + sum(part for name, part in routers.items() if name != "passes")
        return HydraLoss(total, prediction, routers)

    @torch.no_grad()
    def extend(self, tokens_BS: Tensor, state: GenerationState) -> Tensor:
        """Return logits (B, V) after the last of new tokens, which follow those in `state`.

        Pieces of any size give what the whole would have given, where routing is causal.
        """
        batch, length = tokens_BS.shape
        positions_BS, _ = state.cache.add_tokens(batch, length, None)
        angles = self.rotary.angles(positions_BS)
        states = [
            AttentionState(state.cache.layer(index), latent_BRZ, angles)
            for index, latent_BRZ in enumerate(state.latents_NBRZ)
        ]
        y_BSD, _ = self._trunk(tokens_BS, states)
        state.cache.advance(length)
        return F.linear(y_BSD[:, -1], self.embedding.weight)

    def become_causal(self) -> None:
        """Route tokens by their own scores alone, as generation has to.

        `packed` becomes `masked`, which computes the same and reads no number on the host.
        """
        for module in self.modules():
            if getattr(module, "form", None) == "packed":
                module.form = "masked"  # type: ignore[assignment]
            if getattr(module, "form", None) in ("top-k", "capacity"):
                module.form = "threshold"  # type: ignore[assignment]
                self.compares_with_thresholds = True

    @contextlib.contextmanager
    def causal_routing(self) -> Iterator[None]:
        """Route so inside, as validation does: its loss is then one that generation can reach."""
        kept = [(module, getattr(module, "form", None)) for module in self.modules()]
        compared = self.compares_with_thresholds
        self.become_causal()
        try:
            yield
        finally:
            self.compares_with_thresholds = compared
            for module, form in kept:
                if form is not None:
                    module.form = form

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Layers, heads and head width of a KVCache."""
        return self.config.blocks, self.config.kv_heads, self.config.head_width

    def _trunk(
        self, tokens_BS: Tensor, states: list[AttentionState] | None = None
    ) -> tuple[Tensor, list[BlockRouting]]:
        x_BSD = embedding(self.embedding.weight, tokens_BS, self.config.width**0.5)
        routings = []
        for index, block in enumerate(self.blocks):
            thresholds = self.thresholds.of_block(index) if self.compares_with_thresholds else None
            x_BSD, routing = block(x_BSD, thresholds, states[index] if states else None)
            routings.append(routing)
        return self.norm(x_BSD)[0], routings


def initialize_weights(model: nn.Module, config: HydraConfig) -> None:
    """Fill all parameters: normal with STD, divided by depth where they add to the stream."""
    residual_std = STD / math.sqrt(2 * config.blocks * config.recursions)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=STD)
        if isinstance(module, (HeadConvolution, DepthwiseConvolution, DenseConvolution)):
            # By fan-in the tiny model of the paper's kind is at 2.17 after 200 steps, with 0.02 at
            # 2.26 (one seed). HYDRA's kind keeps its published 0.02.
            std = module.inputs**-0.5 if config.attention == "paper" else STD
            for weight in module.parameters():
                nn.init.normal_(weight, std=std)
        if isinstance(module, Router):
            nn.init.normal_(module.weight_D, std=STD)
        if isinstance(module, Recursion):
            nn.init.zeros_(module.offset_RD)
            nn.init.normal_(module.embedding_RD, std=STD)
    for module in model.modules():
        if isinstance(module, CCGQA):
            nn.init.normal_(module.out.weight, std=residual_std)
            root = math.sqrt(config.head_width)
            nn.init.constant_(module.temperature, 0.0 if module.as_paper else root)
        if isinstance(module, SwiGLU):
            nn.init.normal_(module.w_out.weight, std=residual_std)
        if isinstance(module, DepthRouter):
            nn.init.constant_(module.score.bias, module.first_bias)
        if isinstance(module, RoutedFeedForward) and module.router is not None:
            nn.init.constant_(module.router.bias, share_score(config.capacity))
