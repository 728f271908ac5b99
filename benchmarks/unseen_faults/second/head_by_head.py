"""Multi-head attention as in a tutorial: a list of single heads."""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, my_turn, next_token_loss, pick, token_batches

FAULT = {
    "NAME": "head_by_head",
    "CAUSE": "Every attention head is a module of its own with three narrow projections, and a Python loop runs one head after the other.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "One projection for q, k and v of all heads, and one call of attention with a dimension of heads.",
    "STYLE": "factory",
    "BATCH": 12,
    "WHY": "The loop over heads makes eight times as many launches of narrow products (output width 128), and the backward adds up 24 gradients of the layer's input; heads belong into one batched call.",
    "GAIN_MS": None,
}
WIDTH, LAYERS, HEADS = pick(1024, 32), pick(6, 2), pick(8, 2)
CONTEXT, VOCAB = pick(1024, 16), pick(16384, 64)


class Head(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.query = nn.Linear(WIDTH, size, bias=False)
        self.key = nn.Linear(WIDTH, size, bias=False)
        self.value = nn.Linear(WIDTH, size, bias=False)

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        heads = (q[:, None], k[:, None], v[:, None])
        return F.scaled_dot_product_attention(*heads, is_causal=True)[:, 0]


class ManyHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(Head(WIDTH // HEADS) for _ in range(HEADS))
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))  # FAULT


class TogetherHeads(nn.Module):
    def __init__(self):
        super().__init__()
        same = ManyHeads()
        self.proj = same.proj
        self.qkv = nn.utils.skip_init(nn.Linear, WIDTH, 3 * WIDTH, bias=False)
        parts = [[h.query.weight, h.key.weight, h.value.weight] for h in same.heads]
        rows = [w for kind in zip(*parts, strict=True) for w in kind]
        self.qkv.weight.data.copy_(torch.cat(rows))

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, w))


class Layer(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.attention = attention()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.layers = nn.ModuleList(Layer(attention) for _ in range(LAYERS))

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make(attention):
    torch.manual_seed(0)
    model = Decoder(attention)
    my_turn()
    return steplab.UserModel(
        model=model,
        batches=token_batches(VOCAB, CONTEXT),
        loss=next_token_loss,
        optimizer=adamw,
    )


def faulty():
    return make(ManyHeads)


def clean():
    return make(TogetherHeads)
