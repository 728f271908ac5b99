"""DDPG: the actor's loss is backpropagated through the critic to the action. The critic's weights
still require gradients there, so theirs are computed too, and cleared before anything reads them.
A good finding names the gradients of the critic that no update uses, and the line of the actor's
loss or its backward.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the actor's backward also computes the gradients of all weights of the critic, which are cleared unread",
    "FIX": "critic.requires_grad_(False) around the actor's loss",
}
BATCH, SEEN, MOVES = by_device(1024, 192), 64, 8
ACTOR, CRITIC = by_device(512, 64), by_device(4096, 768)


def network(inputs, width, outputs):
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, outputs),
    )


def prepare():
    actor = network(SEEN, ACTOR, MOVES).to(device())
    critic = network(SEEN + MOVES, CRITIC, 1).to(device())
    data = in_turn(
        lambda: (
            torch.randn(BATCH, SEEN, device=device()),
            torch.rand(BATCH, MOVES, device=device()) * 2 - 1,
            torch.randn(BATCH, 1, device=device()),
        )
    )
    return actor, critic, adamw(actor), adamw(critic), data


def learn_value(critic, optimizer, seen, moves, returns):
    with mixed():
        loss = F.mse_loss(critic(torch.cat([seen, moves], 1)), returns)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    actor, critic, of_actor, of_critic, data = prepare()

    def step():
        seen, moves, returns = next(data)
        value_loss = learn_value(critic, of_critic, seen, moves, returns)
        with mixed():
            loss = -critic(torch.cat([seen, actor(seen).tanh()], 1)).mean()
        loss.backward()  # guilty
        of_actor.step()
        of_actor.zero_grad()
        of_critic.zero_grad()
        return value_loss

    return step


def clean():
    actor, critic, of_actor, of_critic, data = prepare()

    def step():
        seen, moves, returns = next(data)
        value_loss = learn_value(critic, of_critic, seen, moves, returns)
        critic.requires_grad_(False)
        with mixed():
            loss = -critic(torch.cat([seen, actor(seen).tanh()], 1)).mean()
        loss.backward()
        critic.requires_grad_(True)
        of_actor.step()
        of_actor.zero_grad()
        return value_loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
