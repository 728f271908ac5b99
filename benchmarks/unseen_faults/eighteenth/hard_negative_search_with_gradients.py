"""A retriever learns from hard negatives: each question comes with eight candidate passages, the encoder
reads all of them, and the one that scores highest enters the loss. The seven others get no gradient, but they
were read with the graph on, so the backward pass goes through all eight with gradients that are zero.
To choose, it is enough to read them without a graph, and to read the chosen one again with it.
A good finding names the backward pass through the candidates that the loss does not use, or the line that
reads them or picks from them.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "all candidates are encoded with gradients though only the hardest one enters the loss",
    "FIX": "score the candidates under no_grad and encode the chosen one again with gradients",
    "BATCH": 64,
    "CPU_BATCH": 6,
}
VOCAB, CONTEXT, CANDIDATES = by_device(16_384, 512), by_device(64, 24), 8
WIDTH, HEADS, LAYERS = by_device(512, 96), by_device(8, 3), by_device(6, 2)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Retriever(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))

    def encode(self, ids):
        x = self.layers(self.tokens(ids) + self.places.weight)
        return F.normalize(x.mean(1).float(), dim=-1)


class WithGraph(Retriever):
    def forward(self, questions, answers, candidates):
        asked, right = self.encode(questions), self.encode(answers)
        wrong = self.encode(candidates.flatten(0, 1)).view(*candidates.shape[:2], WIDTH)  # guilty
        worst = torch.einsum("qw,qcw->qc", asked, wrong).argmax(1)
        return asked, right, wrong[torch.arange(len(worst), device=worst.device), worst]


class ChosenAgain(Retriever):
    def forward(self, questions, answers, candidates):
        asked, right = self.encode(questions), self.encode(answers)
        with torch.no_grad():
            wrong = self.encode(candidates.flatten(0, 1)).view(*candidates.shape[:2], WIDTH)
            worst = torch.einsum("qw,qcw->qc", asked, wrong).argmax(1)
        chosen = candidates[torch.arange(len(worst), device=worst.device), worst]
        return asked, right, self.encode(chosen)


def questions(size):
    def make():
        ids = torch.randint(VOCAB, (size, 2 + CANDIDATES, CONTEXT), device=device())
        return ids[:, 0].contiguous(), ids[:, 1].contiguous(), ids[:, 2:].contiguous()

    return in_turn(make)


def contrast(model, batch):
    with mixed():
        asked, right, wrong = model(*batch)
    scores = asked @ torch.cat([right, wrong]).T / 0.05
    return F.cross_entropy(scores, torch.arange(len(asked), device=scores.device))


def faulty():
    return steplab.UserModel(WithGraph(), questions, contrast, optimizer=adamw)


def clean():
    return steplab.UserModel(ChosenAgain(), questions, contrast, optimizer=adamw)
