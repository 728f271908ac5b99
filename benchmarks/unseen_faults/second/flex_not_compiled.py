"""Attention with a sliding window, by FlexAttention."""

import steplab
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from common import adamw, device, my_turn, next_token_loss, pick, token_batches

FAULT = {
    "NAME": "flex_not_compiled",
    "CAUSE": "flex_attention is called without torch.compile, so it runs its reference code, which materializes all scores in fp32 and ignores the blocks of the mask.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "attend = torch.compile(flex_attention), which generates the fused kernel.",
    "STYLE": "factory",
    "BATCH": 24,
    "WHY": "Uncompiled flex_attention is a chain of products, masks and softmax over heads x context x context in fp32; only the compiled one is a fused kernel that skips masked blocks.",
    "GAIN_MS": None,
}
WIDTH, LAYERS, HEADS = pick(1024, 32), pick(8, 1), pick(8, 2)
CONTEXT, VOCAB, WINDOW = pick(512, 16), pick(16384, 64), pick(128, 4)


def window(b, h, q, k):
    return (q >= k) & (q - k < WINDOW)


def on_cpu(q, k, v, block_mask):  # FlexAttention has no backward on a CPU
    at = torch.arange(q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, window(0, 0, at[:, None], at[None]))


def attention(compiled):
    if device() == "cpu":
        return on_cpu
    return torch.compile(flex_attention) if compiled else flex_attention


class Layer(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.attend = attend

    def forward(self, x, mask):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = self.attend(q, k, v, block_mask=mask)  # FAULT
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Layer(attend) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.mask = None

    def forward(self, ids):
        t = ids.shape[1]
        if self.mask is None and ids.is_cuda:
            self.mask = create_block_mask(window, None, None, t, t, device=ids.device)
        x = self.tokens(ids) + self.positions.weight[:t]
        for layer in self.layers:
            x = layer(x, self.mask)
        return self.head(self.norm(x))


def make(compiled):
    torch.manual_seed(0)
    model = Decoder(attention(compiled))
    my_turn()
    return steplab.UserModel(
        model=model,
        batches=token_batches(VOCAB, CONTEXT),
        loss=next_token_loss,
        optimizer=adamw,
    )


def faulty():
    return make(compiled=False)


def clean():
    return make(compiled=True)
