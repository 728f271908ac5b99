"""Prioritized replay as it is often written: for every batch the priorities of the whole buffer are
raised to a power, divided by their sum and given to choice, which sums them up once more. A tree of
sums needs a few rows of it per sample. Both draw the same transitions from the same seed.
A good finding names the work on the whole buffer of priorities in numpy, and the line.
"""

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the probabilities of all transitions of the replay buffer are computed anew for every batch",
    "FIX": "keep the powers of the priorities in a tree of sums, or at least update only the rows that changed",
}
SIZE, BATCH = 2**19, by_device(4096, 512)
STATE, WIDTH, MOVES, ALPHA = 32, by_device(2048, 512), 8, 0.6


class Whole:
    def __init__(self, priorities):
        self.priorities = priorities

    def draw(self, rng):
        p = self.priorities**ALPHA  # guilty
        return rng.choice(SIZE, BATCH, p=p / p.sum())

    def update(self, index, errors):
        self.priorities[index] = errors


class Tree:
    """levels[0] is the total, levels[-1] the powers of all priorities."""

    def __init__(self, priorities):
        self.levels = [priorities**ALPHA]
        while len(self.levels[0]) > 1:
            self.levels.insert(0, self.levels[0].reshape(-1, 2).sum(1))

    def draw(self, rng):
        left, index = rng.random(BATCH) * self.levels[0][0], np.zeros(BATCH, int)
        for level in self.levels[1:]:
            index *= 2
            first = level[index]
            right = left >= first
            left -= first * right
            index += right
        return index

    def update(self, index, errors):
        self.levels[-1][index] = errors**ALPHA
        for above, level in zip(self.levels[-2::-1], self.levels[:0:-1], strict=True):
            index = index // 2
            above[index] = level[2 * index] + level[2 * index + 1]


def prepare(kind):
    model = nn.Sequential(
        nn.Linear(STATE, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, MOVES),
    ).to(device())
    target = copy.deepcopy(model).requires_grad_(False)
    states, rewards = torch.randn(SIZE, STATE, device=device()), torch.randn(SIZE, device=device())
    moves = torch.randint(MOVES, (SIZE, 1), device=device())
    replay, rng = kind(np.random.default_rng(0).random(SIZE) + 0.01), np.random.default_rng(1)
    optimizer = adamw(model)

    def step():
        index = replay.draw(rng)
        rows = torch.from_numpy(index).to(device())
        x, after = states.index_select(0, rows), states.index_select(0, (rows + 1) % SIZE)
        with mixed():
            goal = rewards[rows] + 0.99 * target(after).amax(1)
            error = model(x).gather(1, moves[rows]).squeeze(1) - goal
            loss = F.huber_loss(error, torch.zeros_like(error))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        replay.update(index, error.detach().abs().double().cpu().numpy() + 1e-6)
        return loss.detach()

    return step


def faulty():
    return prepare(Whole)


def clean():
    return prepare(Tree)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
