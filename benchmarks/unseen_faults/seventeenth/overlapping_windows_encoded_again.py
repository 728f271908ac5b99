"""Actions in a video are told for windows of eight frames, which overlap by half: an encoder makes a vector
of each frame, and a small transformer reads the vectors of a window. The windows are cut out of the
frames first, so nearly every frame goes through the encoder twice, once for each window that it is in.
A good finding names the encoder's work on copies of the same frames, and the line that cuts or encodes.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "frames are encoded once for each of the overlapping windows that they are in",
    "FIX": "encode each frame once and cut the windows out of the encoded frames",
    "BATCH": 16,
    "CPU_BATCH": 2,
}
FRAMES, WINDOW, STRIDE = 32, 8, 4
SIDE, PATCH, ACTIONS = by_device(112, 32), 8, 20
WIDTH, HEADS, LAYERS = by_device(384, 96), by_device(6, 2), by_device(4, 2)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.places = nn.Parameter(0.02 * torch.randn((SIDE // PATCH) ** 2, WIDTH))
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))

    def forward(self, frames):
        return self.layers(self.stem(frames).flatten(2).transpose(1, 2) + self.places).mean(1)


def windows_then_codes(encoder, video):
    windows = video.unfold(1, WINDOW, STRIDE).permute(0, 1, 5, 2, 3, 4)
    codes = encoder(windows.flatten(0, 2))  # guilty
    return codes.view(-1, WINDOW, WIDTH)


def codes_then_windows(encoder, video):
    codes = encoder(video.flatten(0, 1)).view(*video.shape[:2], WIDTH)
    return codes.unfold(1, WINDOW, STRIDE).transpose(2, 3).reshape(-1, WINDOW, WIDTH)


class ActionNet(nn.Module):
    def __init__(self, look):
        super().__init__()
        self.look, self.encoder = look, Encoder()
        self.order = nn.Parameter(0.02 * torch.randn(WINDOW, WIDTH))
        self.reader, self.head = Layer(), nn.Linear(WIDTH, ACTIONS)

    def forward(self, video):
        codes = self.look(self.encoder, video)
        return self.head(self.reader(codes + self.order).mean(1))


def videos(size):
    count = (FRAMES - WINDOW) // STRIDE + 1

    def batch():
        video = torch.randn(size, FRAMES, 3, SIDE, SIDE, device=device())
        return video, torch.randint(ACTIONS, (size * count,), device=device())

    return in_turn(batch, 4)


def loss(model, batch):
    video, actions = batch
    with mixed():
        return F.cross_entropy(model(video), actions)


def faulty():
    return steplab.UserModel(ActionNet(windows_then_codes), videos, loss, optimizer=adamw)


def clean():
    return steplab.UserModel(ActionNet(codes_then_windows), videos, loss, optimizer=adamw)
