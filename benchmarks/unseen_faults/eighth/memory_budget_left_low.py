"""The script sets the compiler's activation memory budget to zero, left over from a far larger
model: the compiled backward then computes nearly the whole forward again, matrix products and
attention included, although the activations would take a few percent of the GPU's memory.
A good finding names the recomputation in the compiled backward (or the setting) and the line.
"""

import torch
import torch.nn.functional as F
from torch._functorch import config

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "activation_memory_budget = 0 is left on: the compiled backward computes the forward again although memory is plentiful",
    "FIX": "leave the budget at 1, its default",
}
BATCH, TIME, WIDTH = by_device(16, 2), by_device(1024, 128), by_device(1024, 256)
LAYERS, VOCAB = by_device(4, 2), by_device(8192, 512)


def prepare():
    model = Decoder(WIDTH, LAYERS, VOCAB, TIME).to(device())
    data = in_turn(lambda: torch.randint(VOCAB, (BATCH, TIME + 1), device=device()))
    return model, adamw(model), data


def build():
    model, optimizer, data = prepare()

    @torch.compile
    def compute(ids):
        logits = model(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def step():
        with mixed():
            loss = compute(next(data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    config.activation_memory_budget = 0.0  # guilty
    return build()


def clean():
    config.activation_memory_budget = 1.0
    return build()


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
