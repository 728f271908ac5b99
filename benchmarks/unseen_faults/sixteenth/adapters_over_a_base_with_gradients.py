"""A language model is fine-tuned by low-rank adapters. The optimizer gets the adapters' parameters alone,
which looks as if the base were frozen; but its weights still require gradients, so each backward pass
computes them, adds them up in .grad, and nobody ever reads or clears them.
A good finding names gradients of the base weights that no optimizer uses, and the line (that of the
optimizer's parameters, or the base layer's own).
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import Decoder, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the base weights require gradients although only the adapters are trained",
    "FIX": "requires_grad_(False) on the base",
}
VOCAB, WIDTH, LAYERS = by_device(32_000, 1000), by_device(1024, 192), by_device(12, 3)
BATCH, CONTEXT, RANK = by_device(16, 4), by_device(512, 64), 8


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.lora_down = nn.Linear(base.in_features, RANK, bias=False)
        self.lora_up = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.lora_up.weight)

    def forward(self, x):
        return self.base(x) + self.lora_up(self.lora_down(x))


def adapted():
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT)
    for block in model.blocks:
        for name in ("qkv", "proj", "up", "down"):
            setattr(block, name, Adapted(getattr(block, name)))
    return model.to(device())


def listed(model):
    return [p for name, p in model.named_parameters() if ".lora_" in name]  # guilty


def alone_with_gradients(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    return [p for p in model.parameters() if p.requires_grad]


def build(trained):
    model = adapted()
    optimizer = torch.optim.AdamW(trained(model), lr=3e-4, fused=True)
    data = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))

    def step():
        ids = next(data)
        with mixed():
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(listed)


def clean():
    return build(alone_with_gradients)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
