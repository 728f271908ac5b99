"""A DQN with prioritized replay. After each update the new priorities go into the sum tree one at a
time: each is read with item(), and its way up to the root is walked in Python.
A good finding names the Python updates of the tree, and the line that makes them one by one.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "new priorities are read and put into the sum tree one by one, in Python",
    "FIX": "read all priorities at once and update the tree level by level with numpy",
}
BATCH, WIDTH, CAPACITY = by_device(2048, 1024), by_device(1024, 224), 1 << 15
STATE, ACTIONS = 32, 6


class SumTree:
    def __init__(self):
        self.sums = np.zeros(2 * CAPACITY)
        self.update_all(np.arange(CAPACITY), np.ones(CAPACITY))

    def update(self, leaf, priority):
        node = leaf + CAPACITY
        change = priority - self.sums[node]
        while node >= 1:
            self.sums[node] += change
            node //= 2

    def update_all(self, leaves, priorities):
        nodes = leaves + CAPACITY
        self.sums[nodes] = priorities
        while nodes[0] > 1:
            nodes = np.unique(nodes // 2)
            self.sums[nodes] = self.sums[2 * nodes] + self.sums[2 * nodes + 1]

    def draw(self, chance):
        wanted = chance.random(BATCH) * self.sums[1]
        nodes = np.ones(BATCH, dtype=np.int64)
        while nodes[0] < CAPACITY:
            left = self.sums[2 * nodes]
            right = wanted >= left
            wanted = np.where(right, wanted - left, wanted)
            nodes = 2 * nodes + right
        return nodes - CAPACITY


def network():
    return nn.Sequential(
        nn.Linear(STATE, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, ACTIONS),
    ).to(device())


def prepare():
    torch.manual_seed(0)
    online, target = network(), network().requires_grad_(False)
    target.load_state_dict(online.state_dict())
    memory = (
        torch.randn(CAPACITY, STATE, device=device()),
        torch.randint(ACTIONS, (CAPACITY,), device=device()),
        torch.randn(CAPACITY, device=device()),
        torch.randn(CAPACITY, STATE, device=device()),
    )
    return online, target, adamw(online), memory, SumTree(), np.random.default_rng(0)


def learn(online, target, optimizer, memory, leaves):
    rows = torch.from_numpy(leaves).to(device())
    state, action, reward, after = (part[rows] for part in memory)
    with torch.no_grad(), mixed():
        wanted = reward + 0.99 * target(after).amax(-1)
    with mixed():
        q = online(state).gather(1, action[:, None]).squeeze(1)
    error = q.float() - wanted.float()
    loss = F.huber_loss(error, torch.zeros_like(error))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), error.detach().abs() + 0.01


def faulty():
    online, target, optimizer, memory, tree, chance = prepare()

    def step():
        leaves = tree.draw(chance)
        loss, priorities = learn(online, target, optimizer, memory, leaves)
        for leaf, priority in zip(leaves, priorities, strict=True):
            tree.update(leaf, priority.item())  # guilty
        return loss

    return step


def clean():
    online, target, optimizer, memory, tree, chance = prepare()

    def step():
        leaves = tree.draw(chance)
        loss, priorities = learn(online, target, optimizer, memory, leaves)
        tree.update_all(leaves, priorities.cpu().numpy())
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
