"""The loss on held-out data is shown in the progress bar, so the whole validation batch goes
through the model after every update instead of now and then.
A good finding names the forward on the validation batch, whose result no update needs, and its
line.
"""

from itertools import count

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the validation batch goes through the model after every step",
    "FIX": "validate every few hundred steps",
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(16, 4),
    by_device(512, 64),
    by_device(768, 128),
    by_device(12, 3),
)
VOCAB, HELD_OUT, EVERY = by_device(16_384, 1000), by_device(32, 8), 500


def prepare():
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    tokens = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))
    held_out = torch.randint(VOCAB, (HELD_OUT, CONTEXT + 1), device=device())
    return model, adamw(model), tokens, held_out


def loss_of(model, ids):
    with mixed():
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def validate(model, ids):
    model.eval()
    loss = loss_of(model, ids)
    model.train()
    return loss


def update(model, optimizer, ids):
    loss = loss_of(model, ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, tokens, held_out = prepare()
    shown = {}

    def step():
        loss = update(model, optimizer, next(tokens))
        shown["validation"] = validate(model, held_out)  # guilty
        return loss

    return step


def clean():
    model, optimizer, tokens, held_out = prepare()
    shown, number = {}, count(1)

    def step():
        loss = update(model, optimizer, next(tokens))
        if next(number) % EVERY == 0:
            shown["validation"] = validate(model, held_out)
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
