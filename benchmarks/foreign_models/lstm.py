"""A language model of two LSTM layers."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steplab

WORDS = 1024


class LSTMModel(nn.Module):
    """Words in, logits out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.recurrent = nn.LSTM(width, width, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, words_BT: Tensor) -> Tensor:
        """Return logits (B, T, V)."""
        hidden_BTD, _ = self.recurrent(self.words(words_BT))
        return self.head(hidden_BTD)


def make(width: int = 128, context: int = 32) -> steplab.UserModel:
    """Two layers with dropout between them, torch's AdamW."""

    def batches(size: int) -> Iterator[Tensor]:
        random = torch.Generator().manual_seed(0)
        while True:
            yield torch.randint(WORDS, (size, context + 1), generator=random)

    def loss(model: nn.Module, words: Tensor) -> Tensor:
        logits = model(words[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())

    return steplab.UserModel(LSTMModel(width), batches, loss, context)
