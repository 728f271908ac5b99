"""The replay buffer of a Q-learner is a deque of transitions, of which random ones are drawn. A
deque finds an element in its middle by walking from its end, and what is drawn must be stacked.
A good finding names the wait for the batch, or the time in Python, and the line that samples.
"""

import copy
from collections import deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "transitions are drawn from the middle of a long deque, which walks to each of them, and stacked one by one",
    "FIX": "keep the transitions in arrays and index them with all numbers of a batch",
}
BATCH, STATE, ACTIONS, WIDTH = by_device(4096, 1024), 16, 6, by_device(2048, 320)
STORED, DISCOUNT = by_device(1_000_000, 300_000), 0.99


class Deque:
    def __init__(self, *columns):
        self.rows = deque(zip(*columns, strict=True), maxlen=STORED)

    def draw(self, chance):
        rows = [self.rows[i] for i in chance.integers(STORED, size=BATCH)]  # guilty
        return [np.stack(column) for column in zip(*rows, strict=True)]


class Arrays:
    def __init__(self, *columns):
        self.columns = columns

    def draw(self, chance):
        numbers = chance.integers(STORED, size=BATCH)
        return [column[numbers] for column in self.columns]


def build(buffer):
    chance = np.random.default_rng(1)
    states = chance.standard_normal((STORED + 1, STATE), dtype=np.float32)
    moves = chance.integers(ACTIONS, size=STORED)
    rewards = chance.standard_normal(STORED, dtype=np.float32)
    stored = buffer(states[:-1], moves, rewards, states[1:])
    model = nn.Sequential(
        nn.Linear(STATE, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, ACTIONS),
    ).to(device())
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        batch = stored.draw(chance)
        state, move, reward, after = (torch.from_numpy(a).to(device()) for a in batch)
        with mixed():
            with torch.no_grad():
                goal = reward + DISCOUNT * target(after).amax(1)
            values = model(state).gather(1, move[:, None])[:, 0]
            loss = F.smooth_l1_loss(values, goal)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(Deque)


def clean():
    return build(Arrays)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
