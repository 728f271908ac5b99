"""A network for speaker verification learns by a loss over pairs of voices. The equal error rate
of the batch, which is printed every 200 steps, is computed after every step over 200 thresholds.
A good finding names the metric on the host, and the line that computes it in every step.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the equal error rate over 200 thresholds is computed in every step for a rare print",
    "FIX": "compute it only in the steps that print it",
}
BATCH, FRAMES, MELS, WIDTH = by_device(512, 128), 50, 40, by_device(512, 144)
SPEAKERS, EVERY = 16, 200


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.frames = nn.Sequential(
            nn.Conv1d(MELS, WIDTH, 5, stride=2),
            nn.ReLU(),
            nn.Conv1d(WIDTH, WIDTH, 3, stride=2),
            nn.ReLU(),
        )
        self.out = nn.Linear(WIDTH, 64)

    def forward(self, x):
        return F.normalize(self.out(self.frames(x).mean(-1)).float(), dim=-1)


def equal_error_rate(scores, same):
    scores, same = scores.cpu().numpy(), same.cpu().numpy()
    best = (2.0, 0.0)
    for threshold in np.linspace(-1, 1, 200):
        accepted = scores >= threshold
        false_accept = (accepted & ~same).sum() / (~same).sum()
        false_reject = (~accepted & same).sum() / same.sum()
        gap = abs(false_accept - false_reject)
        best = min(best, (gap, (false_accept + false_reject) / 2))
    return best[1]


def prepare():
    torch.manual_seed(0)
    model = Network().to(device())

    def batch():
        x = torch.randn(BATCH, MELS, FRAMES, device=device())
        return x, torch.randint(SPEAKERS, (BATCH,), device=device())

    return model, adamw(model), in_turn(batch)


def learn(model, optimizer, x, speaker):
    with mixed():
        z = model(x)
    scores, same = z @ z.T, speaker[:, None] == speaker
    loss = F.binary_cross_entropy_with_logits(10 * scores, same.float())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), scores.detach(), same


def faulty():
    model, optimizer, data = prepare()
    count = 0

    def step():
        nonlocal count
        count += 1
        loss, scores, same = learn(model, optimizer, *next(data))
        rate = equal_error_rate(scores, same)  # guilty
        if count % EVERY == 0:
            print(f"step {count}  EER {rate:.3f}")
        return loss

    return step


def clean():
    model, optimizer, data = prepare()
    count = 0

    def step():
        nonlocal count
        count += 1
        loss, scores, same = learn(model, optimizer, *next(data))
        if count % EVERY == 0:
            print(f"step {count}  EER {equal_error_rate(scores, same):.3f}")
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
