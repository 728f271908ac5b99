"""An actor-critic agent learns from rollouts. For the targets the critic runs on all next states,
although the next state of one time step is the state of the following one, whose value the loss
has already computed: only the very last state of each rollout is new.
A good finding names the critic's second run, that it computes the same values again, and the line.
"""

import torch
from torch import nn
from torch.distributions import Normal

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the critic runs on all next states although all but the last are states that it has just seen",
    "FIX": "shift the values by one time step and run the critic on the last state only",
}
TIME, ENVS = by_device(128, 32), by_device(128, 24)
STATE, WIDTH, MOVES = by_device(512, 64), by_device(4096, 256), 8
GAMMA = 0.99


def network(width, outputs):
    return nn.Sequential(
        nn.Linear(STATE, width),
        nn.SiLU(),
        nn.Linear(width, width),
        nn.SiLU(),
        nn.Linear(width, width),
        nn.SiLU(),
        nn.Linear(width, outputs),
    ).to(device())


def rollout():
    return {
        "states": torch.randn(TIME + 1, ENVS, STATE, device=device()),
        "moves": torch.randn(TIME, ENVS, MOVES, device=device()),
        "rewards": torch.randn(TIME, ENVS, device=device()),
        "alive": (torch.rand(TIME, ENVS, device=device()) > 0.02).float(),
    }


def prepare():
    actor, critic = network(WIDTH // 4, MOVES), network(WIDTH, 1)
    weights = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=3e-4, fused=True)
    return actor, critic, optimizer, in_turn(rollout)


def update(actor, optimizer, roll, values, following):
    target = roll["rewards"] + GAMMA * roll["alive"] * following
    advantage = (target - values).detach()
    with mixed():
        mean = actor(roll["states"][:-1]).float()
    policy = Normal(mean, 1.0, validate_args=False)
    chosen = policy.log_prob(roll["moves"]).sum(-1)
    loss = (target - values).square().mean() - (chosen * advantage).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    actor, critic, optimizer, data = prepare()

    def step():
        roll = next(data)
        with mixed():
            values = critic(roll["states"][:-1]).squeeze(-1).float()
            with torch.no_grad():
                following = critic(roll["states"][1:]).squeeze(-1).float()  # guilty
        return update(actor, optimizer, roll, values, following)

    return step


def clean():
    actor, critic, optimizer, data = prepare()

    def step():
        roll = next(data)
        with mixed():
            values = critic(roll["states"][:-1]).squeeze(-1).float()
            with torch.no_grad():
                last = critic(roll["states"][-1:]).squeeze(-1).float()
                following = torch.cat([values[1:], last])
        return update(actor, optimizer, roll, values, following)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
