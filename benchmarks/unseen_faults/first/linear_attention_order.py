"""Linear attention for an encoder: features of queries and keys instead of a softmax."""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, device, my_turn, pick

FAULT = {
    "NAME": "linear_attention_order",
    "CAUSE": "Linear attention multiplies queries with keys first and so builds the time x time matrix that it was meant to avoid; keys with values first would be linear in the time.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Change the order of the products: queries @ (keys^T @ values).",
    "STYLE": "factory",
    "BATCH": 2,
}
WIDTH, HEADS, LAYERS, CONTEXT, FEATURES = (
    pick(1024, 32),
    pick(16, 2),
    pick(6, 1),
    pick(4096, 16),
    pick(32, 4),
)


class LinearAttention(nn.Module):
    def __init__(self, quadratic):
        super().__init__()
        self.quadratic = quadratic
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        if self.quadratic:
            y = (q @ k.transpose(-2, -1)) @ v  # FAULT
        else:
            y = q @ (k.transpose(-2, -1) @ v)
        y = y / (q @ k.sum(dim=-2).unsqueeze(-1))
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    def __init__(self, quadratic):
        super().__init__()
        self.inward = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(LinearAttention(quadratic) for _ in range(LAYERS))
        self.outward = nn.Linear(WIDTH, FEATURES)

    def forward(self, x):
        x = self.inward(x)
        for block in self.blocks:
            x = block(x)
        return self.outward(x)


def batches(size):
    ready = [torch.randn(size, CONTEXT, FEATURES, device=device()) for _ in range(4)]
    while True:
        yield from ready


def loss(model, x):
    hidden = torch.rand(x.shape[:2], device=x.device) < 0.15
    with torch.autocast(x.device.type, torch.bfloat16):
        out = model(x * ~hidden[..., None])
    return F.mse_loss(out.float(), x)


def make(quadratic):
    model = Encoder(quadratic)
    my_turn()
    return steplab.UserModel(
        model=model, batches=batches, loss=loss, optimizer=adamw, tokens_per_sequence=CONTEXT
    )


def faulty():
    return make(quadratic=True)


def clean():
    return make(quadratic=False)
