"""A network for click prediction is regularized by the squares of all its weights, and the author added the
penalty to the loss as the formula has it: a sum over model.parameters(). So every step squares and
sums all weights, and the backward pass makes a second gradient as large as the model and adds it to
the first. Adam's weight_decay adds the very same term while it reads the gradients anyway.
A good finding names the squares of all weights in the loss (or their gradients), and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the L2 penalty is a term of the loss over all weights instead of the optimizer's",
    "FIX": "leave the penalty out of the loss and give Adam weight_decay=2 * PENALTY",
}
BATCH, FEATURES = by_device(1024, 64), by_device(1024, 256)
WIDTH, DEPTH, PENALTY = by_device(4096, 960), by_device(6, 4), 1e-5


def network():
    parts, inside = [], FEATURES
    for _ in range(DEPTH):
        parts += [nn.Linear(inside, WIDTH), nn.ReLU()]
        inside = WIDTH
    return nn.Sequential(*parts, nn.Linear(inside, 1)).to(device())


def click_loss(model, features, clicked):
    with mixed():
        logits = model(features)[:, 0]
    return F.binary_cross_entropy_with_logits(logits.float(), clicked)


def penalized_loss(model, features, clicked):
    squares = sum(weight.pow(2).sum() for weight in model.parameters())  # guilty
    return click_loss(model, features, clicked) + PENALTY * squares


def train(loss_of, decay):
    torch.manual_seed(0)
    model = network()
    updates = torch.optim.Adam(model.parameters(), lr=1e-4, weight_decay=decay, fused=True)

    def impressions():
        clicked = torch.randint(2, (BATCH,), device=device()).float()
        return torch.randn(BATCH, FEATURES, device=device()), clicked

    stream = in_turn(impressions)

    def step():
        features, clicked = next(stream)
        loss = loss_of(model, features, clicked)
        loss.backward()
        updates.step()
        updates.zero_grad()
        return loss.detach()

    return step


def faulty():
    return train(penalized_loss, 0.0)


def clean():
    return train(click_loss, 2 * PENALTY)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
