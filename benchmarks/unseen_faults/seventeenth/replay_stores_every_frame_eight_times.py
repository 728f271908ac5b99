"""Deep Q-learning from pictures: a state is the last four frames. The replay buffer on the device stores each
transition with the stack before and the stack after it, so every frame lies there eight times. Frames
that are stored once, with stacks put together when a batch is drawn, need an eighth of that.
A good finding names the replay buffer that fills the memory and the line that makes it.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the replay buffer stores both stacks of every transition, so each frame lies there eight times",
    "FIX": "store each frame once and gather the stacks by index when a batch is drawn",
}
CAPACITY, SIDE, DEEP = by_device(200_000, 6000), by_device(84, 36), 4
BATCH, WIDTH, ACTIONS, ACTORS = by_device(1024, 32), by_device(32, 12), 18, 8


class StackedReplay:
    def __init__(self, frames):
        self.stacks = torch.empty(
            CAPACITY, 2, DEEP, SIDE, SIDE, dtype=torch.uint8, device=device()
        )  # guilty
        for place in range(2 * DEEP):
            first = place // DEEP + place % DEEP
            self.stacks[:, place // DEEP, place % DEEP] = frames[first : first + CAPACITY]

    def push(self, place, frames):
        """Write the new frames into all stacks that have them."""
        for after in range(-1, DEEP):
            for stack, layer in ((0, DEEP - 1 - after), (1, DEEP - 2 - after)):
                if 0 <= layer < DEEP:
                    self.stacks[place + after : place + after + ACTORS, stack, layer] = frames

    def draw(self, index):
        return self.stacks[index].unbind(1)


class FrameReplay:
    def __init__(self, frames):
        self.frames = frames.clone()
        self.span = torch.arange(DEEP + 1, device=device())

    def push(self, place, frames):
        self.frames[place + DEEP - 1 : place + DEEP - 1 + ACTORS] = frames

    def draw(self, index):
        five = self.frames[index[:, None] + self.span]
        return five[:, :DEEP], five[:, 1:]


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x):
        return x + self.second(F.relu(self.first(F.relu(x))))


class QNet(nn.Module):
    def __init__(self):
        super().__init__()
        layers, inside = [], DEEP
        for outside in (WIDTH, 2 * WIDTH, 2 * WIDTH):
            layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.MaxPool2d(3, 2, 1)]
            layers += [Residual(outside), Residual(outside)]
            inside = outside
        self.body = nn.Sequential(*layers, nn.ReLU(), nn.Flatten())
        side = SIDE
        for _ in range(3):
            side = (side + 1) // 2
        self.head = nn.Sequential(
            nn.Linear(inside * side**2, 512), nn.ReLU(), nn.Linear(512, ACTIONS)
        )

    def forward(self, states):
        x = (states.float() / 255).contiguous(memory_format=torch.channels_last)
        return self.head(self.body(x))


def build(kind):
    model, target = (QNet().to(device(), memory_format=torch.channels_last) for _ in range(2))
    target.requires_grad_(False)
    optimizer = adamw(model)
    frames = torch.randint(256, (CAPACITY + DEEP, SIDE, SIDE), dtype=torch.uint8, device=device())
    replay = kind(frames)
    del frames
    actions = torch.randint(ACTIONS, (CAPACITY,), device=device())
    rewards = torch.randn(CAPACITY, device=device())
    place = 0

    def step():
        nonlocal place
        new = torch.randint(256, (ACTORS, SIDE, SIDE), dtype=torch.uint8, device=device())
        replay.push(place + DEEP, new)
        place = (place + ACTORS) % (CAPACITY - 4 * ACTORS)
        index = torch.randint(CAPACITY, (BATCH,), device=device())
        states, nexts = replay.draw(index)
        with mixed():
            with torch.no_grad():
                goal = rewards[index] + 0.99 * target(nexts).amax(1).float()
            values = model(states).gather(1, actions[index, None])[:, 0]
            loss = F.smooth_l1_loss(values.float(), goal)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(StackedReplay)


def clean():
    return build(FrameReplay)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
