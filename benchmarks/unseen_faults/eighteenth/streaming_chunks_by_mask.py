"""An acoustic model is trained for streaming: a frame may look at the frames of its own chunk and at no
others. The rule is given to attention as a mask over the whole utterance, so the scores of all pairs of
frames are computed and nearly all of them thrown away; with the chunks folded into the batch dimension
only the pairs that count are computed, and no mask is needed.
A good finding names attention over the whole utterance whose mask hides nearly all of it, and its line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "attention within chunks is full attention over the utterance with a block-diagonal mask",
    "FIX": "fold the chunks into the batch dimension and attend within each, without a mask",
    "BATCH": 16,
    "CPU_BATCH": 1,
}
FRAMES, CHUNK, MELS, SOUNDS = by_device(4096, 512), by_device(64, 32), 80, 48
WIDTH, HEADS, LAYERS = by_device(512, 96), by_device(8, 4), by_device(8, 3)


class Layer(nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.masked = masked
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, x, mask):
        if self.masked:
            q, k, v = self.qkv(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # guilty
            return self.proj(y.transpose(1, 2).flatten(2))
        chunks = x.reshape(-1, CHUNK, WIDTH)
        q, k, v = self.qkv(chunks).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(x.shape))

    def forward(self, x, mask):
        x = x + self.attend(self.norm1(x), mask)
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Acoustic(nn.Module):
    def __init__(self, masked):
        super().__init__()
        chunk = torch.arange(FRAMES) // CHUNK
        self.register_buffer("mask", chunk[:, None] == chunk if masked else None)
        self.inside, self.outside = nn.Linear(MELS, WIDTH), nn.Linear(WIDTH, SOUNDS)
        self.layers = nn.ModuleList(Layer(masked) for _ in range(LAYERS))

    def forward(self, mels):
        x = self.inside(mels)
        for layer in self.layers:
            x = layer(x, self.mask)
        return self.outside(x)


def utterances(size):
    def make():
        mels = torch.randn(size, FRAMES, MELS, device=device())
        return mels, torch.randint(SOUNDS, (size, FRAMES), device=device())

    return in_turn(make)


def loss(model, batch):
    mels, sounds = batch
    with mixed():
        return F.cross_entropy(model(mels).flatten(0, 1), sounds.flatten())


def faulty():
    return steplab.UserModel(Acoustic(masked=True), utterances, loss, optimizer=adamw)


def clean():
    return steplab.UserModel(Acoustic(masked=False), utterances, loss, optimizer=adamw)
