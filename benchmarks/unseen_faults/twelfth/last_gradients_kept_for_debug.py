"""An autoencoder recommends items from all that a user has bought. To look for the cause of a bad
loss, a copy of all gradients of the last step is kept, and the loss has not been bad for months.
A good finding names the copies of the gradients that stay alive, and the line that makes them.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "a copy of all gradients of the last step is kept for debugging, and nothing reads it",
    "FIX": "do not keep the gradients, or only their norms",
}
BATCH, ITEMS, WIDTH = by_device(256, 48), by_device(100000, 8000), by_device(1024, 224)


def prepare():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(ITEMS, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, ITEMS),
    ).to(device())
    data = in_turn(lambda: (torch.rand(BATCH, ITEMS, device=device()) < 0.01).float(), 2)
    return model, adamw(model), data


def backward(model, bought):
    with mixed():
        logits = model(F.normalize(bought))
    loss = -(F.log_softmax(logits.float(), -1) * bought).sum(-1).mean()
    loss.backward()
    return loss.detach()


def faulty():
    model, optimizer, data = prepare()
    debug = {}

    def step():
        loss = backward(model, next(data))
        debug["grads"] = {n: p.grad.clone() for n, p in model.named_parameters()}  # guilty
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def clean():
    model, optimizer, data = prepare()

    def step():
        loss = backward(model, next(data))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
