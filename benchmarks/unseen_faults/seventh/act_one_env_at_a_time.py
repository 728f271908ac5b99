"""Thirty-two environments are played at once, but the policy is asked for the move of each of them
on its own: one forward per environment and time step instead of one per time step.
A good finding names the many small forwards, and the line that calls the policy.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the policy runs once per environment, on a batch of one, in every time step of the rollout",
    "FIX": "one forward on the states of all environments",
}
ENVS, TIME, SEEN, MOVES = by_device(128, 32), by_device(16, 8), 48, 8
WIDTH = by_device(1024, 448)


def prepare():
    policy = nn.Sequential(
        nn.Linear(SEEN, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, MOVES),
    ).to(device())
    start = torch.randn(ENVS, SEEN, device=device())
    effect = torch.randn(MOVES, SEEN, device=device()) * 0.3
    return policy, adamw(policy), start, effect


def ask_each(policy, states):
    return torch.cat([policy(state[None]) for state in states])  # guilty


def ask_all(policy, states):
    return policy(states)


@torch.no_grad()
def play(policy, states, effect, ask):
    seen, made = [], []
    for _ in range(TIME):
        with mixed():
            moves = ask(policy, states).argmax(-1)
        seen.append(states)
        made.append(moves)
        states = 0.9 * states + effect[moves]
    return torch.cat(seen), torch.cat(made)


def build(ask):
    policy, optimizer, start, effect = prepare()

    def step():
        seen, made = play(policy, start, effect, ask)
        rewards = -seen.square().mean(1)
        with mixed():
            chances = -F.cross_entropy(policy(seen), made, reduction="none")
        loss = -(chances * (rewards - rewards.mean())).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(ask_each)


def clean():
    return build(ask_all)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
