"""The training step returns a dictionary with the loss, the logits and the probabilities of the
whole vocabulary, in fp32. The loop needs the loss, and one number for its log: the probability of
the right token. All of it stays alive during the backward, where the memory is shortest.
The twin takes that number from the loss of each token.
A good finding names the logits or probabilities that are kept during the backward, and the line.
"""

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "logits and probabilities of the whole vocabulary are returned with the loss and stay alive during the backward",
    "FIX": "return the loss and the number for the log, exp(-loss of the token), alone",
}
BATCH, TIME, VOCAB = by_device(12, 2), by_device(1024, 64), by_device(50304, 8192)
WIDTH, LAYERS = by_device(768, 64), by_device(4, 1)


def prepare():
    model = Decoder(WIDTH, LAYERS, VOCAB, TIME).to(device())
    data = in_turn(lambda: torch.randint(VOCAB, (BATCH, TIME + 1), device=device()))
    return model, adamw(model), data


def training_step(model, ids):
    with mixed():
        logits = model(ids[:, :-1]).flatten(0, 1).float()
        loss = F.cross_entropy(logits, ids[:, 1:].flatten())
    return {"loss": loss, "logits": logits, "probs": logits.softmax(-1)}  # guilty


def lean_training_step(model, ids):
    with mixed():
        logits = model(ids[:, :-1]).flatten(0, 1)
        losses = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
    return losses.mean(), losses.detach().neg().exp().mean()


def faulty():
    model, optimizer, data = prepare()
    log = {}

    def step():
        ids = next(data)
        output = training_step(model, ids)
        output["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        right = output["probs"].detach().gather(1, ids[:, 1:].reshape(-1, 1))
        log["confidence"] = right.mean()
        return output["loss"].detach()

    return step


def clean():
    model, optimizer, data = prepare()
    log = {}

    def step():
        loss, confidence = lean_training_step(model, next(data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log["confidence"] = confidence
        return loss.detach()

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
