"""Fine-tuning a frozen decoder with low-rank adapters, in the manner of PEFT."""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import my_turn, next_token_loss, pick, token_batches

FAULT = {
    "NAME": "lora_merged",
    "CAUSE": "Every forward adds the adapter's product to the frozen weight and multiplies by the sum, so the backward computes the full gradient of every frozen matrix only to project it onto the two small factors.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "F.linear(x, weight) + F.linear(F.linear(x, a) * scale, b): no gradient of the size of the weight exists.",
    "STYLE": "factory",
    "BATCH": 12,
    "WHY": "The backward of W + B A computes gradients of the size of every frozen W (a third of all products); applying A and B to x one after the other needs none of them.",
    "GAIN_MS": None,
}
WIDTH, LAYERS, HEADS = pick(1024, 32), pick(8, 2), pick(16, 2)
CONTEXT, VOCAB, RANK = pick(1024, 16), pick(16384, 64), pick(16, 2)


class LoraLinear(nn.Module):
    def __init__(self, inner, outer, merged):
        super().__init__()
        frozen = torch.randn(outer, inner).mul_(inner**-0.5).bfloat16()
        self.weight = nn.Parameter(frozen, requires_grad=False)
        self.a = nn.Parameter(torch.randn(RANK, inner) * inner**-0.5)
        self.b = nn.Parameter(torch.randn(outer, RANK) * 0.01)
        self.scale, self.merged = 2.0, merged

    def forward(self, x):
        if self.merged:
            return F.linear(x, self.weight + self.scale * (self.b @ self.a))  # FAULT
        return F.linear(x, self.weight) + F.linear(F.linear(x, self.a) * self.scale, self.b)


class Block(nn.Module):
    def __init__(self, merged):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = LoraLinear(WIDTH, 3 * WIDTH, merged)
        self.proj = LoraLinear(WIDTH, WIDTH, merged)
        self.up = LoraLinear(WIDTH, 4 * WIDTH, merged)
        self.down = LoraLinear(4 * WIDTH, WIDTH, merged)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Adapted(nn.Module):
    def __init__(self, merged):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH).requires_grad_(False)
        self.positions = nn.Embedding(CONTEXT, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(merged) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False).bfloat16().requires_grad_(False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def optimizer(model, **how):
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=3e-4, **{"fused": True, **how})


def make(merged):
    torch.manual_seed(0)
    model = Adapted(merged)
    my_turn()
    return steplab.UserModel(
        model=model,
        batches=token_batches(VOCAB, CONTEXT),
        loss=next_token_loss,
        optimizer=optimizer,
    )


def faulty():
    return make(merged=True)


def clean():
    return make(merged=False)
