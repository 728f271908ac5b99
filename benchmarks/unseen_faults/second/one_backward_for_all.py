"""Gradient accumulation over four micro-batches. Own loop."""

import torch

from common import Decoder, adamw, device, main, next_token_loss, pick

FAULT = {
    "NAME": "one_backward_for_all",
    "CAUSE": "The losses of the four micro-batches are added up and differentiated once at the end, so the activations of all four are alive together and nothing is gained by splitting the batch.",
    "LINE": "# FAULT",
    "KIND": "memory",
    "FIX": "Call (loss / 4).backward() for each micro-batch, which frees its activations before the next forward.",
    "STYLE": "loop",
    "WHY": "The peak holds the saved activations of four forward passes; a backward per micro-batch gives the same gradients with those of one.",
    "GAIN_MS": None,
}
BATCH, PARTS, CONTEXT, VOCAB = pick(6, 2), 4, pick(1024, 16), pick(16384, 64)


def make(together):
    dev = device()
    torch.manual_seed(0)
    model = Decoder(pick(1024, 32), pick(6, 1), VOCAB, CONTEXT).to(dev)
    optimizer = adamw(model)
    data = torch.randint(VOCAB, (16, BATCH, CONTEXT + 1), device=dev)
    count = 0

    def step():
        nonlocal count
        total = torch.zeros((), device=dev)
        for _ in range(PARTS):
            loss = next_token_loss(model, data[count % 16]) / PARTS
            count += 1
            if together:
                total = total + loss  # FAULT
            else:
                loss.backward()
                total += loss.detach()
        if together:
            total.backward()
        optimizer.step()
        optimizer.zero_grad()
        return total.detach()

    return step


def faulty():
    return make(together=True)


def clean():
    return make(together=False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
