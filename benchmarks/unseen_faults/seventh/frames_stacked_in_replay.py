"""DQN sees the last four frames. The replay memory stores all four for every state, and four more
for the state after it, so every frame lies in memory eight times.
A good finding names the replay memory as what holds most of the memory, and the line that makes it.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the replay memory stores each frame eight times: in the stacks of four states and of four next states",
    "FIX": "store every frame once and stack four of them when a batch is drawn",
}
BATCH, SIZE, WIDTH, MOVES = by_device(256, 64), 84, by_device(64, 16), 6
CAPACITY, STACK = by_device(100_000, 3000), 4


class Stacked:
    def __init__(self, frames):
        self.states = (
            frames.unfold(0, STACK, 1)[:CAPACITY].permute(0, 3, 1, 2).contiguous()
        )  # guilty
        self.following = frames.unfold(0, STACK, 1)[1:].permute(0, 3, 1, 2).contiguous()

    def draw(self, numbers):
        return self.states[numbers], self.following[numbers]


class Single:
    def __init__(self, frames):
        self.frames, self.offsets = frames, torch.arange(STACK, device=frames.device)

    def draw(self, numbers):
        numbers = numbers[:, None] + self.offsets
        return self.frames[numbers], self.frames[numbers + 1]


def network():
    return nn.Sequential(
        nn.Conv2d(STACK, WIDTH, 8, 4),
        nn.ReLU(),
        nn.Conv2d(WIDTH, 2 * WIDTH, 4, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * WIDTH * 81, MOVES),
    ).to(device())


def build(memory):
    played = CAPACITY + STACK
    frames = torch.randint(256, (played, SIZE, SIZE), dtype=torch.uint8, device=device())
    replay, net, target = memory(frames), network(), network().requires_grad_(False)
    moves = torch.randint(MOVES, (CAPACITY, 1), device=device())
    rewards = torch.randn(CAPACITY, device=device())
    optimizer = adamw(net)
    chance = torch.Generator(device()).manual_seed(1)

    def step():
        numbers = torch.randint(CAPACITY, (BATCH,), generator=chance, device=device())
        states, following = replay.draw(numbers)
        with mixed():
            with torch.no_grad():
                goal = rewards[numbers] + 0.99 * target(following.float() / 255).amax(1)
            guess = net(states.float() / 255).gather(1, moves[numbers])[:, 0]
            loss = F.smooth_l1_loss(guess, goal)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(Stacked)


def clean():
    return build(Single)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
