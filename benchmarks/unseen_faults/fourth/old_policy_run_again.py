"""PPO compares the new policy with the one that played. The latter is kept as a second network and
evaluated on every minibatch, although its probabilities were known when the moves were made.
A good finding names the old network's forward in the update, and the line that calls it.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the old policy's network runs on every minibatch of an update instead of once, when the moves are made",
    "FIX": "store the log-probabilities with the moves",
}
MOVES, BATCH = by_device(16_384, 1280), by_device(2048, 80)
SIDE, CHANNELS, ACTIONS = by_device(84, 32), by_device(32, 24), 6
LEFT = ((SIDE - 3) // 2 - 1) // 2 - 2  # of the side after the convolutions


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, CHANNELS, 5, stride=2),
            nn.ReLU(),
            nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, stride=2),
            nn.ReLU(),
            nn.Conv2d(2 * CHANNELS, 2 * CHANNELS, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * CHANNELS * LEFT**2, 256),
            nn.ReLU(),
        ).to(memory_format=torch.channels_last)
        self.actor, self.critic = nn.Linear(256, ACTIONS), nn.Linear(256, 1)

    def forward(self, seen, actions):
        h = self.body(seen)
        logs = self.actor(h).log_softmax(-1)
        return logs.gather(1, actions[:, None])[:, 0], self.critic(h)[:, 0], logs


def prepare():
    policy = Policy().to(device())
    seen = torch.rand(MOVES, 4, SIDE, SIDE, device=device())
    seen = seen.contiguous(memory_format=torch.channels_last)
    actions = torch.randint(ACTIONS, (MOVES,), device=device())
    advantages, returns = torch.randn(2, MOVES, device=device())
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4, fused=True)
    return policy, optimizer, (seen, actions, advantages, returns)


def minibatches():
    chance = torch.Generator().manual_seed(1)
    while True:
        yield from torch.randperm(MOVES, generator=chance).to(device()).split(BATCH)


def update(policy, optimizer, batch, old):
    seen, actions, advantages, returns = batch
    with mixed():
        new, values, logs = policy(seen, actions)
        ratio = (new - old).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        entropy = -(logs.exp() * logs).sum(-1).mean()
        loss = 0.5 * F.mse_loss(values, returns) - gain - 0.01 * entropy
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    policy, optimizer, moves = prepare()
    old_policy, numbers = copy.deepcopy(policy).requires_grad_(False), minibatches()

    def step():
        chosen = next(numbers)
        batch = [t[chosen] for t in moves]
        with torch.no_grad(), mixed():
            old = old_policy(batch[0], batch[1])[0]  # guilty
        return update(policy, optimizer, batch, old)

    return step


def clean():
    policy, optimizer, moves = prepare()
    numbers = minibatches()
    with torch.no_grad(), mixed():
        parts = zip(moves[0].split(BATCH), moves[1].split(BATCH), strict=True)
        played = torch.cat([policy(seen, actions)[0] for seen, actions in parts])

    def step():
        chosen = next(numbers)
        return update(policy, optimizer, [t[chosen] for t in moves], played[chosen])

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
