"""A chat model in the style of nanochat: bf16 inside, two optimizers, no weights in its norms.

It asserts its own dtypes and opens autocast by itself, so `model.double()` does not run.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steplab

WORDS = 1024


def norm(x: Tensor) -> Tensor:
    """RMSNorm without a weight."""
    return F.rms_norm(x, (x.shape[-1],))


def rotate(x_BTHK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Turn both halves of each head by the angles of its position."""
    first, second = x_BTHK.chunk(2, dim=-1)
    cos, sin = cos_TK[:, None], sin_TK[:, None]
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)


class Block(nn.Module):
    """Attention with normed queries and keys, then a squared ReLU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.mix = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.wide = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)
        nn.init.zeros_(self.mix.weight)
        nn.init.zeros_(self.narrow.weight)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        """Return the stream with both added."""
        B, T, D = x_BTD.shape
        inner = norm(x_BTD)
        heads = [p(inner).view(B, T, self.heads, -1) for p in (self.query, self.key, self.value)]
        query, key = (norm(rotate(x, cos_TK, sin_TK)) for x in heads[:2])
        query, key, value = (x.transpose(1, 2) for x in (query, key, heads[2]))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTD = x_BTD + self.mix(mixed.transpose(1, 2).reshape(B, T, D))
        return x_BTD + self.narrow(F.relu(self.wide(norm(x_BTD))).square())


class ChatModel(nn.Module):
    """Embedding and angles in bf16; logits are capped at 15 and judged in fp32."""

    cos_TK: Tensor
    sin_TK: Tensor

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width).to(torch.bfloat16)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, WORDS, bias=False)
        half = width // heads // 2
        rates_K = 10000.0 ** (-torch.arange(half) / half)
        angles_TK = torch.arange(context)[:, None] * rates_K
        self.register_buffer("cos_TK", angles_TK.cos().bfloat16(), persistent=False)
        self.register_buffer("sin_TK", angles_TK.sin().bfloat16(), persistent=False)

    def forward(self, words_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the mean loss."""
        assert self.cos_TK.dtype == torch.bfloat16, "the angles must stay in bf16"
        x_BTD = norm(self.words(words_BT))
        for block in self.blocks:
            x_BTD = block(x_BTD, self.cos_TK, self.sin_TK)
        logits_BTV = 15 * torch.tanh(self.head(norm(x_BTD)).float() / 15)
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


class Together(torch.optim.Optimizer):
    """Several optimizers that step as one; each keeps its own groups and state."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        super().__init__([g for one in optimizers for g in one.param_groups], {})
        self.param_groups = [g for one in optimizers for g in one.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Let each of them step."""
        assert closure is None
        for one in self.optimizers:
            one.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states in their order."""
        return {str(n): one.state_dict() for n, one in enumerate(self.optimizers)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give each its state back."""
        for n, one in enumerate(self.optimizers):
            one.load_state_dict(state_dict[str(n)])


def make(width: int = 128, layers: int = 2, context: int = 64) -> steplab.UserModel:
    """Muon for the matrices of the blocks, AdamW for embedding and head."""

    def batches(size: int) -> Iterator[tuple[Tensor, Tensor]]:
        random = torch.Generator().manual_seed(0)
        while True:
            words = torch.randint(WORDS, (size, context + 1), generator=random)
            yield words[:, :-1], words[:, 1:]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast(batch[0].device.type, dtype=torch.bfloat16):
            return model(*batch)

    def optimizer(model: Any, **how: bool) -> torch.optim.Optimizer:
        matrices = torch.optim.Muon(model.blocks.parameters(), lr=0.02, weight_decay=0.0)
        ends = [
            {"params": model.words.parameters(), "lr": 0.2},
            {"params": model.head.parameters(), "lr": 0.004},
        ]
        return Together(matrices, torch.optim.AdamW(ends, betas=(0.8, 0.95), **how))

    network = ChatModel(width, layers, 4, context)
    return steplab.UserModel(network, batches, loss, context, optimizer=optimizer)
