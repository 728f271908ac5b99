"""An actor-critic update for a robot arm goes over a rollout whose observations are all known. The
code was taken over from the collecting of the rollout: the network is asked moment by moment, with
the few observations of that moment, and the log probabilities, entropies and values are gathered in
lists. It has no state from moment to moment; one call with all observations gives the same.
A good finding names the many small calls of the network in a Python loop over time, and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal

from common import adamw, by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the network is called once for each moment of the rollout in a Python loop",
    "FIX": "evaluate the network on the observations of all moments in one call",
}
MOMENTS, ARMS = by_device(48, 48), by_device(256, 64)
SEEN, MOVES, WIDTH = 48, 8, by_device(1024, 192)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(SEEN, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )
        self.mean, self.value = nn.Linear(WIDTH, MOVES), nn.Linear(WIDTH, 1)
        self.log_std = nn.Parameter(torch.zeros(MOVES))

    def forward(self, seen, moves):
        x = self.trunk(seen)
        policy = Normal(self.mean(x), self.log_std.exp(), validate_args=False)
        return policy.log_prob(moves).sum(-1), policy.entropy().sum(-1), self.value(x).squeeze(-1)


def moment_by_moment(model, seen, moves):
    found = [model(seen[t], moves[t]) for t in range(len(seen))]  # guilty
    return [torch.stack(kind) for kind in zip(*found, strict=True)]


def all_at_once(model, seen, moves):
    return model(seen, moves)


def build(evaluate):
    model = ActorCritic().to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randn(MOMENTS, ARMS, SEEN, device=device()),
            torch.randn(MOMENTS, ARMS, MOVES, device=device()),
            torch.randn(MOMENTS, ARMS, device=device()),
            torch.randn(MOMENTS, ARMS, device=device()),
            torch.full((MOMENTS, ARMS), -11.0, device=device()),
        )
    )

    def step():
        seen, moves, advantage, returns, before = next(data)
        log_prob, entropy, value = evaluate(model, seen, moves)
        ratio = (log_prob - before).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        loss = -gain.mean() + 0.5 * F.mse_loss(value, returns) - 0.01 * entropy.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(moment_by_moment)


def clean():
    return build(all_at_once)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
