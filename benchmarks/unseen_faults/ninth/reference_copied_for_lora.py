"""Preference tuning (DPO) of low-rank adapters. The reference policy is a deep copy of the whole
model, so the frozen weights are in memory twice, although the model without its adapters is the
reference.
A good finding names the second copy of the frozen weights, and the line of the deepcopy.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from common import Decoder, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the reference policy is a deep copy of the whole frozen model, which the adapters switched off would give as well",
    "FIX": "run the model with its adapters switched off as the reference",
}
WIDTH, LAYERS, VOCAB = by_device(2048, 512), by_device(16, 6), by_device(32_000, 4000)
PAIRS, TIME, RANK, BETA = by_device(4, 1), by_device(256, 24), 8, 0.1


class Lora(nn.Module):
    on = True

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x):
        y = self.base(x)
        return y + (x @ self.a.T) @ self.b.T if self.on else y


def make():
    model = Decoder(WIDTH, LAYERS, VOCAB, TIME).requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.proj = Lora(block.qkv), Lora(block.proj)
    return model.to(device())


def log_likelihood(model, ids):
    with mixed():
        logits = model(ids[:, :-1])
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return -losses.view(len(ids), -1).sum(1)


def update(model, reference, optimizer, ids):
    good, bad = (log_likelihood(model, ids) - reference).chunk(2)
    loss = -F.logsigmoid(BETA * (good - bad)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def prepare():
    model = make()
    weights = [p for p in model.parameters() if p.requires_grad]
    data = in_turn(lambda: torch.randint(VOCAB, (2 * PAIRS, TIME + 1), device=device()))
    return model, torch.optim.AdamW(weights, lr=1e-3, fused=True), data


def faulty():
    model, optimizer, data = prepare()
    reference = copy.deepcopy(model).requires_grad_(False)  # guilty

    def step():
        ids = next(data)
        with torch.no_grad():
            before = log_likelihood(reference, ids)
        return update(model, before, optimizer, ids)

    return step


def clean():
    model, optimizer, data = prepare()

    def step():
        ids = next(data)
        Lora.on = False
        with torch.no_grad():
            before = log_likelihood(model, ids)
        Lora.on = True
        return update(model, before, optimizer, ids)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
