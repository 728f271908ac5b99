"""Images are flipped and changed in contrast at random in the training loop, one image after the other,
and stacked to a batch again, although both can be done to the whole batch at once.
A good finding names the many small operators of the augmentation, and the line of its loop.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "a batch is augmented image by image in Python and stacked again",
    "FIX": "torch.where on the whole batch, with one random number per image",
}
BATCH, SIZE, WIDTH, CLASSES = by_device(1024, 768), 16, by_device(128, 12), 10


def one(image, flip, strength):
    if flip:
        image = image.flip(-1)
    middle = image.mean()
    image = ((image - middle) * strength + middle).clamp(0, 1)
    return (image - 0.5) / 0.25


def faulty_augment(images, flips, strengths):
    given = zip(images, flips, strengths, strict=True)
    return torch.stack([one(i, f, b) for i, f, b in given])  # guilty


def clean_augment(images, flips, strengths):
    images = torch.where(flips[:, None, None, None], images.flip(-1), images)
    middles = images.mean((1, 2, 3), keepdim=True)
    images = torch.lerp(middles, images, strengths[:, None, None, None]).clamp(0, 1)
    return (images - 0.5) / 0.25


def build(augment):
    model = nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(WIDTH, 2 * WIDTH, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * WIDTH * 16, CLASSES),
    ).to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.rand(BATCH, 3, SIZE, SIZE, device=device()),
            torch.randint(CLASSES, (BATCH,), device=device()),
        )
    )
    chance = torch.Generator(device()).manual_seed(1)

    def step():
        images, labels = next(data)
        flips, strengths = torch.rand(2, BATCH, generator=chance, device=device())
        with mixed():
            images = augment(images, flips < 0.5, strengths + 0.5)
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(faulty_augment)


def clean():
    return build(clean_augment)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
