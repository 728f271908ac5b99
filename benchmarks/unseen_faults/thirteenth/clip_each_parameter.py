"""A decision transformer reads returns, states and actions and predicts the next action. Its gradients
are clipped in a loop that calls clip_grad_norm_ for each parameter by itself: a handful of tiny
operators for each of more than a hundred weights. One call takes all parameters. (The limit
is there for rare spikes; in ordinary steps both ways leave the gradients as they are.)
A good finding names the clipping parameter by parameter and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import Block, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "clip_grad_norm_ is called once per parameter in a Python loop",
    "FIX": "call clip_grad_norm_ once with all parameters",
}
BATCH, MOVES, STATE, ACTION = by_device(192, 3), by_device(64, 16), 32, 8
WIDTH, LAYERS, LIMIT = by_device(256, 64), 12, 100.0


class DecisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.goal, self.state = nn.Linear(1, WIDTH), nn.Linear(STATE, WIDTH)
        self.action, self.times = nn.Linear(ACTION, WIDTH), nn.Embedding(MOVES, WIDTH)
        self.blocks = nn.Sequential(*[Block(WIDTH, WIDTH // 64) for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, ACTION)

    def forward(self, goals, states, actions):
        parts = torch.stack([self.goal(goals), self.state(states), self.action(actions)], 2)
        x = (parts + self.times.weight[:, None]).flatten(1, 2)
        x = self.blocks(x).unflatten(1, (MOVES, 3))[:, :, 1]
        return self.head(self.norm(x))


def one_by_one(parameters):
    for parameter in parameters:
        nn.utils.clip_grad_norm_(parameter, LIMIT)  # guilty


def together(parameters):
    nn.utils.clip_grad_norm_(parameters, LIMIT)


def build(clip):
    model = DecisionTransformer().to(device())
    optimizer, parameters = adamw(model), list(model.parameters())

    def batch():
        sizes = (1, STATE, ACTION)
        return [torch.randn(BATCH, MOVES, size, device=device()) for size in sizes]

    data = in_turn(batch, 4)

    def step():
        goals, states, actions = next(data)
        with mixed():
            loss = F.mse_loss(model(goals, states, actions), actions)
        loss.backward()
        clip(parameters)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(one_by_one)


def clean():
    return build(together)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
