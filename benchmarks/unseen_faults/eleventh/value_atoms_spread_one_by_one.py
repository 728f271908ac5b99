"""A distributional value network (C51, here with 101 atoms) learns from replay. The target is
projected onto the 101 atoms by a Python loop over the atoms: each spreads its mass with a hat
function over all 101, of which two get something.
A good finding names the loop over the atoms in the projection of the target distribution.
"""

import copy

import torch
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the target distribution is projected atom by atom in Python, each over all atoms",
    "FIX": "add each atom's mass to its two neighbors with two scatter_add_ of the whole batch",
}
BATCH, STATE, ACTIONS, ATOMS = by_device(4096, 512), 48, 6, 101
WIDTH = by_device(1024, 256)
LOW, HIGH, GAMMA = -10.0, 10.0, 0.99


def project_in_loop(place, mass):
    slots = torch.arange(ATOMS, device=place.device)
    target = torch.zeros_like(mass)
    for a in range(ATOMS):
        target += mass[:, a, None] * (1 - (place[:, a, None] - slots).abs()).clamp(min=0)  # guilty
    return target


def project(place, mass):
    low = place.floor()
    share, low = place - low, low.long()
    target = torch.zeros_like(mass)
    target.scatter_add_(1, low, mass * (1 - share))
    return target.scatter_add_(1, (low + 1).clamp_(max=ATOMS - 1), mass * share)


def network():
    return nn.Sequential(
        nn.Linear(STATE, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, ACTIONS * ATOMS),
        nn.Unflatten(1, (ACTIONS, ATOMS)),
    ).to(device())


def build(projection):
    online = network()
    frozen = copy.deepcopy(online).requires_grad_(False)
    optimizer = adamw(online)
    support = torch.linspace(LOW, HIGH, ATOMS, device=device())
    rows = torch.arange(BATCH, device=device())

    def batch():
        state, after = torch.randn(2, BATCH, STATE, device=device())
        action = torch.randint(ACTIONS, (BATCH,), device=device())
        reward = torch.randn(BATCH, 1, device=device())
        alive = (torch.rand(BATCH, 1, device=device()) > 0.1).float()
        return state, action, reward, after, alive

    data = in_turn(batch)

    def step():
        state, action, reward, after, alive = next(data)
        with torch.no_grad():
            with mixed():
                logits = frozen(after)
            chances = logits.float().softmax(-1)
            mass = chances[rows, (chances @ support).argmax(1)]
            values = (reward + GAMMA * alive * support).clamp(LOW, HIGH)
            target = projection((values - LOW) * ((ATOMS - 1) / (HIGH - LOW)), mass)
        with mixed():
            logits = online(state)[rows, action]
        loss = -(target * logits.float().log_softmax(-1)).sum(1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(project_in_loop)


def clean():
    return build(project)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
