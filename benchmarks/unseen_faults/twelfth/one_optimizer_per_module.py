"""A mixer for time series: many narrow layers. Every layer has an optimizer of its own, with the
same settings, and the step calls them one after the other.
A good finding names the many small updates, and the line that makes an optimizer per layer.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "each of 182 layers has an AdamW of its own, so the update is 182 small calls",
    "FIX": "make one optimizer for all parameters of the model",
}
BATCH, WIDTH, CHANNELS, PAST = by_device(256, 12), by_device(128, 48), 8, 48
LAYERS = 45


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x + F.gelu(self.up(self.norm1(x)))
        return x + F.gelu(self.down(self.norm2(x)))


def prepare():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(PAST, WIDTH), *(Mix() for _ in range(LAYERS)), nn.Linear(WIDTH, 12)
    ).to(device())

    def batch():
        past = torch.randn(BATCH, CHANNELS, PAST, device=device())
        return past, torch.randn(BATCH, CHANNELS, 12, device=device())

    return model, in_turn(batch)


def learn(model, past, future):
    with mixed():
        guess = model(past)
    loss = F.mse_loss(guess.float(), future)
    loss.backward()
    return loss.detach()


def faulty():
    model, data = prepare()
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.LayerNorm)]
    optimizers = [adamw(layer) for layer in layers]  # guilty

    def step():
        loss = learn(model, *next(data))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step


def clean():
    model, data = prepare()
    optimizer = adamw(model)

    def step():
        loss = learn(model, *next(data))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
