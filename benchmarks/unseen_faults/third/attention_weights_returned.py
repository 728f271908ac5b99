"""nn.MultiheadAttention is called with its default need_weights=True and its second result is
thrown away, so scores and probabilities of all pairs are made, kept for backward and averaged.
A good finding names the unfused attention whose weights nobody reads, and the line of the call.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 16,
    "CPU_BATCH": 3,
    "CAUSE": "need_weights is left at True: attention is computed unfused and its averaged weights are returned, which nobody reads",
    "FIX": "need_weights=False",
}
TIME, WIDTH, HEADS, LAYERS = by_device(1024, 512), by_device(768, 128), by_device(12, 4), 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def mix(self, x):
        return self.attention(x, x, x, need_weights=False)[0]

    def forward(self, x):
        x = x + self.mix(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Returning(Layer):
    def mix(self, x):
        y, _ = self.attention(x, x, x)  # guilty
        return y


class Patches(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.embed = nn.Linear(48, WIDTH)
        self.layers = nn.Sequential(*(layer() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 48)

    def forward(self, x):
        return self.head(self.layers(self.embed(x)))


def build(layer):
    my_turn()

    def batches(size):
        return in_turn(lambda: torch.randn(size, TIME, 48, device=device()))

    def loss(model, x):
        with mixed():
            return F.mse_loss(model(x), x)

    return steplab.UserModel(Patches(layer), batches, loss, tokens_per_sequence=TIME)


def faulty():
    return build(Returning)


def clean():
    return build(Layer)
