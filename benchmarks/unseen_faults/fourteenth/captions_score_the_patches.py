"""A model that writes captions reads the patches of an image and then the words. The head scores the
vocabulary at every position, and the scores of the patches, which have no next word, are cut off
after that. Three quarters of the largest product of the model are thrown away. The model is
compiled, but the compiler does not move the slice before the product.
A good finding names the product of the head on positions whose scores are not used, and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import Block, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the head computes the logits of all image positions, which are cut off right after",
    "FIX": "cut the hidden states to the words before the head",
}
BATCH, PATCHES, WORDS = by_device(32, 3), by_device(576, 96), by_device(128, 32)
PIXELS, WIDTH, LAYERS = by_device(588, 48), by_device(512, 64), by_device(6, 2)
VOCAB = by_device(32_768, 2048)


class Captioner(nn.Module):
    def __init__(self, cut_first):
        super().__init__()
        self.cut_first = cut_first
        self.patches, self.words = nn.Linear(PIXELS, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(PATCHES + WORDS, WIDTH))
        self.blocks = nn.Sequential(*(Block(WIDTH, max(1, WIDTH // 64)) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, patches, words):
        x = torch.cat([self.patches(patches), self.words(words)], dim=1) + self.positions
        x = self.norm(self.blocks(x))
        if self.cut_first:
            return self.head(x[:, PATCHES:])
        logits = self.head(x)  # guilty
        return logits[:, PATCHES:]


def build(cut_first):
    model = Captioner(cut_first).to(device())
    optimizer = adamw(model)
    compiled = torch.compile(model)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, PATCHES, PIXELS, device=device()),
            torch.randint(VOCAB, (BATCH, WORDS + 1), device=device()),
        )
    )

    def step():
        patches, words = next(data)
        with mixed():
            logits = compiled(patches, words[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(cut_first=False)


def clean():
    return build(cut_first=True)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
