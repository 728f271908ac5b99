"""A language model is fine-tuned with LoRA adapters that the team wrote by itself, after the formula in
the paper: W + s B A. So every layer multiplies the two thin matrices out and adds the product to the
frozen weight, and the backward pass makes the gradient of a full weight only to project it down to
the thin ones. Applied to the activations, first A and then B, the adapter costs next to nothing.
A good finding names the product of the thin matrices as large as the weight (or the gradient of that
full weight) in every layer and one of the two lines.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "the low-rank update is multiplied out to a full weight in every forward pass",
    "FIX": "apply the adapter to the activations: linear(x, W) + linear(linear(x, A), B) * s",
    "BATCH": 8,
    "CPU_BATCH": 1,
}
CONTEXT, VOCAB = by_device(512, 64), by_device(16_384, 256)
WIDTH, HEADS, LAYERS = by_device(2048, 256), by_device(16, 4), by_device(8, 4)
RANK, SCALE = 8, 2.0


class Adapted(nn.Module):
    def __init__(self, inside, outside, merged):
        super().__init__()
        self.merged = merged
        self.weight = nn.Parameter(torch.randn(outside, inside) * inside**-0.5, requires_grad=False)
        self.lora_a = nn.Parameter(torch.randn(RANK, inside) * inside**-0.5)
        self.lora_b = nn.Parameter(torch.zeros(outside, RANK))

    def forward(self, x):
        if self.merged:
            weight = self.weight + SCALE * (self.lora_b @ self.lora_a)  # guilty
            return F.linear(x, weight)
        low = F.linear(x, self.lora_a) * SCALE
        return F.linear(x, self.weight) + F.linear(low, self.lora_b)


class Layer(nn.Module):
    def __init__(self, merged):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = Adapted(WIDTH, 3 * WIDTH, merged)
        self.proj = Adapted(WIDTH, WIDTH, merged)
        self.up = Adapted(WIDTH, 4 * WIDTH, merged)
        self.down = Adapted(4 * WIDTH, WIDTH, merged)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Assistant(nn.Module):
    def __init__(self, merged):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(*(Layer(merged) for _ in range(LAYERS)))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        for part in (self.tokens, self.places, self.head):
            part.requires_grad_(False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight
        return self.head(self.norm(self.layers(x)))


def loss_of(model, batch):
    ids, labels = batch
    with mixed():
        return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def batches(size):
    def make():
        ids = torch.randint(VOCAB, (size, CONTEXT + 1), device=device())
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return in_turn(make)


def optimizer(model, **how):
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-4, **{"fused": True, **how})


def build(merged):
    import steplab

    return steplab.UserModel(Assistant(merged), batches, loss_of, optimizer=optimizer)


def faulty():
    return build(merged=True)


def clean():
    return build(merged=False)
