"""The step computes the loss and its gradients through a closure and then hands the same closure to
the optimizer, as it had to with LBFGS. AdamW calls it once more, so forward and backward run twice.
A good finding names the forward and backward passes that are repeated on the same batch, and the
line of optimizer.step(closure).
"""

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "optimizer.step(closure) runs forward and backward again, which the step has just done",
    "FIX": "optimizer.step() without the closure",
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(16, 4),
    by_device(512, 64),
    by_device(768, 128),
    by_device(12, 3),
)
VOCAB = by_device(16_384, 1000)


def prepare():
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    tokens = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))
    return model, adamw(model), tokens


def closure_of(model, optimizer, ids):
    def closure():
        optimizer.zero_grad()
        with mixed():
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        return loss

    return closure


def faulty():
    model, optimizer, tokens = prepare()

    def step():
        closure = closure_of(model, optimizer, next(tokens))
        loss = closure()
        optimizer.step(closure)  # guilty
        return loss.detach()

    return step


def clean():
    model, optimizer, tokens = prepare()

    def step():
        closure = closure_of(model, optimizer, next(tokens))
        loss = closure()
        optimizer.step()
        return loss.detach()

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
