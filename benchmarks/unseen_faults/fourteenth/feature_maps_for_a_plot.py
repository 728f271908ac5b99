"""A convolutional network grades X-ray images. Once per epoch a notebook draws what the blocks look
at; for that, forward hooks put the output of every block into a dictionary in every step. So the
maps of a whole batch stay alive through the update and until the next step replaces them. The plot
can make a pass of its own over its few images.
A good finding names the feature maps that the hooks keep alive between steps and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "forward hooks keep the output of every block in a dictionary that outlives the step",
    "FIX": "hook the blocks for the plot's own pass alone",
}
BATCH, SIDE, BLOCKS = by_device(32, 4), by_device(224, 64), by_device(8, 4)
WIDTH, GRADES = by_device(64, 16), 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(WIDTH), nn.BatchNorm2d(WIDTH)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(x + self.norm2(self.conv2(y)), inplace=True)


class Grader(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, WIDTH, 5, stride=2, padding=2)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, GRADES)

    def forward(self, images):
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


def keep_maps(model):
    """Have the output of each block put into a dictionary, for the plot."""
    maps = {}

    def keeper(name):
        def keep(module, args, output):
            maps[name] = output  # guilty

        return keep

    for name, block in model.blocks.named_children():
        block.register_forward_hook(keeper(name))
    return maps


def build(plots):
    layout = {"memory_format": torch.channels_last}
    model = Grader().to(device(), **layout)
    optimizer = adamw(model)
    maps = keep_maps(model) if plots else {}
    data = in_turn(
        lambda: (
            torch.randn(BATCH, 1, SIDE, SIDE, device=device()).to(**layout),
            torch.randint(GRADES, (BATCH,), device=device()),
        ),
        4,
    )

    def step():
        images, grades = next(data)
        with mixed():
            loss = F.cross_entropy(model(images), grades)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step.maps = maps  # the notebook draws them
    return step


def faulty():
    return build(plots=True)


def clean():
    return build(plots=False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
