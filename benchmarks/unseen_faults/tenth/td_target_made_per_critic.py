"""Twin critics share one target, but the target (target actor and both target critics on the next
states) is computed inside the sum over the critics, once for each of them.
A good finding names the target that is computed twice from the same batch, and the line.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the bootstrapped target of the twin critics is computed once per critic, same batch",
    "FIX": "compute the target once, before the losses of the critics",
}
BATCH, WIDTH, STATE, ACTION = by_device(4096, 256), by_device(2048, 320), 24, 6


def network(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, outputs),
    )


class Agent:
    def __init__(self):
        self.critics = nn.ModuleList(network(STATE + ACTION, 1) for _ in range(2)).to(device())
        self.target_actor = network(STATE, ACTION).to(device())
        self.target_critics = copy.deepcopy(self.critics)
        self.optimizer = adamw(self.critics)

    @torch.no_grad()
    def target(self, reward, after):
        move = self.target_actor(after).tanh()
        pair = torch.cat([after, move], 1)
        worst = torch.minimum(self.target_critics[0](pair), self.target_critics[1](pair))
        return reward + 0.99 * worst

    def update(self, loss):
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def prepare():
    chance = torch.Generator(device()).manual_seed(1)

    def batch():
        sizes = (STATE + ACTION, 1, STATE)
        return [torch.randn(BATCH, n, device=device(), generator=chance) for n in sizes]

    return Agent(), in_turn(batch)


def faulty():
    agent, data = prepare()

    def step():
        pair, reward, after = next(data)
        loss = 0.0
        with mixed():
            for critic in agent.critics:
                loss = loss + F.mse_loss(critic(pair), agent.target(reward, after))  # guilty
        return agent.update(loss)

    return step


def clean():
    agent, data = prepare()

    def step():
        pair, reward, after = next(data)
        loss = 0.0
        with mixed():
            target = agent.target(reward, after)
            for critic in agent.critics:
                loss = loss + F.mse_loss(critic(pair), target)
        return agent.update(loss)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
