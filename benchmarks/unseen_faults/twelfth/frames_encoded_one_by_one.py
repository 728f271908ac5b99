"""A classifier of gestures in short videos: a small convolutional encoder of single frames, then a
GRU over time. The encoder is called in a loop, once per frame, on a handful of small images.
A good finding names the encoder that is run frame by frame on small batches, and the line that
calls it in the loop.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the encoder of frames is called once per frame of the video, on a few small images",
    "FIX": "flatten batch and time and encode all frames in one call",
}
BATCH, FRAMES, SIDE, GESTURES = by_device(16, 4), by_device(64, 32), 16, 20
WIDTH = by_device(64, 24)


class Video(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, WIDTH, 3, stride=2, padding=1),
            nn.GroupNorm(4, WIDTH),
            nn.ReLU(),
            nn.Conv2d(WIDTH, 2 * WIDTH, 3, stride=2, padding=1),
            nn.GroupNorm(4, 2 * WIDTH),
            nn.ReLU(),
            nn.Conv2d(2 * WIDTH, 4 * WIDTH, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * WIDTH, 4 * WIDTH),
        )
        self.over_time = nn.GRU(4 * WIDTH, 4 * WIDTH, batch_first=True)
        self.head = nn.Linear(4 * WIDTH, GESTURES)


class FrameByFrame(Video):
    def forward(self, video):
        seen = []
        for t in range(video.shape[1]):
            seen.append(self.encoder(video[:, t]))  # guilty
        states, _ = self.over_time(torch.stack(seen, 1))
        return self.head(states[:, -1])


class AtOnce(Video):
    def forward(self, video):
        seen = self.encoder(video.flatten(0, 1)).unflatten(0, video.shape[:2])
        states, _ = self.over_time(seen)
        return self.head(states[:, -1])


def batch():
    video = torch.randn(BATCH, FRAMES, 1, SIDE, SIDE, device=device())
    return video, torch.randint(GESTURES, (BATCH,), device=device())


def training(kind):
    model = kind().to(device())
    optimizer, data = adamw(model), in_turn(batch)

    def step():
        video, gestures = next(data)
        with mixed():
            logits = model(video)
        loss = F.cross_entropy(logits.float(), gestures)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return training(FrameByFrame)


def clean():
    return training(AtOnce)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
