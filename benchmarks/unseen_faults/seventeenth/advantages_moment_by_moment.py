"""An iteration of PPO on simulated robots: the advantages of a rollout (GAE) are computed first, and the
policy is updated on four minibatches after that. The advantages come from a Python loop over the
moments, from the last to the first, with a dozen tiny operators on the device for each.
A good finding names the loop over the moments of the rollout (launches) and one of its lines.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the advantages of the rollout are computed in a Python loop over its moments",
    "FIX": "compute all differences at once and sum them by doubling spans (a scan)",
}
MOMENTS, ROBOTS = 1024, by_device(64, 4)
SENSES, JOINTS, MINIBATCHES = by_device(256, 48), by_device(24, 6), 4
WIDTH, LAYERS = by_device(2048, 64), 3
DISCOUNT, SMOOTH, CLIP = 0.99, 0.95, 0.2


def mlp(outside):
    layers, inside = [], SENSES
    for _ in range(LAYERS):
        layers += [nn.Linear(inside, WIDTH), nn.ELU()]
        inside = WIDTH
    return nn.Sequential(*layers, nn.Linear(inside, outside))


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy, self.critic = mlp(JOINTS), mlp(1)
        self.log_spread = nn.Parameter(torch.zeros(JOINTS))

    def forward(self, senses, moves):
        apart = (moves - self.policy(senses).float()) * torch.exp(-self.log_spread)
        return -(0.5 * apart.square() + self.log_spread).sum(1), self.critic(senses).float()[:, 0]


def advantages_in_order(rewards, values, alive):
    found, last = [], torch.zeros_like(rewards[0])
    for moment in reversed(range(MOMENTS)):
        error = rewards[moment] + DISCOUNT * alive[moment] * values[moment + 1] - values[moment]
        last = error + DISCOUNT * SMOOTH * alive[moment] * last  # guilty
        found.append(last)
    return torch.stack(found[::-1])


def advantages_by_scan(rewards, values, alive):
    total = rewards + DISCOUNT * alive * values[1:] - values[:-1]
    keep, span = DISCOUNT * SMOOTH * alive, 1
    while span < MOMENTS:
        total = total + keep * F.pad(total[span:], (0, 0, 0, span))
        keep = keep * F.pad(keep[span:], (0, 0, 0, span))
        span *= 2
    return total


def build(advantages):
    agent = Agent().to(device())
    optimizer = adamw(agent)

    def rollout():
        shape = (MOMENTS, ROBOTS)
        alive = (torch.rand(shape, device=device()) > 0.01).float()
        values = torch.randn(MOMENTS + 1, ROBOTS, device=device())
        senses, moves = (torch.randn(*shape, size, device=device()) for size in (SENSES, JOINTS))
        old = -0.5 * moves.square().sum(2)
        return senses, moves, old, torch.randn(shape, device=device()), values, alive

    data = in_turn(rollout, 4)

    def step():
        senses, moves, old, rewards, values, alive = next(data)
        gains = advantages(rewards, values, alive)
        returns = (gains + values[:-1]).flatten()
        gains = ((gains - gains.mean()) / (gains.std() + 1e-8)).flatten()
        senses, moves, old = senses.flatten(0, 1), moves.flatten(0, 1), old.flatten()
        order = torch.randperm(MOMENTS * ROBOTS, device=device())
        for part in order.chunk(MINIBATCHES):
            with mixed():
                log_p, guess = agent(senses[part], moves[part])
            ratio = torch.exp((log_p - old[part]).clamp(-5, 5))
            gain = gains[part]
            surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
            loss = F.mse_loss(guess, returns[part]) - surrogate.mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(advantages_in_order)


def clean():
    return build(advantages_by_scan)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
