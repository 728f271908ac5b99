from __future__ import annotations

import pytest
from torch import nn

from steplab.meter.meter import count_flops_per_token


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 50, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


@pytest.mark.parametrize("tied", [True, False])
def test_head_counts_once_and_embedding_never(tied: bool) -> None:
    flops, formula = count_flops_per_token(Tied(tied))
    assert flops == 6 * (8 * 8 + 8 * 50)
    assert formula.startswith("6 x 464 matmul")


def test_formula_says_what_it_cannot_know() -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.Linear(4, 4))
    model[1].requires_grad_(False)
    flops, formula = count_flops_per_token(model)
    assert flops == 6 * 16
    assert "48 weights of more than 2 dimensions not counted" in formula
    assert "16 frozen ones counted as trained" in formula
    assert count_flops_per_token(nn.LayerNorm(4))[0] is None
