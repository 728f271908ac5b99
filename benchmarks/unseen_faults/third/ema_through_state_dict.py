"""The moving average of the weights is computed into a new dict and loaded with load_state_dict, so
that every weight passes memory four times and a whole third model is allocated.
A good finding names the average of the weights as what takes the time after the update, and the
line that builds the new state.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the moving average goes through state_dict and load_state_dict: two products, a sum and a copy of all weights with new memory",
    "FIX": "torch._foreach_lerp_(average, weights, 1 - decay) in place",
}
BATCH, WIDTH, DECAY = by_device(1024, 24), by_device(4096, 1536), 0.999


class Averaged:
    def __init__(self, model):
        self.model, self.average = model, copy.deepcopy(model).requires_grad_(False)


class ByStateDict(Averaged):
    def update(self):
        old, new = self.average.state_dict(), self.model.state_dict()
        mean = {k: DECAY * old[k] + (1 - DECAY) * new[k] for k in old}  # guilty
        self.average.load_state_dict(mean)


class InPlace(Averaged):
    @torch.no_grad()
    def update(self):
        torch._foreach_lerp_(
            list(self.average.parameters()), list(self.model.parameters()), 1 - DECAY
        )


def build(kind):
    model = nn.Sequential(
        nn.Linear(128, WIDTH),
        nn.SiLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.SiLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.SiLU(),
        nn.Linear(WIDTH, 128),
    ).to(device())
    average = kind(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    data = in_turn(lambda: torch.randn(BATCH, 128, device=device()))

    def step():
        x = next(data)
        optimizer.zero_grad()
        with mixed():
            loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        average.update()
        return loss.detach()

    return step


def faulty():
    return build(ByStateDict)


def clean():
    return build(InPlace)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
