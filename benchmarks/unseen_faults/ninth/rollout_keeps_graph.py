"""The policy plays a rollout, and its log-probabilities and values are stored as they come, with
their graphs. So the activations of all time steps stay in memory during the whole update, although
PPO uses the stored numbers as constants.
A good finding names the activations of the rollout that are kept, and the line of the policy's call
or of the list that holds them.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the policy plays without no_grad, and the stored log-probabilities and values keep the activations of the rollout",
    "FIX": "play the rollout under torch.no_grad()",
}
ENVS, STEPS, PARTS = by_device(256, 8), by_device(64, 24), 12
SIZE, WIDTH, MOVES = by_device(64, 32), by_device(64, 16), 6


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, WIDTH, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(WIDTH, WIDTH, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(WIDTH, WIDTH, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(WIDTH * (SIZE // 4) ** 2, MOVES + 1),
        )

    def forward(self, x):
        logits, value = self.body(x).float().split([MOVES, 1], 1)
        return logits.log_softmax(1), value.squeeze(1)


def play(policy, worlds):
    """Return moves, log-probabilities and values of STEPS moves in all environments."""
    kept = []
    with mixed():
        for state in worlds:
            log_p, value = policy(state)
            move = torch.multinomial(log_p.detach().exp(), 1)
            kept.append((move, log_p.gather(1, move).squeeze(1), value))
    return [torch.stack(part) for part in zip(*kept, strict=True)]


def prepare():
    policy = Policy().to(device())
    worlds = torch.randn(STEPS, ENVS, 4, SIZE, SIZE, device=device())
    rewards = torch.randn(STEPS, ENVS, device=device())
    return policy, adamw(policy), worlds, rewards


def learn(policy, optimizer, worlds, rewards, moves, old, values):
    gain = (rewards - values).detach()
    total, parts = (
        0,
        zip(*(x.chunk(PARTS) for x in (worlds, moves, old, gain, rewards)), strict=True),
    )
    for state, move, before, better, reward in parts:
        with mixed():
            log_p, value = policy(state.flatten(0, 1))
        ratio = (log_p.gather(1, move.flatten(0, 1)).squeeze(1) - before.detach().flatten()).exp()
        better = better.flatten()
        loss = -torch.min(ratio * better, ratio.clamp(0.8, 1.2) * better).mean()
        loss = loss + 0.5 * F.mse_loss(value, reward.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    return total / PARTS


def faulty():
    policy, optimizer, worlds, rewards = prepare()

    def step():
        moves, old, values = play(policy, worlds)  # guilty
        return learn(policy, optimizer, worlds, rewards, moves, old, values)

    return step


def clean():
    policy, optimizer, worlds, rewards = prepare()

    def step():
        with torch.no_grad():
            moves, old, values = play(policy, worlds)
        return learn(policy, optimizer, worlds, rewards, moves, old, values)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
