"""A deep ensemble forecasts the load of a power grid: five networks sharing nothing. Their losses
are summed and differentiated at the end, so the activations of all five are alive at once.
A good finding names the activations of all members held until one backward, and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the losses of five separate members are summed, so all their activations are alive",
    "FIX": "call backward for each member right after its own forward",
}
BATCH, HISTORY, HOURS, MEMBERS = by_device(32768, 1024), 96, 24, 5
WIDTH = by_device(1024, 128)


def member():
    return nn.Sequential(
        nn.Linear(HISTORY, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, HOURS),
    )


def prepare():
    members = nn.ModuleList(member() for _ in range(MEMBERS)).to(device())
    data = in_turn(
        lambda: (
            torch.randn(BATCH, HISTORY, device=device()),
            torch.randn(BATCH, HOURS, device=device()),
        ),
        2,
    )
    return members, adamw(members), data


def loss_of(net, past, load):
    with mixed():
        guess = net(past)
    return F.huber_loss(guess.float(), load)


def faulty():
    members, optimizer, data = prepare()

    def step():
        past, load = next(data)
        loss = sum(loss_of(net, past, load) for net in members)  # guilty
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def clean():
    members, optimizer, data = prepare()

    def step():
        past, load = next(data)
        total = torch.zeros((), device=device())
        for net in members:
            loss = loss_of(net, past, load)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
