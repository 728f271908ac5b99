"""The FLOPs of every step are counted with torch's FlopCounterMode to log the MFU, although they
are the same in every step; the mode sends each operator through Python.
A good finding names the dispatch mode that is active during the step, and the line that enters it.
"""

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "FlopCounterMode is active in every step and sends each operator of forward and backward through Python",
    "FIX": "count once, before training",
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(4, 2),
    by_device(128, 32),
    by_device(512, 128),
    by_device(12, 9),
)
VOCAB = by_device(8192, 512)


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
    log = {}

    def step():
        with FlopCounterMode(display=False) as counter:  # guilty
            loss = forward_backward(model, next(tokens))
        log["flops"] = counter.get_total_flops()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def clean():
    model, optimizer, tokens = prepare()
    log, flops = {}, 6 * sum(p.numel() for p in model.parameters()) * BATCH * CONTEXT

    def step():
        loss = forward_backward(model, next(tokens))
        log["flops"] = flops
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
