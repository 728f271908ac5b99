"""The size of each update relative to its weights is logged, as a well-known lecture advises; for
this all weights are cloned before every step and compared after it.
A good finding names the copies of all weights and the norms that belong to the log, and the line of
the clones or that of the norms.
"""

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "all weights are cloned before every update, and the difference is taken after it, for a log",
    "FIX": "do it every few hundred steps",
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(8, 2),
    by_device(256, 32),
    by_device(1024, 256),
    by_device(12, 4),
)
VOCAB, EVERY = by_device(16_384, 2000), 500


def build(every):
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    optimizer = adamw(model)
    tokens = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))
    log, done = {}, 0

    def step():
        nonlocal done
        ids = next(tokens)
        with mixed():
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        done += 1
        logged = done % every == 0
        if logged:
            before = {n: p.detach().clone() for n, p in model.named_parameters()}  # guilty
        optimizer.step()
        optimizer.zero_grad()
        if logged:
            for name, p in model.named_parameters():
                log[name] = (p.detach() - before[name]).norm() / before[name].norm()
        return loss.detach()

    return step


def faulty():
    return build(1)


def clean():
    return build(EVERY)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
