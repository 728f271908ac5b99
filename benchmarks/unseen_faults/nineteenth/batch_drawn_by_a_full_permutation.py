"""A soft actor-critic agent learns to walk from a replay memory. The batch of an update is drawn without
repetition: the indices of the whole memory are shuffled, and the first 256 of them are kept.
A good finding names the permutation of the whole memory (a sort of all its indices) for one small batch,
and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the whole replay memory's indices are shuffled to draw one small batch",
    "FIX": "draw the batch's indices directly: torch.randint(len(memory), (batch,))",
}
MEMORY, BATCH = by_device(8_000_000, 1_000_000), by_device(1024, 256)
SEEN, MOVES, WIDTH = 17, 6, by_device(512, 320)


def network(inside, outside):
    return nn.Sequential(
        nn.Linear(inside, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, outside),
    )


def shuffled(held):
    return torch.randperm(held, device=device())[:BATCH]  # guilty


def drawn(held):
    return torch.randint(held, (BATCH,), device=device())


def training(draw):
    torch.manual_seed(0)
    at = device()
    actor, critics = network(SEEN, MOVES).to(at), [network(SEEN + MOVES, 1).to(at) for _ in "ab"]
    targets = [network(SEEN + MOVES, 1).to(at).requires_grad_(False) for _ in "ab"]
    learned = [weight for critic in critics for weight in critic.parameters()]
    followers = [weight for target in targets for weight in target.parameters()]
    critic_optimizer = torch.optim.Adam(learned, lr=3e-4, fused=True)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4, fused=True)
    states = torch.randn(MEMORY, SEEN, device=at)
    moves = torch.rand(MEMORY, MOVES, device=at) * 2 - 1
    rewards = torch.randn(MEMORY, device=at)

    def step():
        index = draw(MEMORY - 1)
        now, move, reward, after = states[index], moves[index], rewards[index], states[index + 1]
        with torch.no_grad():
            pair = torch.cat([after, actor(after).tanh()], 1)
            goal = reward + 0.99 * torch.minimum(targets[0](pair), targets[1](pair)).squeeze(1)
        pair = torch.cat([now, move], 1)
        critic_loss = sum(F.mse_loss(critic(pair).squeeze(1), goal) for critic in critics)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()
        for weight in learned:
            weight.requires_grad_(False)
        actor_loss = -critics[0](torch.cat([now, actor(now).tanh()], 1)).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()
        for weight in learned:
            weight.requires_grad_(True)
        with torch.no_grad():
            torch._foreach_lerp_(followers, learned, 0.005)
        return critic_loss

    return step


def faulty():
    return training(shuffled)


def clean():
    return training(drawn)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
