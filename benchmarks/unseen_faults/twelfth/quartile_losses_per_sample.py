"""A diffusion model for rows of a table. The log has the mean loss of each quarter of the
diffusion times, for which a Python loop goes through all rows of the batch in every step.
A good finding names the loop over the rows that reads and logs each loss.
"""

from collections import defaultdict

import torch
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the losses of all rows are logged one by one in a Python loop, by quarter of time",
    "FIX": "add up the losses of each quarter with index_add on the device",
}
BATCH, FEATURES, WIDTH, TIMES = by_device(16384, 2560), 24, by_device(512, 144), 1000


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(TIMES, WIDTH)
        self.enter = nn.Linear(FEATURES, WIDTH)
        self.body = nn.Sequential(
            nn.SiLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.SiLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.SiLU(),
            nn.Linear(WIDTH, FEATURES),
        )

    def forward(self, x, t):
        return self.body(self.enter(x) + self.time(t))


def prepare():
    torch.manual_seed(0)
    model = Network().to(device())
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, TIMES, device=device()), 0)
    data = in_turn(lambda: torch.randn(BATCH, FEATURES, device=device()))
    return model, adamw(model), kept, data


def learn(model, optimizer, kept, x):
    t = torch.randint(TIMES, (len(x),), device=x.device)
    noise = torch.randn_like(x)
    share = kept[t][:, None]
    noisy = share.sqrt() * x + (1 - share).sqrt() * noise
    with mixed():
        guess = model(noisy, t)
    losses = (guess.float() - noise).square().mean(-1)
    loss = losses.mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), losses.detach(), t


def faulty():
    model, optimizer, kept, data = prepare()
    sums, counts = defaultdict(float), defaultdict(int)

    def step():
        loss, losses, t = learn(model, optimizer, kept, next(data))
        for when, value in zip(t, losses, strict=True):  # guilty
            name = f"loss_q{4 * when.item() // TIMES}"
            sums[name] += value.item()
            counts[name] += 1
        return loss

    return step


def clean():
    model, optimizer, kept, data = prepare()
    sums, counts = torch.zeros(2, 4, device=device())

    def step():
        loss, losses, t = learn(model, optimizer, kept, next(data))
        quarter = 4 * t // TIMES
        sums.index_add_(0, quarter, losses)
        counts.index_add_(0, quarter, torch.ones_like(losses))
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
