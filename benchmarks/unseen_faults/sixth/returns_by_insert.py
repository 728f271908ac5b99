"""The discounted returns of a policy gradient are summed up backward through time in Python, one
single-number tensor at a time, and inserted at the front of a list, episode by episode.
A good finding names the thousands of tiny operators or the host's time, and the line of the loop.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "returns are summed up in Python, one number of one episode after the other",
    "FIX": "one product of all rewards with a triangular matrix of discounts",
}
EPISODES, TIME, SEEN = by_device(64, 16), by_device(256, 128), 32
WIDTH, ACTIONS, DISCOUNT = by_device(1024, 192), 6, 0.98


def prepare():
    policy = nn.Sequential(
        nn.Linear(SEEN, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, ACTIONS),
    ).to(device())
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, fused=True)
    played = in_turn(
        lambda: (
            torch.randn(EPISODES, TIME, SEEN, device=device()),
            torch.randint(ACTIONS, (EPISODES, TIME), device=device()),
            torch.rand(EPISODES, TIME, device=device()),
        )
    )
    return policy, optimizer, played


def returns_in_python(rewards):
    episodes = []
    for episode in rewards:
        total, returns = 0.0, []
        for reward in reversed(episode):
            total = reward + DISCOUNT * total  # guilty
            returns.insert(0, total)
        episodes.append(torch.stack(returns))
    return torch.stack(episodes)


def returns_by_product():
    powers = DISCOUNT ** torch.arange(TIME, device=device()).float()
    where = torch.arange(TIME, device=device())
    apart = where[:, None] - where[None]
    discounts = torch.where(apart >= 0, powers[apart.clamp(min=0)], 0.0)
    return lambda rewards: rewards @ discounts


def build(returns_of):
    policy, optimizer, played = prepare()

    def step():
        seen, moves, rewards = next(played)
        returns = returns_of(rewards)
        gain = (returns - returns.mean()) / returns.std()
        with mixed():
            logits = policy(seen)
            chosen = F.cross_entropy(logits.flatten(0, 1), moves.flatten(), reduction="none")
            loss = (chosen * gain.flatten()).mean() + chosen.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(returns_in_python)


def clean():
    return build(returns_by_product())


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
