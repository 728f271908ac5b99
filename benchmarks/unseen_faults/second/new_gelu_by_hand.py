"""A GPT-2 whose activation was copied from an old model file."""

import math

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, my_turn, next_token_loss, pick, token_batches

FAULT = {
    "NAME": "new_gelu_by_hand",
    "CAUSE": "The tanh form of GELU is spelled out in eight elementwise operators over the widest activation; under autocast pow makes most of them fp32.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": 'F.gelu(x, approximate="tanh"), one kernel each way that stays in bf16.',
    "STYLE": "factory",
    "BATCH": 12,
    "WHY": "The hand-written GELU is a chain of elementwise kernels in fp32 over tokens x 4 width, forward and backward; the built-in one is one bf16 kernel and saves one tensor instead of seven.",
    "GAIN_MS": None,
}
WIDTH, LAYERS, HEADS = pick(1024, 32), pick(8, 2), pick(16, 2)
CONTEXT, VOCAB = pick(1024, 16), pick(16384, 64)
ROOT = math.sqrt(2.0 / math.pi)


class NewGelu(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0))))  # FAULT


class Mlp(nn.Module):
    def __init__(self, by_hand):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.act = NewGelu() if by_hand else nn.GELU(approximate="tanh")

    def forward(self, x):
        return self.c_proj(self.act(self.c_fc(x)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.c_attn(x).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, w))


class Layer(nn.Module):
    def __init__(self, by_hand):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = Attention(), Mlp(by_hand)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt2(nn.Module):
    def __init__(self, by_hand):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList(Layer(by_hand) for _ in range(LAYERS))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for layer in self.h:
            x = layer(x)
        return self.lm_head(self.ln_f(x))


def make(by_hand):
    torch.manual_seed(0)
    model = Gpt2(by_hand)
    my_turn()
    return steplab.UserModel(
        model=model,
        batches=token_batches(VOCAB, CONTEXT),
        loss=next_token_loss,
        optimizer=adamw,
    )


def faulty():
    return make(by_hand=True)


def clean():
    return make(by_hand=False)
