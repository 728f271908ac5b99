"""Debug messages are formatted as f-strings, gradients and all, before the logger drops them
because its level is INFO. Making text of a tensor takes far longer than one would think, and on a
GPU it waits for the device.
A good finding names the formatting of tensors as text, and the line of the debug call.
"""

import logging

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "every gradient is formatted as text by an f-string for a debug message that is not written",
    "FIX": 'logger.debug("%s: %s", name, p.grad), which formats only what is written',
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(16, 4),
    by_device(512, 64),
    by_device(768, 128),
    by_device(12, 3),
)
VOCAB = by_device(16_384, 1000)
logger = logging.getLogger("train")
logger.setLevel(logging.INFO)


def prepare():
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    tokens = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))
    return model, adamw(model), tokens


def forward_backward(model, ids):
    with mixed():
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return loss.detach()


def faulty():
    model, optimizer, tokens = prepare()

    def step():
        loss = forward_backward(model, next(tokens))
        for name, p in model.named_parameters():
            logger.debug(f"{name}: {p.grad}")  # guilty
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def clean():
    model, optimizer, tokens = prepare()

    def step():
        loss = forward_backward(model, next(tokens))
        if logger.isEnabledFor(logging.DEBUG):
            for name, p in model.named_parameters():
                logger.debug("%s: %s", name, p.grad)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
