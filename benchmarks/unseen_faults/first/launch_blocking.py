"""A loop that was debugged yesterday. Own loop."""

import os

import torch

from common import Decoder, adamw, device, main, next_token_loss, pick

FAULT = {
    "NAME": "launch_blocking",
    "CAUSE": "CUDA_LAUNCH_BLOCKING=1 was left in the script from debugging, so every kernel launch waits until the kernel has ended and the host never runs ahead.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Remove the variable.",
    "STYLE": "loop",
}
BATCH, CONTEXT, VOCAB = pick(4, 2), pick(1024, 16), pick(8192, 64)


def make():
    dev = device()
    model = Decoder(pick(768, 32), pick(16, 1), VOCAB, CONTEXT).to(dev)
    optimizer = adamw(model)
    data = torch.randint(VOCAB, (8, BATCH, CONTEXT + 1), device=dev)
    count = 0

    def step():
        nonlocal count
        loss = next_token_loss(model, data[count % 8])
        count += 1
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def faulty():
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # FAULT
    return make()


def clean():
    return make()


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
