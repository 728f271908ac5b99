"""An encoder of proteins in the manner of T5 adds a bias by relative position to the attention, from
one small table that all layers share. But each layer makes the bias itself: the buckets of all
pairs of positions, with a logarithm, and the lookup of (time, time, heads), whose backward adds up
as many gradients. The bias is the same in all layers; T5 makes it in the first and passes it on.
A good finding names the bias (or its buckets) computed again in every layer and the line.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "the bias by relative position, the same for all layers, is made anew in every layer",
    "FIX": "make the bias once per step and pass it to the layers",
    "BATCH": 2,
    "CPU_BATCH": 1,
}
CONTEXT, WIDTH, HEADS = by_device(1024, 256), by_device(512, 64), by_device(8, 2)
LAYERS, VOCAB, BUCKETS, FARTHEST = by_device(8, 3), 32, 32, 128


class RelativeBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(BUCKETS, HEADS)

    def forward(self, time, where):
        place = torch.arange(time, device=where)
        relative = place[None, :] - place[:, None]
        half = BUCKETS // 2
        bucket = (relative > 0).long() * half
        relative = relative.abs()
        exact = half // 2
        far = torch.log(relative.clamp(min=1).float() / exact) / math.log(FARTHEST / exact)
        far = (exact + far * (half - exact)).long().clamp(max=half - 1)
        bucket = bucket + torch.where(relative < exact, relative, far)
        return self.table(bucket).permute(2, 0, 1)[None]


class ProteinLayer(nn.Module):
    def __init__(self, relative):
        super().__init__()
        self.relative = relative
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH, False), nn.Linear(WIDTH, WIDTH, False)
        self.wi, self.wo = nn.Linear(WIDTH, 4 * WIDTH, False), nn.Linear(4 * WIDTH, WIDTH, False)

    def forward(self, x, position_bias=None):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if position_bias is None:
            position_bias = self.relative(t, x.device)  # guilty
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=position_bias.to(q.dtype))
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.wo(F.gelu(self.wi(self.norm2(x))))


class ProteinEncoder(nn.Module):
    def __init__(self, once):
        super().__init__()
        self.once = once
        self.shared = nn.Embedding(VOCAB, WIDTH)
        self.relative = RelativeBias()
        self.block = nn.ModuleList(ProteinLayer(self.relative) for _ in range(LAYERS))
        self.final_norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids):
        x = self.shared(input_ids)
        bias = self.relative(input_ids.shape[1], x.device) if self.once else None
        for layer in self.block:
            x = layer(x, bias)
        return self.head(self.final_norm(x))


def loss_of(model, batch):
    input_ids, labels = batch
    with mixed():
        logits = model(input_ids)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batches(size):
    shape = (size, CONTEXT)
    return in_turn(lambda: tuple(torch.randint(VOCAB, shape, device=device()) for _ in range(2)))


def build(once):
    import steplab

    return steplab.UserModel(ProteinEncoder(once), batches, loss_of, optimizer=adamw)


def faulty():
    return build(once=False)


def clean():
    return build(once=True)
