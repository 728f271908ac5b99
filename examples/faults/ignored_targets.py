"""Ignored targets: steplab profile examples/faults/ignored_targets.py:faulty

An instruction model learns the answer only, so the labels of the prompt are -100. The head computes
logits for the prompt as well. The clean twin gives the head the states of the answer: same loss.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steplab

rule = "ignored_targets"
where = "cpu"
ANSWERED = 8  # one token in so many is of the answer


class Model(nn.Module):
    """Words, two layers that mix nothing, and a head over the vocabulary."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()),) * 2)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids_BT: Tensor, last: int) -> Tensor:
        """Return the logits of the last tokens of each row."""
        return self.head(self.layers(self.words(ids_BT))[:, -last:])


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, context: int, vocabulary: int, whole: bool) -> steplab.UserModel:
    """Rows of a prompt and its answer."""
    answer = context // ANSWERED

    def batches(size: int) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            ids_BT = torch.randint(vocabulary, (size, context))
            labels_BT = torch.randint(vocabulary, (size, context))
            labels_BT[:, :-answer] = -100
            yield ids_BT, labels_BT

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        ids_BT, labels_BT = batch
        last = context if whole else answer
        logits_BTV = model(ids_BT, last)
        return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT[:, -last:].flatten())

    model = Model(vocabulary, width)
    return steplab.UserModel(model, batches, loss, context, optimizer=adamw)


def faulty(width: int = 64, context: int = 64, vocabulary: int = 4096) -> steplab.UserModel:
    """Logits of every token."""
    return made(width, context, vocabulary, whole=True)


def clean(width: int = 64, context: int = 64, vocabulary: int = 4096) -> steplab.UserModel:
    """Logits of the answer."""
    return made(width, context, vocabulary, whole=False)
