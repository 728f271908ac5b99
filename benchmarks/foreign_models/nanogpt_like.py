"""A small GPT as many people write it: learned positions, LayerNorm, one class per part."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steplab

WORDS = 1024


class Attention(nn.Module):
    """Causal attention whose heads share two projections."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Mix each position with those before it."""
        B, T, D = x_BTD.shape
        split = self.project_in(x_BTD).view(B, T, 3, self.heads, D // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.project_out(mixed.transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a LayerNorm."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the stream with both added."""
        x_BTD = x_BTD + self.dropout(self.attention(self.norm_1(x_BTD)))
        return x_BTD + self.dropout(self.narrow(F.gelu(self.wide(self.norm_2(x_BTD)))))


class GPT(nn.Module):
    """Words in, logits and loss out; the head shares the embedding's weight."""

    def __init__(self, width: int, layers: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, words_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (B, T, V) and the mean loss."""
        places = torch.arange(words_BT.shape[1], device=words_BT.device)
        x_BTD = self.words(words_BT) + self.places(places)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(self.norm(x_BTD))
        return logits_BTV, F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def make(width: int = 128, layers: int = 2, context: int = 64) -> steplab.UserModel:
    """A GPT with dropout 0.1 and an AdamW that decays matrices only."""

    def batches(size: int) -> Iterator[tuple[Tensor, Tensor]]:
        random = torch.Generator().manual_seed(0)
        while True:
            words = torch.randint(WORDS, (size, context + 1), generator=random)
            yield words[:, :-1], words[:, 1:]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(*batch)[1]

    def optimizer(model: nn.Module, **how: bool) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0}]
        return torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), **how)

    network = GPT(width, layers, 4, context, dropout=0.1)
    return steplab.UserModel(network, batches, loss, context, optimizer=optimizer)
