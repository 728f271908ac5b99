"""To see how the language model gets on, a line of text is generated, token by token, after every
training step instead of once in a while.
A good finding names the generation in every step, its share of the step, and its line.
"""

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "a sample of text is generated, one forward per token, after every step",
    "FIX": "generate a sample every few hundred steps",
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(16, 4),
    by_device(512, 64),
    by_device(768, 128),
    by_device(12, 3),
)
VOCAB, SAMPLE, EVERY = by_device(16_384, 256), by_device(24, 16), 500


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


@torch.no_grad()
def generate(model):
    ids = torch.zeros(1, 1, dtype=torch.long, device=device())
    for _ in range(SAMPLE):
        with mixed():
            following = model(ids)[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, following], 1)
    return ids


def faulty():
    model, optimizer, tokens = prepare()
    shown = {}

    def step():
        loss = train(model, optimizer, next(tokens))
        shown["sample"] = generate(model)  # guilty
        return loss

    return step


def clean():
    model, optimizer, tokens = prepare()
    shown, done = {}, 0

    def step():
        nonlocal done
        loss = train(model, optimizer, next(tokens))
        done += 1
        if done % EVERY == 0:
            shown["sample"] = generate(model)
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
