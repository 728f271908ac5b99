"""A recipe for a small GPU accumulates gradients over micro-batches of one sample; here the whole
batch would fit, and each sample pays for a forward and a backward pass of its own.
A good finding names the many small passes per update, or the products that are too small, and the
line that splits the batch.
"""

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "gradients are accumulated over micro-batches of one sample although the whole batch fits into memory",
    "FIX": "one forward and backward pass of the whole batch",
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(64, 24),
    by_device(256, 16),
    by_device(768, 128),
    by_device(8, 2),
)
VOCAB = by_device(16_384, 1000)


def build(micro):
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    optimizer = adamw(model)
    tokens = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))

    def step():
        total = torch.zeros((), device=device())
        for ids in next(tokens).split(micro):  # guilty
            with mixed():
                loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss = loss * (len(ids) / BATCH)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def faulty():
    return build(1)


def clean():
    return build(BATCH)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
