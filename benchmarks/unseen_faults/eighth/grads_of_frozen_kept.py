"""A classifier is first trained as a whole; then the backbone is frozen and only the head goes on.
The last gradients of the backbone stay in p.grad: the new optimizer does not know those weights, so
its zero_grad never clears them, and they take as much memory as the backbone itself until the end.
A good finding names the stale gradients of the frozen weights and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the gradients of the frozen backbone stay in p.grad for the rest of the training, as large as its weights",
    "FIX": "model.zero_grad() when the backbone is frozen",
}
BATCH, TIME, WIDTH = by_device(8, 4), by_device(512, 64), by_device(2048, 320)
LAYERS, VOCAB, CLASSES = by_device(12, 4), by_device(8192, 512), 10


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = Decoder(WIDTH, LAYERS, VOCAB, TIME), nn.Linear(WIDTH, CLASSES)
        self.backbone.head = nn.Identity()

    def forward(self, ids):
        return self.head(self.backbone.hidden(ids).mean(1))


def train(model, optimizer, ids, labels):
    optimizer.zero_grad()
    with mixed():
        loss = F.cross_entropy(model(ids), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def first_phase():
    with torch.device(device()):
        model = Classifier()
    data = in_turn(
        lambda: (
            torch.randint(VOCAB, (BATCH, TIME), device=device()),
            torch.randint(CLASSES, (BATCH,), device=device()),
        )
    )
    optimizer = adamw(model)
    for _ in range(2):
        train(model, optimizer, *next(data))
    return model, data


def second_phase(model, data):
    optimizer = adamw(model.head)
    if device() == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return lambda: train(model, optimizer, *next(data))


def faulty():
    model, data = first_phase()
    model.backbone.requires_grad_(False)  # guilty
    return second_phase(model, data)


def clean():
    model, data = first_phase()
    model.backbone.requires_grad_(False)
    model.zero_grad(set_to_none=True)
    return second_phase(model, data)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
