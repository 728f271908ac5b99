"""Every block computes the entropy of its attention for the log, in every step. The fused attention
does not give its probabilities, so all scores are computed once more, as a full matrix in fp32.
A good finding names the scores or the entropy, that the update does not need them, and the line.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "every layer computes its full attention matrix a second time in every step, to log the entropy",
    "FIX": "log the entropy every few hundred steps",
}
BATCH, TIME, VOCAB = by_device(8, 4), by_device(1024, 128), by_device(8192, 256)
WIDTH, LAYERS, HEADS = by_device(768, 96), by_device(12, 2), by_device(12, 6)
EVERY = 500


@torch.no_grad()
def attention_entropy(q, k):
    """Return the mean entropy of a causal attention."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    probs = scores.float().masked_fill(future, float("-inf")).softmax(-1)
    return -(probs * (probs + 1e-9).log()).sum(-1).mean()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.watched, self.entropy = False, None

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if self.watched:
            self.entropy = attention_entropy(q, k)  # guilty
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TIME, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(every):
    model = Model().to(device())
    optimizer = adamw(model)
    data = in_turn(lambda: torch.randint(VOCAB, (BATCH, TIME + 1), device=device()))
    done, log = 0, {}

    def step():
        nonlocal done
        done += 1
        for block in model.blocks:
            block.watched = done % every == 0
        ids = next(data)
        with mixed():
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if done % every == 0:
            log["entropy"] = torch.stack([block.entropy for block in model.blocks])
        return loss.detach()

    return step


def faulty():
    return build(1)


def clean():
    return build(EVERY)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
