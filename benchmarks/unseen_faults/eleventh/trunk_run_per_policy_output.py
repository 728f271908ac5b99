"""Proximal policy optimization on small pictures. The agent has methods for the logarithm of a move's
probability, the entropy and the value, and each of them runs the convolutional trunk.
A good finding names the trunk that runs three times on the same observations, and the line that calls it so.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the agent's trunk runs three times on the same observations: for probability, entropy and value",
    "FIX": "run the trunk once and compute all three from its features",
}
BATCH, SIDE, MOVES = by_device(1024, 160), by_device(64, 24), 6
CHANNELS = by_device(64, 16)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(4, CHANNELS, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * CHANNELS, 2 * CHANNELS, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * CHANNELS * (SIDE // 4) ** 2, 128),
            nn.ReLU(),
        )
        self.policy, self.critic = nn.Linear(128, MOVES), nn.Linear(128, 1)

    def features(self, observations):
        with mixed():
            return self.trunk(observations).float()

    def log_probability(self, observations, moves):
        logp = F.log_softmax(self.policy(self.features(observations)), -1)
        return logp.gather(1, moves[:, None]).squeeze(1)

    def entropy(self, observations):
        logp = F.log_softmax(self.policy(self.features(observations)), -1)
        return -(logp.exp() * logp).sum(1)

    def value(self, observations):
        return self.critic(self.features(observations)).squeeze(1)

    def evaluate(self, observations, moves):
        features = self.features(observations)
        logp = F.log_softmax(self.policy(features), -1)
        entropy = -(logp.exp() * logp).sum(1)
        chosen = logp.gather(1, moves[:, None]).squeeze(1)
        return chosen, entropy, self.critic(features).squeeze(1)


def prepare():
    torch.manual_seed(0)
    agent = Agent().to(device())
    data = in_turn(
        lambda: (
            torch.randn(BATCH, 4, SIDE, SIDE, device=device()),
            torch.randint(MOVES, (BATCH,), device=device()),
            torch.full((BATCH,), -1.79, device=device()),
            torch.randn(BATCH, device=device()),
            torch.randn(BATCH, device=device()),
        )
    )
    return agent, adamw(agent), data


def learn(optimizer, logp, entropy, value, old, advantage, returns):
    ratio = (logp - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    loss = F.mse_loss(value, returns) * 0.5 - gain - 0.01 * entropy.mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    agent, optimizer, data = prepare()

    def step():
        seen, moves, *rest = next(data)
        outputs = (
            agent.log_probability(seen, moves),
            agent.entropy(seen),
            agent.value(seen),
        )  # guilty
        return learn(optimizer, *outputs, *rest)

    return step


def clean():
    agent, optimizer, data = prepare()

    def step():
        seen, moves, *rest = next(data)
        return learn(optimizer, *agent.evaluate(seen, moves), *rest)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
