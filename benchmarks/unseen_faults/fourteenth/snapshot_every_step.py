"""A speech classifier once diverged in the night. Since then the loop keeps a "last good state" to
return to: after every step it copies the state of the model and of the optimizer with
`copy.deepcopy`. One snapshot every few hundred steps would do.
A good finding names the copies of all weights and optimizer states in every step, and the line.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the whole state of the model and the optimizer is deep-copied after every step",
    "FIX": "take the snapshot once in a few hundred steps",
}
BATCH, FRAMES, BANDS = by_device(64, 8), by_device(400, 48), 80
WIDTH, LAYERS, WORDS = by_device(1536, 256), by_device(12, 5), 35


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Conv1d(BANDS, WIDTH, 3, 2, 1)
        self.layers = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, bands):
        x = F.silu(self.start(bands))
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return self.head(x.mean(-1))


def build(every):
    model = Speech().to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, BANDS, FRAMES, device=device()),
            torch.randint(WORDS, (BATCH,), device=device()),
        )
    )
    last_good, count = None, 0

    def step():
        nonlocal last_good, count
        bands, words = next(data)
        with mixed():
            loss = F.cross_entropy(model(bands), words)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        count += 1
        if count % every == 0:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            last_good = copy.deepcopy(states)  # guilty
        return loss.detach()

    return step


def faulty():
    return build(every=1)


def clean():
    return build(every=500)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
