"""A small vision transformer learns from a frozen larger one. The student's forward stands under bf16
autocast, but the teacher is called a line above it, so all its matrix products and its attention run
in fp32, without the tensor cores. (On a CPU this file has no autocast, and the twins are the same.)
A good finding names the fp32 products of the teacher and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 192,
    "CPU_BATCH": 32,
    "CAUSE": "the frozen teacher is called outside autocast, so its forward runs in fp32",
    "FIX": "call the teacher under the same autocast as the student",
}
SIDE, PATCH, CLASSES = by_device(224, 64), 16, by_device(1000, 100)
SMALL, LARGE = (by_device(256, 64), by_device(6, 2)), (by_device(384, 96), by_device(8, 2))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, stride=PATCH)
        self.positions = nn.Parameter(torch.randn((SIDE // PATCH) ** 2, width) * 0.02)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images):
        x = self.patches(images).flatten(2).mT + self.positions
        return self.head(self.norm(self.blocks(x).mean(1)))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = ViT(*SMALL), ViT(*LARGE).requires_grad_(False)


def distance(answer, known):
    """Return the divergence of the student from the teacher at temperature 2."""
    answer, known = answer.float().div(2).log_softmax(-1), known.float().div(2).log_softmax(-1)
    return F.kl_div(answer, known, reduction="batchmean", log_target=True)


def above(model, images):
    with torch.no_grad():
        known = model.teacher(images)  # guilty
    with mixed():
        answer = model.student(images)
    return distance(answer, known)


def inside(model, images):
    with mixed():
        with torch.no_grad():
            known = model.teacher(images)
        answer = model.student(images)
    return distance(answer, known)


def build(loss):
    my_turn()

    def batch(size):
        return torch.randn(size, 3, SIDE, SIDE, device=device())

    return steplab.UserModel(
        Pair(), lambda size: in_turn(lambda: batch(size), 4), loss, unit="images"
    )


def faulty():
    return build(above)


def clean():
    return build(inside)
