"""A decoder with compiled blocks, after somebody had hunted for a compiler error."""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import TINY, adamw, my_turn, next_token_loss, pick, token_batches

FAULT = {
    "NAME": "compile_debug_backend",
    "CAUSE": 'The blocks are compiled with backend="aot_eager", left over from debugging: the graph is traced but every operator still runs as an eager kernel.',
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "layer.compile() with its default backend, Inductor, which fuses.",
    "STYLE": "factory",
    "BATCH": 12,
    "WHY": "The compiled blocks contain no generated kernel at all; aot_eager is for debugging, and the chains of elementwise kernels that Inductor would fuse run one by one.",
    "GAIN_MS": None,
}
WIDTH, LAYERS, HEADS = pick(1024, 32), pick(6, 1), pick(16, 2)
CONTEXT, VOCAB = pick(1024, 16), pick(8192, 64)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = Norm(), Norm()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up = nn.Linear(WIDTH, 6 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make(debugging):
    torch.manual_seed(0)
    model = Decoder()
    for layer in model.layers:
        if debugging:
            layer.compile(backend="aot_eager")  # FAULT
        else:
            layer.compile(backend="eager" if TINY else "inductor")
    my_turn()
    return steplab.UserModel(
        model=model,
        batches=token_batches(VOCAB, CONTEXT),
        loss=next_token_loss,
        optimizer=adamw,
    )


def faulty():
    return make(debugging=True)


def clean():
    return make(debugging=False)
