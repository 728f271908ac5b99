"""A walking robot learns with PPO. The update of a rollout shall end early when the policy has gone too far
from the one that acted, so after each minibatch the divergence is measured: by a pass of the policy over
the whole rollout, every time. The ratio of the minibatch at hand, which the loss has computed anyway,
estimates the same number for nothing.
A good finding names the policy's extra pass over the whole rollout in each update and the line that asks
for it.
"""

import torch
from torch import nn
from torch.distributions import Normal

from common import by_device, device, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "after each minibatch the policy is run over the whole rollout only to measure its KL",
    "FIX": "estimate the KL from the log-ratio of the minibatch that the loss already has",
}
ROLLOUT, BATCH = by_device(131_072, 2048), by_device(16_384, 512)
SENSES, MOTORS, WIDTH = 48, 12, by_device(512, 320)
CLIP, LIMIT = 0.2, 0.03


def mlp(outputs):
    return nn.Sequential(
        nn.Linear(SENSES, WIDTH),
        nn.ELU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ELU(),
        nn.Linear(WIDTH, WIDTH // 2),
        nn.ELU(),
        nn.Linear(WIDTH // 2, outputs),
    )


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy, self.critic = mlp(MOTORS), mlp(1)
        self.spread = nn.Parameter(torch.zeros(MOTORS))

    def log_prob(self, senses, action):
        return Normal(self.policy(senses), self.spread.exp()).log_prob(action).sum(-1)


def collect(agent):
    senses = torch.randn(ROLLOUT, SENSES, device=device())
    with torch.no_grad():
        action = agent.policy(senses) + torch.randn(ROLLOUT, MOTORS, device=device())
        acted = agent.log_prob(senses, action)
    advantage = torch.randn(ROLLOUT, device=device())
    return {"senses": senses, "action": action, "acted": acted, "advantage": advantage}


def estimate(change):
    return (change.exp() - 1 - change).mean()


@torch.no_grad()
def divergence_of_rollout(agent, rollout, change):
    change = agent.log_prob(rollout["senses"], rollout["action"]) - rollout["acted"]  # guilty
    return estimate(change)


@torch.no_grad()
def divergence_of_batch(agent, rollout, change):
    return estimate(change)


def make(divergence):
    torch.manual_seed(0)
    agent = Agent().to(device())
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-6, fused=True)
    rollout = collect(agent)
    state = {"order": [], "stopped": 0}

    def step():
        if not state["order"]:
            state["order"] = list(torch.randperm(ROLLOUT, device=device()).split(BATCH))
        index = state["order"].pop()
        senses, action, acted, advantage = (part[index] for part in rollout.values())
        change = agent.log_prob(senses, action) - acted
        ratio = change.exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        value = agent.critic(senses).squeeze(-1)
        loss = (value - advantage).square().mean() - gain.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if divergence(agent, rollout, change) > LIMIT:
            state["order"], state["stopped"] = [], state["stopped"] + 1
        return loss.detach()

    return step


def faulty():
    return make(divergence_of_rollout)


def clean():
    return make(divergence_of_batch)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
