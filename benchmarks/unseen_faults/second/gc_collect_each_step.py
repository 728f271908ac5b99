"""A loop that collects garbage after every step, against running out of memory. Own loop."""

import gc

import torch

from common import Decoder, adamw, device, main, next_token_loss, pick

FAULT = {
    "NAME": "gc_collect_each_step",
    "CAUSE": "gc.collect() walks through every Python object of the process after every step, tens of milliseconds in which nothing is launched.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Leave it out: tensors are freed by their reference counts. (Or collect once per epoch.)",
    "STYLE": "loop",
    "WHY": "A full garbage collection of Python runs in every step and frees nothing; the device idles once it has caught up with the host.",
    "GAIN_MS": None,
}
BATCH, CONTEXT, VOCAB = pick(20, 2), pick(1024, 16), pick(16384, 64)


def make(collects):
    dev = device()
    torch.manual_seed(0)
    model = Decoder(pick(1024, 32), pick(8, 1), VOCAB, CONTEXT).to(dev)
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
        if collects:
            gc.collect()  # FAULT
        return loss.detach()

    return step


def faulty():
    return make(collects=True)


def clean():
    return make(collects=False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
