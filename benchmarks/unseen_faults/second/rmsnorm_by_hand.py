"""A decoder with norms before and after every branch, as in Gemma 2."""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, my_turn, next_token_loss, pick, token_batches

FAULT = {
    "NAME": "rmsnorm_by_hand",
    "CAUSE": "RMSNorm is written out in float, pow, mean, rsqrt, mul, mul and a cast, four times per layer, instead of calling the fused operator.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "F.rms_norm(x, (width,), weight, eps), one kernel forward and two backward.",
    "STYLE": "factory",
    "BATCH": 12,
    "WHY": "Each norm is some seven kernels forward and fifteen backward that are bound by bandwidth; the fused F.rms_norm reads and writes every tensor once.",
    "GAIN_MS": None,
}
WIDTH, LAYERS, HEADS = pick(1024, 32), pick(8, 2), pick(16, 2)
CONTEXT, VOCAB = pick(1024, 16), pick(16384, 64)


class RmsNormByHand(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        dtype = x.dtype
        x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)  # FAULT
        return (self.weight * x).to(dtype)


class RmsNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


class Layer(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.before_attention, self.after_attention = norm(WIDTH), norm(WIDTH)
        self.before_mlp, self.after_mlp = norm(WIDTH), norm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def attend(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, w))

    def forward(self, x):
        x = x + self.after_attention(self.attend(self.before_attention(x)))
        return x + self.after_mlp(self.down(F.gelu(self.up(self.before_mlp(x)))))


class Decoder(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Layer(norm) for _ in range(LAYERS))
        self.norm, self.head = norm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make(norm):
    torch.manual_seed(0)
    model = Decoder(norm)
    my_turn()
    return steplab.UserModel(
        model=model,
        batches=token_batches(VOCAB, CONTEXT),
        loss=next_token_loss,
        optimizer=adamw,
    )


def faulty():
    return make(RmsNormByHand)


def clean():
    return make(RmsNorm)
