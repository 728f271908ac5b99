"""Low-rank adapters are trained on a frozen language model. The frozen matrices stay in fp32, as
they were loaded, and autocast makes a bf16 copy of each, which the graph keeps for the backward:
6 bytes for each weight that never changes. In bf16 it would be 2, and the products are the same.
A good finding names the frozen weights in fp32 (or their bf16 copies), and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import Decoder, by_device, device, in_turn, main

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "frozen weights are kept in fp32, and each has a bf16 copy of autocast beside it until the backward",
    "FIX": "keep the frozen matrices in bf16",
}
BATCH, TIME, VOCAB = by_device(2, 4), by_device(1024, 64), by_device(8192, 256)
WIDTH, LAYERS, RANK = by_device(2048, 256), by_device(20, 2), 8


class Adapted(nn.Module):
    """A frozen linear layer and a trained low-rank one beside it."""

    def __init__(self, linear, dtype):
        super().__init__()
        self.base = linear.to(dtype).requires_grad_(False)
        self.down = nn.Linear(linear.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, linear.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.01)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapted(dtype):
    """Return the frozen model with its matrices in `dtype`, and adapters."""
    with torch.device(device()):
        model = Decoder(WIDTH, LAYERS, VOCAB, TIME).requires_grad_(False)
        for block in model.blocks:
            for name in ("qkv", "proj", "up", "down"):
                setattr(block, name, Adapted(getattr(block, name), dtype))
    return model


def build(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-4, fused=True)
    data = in_turn(lambda: torch.randint(VOCAB, (BATCH, TIME + 1), device=device()))

    def step():
        ids = next(data)
        with torch.autocast(device(), torch.bfloat16):
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(adapted(torch.float32))  # guilty


def clean():
    return build(adapted(torch.bfloat16))


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
