"""An actor-critic appends what it sees to a list and learns from the newest entries. After the update
the list is not cleared, so the observations of all steps stay in memory.
A good finding names memory that grows with every step, and the line that appends.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the list of observations is never cleared after an update and grows with every step",
    "FIX": "clear the list after the update",
}
PLAYERS, PIXELS, MOMENTS = by_device(1024, 64), by_device(3 * 64 * 64, 3 * 64 * 64), 4
WIDTH, ACTIONS = by_device(1024, 48), 6


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(PIXELS, WIDTH), nn.ReLU())
        self.actor, self.critic = nn.Linear(WIDTH, ACTIONS), nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = self.body(x)
        return self.actor(x), self.critic(x)[:, 0]


class Game:
    def __init__(self):
        self.scene = torch.randn(PLAYERS, PIXELS, device=device())
        self.reward = torch.randn(PLAYERS, device=device())

    def play(self, memory):
        for _ in range(MOMENTS):
            seen = self.scene.roll(1, 0)
            moves = torch.randint(ACTIONS, (PLAYERS,), device=device())
            memory.append((seen, moves, self.reward))  # guilty
            self.scene = seen


def learn(policy, optimizer, recent):
    seen, moves, rewards = (torch.cat(parts) for parts in zip(*recent, strict=True))
    with mixed():
        logits, values = policy(seen)
        gain = rewards - values.float()
        chosen = F.cross_entropy(logits, moves, reduction="none")
        loss = (chosen * gain.detach()).mean() + gain.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def prepare():
    policy = Policy().to(device())
    return policy, torch.optim.AdamW(policy.parameters(), lr=1e-4, fused=True), Game()


def faulty():
    policy, optimizer, game = prepare()
    memory = []

    def step():
        game.play(memory)
        return learn(policy, optimizer, memory[-MOMENTS:])

    return step


def clean():
    policy, optimizer, game = prepare()
    memory = []

    def step():
        game.play(memory)
        loss = learn(policy, optimizer, memory[-MOMENTS:])
        memory.clear()
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
