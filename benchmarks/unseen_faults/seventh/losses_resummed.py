"""For the average in the progress bar, the losses of all steps since the beginning of the epoch are
kept as tensors in a list and added up again in every step, one by one.
A good finding names the thousands of tiny additions, or the time of the host, and the line that
adds up the losses.
"""

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the losses of all earlier steps, a list of tensors, are added up again in every step",
    "FIX": "keep a running sum: total += loss.detach()",
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(16, 4),
    by_device(512, 64),
    by_device(768, 128),
    by_device(12, 3),
)
VOCAB, DONE = by_device(16_384, 1000), by_device(12_000, 8000)  # DONE: steps of this epoch so far


def prepare():
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    tokens = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))
    return model, adamw(model), tokens


def train(model, optimizer, ids):
    with mixed():
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, tokens = prepare()
    losses, bar = list(torch.full((DONE,), 7.0, device=device()).unbind()), {}

    def step():
        loss = train(model, optimizer, next(tokens))
        losses.append(loss)
        bar["loss"] = sum(losses) / len(losses)  # guilty
        return loss

    return step


def clean():
    model, optimizer, tokens = prepare()
    total, count, bar = torch.tensor(7.0 * DONE, device=device()), DONE, {}

    def step():
        nonlocal count
        loss = train(model, optimizer, next(tokens))
        total.add_(loss)
        count += 1
        bar["loss"] = total / count
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
