"""A recognizer of phonemes labels every frame of speech, and the loop keeps a confusion matrix of the
training. It is filled by the lines that the forum has for this: a zip over labels and predictions
that adds 1 to one element of a tensor at a time. Each frame costs several tiny operations.
A good finding names the Python loop over single labels that fills the confusion matrix and one of
its lines.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the confusion matrix is filled by a Python loop, one element of a tensor at a time",
    "FIX": "count all pairs at once on the device (index_put_ with accumulate, or bincount)",
}
BATCH, FRAMES, BANDS, PHONEMES = by_device(32, 10), by_device(300, 144), 80, 61
WIDTH, LAYERS = by_device(512, 128), by_device(6, 3)


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Conv1d(BANDS, WIDTH, 5, padding=2)
        self.layers = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 5, padding=2) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, PHONEMES)

    def forward(self, bands):
        x = F.gelu(self.start(bands))
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.head(x.transpose(1, 2))


class PairByPair:
    def __init__(self):
        self.counts = torch.zeros(PHONEMES, PHONEMES, dtype=torch.long, device=device())

    def update(self, labels, predicted):
        for t, p in zip(labels.view(-1), predicted.view(-1), strict=True):
            self.counts[t.long(), p.long()] += 1  # guilty


class AllAtOnce:
    def __init__(self):
        self.counts = torch.zeros(PHONEMES, PHONEMES, dtype=torch.long, device=device())
        self.one = torch.ones((), dtype=torch.long, device=device())

    def update(self, labels, predicted):
        pair = labels.view(-1), predicted.view(-1)
        self.counts.index_put_(pair, self.one, accumulate=True)


def build(confusion):
    model = Recognizer().to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, BANDS, FRAMES, device=device()),
            torch.randint(PHONEMES, (BATCH, FRAMES), device=device()),
        )
    )

    def step():
        bands, labels = next(data)
        with mixed():
            logits = model(bands)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        confusion.update(labels, logits.detach().argmax(-1))
        return loss.detach()

    return step


def faulty():
    return build(PairByPair())


def clean():
    return build(AllAtOnce())


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
