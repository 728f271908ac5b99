"""A GPT-2-like decoder is compiled layer by layer, so that all layers share one compilation. As in GPT-2
with scaled attention by layer, the queries are divided by the layer's number, a plain int attribute: each
layer needs a compilation of its own, and after eight of them the limit is reached and 16 layers run eagerly.
A good finding names the recompilations (or the uncompiled layers) and the number. (Small on a CPU.)
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "compiled layers read their number as a Python int, so each recompiles until the limit and "
    "the others run uncompiled",
    "FIX": "keep the scale of a layer in a buffer (a tensor), so that one compilation serves all layers",
}
BATCH, CONTEXT, VOCAB = by_device(16, 8), by_device(1024, 64), by_device(8192, 128)
WIDTH, HEADS, LAYERS = by_device(512, 32), by_device(8, 2), 24


class Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number
        self.register_buffer("scale", torch.tensor(1.0 / number))
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.scaled(q), k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class ByNumber(Layer):
    def scaled(self, q):
        return q / self.number  # guilty


class ByBuffer(Layer):
    def scaled(self, q):
        return q * self.scale.to(q.dtype)


class Decoder(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(kind(number) for number in range(1, LAYERS + 1))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build(kind):
    model = Decoder(kind).to(device())
    for layer in model.layers:
        layer.compile()
    optimizer = adamw(model)
    data = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))

    def step():
        ids = next(data)
        with mixed():
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(ByNumber)


def clean():
    return build(ByBuffer)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
