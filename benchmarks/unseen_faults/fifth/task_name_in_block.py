"""Every task has its own scale in the norm of a compiled block, which takes the task's name and
looks the scale up by it. The compiler makes a version per name and stops after eight: the blocks
run uncompiled for all other tasks.
A good finding names the recompilations for each name, or that the blocks run uncompiled, and the
line that compiles or that looks the scale up.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the compiled block takes the name of the task and is compiled anew for each; beyond eight names it runs eagerly",
    "FIX": "look the task's scale up outside and give the block the tensor",
}
BATCH, TIME, WIDTH, INNER = by_device(64, 16), by_device(512, 96), by_device(2048, 256), 32
LAYERS, TASKS = 3, [f"task{i}" for i in range(40)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterDict({task: torch.ones(WIDTH) for task in TASKS})
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.1))
        self.mix, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.compile()


class ByName(Block):  # forward is written twice since the compiler's limit is one per function
    def forward(self, x, task):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scales[task]  # guilty
        y = y * torch.sigmoid(1.702 * y) + torch.tanh(self.shift) * y
        return x + self.out(F.silu(self.mix(y)))


class ByTensor(Block):
    def forward(self, x, scale):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale
        y = y * torch.sigmoid(1.702 * y) + torch.tanh(self.shift) * y
        return x + self.out(F.silu(self.mix(y)))


def build(block, given):
    first, last = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16)
    blocks = [block() for _ in range(LAYERS)]
    model = nn.Sequential(first, *blocks, last).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = in_turn(lambda: torch.randn(BATCH, TIME, 16, device=device()))
    tasks = in_turn(iter(TASKS).__next__, len(TASKS))

    def step():
        x, task = next(batches), next(tasks)
        with mixed():
            y = first(x)
            for part in blocks:
                y = part(y, given(part, task))
            loss = F.mse_loss(last(y), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(ByName, lambda block, task: task)


def clean():
    return build(ByTensor, lambda block, task: block.scales[task])


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
