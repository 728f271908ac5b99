"""Sentence embeddings are learned by momentum contrast: queries are compared with keys that a slowly moving
copy of the encoder makes, and with a queue of earlier keys. The keys are detached after the fact, but their
encoder runs with gradients on, so its activations lie beside those of the queries until it is through.
A good finding names the activations saved for a backward pass that never comes, and the line of the keys.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from common import Block, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the momentum encoder runs outside of no_grad, so its activations are saved; only its keys "
    "are detached",
    "FIX": "run the momentum encoder under torch.no_grad()",
}
BATCH, TIME, VOCAB = by_device(256, 32), by_device(128, 24), by_device(8192, 128)
WIDTH, LAYERS = by_device(512, 64), by_device(6, 4)
FEATURES, QUEUE = by_device(256, 32), by_device(8192, 256)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TIME, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, max(1, WIDTH // 64)) for _ in range(LAYERS)))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, FEATURES)

    def forward(self, ids):
        states = self.blocks(self.tokens(ids) + self.places.weight)
        return F.normalize(self.out(self.norm(states).mean(1)).float(), dim=-1)


def keys_with_graph(slow, ids):
    keys = slow(ids)  # guilty
    return keys.detach()


def keys_without_graph(slow, ids):
    with torch.no_grad():
        return slow(ids)


def build(keys_of):
    encoder = Encoder().to(device())
    slow = copy.deepcopy(encoder)
    optimizer = adamw(encoder)
    queue = F.normalize(torch.randn(QUEUE, FEATURES, device=device()), dim=-1)
    labels = torch.zeros(BATCH, dtype=torch.long, device=device())
    data = in_turn(lambda: torch.randint(VOCAB, (2, BATCH, TIME), device=device()))
    filled = 0

    def step():
        nonlocal filled
        views = next(data)
        with mixed():
            queries = encoder(views[0])
            keys = keys_of(slow, views[1])
        same = (queries * keys).sum(-1, keepdim=True)
        loss = F.cross_entropy(torch.cat([same, queries @ queue.T], dim=1) / 0.07, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(list(slow.parameters()), list(encoder.parameters()), 0.001)
            queue[filled : filled + BATCH] = keys
            filled = (filled + BATCH) % QUEUE
        return loss.detach()

    return step


def faulty():
    return build(keys_with_graph)


def clean():
    return build(keys_without_graph)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
