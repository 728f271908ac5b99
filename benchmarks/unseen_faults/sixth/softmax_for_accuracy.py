"""The accuracy of the training batch is computed in numpy. All logits are copied there, made double
and put through a softmax, only to see which one is the largest.
A good finding names the metric's work on the host, which no update needs, and the line of the
softmax.
"""

import numpy as np
import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the accuracy takes a softmax of all logits in numpy, in double, before the argmax",
    "FIX": "the argmax of the logits, on the device",
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(8, 6),
    by_device(256, 64),
    by_device(384, 64),
    by_device(8, 2),
)
VOCAB = by_device(8192, 3000)


def numpy_accuracy(logits, target):
    scores = logits.float().cpu().numpy().astype(np.float64)
    odds = np.exp(scores - scores.max(-1, keepdims=True))
    found = (odds / odds.sum(-1, keepdims=True)).argmax(-1)  # guilty
    return float((found == target.cpu().numpy()).mean())


def torch_accuracy(logits, target):
    return (logits.argmax(-1) == target).float().mean()


def build(accuracy):
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    optimizer = adamw(model)
    tokens = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))
    log = {"accuracy": 0.0}

    def step():
        ids = next(tokens)
        with mixed():
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log["accuracy"] = accuracy(logits.detach(), ids[:, 1:])
        return loss.detach()

    return step


def faulty():
    return build(numpy_accuracy)


def clean():
    return build(torch_accuracy)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
