"""A moving average of the predictions' entropy is logged. The entropy is computed with a graph that
no backward pass ever frees, and the average holds on to that of every step.
A good finding names memory that grows with every step, and the line of the average or of the
entropy.
"""

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "a moving average of a metric keeps the graph, and so the probabilities, of every step",
    "FIX": "compute the metric under torch.no_grad",
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(4, 4),
    by_device(512, 128),
    by_device(512, 128),
    by_device(6, 2),
)
VOCAB = by_device(16_384, 4000)


def prepare():
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    tokens = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))
    return model, adamw(model), tokens


def entropy(logits):
    logs = logits.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1).mean()


def faulty():
    model, optimizer, tokens = prepare()
    log = {"entropy": 0.0}

    def step():
        ids = next(tokens)
        with mixed():
            logits = model(ids[:, :-1]).flatten(0, 1)
            loss = F.cross_entropy(logits, ids[:, 1:].flatten())
            log["entropy"] = 0.95 * log["entropy"] + 0.05 * entropy(logits)  # guilty
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def clean():
    model, optimizer, tokens = prepare()
    log = {"entropy": 0.0}

    def step():
        ids = next(tokens)
        with mixed():
            logits = model(ids[:, :-1]).flatten(0, 1)
            loss = F.cross_entropy(logits, ids[:, 1:].flatten())
            with torch.no_grad():
                log["entropy"] = 0.95 * log["entropy"] + 0.05 * entropy(logits)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
