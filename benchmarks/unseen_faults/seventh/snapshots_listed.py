"""The weights are to be averaged at the end of the training. For that a copy of all weights is kept
in a list after every step, instead of one running average.
A good finding names memory that grows by the size of the model in every step, and the line that
appends the copy.
"""

import torch
import torch.nn.functional as F

from common import Decoder, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "a copy of all weights is appended to a list in every step, to be averaged at the end",
    "FIX": "keep one running average and update it in place",
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(4, 1),
    by_device(256, 32),
    by_device(768, 320),
    by_device(8, 4),
)
VOCAB = by_device(8192, 4000)


def prepare():
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    tokens = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    return model, list(model.parameters()), optimizer, tokens


def train(model, optimizer, ids):
    with mixed():
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, weights, optimizer, tokens = prepare()
    snapshots = []

    def step():
        loss = train(model, optimizer, next(tokens))
        snapshots.append([w.detach().clone() for w in weights])  # guilty
        return loss

    return step


def clean():
    model, weights, optimizer, tokens = prepare()
    average, done = [torch.zeros_like(w) for w in weights], 0

    @torch.no_grad()
    def step():
        nonlocal done
        with torch.enable_grad():
            loss = train(model, optimizer, next(tokens))
        done += 1
        torch._foreach_lerp_(average, weights, 1 / done)
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
