"""The word vectors are pretrained and frozen, yet the moving average of the weights includes them:
the largest tensor by far is read and written in every step to stay what it is.
A good finding names the average of weights that never change (or that the average takes so long),
and its line.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from common import Block, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the moving average of the weights includes frozen word vectors, far more than all trained weights",
    "FIX": "average only the parameters that require gradients",
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(32, 8),
    by_device(256, 48),
    by_device(256, 128),
    by_device(4, 2),
)
WORDS, CLASSES, DECAY = by_device(2_000_000, 200_000), 16, 0.999


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding.from_pretrained(torch.randn(WORDS, WIDTH), freeze=True)
        self.blocks = nn.Sequential(*(Block(WIDTH, WIDTH // 64) for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids):
        return self.head(self.blocks(self.words(ids)).mean(1))


def prepare():
    model = Classifier().to(device())
    average = copy.deepcopy(model).requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-4, fused=True)
    batches = in_turn(
        lambda: (
            torch.randint(WORDS, (BATCH, CONTEXT), device=device()),
            torch.randint(CLASSES, (BATCH,), device=device()),
        )
    )
    return model, average, optimizer, batches


def update(model, optimizer, ids, y):
    with mixed():
        loss = F.cross_entropy(model(ids), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, average, optimizer, batches = prepare()
    new, mean = list(model.parameters()), list(average.parameters())

    def step():
        loss = update(model, optimizer, *next(batches))
        with torch.no_grad():
            torch._foreach_lerp_(mean, new, 1 - DECAY)  # guilty
        return loss

    return step


def clean():
    model, average, optimizer, batches = prepare()
    pairs = zip(model.parameters(), average.parameters(), strict=True)
    new, mean = map(list, zip(*[(p, q) for p, q in pairs if p.requires_grad], strict=True))

    def step():
        loss = update(model, optimizer, *next(batches))
        with torch.no_grad():
            torch._foreach_lerp_(mean, new, 1 - DECAY)
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
