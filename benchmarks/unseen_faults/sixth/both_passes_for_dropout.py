"""A diffusion model forgets the class of every tenth image, for guidance without a classifier. The
network runs on all images with their class and on all without it, and one result each is taken.
A good finding names the network's second pass, or that most of its results are thrown away, and the
line that calls it without the class.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 64,
    "CPU_BATCH": 20,
    "CAUSE": "the network runs on all images with and without their class, and torch.where takes one result each",
    "FIX": "choose the class before the network, and run it once",
}
SIDE, WIDTH, CLASSES, TIMES = by_device(64, 24), by_device(128, 48), 10, 100


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.classes, self.times = nn.Embedding(CLASSES + 1, WIDTH), nn.Embedding(TIMES, WIDTH)
        self.first = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.middle = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.last = nn.Conv2d(WIDTH, 3, 3, padding=1)

    def forward(self, x, time, label):
        known = (self.classes(label) + self.times(time))[:, :, None, None]
        x = F.silu(self.first(x) + known)
        return self.last(x + F.silu(self.middle(x)))


def two_passes(model, x, time, label, forget):
    with_class = model(x, time, label)
    without = model(x, time, torch.full_like(label, CLASSES))  # guilty
    return torch.where(forget[:, None, None, None], without, with_class)


def one_pass(model, x, time, label, forget):
    return model(x, time, torch.where(forget, CLASSES, label))


def make(size):
    images, noise = torch.randn(2, size, 3, SIDE, SIDE, device=device())
    time = torch.randint(TIMES, (size,), device=device())
    share = (time / TIMES)[:, None, None, None]
    noisy = (images * (1 - share) + noise * share).contiguous(memory_format=torch.channels_last)
    label = torch.randint(CLASSES, (size,), device=device())
    return noisy, time, label, torch.rand(size, device=device()) < 0.1, noise


def build(predict):
    my_turn()

    def loss(model, batch):
        *given, noise = batch
        with mixed():
            return F.mse_loss(predict(model, *given), noise)

    model = Network().to(memory_format=torch.channels_last)
    return steplab.UserModel(model, lambda size: in_turn(lambda: make(size)), loss, unit="images")


def faulty():
    return build(two_passes)


def clean():
    return build(one_pass)
