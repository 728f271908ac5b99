"""A replay buffer keeps the frames of a game, which are bytes, as float32 numbers between 0 and 1:
four times the memory, for frames of which a step takes a few.
A good finding names the buffer as by far the largest tensor, and its line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the replay buffer keeps frames of bytes as float32, four times as large",
    "FIX": "keep bytes and convert the few frames of a batch",
}
FRAMES, SIDE, STACK = by_device(400_000, 8000), by_device(84, 64), 4
BATCH, WIDTH, ACTIONS, NEW = by_device(256, 32), by_device(512, 128), 6, 4


class Replay:
    def __init__(self):
        self.frames = torch.zeros(FRAMES, SIDE, SIDE, dtype=torch.uint8, device=device())
        self.actions = torch.randint(ACTIONS, (FRAMES,), device=device())
        self.rewards = torch.randn(FRAMES, device=device())
        self.at = 0
        for _ in range(0, FRAMES, 1000):
            self.write(torch.randint(256, (1000, SIDE, SIDE), dtype=torch.uint8, device=device()))

    def write(self, frames):
        self.frames[self.at : self.at + len(frames)] = frames
        self.at = (self.at + len(frames)) % FRAMES

    def read(self, numbers):
        return self.frames[numbers].float().div_(255)

    def draw(self):
        begin = torch.randint(FRAMES - STACK - 1, (BATCH,), device=device())
        window = self.read(begin[:, None] + torch.arange(STACK + 1, device=device()))
        last = begin + STACK - 1
        return window[:, :-1], self.actions[last], self.rewards[last], window[:, 1:]


class FloatReplay(Replay):
    def __init__(self):
        super().__init__()
        self.frames = self.frames.float().div_(255)  # guilty

    def write(self, frames):
        super().write(frames if self.frames.dtype == torch.uint8 else frames.float().div_(255))

    def read(self, numbers):
        return self.frames[numbers]


def network():
    return nn.Sequential(
        nn.Conv2d(STACK, 32, 8, stride=4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, stride=2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, ACTIONS),
    )


def build(replay):
    online, target = network(), network()
    for net in (online, target):
        net(torch.zeros(1, STACK, SIDE, SIDE))
    target.load_state_dict(online.state_dict())
    online, target = online.to(device()), target.to(device()).requires_grad_(False)
    optimizer = torch.optim.AdamW(online.parameters(), lr=1e-4, fused=True)
    memory = replay()
    seen = torch.randint(256, (NEW, SIDE, SIDE), dtype=torch.uint8, device=device())

    def step():
        memory.write(seen)
        now, action, reward, later = memory.draw()
        with mixed():
            with torch.no_grad():
                goal = reward + 0.99 * target(later).amax(1)
            value = online(now).gather(1, action[:, None])[:, 0]
            loss = F.smooth_l1_loss(value, goal.to(value.dtype))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(FloatReplay)


def clean():
    return build(Replay)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
