"""A sample of predictions and targets is shown now and then. The texts of the whole batch are put
together in every step, token by token, and thrown away in nearly all of them.
A good finding names the argmax or the reading of single tokens that no update needs, and the line
that decodes.
"""

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "predictions and targets of the whole batch are decoded to text, token by token, in every step",
    "FIX": "decode only in the steps that show a sample",
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(8, 10),
    by_device(256, 128),
    by_device(384, 64),
    by_device(8, 1),
)
VOCAB, EVERY = by_device(8192, 300), 500
WORDS = [f"word{i}" for i in range(VOCAB)]


def prepare():
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    tokens = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))
    return model, adamw(model), tokens


def update(model, optimizer, ids):
    with mixed():
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), logits.detach()


def decode(ids):
    rows, length = ids.shape
    return [" ".join(WORDS[ids[i, t].item()] for t in range(length)) for i in range(rows)]


def faulty():
    model, optimizer, tokens = prepare()
    log, done = {}, [0]

    def step():
        ids = next(tokens)
        loss, logits = update(model, optimizer, ids)
        found, target = decode(logits.argmax(-1)), decode(ids[:, 1:])  # guilty
        done[0] += 1
        if done[0] % EVERY == 0:
            log["sample"] = found[0], target[0]
        return loss

    return step


def clean():
    model, optimizer, tokens = prepare()
    log, done = {}, [0]

    def step():
        ids = next(tokens)
        loss, logits = update(model, optimizer, ids)
        done[0] += 1
        if done[0] % EVERY == 0:
            log["sample"] = *decode(logits[:1].argmax(-1)), *decode(ids[:1, 1:])
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
