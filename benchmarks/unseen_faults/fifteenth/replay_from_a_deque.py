"""An agent with continuous actions learns off-policy from a replay memory. The memory is the one of
the tutorials: a deque of named tuples, from which `random.sample` draws a batch, whose fields are
then stacked one row at a time. A deque is slow in its middle, and each batch makes thousands of
small copies. A ring of arrays gives the same by one index.
A good finding names the sampling from (or the stacking of) the replay memory in Python and one of
its lines.
"""

import random
from collections import deque, namedtuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "a batch is drawn transition by transition from a deque of tuples and stacked in Python",
    "FIX": "keep the replay memory in preallocated arrays and draw a batch by one index",
}
BATCH, CAPACITY = by_device(4096, 2048), by_device(1_000_000, 100_000)
STATE, ACTION, WIDTH, GAMMA = 17, 6, by_device(1024, 256), 0.99

Transition = namedtuple("Transition", "state action reward next_state done")


class TupleMemory:
    def __init__(self):
        self.rows = deque(maxlen=CAPACITY)

    def push(self, *row):
        self.rows.append(Transition(*row))

    def sample(self):
        rows = Transition(*zip(*random.sample(self.rows, BATCH), strict=True))
        return [torch.from_numpy(np.stack(field)) for field in rows]  # guilty


class RingMemory:
    def __init__(self):
        shapes = (STATE,), (ACTION,), (), (STATE,), ()
        self.fields = [np.zeros((CAPACITY, *shape), np.float32) for shape in shapes]
        self.count = 0
        self.draw = np.random.default_rng(0)

    def push(self, *row):
        for field, value in zip(self.fields, row, strict=True):
            field[self.count % CAPACITY] = value
        self.count += 1

    def sample(self):
        rows = self.draw.integers(min(self.count, CAPACITY), size=BATCH)
        return [torch.from_numpy(field[rows]) for field in self.fields]


def network(inputs, outputs):
    hidden = nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(WIDTH, outputs))


def to_device(x):
    return x.pin_memory().to("cuda", non_blocking=True) if device() == "cuda" else x


class Walker:
    """Stands for the simulator: a walk of states that is ready."""

    def __init__(self):
        draw = np.random.default_rng(1)
        self.states = draw.standard_normal((4096, STATE), np.float32)
        self.actions = draw.standard_normal((4096, ACTION), np.float32)
        self.rewards = draw.standard_normal(4096, np.float32)
        self.done = (draw.random(4096) < 0.01).astype(np.float32)
        self.at = 0

    def __call__(self):
        i, self.at = self.at % 4095, self.at + 1
        return self.states[i], self.actions[i], self.rewards[i], self.states[i + 1], self.done[i]


def build(memory):
    critic, target = network(STATE + ACTION, 1).to(device()), network(STATE + ACTION, 1)
    target.load_state_dict(critic.state_dict())
    target.to(device()).requires_grad_(False)
    actor = network(STATE, ACTION).to(device()).requires_grad_(False)
    optimizer = adamw(critic)
    walker = Walker()
    for _ in range(CAPACITY):
        memory.push(*walker())

    def step():
        memory.push(*walker())
        state, action, reward, after, done = map(to_device, memory.sample())
        with torch.no_grad():
            future = target(torch.cat((after, actor(after).tanh()), 1))[:, 0]
            wanted = reward + GAMMA * (1 - done) * future
        loss = F.mse_loss(critic(torch.cat((state, action), 1))[:, 0], wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def faulty():
    return build(TupleMemory())


def clean():
    return build(RingMemory())


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
