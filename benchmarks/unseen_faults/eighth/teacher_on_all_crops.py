"""Self-distillation with crops: the student sees two large and eight small crops of every image,
the frozen teacher's targets come from the large ones. The teacher is given the small ones as well,
and what it says about them is never used.
A good finding names the teacher's run on the small crops, that it is not needed, and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the teacher runs on all crops although only its outputs for the large ones are used",
    "FIX": "give the teacher the large crops alone",
}
IMAGES, LARGE, SMALL = by_device(32, 4), 2, 8
LARGE_TOKENS, SMALL_TOKENS, PATCH = by_device(196, 36), by_device(100, 16), by_device(768, 48)
STUDENT, TEACHER, LAYERS = by_device(384, 64), by_device(1024, 128), by_device(8, 2)
CLASSES, HEAT = by_device(4096, 64), 0.07


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, w // 64, 64).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed, self.positions = nn.Linear(PATCH, width), nn.Embedding(LARGE_TOKENS, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, patches):
        x = self.embed(patches) + self.positions.weight[: patches.shape[1]]
        return self.head(self.norm(self.blocks(x)).mean(1))


def crops():
    return [
        torch.randn(LARGE * IMAGES, LARGE_TOKENS, PATCH, device=device()),
        torch.randn(SMALL * IMAGES, SMALL_TOKENS, PATCH, device=device()),
    ]


def build(targets_of):
    student = Encoder(STUDENT).to(device())
    teacher = Encoder(TEACHER).to(device()).eval().requires_grad_(False)
    optimizer, data = adamw(student), in_turn(crops)

    def step():
        views = next(data)
        with mixed():
            with torch.no_grad():
                target = targets_of(teacher, views).float().div(HEAT).softmax(-1)
                target = target.view(LARGE, IMAGES, CLASSES).mean(0)
            guesses = torch.cat([student(view) for view in views]).view(-1, IMAGES, CLASSES)
            loss = -(target * guesses.float().log_softmax(-1)).sum(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def of_all(teacher, views):
    outputs = [teacher(view) for view in views]  # guilty
    return outputs[0]


def of_large(teacher, views):
    return teacher(views[0])


def faulty():
    return build(of_all)


def clean():
    return build(of_large)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
