"""A small language model is pretrained, and histograms of its weights and gradients go to the experiment
tracker. The call was put into the step while somebody was looking for a divergence, and it stayed:
every tensor is binned in every step, where once in a few hundred steps would tell the same.
A good finding names the histograms (logging of weights and gradients) in every step and the line.
"""

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "histograms of all weights and gradients are made in every step",
    "FIX": "make them every few hundred steps",
}
VOCAB, WIDTH, LAYERS = by_device(16_000, 1000), by_device(768, 128), by_device(8, 3)
BATCH, CONTEXT, BINS, EVERY = by_device(16, 6), by_device(512, 64), 64, 500


def binned(tensor):
    return torch.histc(tensor, BINS)


def log_each(model, count, log):
    for name, p in model.named_parameters():
        log[name] = binned(p.detach()), binned(p.grad)  # guilty


def log_some(model, count, log):
    if count % EVERY == 0:
        for name, p in model.named_parameters():
            log[name] = binned(p.detach()), binned(p.grad)


def build(write):
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    optimizer = adamw(model)
    log, count = {}, 0
    data = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))

    def step():
        nonlocal count
        count += 1
        ids = next(data)
        with mixed():
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        write(model, count, log)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(log_each)


def clean():
    return build(log_some)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
