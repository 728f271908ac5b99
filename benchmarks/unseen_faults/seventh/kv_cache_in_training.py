"""use_cache was left on in a decoder in the style of Hugging Face: in training, too, every layer
writes its keys and values to a cache with room for the longest text, which nothing reads.
A good finding names the caches that are filled and never read, and the line that makes them.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import Decoder, by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "memory",
    "STYLE": "factory",
    "BATCH": 16,
    "CPU_BATCH": 4,
    "CAUSE": "every layer makes a cache of keys and values for the longest text in training and copies them there",
    "FIX": "use_cache=False in training",
}
TIME, WIDTH, LAYERS, VOCAB = by_device(512, 64), by_device(768, 128), by_device(12, 3), 1000
LONGEST = 8192


class Layer(nn.Module):
    def __init__(self, like):
        super().__init__()
        self.norm1, self.norm2 = like.norm1, like.norm2
        self.qkv, self.proj, self.up, self.down = like.qkv, like.proj, like.up, like.down
        self.heads = like.heads

    def forward(self, x, cache):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if cache is not None:
            past = k.new_zeros(2, b, self.heads, LONGEST, w // self.heads)  # guilty
            past[0, :, :, :t], past[1, :, :, :t] = k.detach(), v.detach()
            cache.append(past)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(Decoder):
    def __init__(self, use_cache):
        super().__init__(WIDTH, LAYERS, VOCAB, TIME)
        self.blocks, self.use_cache = nn.ModuleList(Layer(b) for b in self.blocks), use_cache

    def forward(self, ids):
        x, cache = self.tokens(ids) + self.positions.weight, [] if self.use_cache else None
        for block in self.blocks:
            x = block(x, cache)
        return {"logits": self.head(self.norm(x)), "past_key_values": cache}


def build(use_cache):
    my_turn()

    def batches(size):
        return in_turn(lambda: torch.randint(VOCAB, (size, TIME + 1), device=device()))

    def loss(model, ids):
        with mixed():
            logits = model(ids[:, :-1])["logits"]
            return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    return steplab.UserModel(Model(use_cache), batches, loss, TIME)


def faulty():
    return build(True)


def clean():
    return build(False)
