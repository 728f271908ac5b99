"""A language model was pretrained with heads that predict the second and third token ahead. For the
second phase the recipe says "without the auxiliary loss", and somebody set its weight to 0.0 in the
configuration. The blocks of these heads, their logits and their losses are still computed, forward
and backward, and multiplied by nothing; the compiler may not drop a product with zero.
A good finding names the auxiliary heads whose loss is multiplied by zero and one of their lines.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import Block, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "an auxiliary loss with the weight 0.0 is computed and backpropagated in every step",
    "FIX": "leave the auxiliary heads out (None) where their loss has no weight",
}
BATCH, CONTEXT, VOCAB = by_device(8, 4), by_device(1024, 96), by_device(16_384, 384)
WIDTH, LAYERS, AHEAD = by_device(768, 128), by_device(8, 3), 2


class ManyAhead(nn.Module):
    def __init__(self, later_weight):
        super().__init__()
        self.later_weight = later_weight
        self.embed, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, WIDTH // 64) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.later = nn.ModuleList()
        if later_weight is not None:
            self.later.extend(Block(WIDTH, WIDTH // 64) for _ in range(AHEAD))

    def token_loss(self, x, labels):
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def forward(self, ids):
        x = self.embed(ids[:, :CONTEXT]) + self.places.weight
        for block in self.blocks:
            x = block(x)
        loss = self.token_loss(x, ids[:, 1 : CONTEXT + 1])
        for ahead, block in enumerate(self.later, 2):
            x = block(x)
            later = self.token_loss(x, ids[:, ahead : CONTEXT + ahead])
            loss = loss + self.later_weight * later  # guilty
        return loss


def build(later_weight):
    model = ManyAhead(later_weight).to(device())
    optimizer = adamw(model)
    compiled = torch.compile(model)
    shape = (BATCH, CONTEXT + 1 + AHEAD)
    data = in_turn(lambda: torch.randint(VOCAB, shape, device=device()))

    def step():
        with mixed():
            loss = compiled(next(data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(later_weight=0.0)


def clean():
    return build(later_weight=None)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
