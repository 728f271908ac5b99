"""Measure your own model: steplab bench step examples/own_model.py:recurrent

The factory's parameters become flags (--width 512 1024), so they can be swept like any others.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steplab


class Forecaster(nn.Module):
    """Predicts the next value of a series with a GRU and a feed-forward head."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Linear(1, width)
        self.recurrent = nn.GRU(width, width, layers, batch_first=True)
        self.head = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, 1))

    def forward(self, series_BT: Tensor) -> Tensor:
        """Return one-step-ahead predictions (B, T)."""
        hidden_BTD, _ = self.recurrent(self.embed(series_BT.unsqueeze(-1)))
        return self.head(hidden_BTD).squeeze(-1)


def recurrent(width: int = 64, layers: int = 2, context: int = 96) -> steplab.UserModel:
    """A GRU that forecasts random walks."""

    def batches(size: int) -> Iterator[Tensor]:
        while True:
            yield torch.randn(size, context + 1).cumsum(dim=1) / context**0.5

    def loss(model: nn.Module, series: Tensor) -> Tensor:
        return F.huber_loss(model(series[:, :-1]), series[:, 1:])

    return steplab.UserModel(
        model=Forecaster(width, layers),
        batches=batches,
        loss=loss,
        tokens_per_sequence=context,
    )
