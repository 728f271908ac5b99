"""A speech recognizer normalizes the mel bands of every utterance over its true length. It does so
one utterance after the other, in Python, and cuts each at a length that lies on the device: every
slice waits for the device, and every utterance launches a handful of tiny kernels. Masked sums over
the padded batch give the same means and deviations without a wait.
A good finding names the loop over utterances or its waits (slicing by lengths on the device), and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "utterances are normalized in a Python loop that slices each by a length on the device, a wait and several tiny kernels each",
    "FIX": "normalize the padded batch at once with masked sums",
}
BATCH, TIME, BANDS = by_device(128, 192), by_device(800, 40), 80
WIDTH, LAYERS, PHONES = by_device(512, 64), by_device(6, 2), 50


class Unit(nn.Module):
    """A feed-forward layer on four frames at a time, with a residual."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4 * BANDS, WIDTH)
        self.units = nn.Sequential(*[Unit() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, PHONES)

    def forward(self, mel):
        x = self.embed(mel.view(len(mel), TIME // 4, 4 * BANDS))
        return self.head(self.norm(self.units(x)))


def one_by_one(mel, lengths):
    out = torch.zeros_like(mel)
    for i, length in enumerate(lengths):
        frames = mel[i, :length]  # guilty
        deviation, mean = torch.std_mean(frames, 0, correction=0)
        out[i, : len(frames)] = (frames - mean) / (deviation + 1e-5)
    return out


def at_once(mel, lengths):
    inside = (torch.arange(TIME, device=mel.device) < lengths[:, None])[..., None]
    count = lengths[:, None, None]
    mean = (mel * inside).sum(1, keepdim=True) / count
    centered = (mel - mean) * inside
    return centered / ((centered.square().sum(1, keepdim=True) / count).sqrt() + 1e-5)


def build(normalize):
    model = Recognizer().to(device())
    optimizer = adamw(model)

    def batch():
        lengths = torch.randint(TIME // 2, TIME, (BATCH,), device=device())
        mel = torch.randn(BATCH, TIME, BANDS, device=device()) * 3 + 1
        phones = torch.randint(PHONES, (BATCH, TIME // 4), device=device())
        outside = torch.arange(TIME // 4, device=device()) * 4 >= lengths[:, None]
        return mel, lengths, phones.masked_fill(outside, -100)

    data = in_turn(batch, 4)

    def step():
        mel, lengths, phones = next(data)
        with mixed():
            logits = model(normalize(mel, lengths))
            loss = F.cross_entropy(logits.flatten(0, 1), phones.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(one_by_one)


def clean():
    return build(at_once)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
