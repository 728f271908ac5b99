"""The network: a decoder transformer in one screen."""

# B batch, T tokens, D width, F feed-forward width, V vocabulary, H heads
from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steplab.modules.attention import Attention
from steplab.modules.kv_cache import KVCache, LayerCache, StaticCache
from steplab.modules.loss import LinearCrossEntropy
from steplab.modules.norms import RMSNorm
from steplab.modules.rotary import Angles, Rotary
from steplab.workloads.gpt.config import GPTConfig

EPS = 1e-5


class SelfAttention(nn.Module):
    """Causal multi-head attention with rotary positions."""

    def __init__(self, config: GPTConfig, rotary: Rotary) -> None:
        super().__init__()
        self.heads = config.heads
        self.fused = config.fused_projections
        if self.fused:
            self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        else:
            self.q = nn.Linear(config.width, config.width, bias=False)
            self.k = nn.Linear(config.width, config.width, bias=False)
            self.v = nn.Linear(config.width, config.width, bias=False)
        self.rotary = rotary
        self.attention = Attention(causal=True)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(
        self, x_BTD: Tensor, angles: Angles | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        """Mix tokens: (B, T, D) to (B, T, D); they follow those in `cache`, at these angles."""
        if self.fused:
            q_BTD, k_BTD, v_BTD = self.qkv(x_BTD).chunk(3, dim=-1)
        else:
            q_BTD, k_BTD, v_BTD = self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q_BTD, k_BTD, v_BTD))
        attend = self.attention if cache is None else partial(cache.attend, self.attention)
        mixed_BHTD = attend(self.rotary(q, angles), self.rotary(k, angles), v)
        return self.out(mixed_BHTD.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU: silu(gate) * up, projected down."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.fused = config.fused_projections
        if self.fused:
            self.gate_up = nn.Linear(config.width, 2 * config.ff_width, bias=False)
        else:
            self.gate = nn.Linear(config.width, config.ff_width, bias=False)
            self.up = nn.Linear(config.width, config.ff_width, bias=False)
        self.down = nn.Linear(config.ff_width, config.width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        if self.fused:
            gate_BTF, up_BTF = self.gate_up(x_BTD).chunk(2, dim=-1)
        else:
            gate_BTF, up_BTF = self.gate(x_BTD), self.up(x_BTD)
        return self.down(F.silu(gate_BTF) * up_BTF)


class Block(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, config: GPTConfig, rotary: Rotary) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, EPS)
        self.attention = SelfAttention(config, rotary)
        self.feed_forward_norm = RMSNorm(config.width, EPS)
        self.feed_forward = FeedForward(config)

    def forward(
        self, x_BTD: Tensor, angles: Angles | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        normed_BTD, x_BTD = self.attention_norm(x_BTD)
        mixed_BTD = self.attention(normed_BTD, angles, cache)
        normed_BTD, x_BTD = self.feed_forward_norm(x_BTD, mixed_BTD)
        return x_BTD + self.feed_forward(normed_BTD)


class GPT(nn.Module):
    """Embedding, blocks, norm, head; with targets it returns the mean cross-entropy."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        rotary = Rotary(config.head_width, config.max_context, config.rope_theta)
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config, rotary) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, EPS)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.loss = LinearCrossEntropy()
        self.apply(_initialize)
        # Residual branches scaled by depth keep the stream's variance near one at the start.
        for block in self.blocks:
            for linear in (block.attention.out, block.feed_forward.down):  # type: ignore[union-attr]
                nn.init.normal_(linear.weight, std=0.02 / (2 * config.layers) ** 0.5)  # type: ignore[union-attr, arg-type]

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Return logits (B, T, V), or the loss when targets are given."""
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        x_BTD, _ = self.norm(x_BTD)
        if targets_BT is None:
            logits_BTV: Tensor = self.head(x_BTD)
            return logits_BTV
        loss: Tensor = self.loss(x_BTD, self.head.weight, targets_BT)
        return loss

    @torch.no_grad()
    def extend(self, tokens_BT: Tensor, cache: KVCache | StaticCache) -> Tensor:
        """Return the logits (B, V) after the last of new tokens, which follow those in `cache`."""
        batch, length = tokens_BT.shape
        positions_BT, _ = cache.add_tokens(batch, length, None)
        angles = self.rotary.angles(positions_BT)
        x_BTD = self.embedding(tokens_BT)
        for index, block in enumerate(self.blocks):
            x_BTD = block(x_BTD, angles, cache.layer(index))
        cache.advance(length)
        logits_BV: Tensor = self.head(self.norm(x_BTD[:, -1])[0])
        return logits_BV

    @property
    def rotary(self) -> Rotary:
        """The table that all blocks share."""
        rotary: Rotary = self.blocks[0].attention.rotary  # type: ignore[assignment, union-attr]
        return rotary

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Layers, heads and head width of a KVCache."""
        return self.config.layers, self.config.heads, self.config.head_width


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
