"""The network."""

# B batch, L tokens, D width, F feed-forward width, V vocabulary
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steplab.core.errors import Unsupported, UserError
from steplab.kernels.cross_entropy import IGNORE_INDEX
from steplab.modules.loss import LinearCrossEntropy
from steplab.modules.precision import Fp32Module, matmul_dtype
from steplab.modules.rotary import Rotary
from steplab.workloads.megalodon.attention import BlockState, GatedAttention
from steplab.workloads.megalodon.config import MegalodonConfig
from steplab.workloads.megalodon.layers import TimestepNorm, ZeroCenteredLayerNorm
from steplab.workloads.megalodon.streaming import BlockCache, MegalodonCache


class FeedForward(nn.Module):
    """silu(up), with a gate silu(gate) * up if SwiGLU, projected down; no biases."""

    def __init__(self, config: MegalodonConfig) -> None:
        super().__init__()
        self.swiglu = config.swiglu
        rows = 2 * config.ff_width if config.swiglu else config.ff_width
        self.up = nn.Linear(config.width, rows, bias=False)
        self.down = nn.Linear(config.ff_width, config.width, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Map (B, L, D) to (B, L, D)."""
        inner_BLF: Tensor = self.up(x_BLD)
        if self.swiglu:
            gate_BLF, up_BLF = inner_BLF.chunk(2, dim=-1)
            return self.down(F.silu(gate_BLF) * up_BLF)
        return self.down(F.silu(inner_BLF))


class Rescale(Fp32Module):
    """A trained factor per channel, small at the start and smaller the deeper the block."""

    def __init__(self, width: int, layer: int) -> None:
        super().__init__()
        self.factor_D = nn.Parameter(torch.full((width,), 0.1 * 0.5**layer))

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Map (B, L, D) to (B, L, D)."""
        return x_BLD * self.factor_D.to(x_BLD.dtype)


class Block(nn.Module):
    """Two hops from one stream: attention reaches the output only through the feed-forward."""

    def __init__(self, config: MegalodonConfig, rotary: Rotary, layer: int) -> None:
        super().__init__()
        self.attention = GatedAttention(config, rotary)
        self.feed_forward_norm = ZeroCenteredLayerNorm(config.width, config.eps)
        self.feed_forward = FeedForward(config)
        self.rescale = Rescale(config.width, layer) if config.rescale_ff else nn.Identity()

    def forward(
        self,
        x_BLD: Tensor,
        valid_BL: Tensor | None = None,
        cache: BlockCache | None = None,
        keeps: bool = False,
    ) -> tuple[Tensor, BlockState | None]:
        """Return x + feed_forward(norm(x + attention(x))), and what the next tokens need."""
        attended_BLD, state = self.attention(x_BLD, valid_BL, cache, keeps)
        hidden_BLD = self.feed_forward_norm(x_BLD + attended_BLD)
        return x_BLD + self.rescale(self.feed_forward(hidden_BLD)), state


class Megalodon(nn.Module):
    """Embedding, blocks, norm, head; with targets it returns the mean cross-entropy."""

    def __init__(self, config: MegalodonConfig) -> None:
        super().__init__()
        self.config = config
        rotary = Rotary(config.head_width, config.chunk, config.rope_theta)
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config, rotary, i) for i in range(config.layers))
        self.norm = TimestepNorm(config.width, config.norm_groups, config.eps)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.loss = LinearCrossEntropy()
        self.keeps_states = False  # in training: compute the states after the last token too
        self.states: list[BlockState] = []  # of the last forward, where kept
        initialize_weights(self)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(
        self, tokens_BL: Tensor, targets_BL: Tensor | None = None, valid_BL: Tensor | None = None
    ) -> Tensor:
        """Return logits (B, L, V) in fp32, or the loss when targets are given.

        Targets of -100 do not count; where none counts, the loss is 0. `valid_BL` is False for
        padding, which is allowed on the right only: on the left it would shift the chunks.
        """
        if valid_BL is not None:
            check_padding(valid_BL)
        x_BLD = self._embed(tokens_BL)
        states = []
        for block in self.blocks:
            x_BLD, state = block(x_BLD, valid_BL, None, self.keeps_states)
            states.append(state)
        if self.keeps_states:
            self.states = [state.detached() for state in states]
        x_BLD, _ = self.norm(x_BLD, None, valid_BL)
        if targets_BL is None:
            return self._logits(x_BLD)
        loss = self.loss(x_BLD, self.head.weight, targets_BL)
        return torch.where((targets_BL != IGNORE_INDEX).any(), loss, 0.0)

    @torch.no_grad()
    def extend(self, tokens_BT: Tensor, cache: MegalodonCache) -> Tensor:
        """Return the logits (B, V) after the last of some new tokens, and update `cache`."""
        cache.begin(tokens_BT)
        x_BTD = self._embed(tokens_BT)
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            x_BTD, state = block(x_BTD, None, layer)
            layer.update(state.statistics, state.averages_B2ND)
        x_BTD, statistics = self.norm(x_BTD, cache.statistics, keeps=True)
        for own, new in zip(cache.statistics, statistics, strict=True):
            own.copy_(new)
        cache.position.advance(tokens_BT.shape[1])
        return self._logits(x_BTD[:, -1])

    def empty_cache(self, batch: int) -> MegalodonCache:
        """Return the cache of `batch` rows that have seen nothing."""
        weight = self.embedding.weight.detach()
        return MegalodonCache(self.config, batch, weight, weight[:0].to(matmul_dtype(weight)))

    def _embed(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.embedding(tokens_BL)
        if matmul_dtype(x_BLD) == torch.float16:
            raise Unsupported(
                "Megalodon does not run in fp16: its moving averages leave the range of fp16.",
                "Use precision=bf16 or precision=fp32.",
            )
        return x_BLD * self.config.width**0.5 if self.config.scale_embedding else x_BLD

    def _logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


def check_padding(valid_BL: Tensor) -> None:
    """Refuse padding that is not on the right; compiled code, which cannot wait, asserts it."""
    wrong = "There is padding to the left of tokens."
    remedy = "Pad on the right: the left shifts the chunks."
    found = (valid_BL[:, 1:] & ~valid_BL[:, :-1]).any()
    if torch.compiler.is_compiling():
        torch._assert_async(~found, f"{wrong} {remedy}")
    elif bool(found):
        raise UserError(wrong, remedy)


@torch.no_grad()
def initialize_weights(model: Megalodon) -> None:
    """Matrices by their fan-in, embedding and head by the width; biases and affines are 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, a=5**0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    std = model.config.width**-0.5
    for weight in (model.embedding.weight, model.head.weight):
        nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std)
