"""A convolutional GAN logs a grid of its samples every 500 steps. The logger makes the grid in every step,
copies it to the host and encodes it as a PNG, and only then looks whether this step is one to be logged,
so the device waits for a picture that is thrown away.
A good finding names the picture that is encoded on the host in every step, and the line.
"""

import struct
import zlib

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "a grid of samples is copied to the host and encoded as PNG in every step, and rarely kept",
    "FIX": "make the grid only in the steps that log it",
}
BATCH, WIDTH, DOUBLINGS = by_device(64, 32), by_device(96, 3), by_device(5, 4)
SIDE, NOISE, EVERY = 4 * 2**DOUBLINGS, 128, 500


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [WIDTH * 2 ** min(3, DOUBLINGS - i) for i in range(DOUBLINGS + 1)]
        self.stem, self.top = nn.Linear(NOISE, widths[0] * 16), widths[0]
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1) for a, b in zip(widths, widths[1:], strict=False)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for b in widths[1:])
        self.head = nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, z):
        x = self.stem(z).view(-1, self.top, 4, 4).contiguous(memory_format=torch.channels_last)
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = F.relu(norm(conv(F.interpolate(x, scale_factor=2))))
        return torch.tanh(self.head(x))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [3] + [WIDTH * 2 ** min(3, i) for i in range(DOUBLINGS)]
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, 4, stride=2, padding=1)
            for a, b in zip(widths, widths[1:], strict=False)
        )
        self.head = nn.Linear(widths[-1] * 16, 1)

    def forward(self, x):
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.2)
        return self.head(x.flatten(1))


def png(rows):
    """Encode (height, width, 3) bytes."""
    height, width, _ = rows.shape
    lines = b"".join(b"\0" + row.tobytes() for row in rows)

    def chunk(name, body):
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def picture(samples):
    """Encode a grid of the samples, eight in a row."""
    tiles = ((samples.detach().float() + 1) * 127.5).byte().view(-1, 8, 3, SIDE, SIDE)
    return png(tiles.permute(0, 3, 1, 4, 2).reshape(-1, 8 * SIDE, 3).cpu().numpy())


def log_hasty(album, count, samples):
    image = picture(samples)  # guilty
    if count % EVERY == 0:
        album[count] = image


def log_rarely(album, count, samples):
    if count % EVERY == 0:
        album[count] = picture(samples)


def build(log):
    generator = Generator().to(device(), memory_format=torch.channels_last)
    critic = Critic().to(device(), memory_format=torch.channels_last)
    for_generator, for_critic = adamw(generator), adamw(critic)
    album, count = {}, 0

    def photos():
        real = torch.rand(BATCH, 3, SIDE, SIDE, device=device()) * 2 - 1
        return real.contiguous(memory_format=torch.channels_last)

    data = in_turn(photos)

    def step():
        nonlocal count
        count += 1
        real = next(data)
        with mixed():
            fakes = generator(torch.randn(BATCH, NOISE, device=device()))
            told = F.softplus(critic(fakes.detach())).mean() + F.softplus(-critic(real)).mean()
        told.backward()
        for_critic.step()
        critic.requires_grad_(False)
        with mixed():
            loss = F.softplus(-critic(fakes)).mean()
        loss.backward()
        critic.requires_grad_(True)
        for_generator.step()
        for_critic.zero_grad()
        for_generator.zero_grad()
        log(album, count, fakes)
        return loss.detach()

    return step


def faulty():
    return build(log_hasty)


def clean():
    return build(log_rarely)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
