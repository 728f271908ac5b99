"""The symmetric loss of SimSiam is the sum of two halves, and each half encodes both views itself:
every view goes through the encoder twice, once for its prediction and once as the fixed target.
A good finding names the encoder that runs again on a view it has already seen, and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "each half of the symmetric loss encodes both views, so each view is encoded twice",
    "FIX": "encode each view once and use the detached result as the target of the other",
}
BATCH, SIZE, WIDTH, OUT = by_device(256, 24), 32, by_device(128, 32), by_device(512, 64)


def networks():
    w = WIDTH
    encoder = nn.Sequential(
        nn.Conv2d(3, w, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(w, 2 * w, 3, 1, 1),
        nn.ReLU(),
        nn.Conv2d(2 * w, 2 * w, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(2 * w, 4 * w, 3, 2, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * w, OUT),
    )
    predictor = nn.Sequential(nn.Linear(OUT, OUT // 4), nn.ReLU(), nn.Linear(OUT // 4, OUT))
    return encoder.to(device()), predictor.to(device())


def prepare():
    encoder, predictor = networks()
    data = in_turn(
        lambda: (
            torch.randn(BATCH, 3, SIZE, SIZE, device=device()),
            torch.randn(BATCH, 3, SIZE, SIZE, device=device()),
        )
    )
    return encoder, predictor, adamw(nn.ModuleList([encoder, predictor])), data


def unlike(p, z):
    return -F.cosine_similarity(p.float(), z.float().detach()).mean()


def update(optimizer, loss):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    encoder, predictor, optimizer, data = prepare()

    def half(one, other):
        p = predictor(encoder(one))
        z = encoder(other).detach()  # guilty
        return unlike(p, z)

    def step():
        first, second = next(data)
        with mixed():
            loss = (half(first, second) + half(second, first)) / 2
        return update(optimizer, loss)

    return step


def clean():
    encoder, predictor, optimizer, data = prepare()

    def step():
        first, second = next(data)
        with mixed():
            z1, z2 = encoder(first), encoder(second)
            loss = (unlike(predictor(z1), z2) + unlike(predictor(z2), z1)) / 2
        return update(optimizer, loss)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
