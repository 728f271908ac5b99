"""An actor-critic agent learns to swing up pendulums: a step plays a few moves in several environments and
then updates the policy. While playing, the policy is asked for one environment at a time, as in a
script that began with one environment; each call is a network pass for a batch of one.
A good finding names the policy's passes with batch size one in the loop over environments (many tiny
passes that one batch would do), and the line.
"""

import math

import torch
from torch import nn

from common import adamw, by_device, device, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "during the rollout the policy is called for each environment by itself",
    "FIX": "stack the observations and call the policy once per move",
}
PLACES, MOVES = by_device(64, 12), by_device(32, 16)
WIDTH, LAYERS, DISCOUNT = by_device(512, 256), 3, 0.97


class Pendulum:
    def __init__(self, angle):
        self.angle, self.speed = angle, 0.0

    def seen(self):
        return math.cos(self.angle), math.sin(self.angle), self.speed

    def move(self, torque):
        torque = max(-2.0, min(2.0, torque))
        off = (self.angle + math.pi) % (2 * math.pi) - math.pi
        self.speed += 0.05 * (15 * math.sin(self.angle) + 3 * torque)
        self.speed = max(-8.0, min(8.0, self.speed))
        self.angle += 0.05 * self.speed
        return -(off**2 + 0.1 * self.speed**2 + 0.001 * torque**2)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [3] + [WIDTH] * LAYERS
        layers = [(nn.Linear(a, b), nn.Tanh()) for a, b in zip(sizes, sizes[1:], strict=False)]
        self.body = nn.Sequential(*(part for pair in layers for part in pair))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, seen):
        return self.head(self.body(seen)).unbind(-1)


def ask_each(agent, seen):
    return torch.stack([agent(row)[0] for row in seen])  # guilty


def ask_all(agent, seen):
    return agent(seen)[0]


def play(agent, ask, places):
    noise = torch.randn(MOVES, PLACES, device=device()) * 0.3
    sights, moves, gains = [], [], []
    with torch.no_grad():
        for now in noise:
            seen = torch.tensor([place.seen() for place in places], device=device())
            move = ask(agent, seen) + now
            sights.append(seen)
            moves.append(move)
            gains.append([place.move(m) for place, m in zip(places, move.tolist(), strict=True)])
    return torch.stack(sights), torch.stack(moves), torch.tensor(gains, device=device())


def build(ask):
    agent = Agent().to(device())
    optimizer = adamw(agent)
    places = [Pendulum(6.2 * i / PLACES) for i in range(PLACES)]
    powers = DISCOUNT ** (torch.arange(MOVES)[None] - torch.arange(MOVES)[:, None]).clamp(min=0)
    discounts = powers.triu().to(device())

    def step():
        seen, moves, gains = play(agent, ask, places)
        returns = discounts @ gains
        for _ in range(4):
            means, values = agent(seen)
            advantage = returns - values
            surprise = (moves - means).square() / 0.18
            loss = (surprise * advantage.detach() / 50).mean() + 0.01 * advantage.square().mean()
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
