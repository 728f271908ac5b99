"""Masked language modeling in the manner of BERT: 15 % of the positions have a target."""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, device, my_turn, pick

FAULT = {
    "NAME": "mlm_head_everywhere",
    "CAUSE": "The vocabulary head runs on every position, and the 15 % that have a target are picked from the logits afterward.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Pick the masked positions from the hidden states first; the head then runs on a seventh of the rows.",
    "STYLE": "factory",
    "BATCH": 24,
    "WHY": "Five sixths of the logits are computed, kept and given zero gradients without ever reaching the loss; gather the hidden states before the head.",
    "GAIN_MS": None,
}
WIDTH, LAYERS, HEADS = pick(1024, 32), pick(6, 1), pick(16, 2)
CONTEXT, VOCAB, MASKED = pick(512, 16), pick(32768, 64), pick(80, 3)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = self.norm1(x + self.proj(y.transpose(1, 2).reshape(b, t, w)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.transform, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.decoder = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return x

    def predict(self, hidden):
        return self.decoder(self.norm(F.gelu(self.transform(hidden))))


def batches(size):
    ready = []
    for _ in range(8):
        ids = torch.randint(VOCAB, (size, CONTEXT), device=device())
        masked = torch.rand(size, CONTEXT, device=device()).argsort(1)[:, :MASKED]
        rows = (masked + torch.arange(size, device=device())[:, None] * CONTEXT).flatten()
        labels = ids.flatten()[rows]
        ready.append((ids.flatten().index_fill(0, rows, 0).view_as(ids), rows, labels))
    while True:
        yield from ready


def make(everywhere):
    def loss(model, batch):
        ids, rows, labels = batch
        with torch.autocast(ids.device.type, torch.bfloat16):
            hidden = model(ids).flatten(0, 1)
            if everywhere:
                logits = model.predict(hidden).index_select(0, rows)  # FAULT
            else:
                logits = model.predict(hidden.index_select(0, rows))
            return F.cross_entropy(logits, labels)

    torch.manual_seed(0)
    model = Bert()
    my_turn()
    return steplab.UserModel(model=model, batches=batches, loss=loss, optimizer=adamw)


def faulty():
    return make(everywhere=True)


def clean():
    return make(everywhere=False)
