"""The configuration of a 160 million model was copied from that of the 13 billion one, and with it
`gradient_checkpointing: true`. The activations of the small one fit into the memory many times
over, yet every block runs its forward pass a second time during the backward pass.
A good finding names the activation checkpointing (the forward computed again) and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from common import Block, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "activation checkpointing recomputes every block though the memory is far from full",
    "FIX": "switch gradient_checkpointing off for this size",
}
BATCH, CONTEXT, VOCAB = by_device(8, 3), by_device(512, 96), by_device(16_384, 256)
WIDTH, LAYERS = by_device(768, 128), by_device(12, 4)


class Pretrained(nn.Module):
    def __init__(self, gradient_checkpointing):
        super().__init__()
        self.gradient_checkpointing = gradient_checkpointing
        self.embed, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, WIDTH // 64) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids) + self.places.weight
        for block in self.blocks:
            if self.gradient_checkpointing and self.training:
                x = checkpoint(block, x, use_reentrant=False)  # guilty
            else:
                x = block(x)
        return self.head(self.norm(x))


def build(gradient_checkpointing):
    model = Pretrained(gradient_checkpointing).to(device())
    optimizer = adamw(model)

    def batch():
        ids = torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device())
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    data = in_turn(batch)

    def step():
        ids, labels = next(data)
        with mixed():
            loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(gradient_checkpointing=True)


def clean():
    return build(gradient_checkpointing=False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
