"""Compiled blocks with rotary embeddings as in Llama's reference code."""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import TINY, adamw, my_turn, next_token_loss, pick, token_batches

FAULT = {
    "NAME": "complex_rope_compiled",
    "CAUSE": "The rotation of queries and keys is a product of complex numbers, for which the compiler generates no code: it falls back to eager kernels with fp32 copies before and after.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Rotate pairs of real numbers with cosine and sine tables; the compiler fuses casts, products and sums into one kernel.",
    "STYLE": "factory",
    "BATCH": 32,
    "WHY": "Complex operators are fallbacks inside the compiled graph: unfused complex64 kernels and copies around them in every block; the same rotation in real arithmetic is fused.",
    "GAIN_MS": None,
}
WIDTH, LAYERS, HEADS = pick(1024, 32), pick(6, 1), pick(16, 2)
CONTEXT, VOCAB = pick(512, 16), pick(8192, 64)


def rotate_complex(x, table):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turned = pairs * torch.view_as_complex(table)  # FAULT
    return torch.view_as_real(turned).flatten(-2).type_as(x)


def rotate_real(x, table):
    a, b = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    c, s = table.unbind(-1)
    return torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2).type_as(x)


class Layer(nn.Module):
    def __init__(self, rotate):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.rotate = rotate

    def forward(self, x, table):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k = self.rotate(q, table), self.rotate(k, table)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Rotary(nn.Module):
    def __init__(self, rotate):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(rotate) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        size = WIDTH // HEADS
        angles = torch.outer(
            torch.arange(CONTEXT).float(), 1e4 ** -(torch.arange(0, size, 2) / size)
        )
        self.register_buffer("table", torch.stack([angles.cos(), angles.sin()], -1))

    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x, self.table)
        return self.head(self.norm(x))


def make(rotate):
    torch.manual_seed(0)
    model = Rotary(rotate)
    for layer in model.layers:
        layer.compile(backend="aot_eager" if TINY else "inductor")
    my_turn()
    return steplab.UserModel(
        model=model,
        batches=token_batches(VOCAB, CONTEXT),
        loss=next_token_loss,
        optimizer=adamw,
    )


def faulty():
    return make(rotate_complex)


def clean():
    return make(rotate_real)
