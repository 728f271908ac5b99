"""An overridden compute_loss hands the labels to the model, which then computes a loss of its own,
and computes a weighted loss from the logits again; the model's loss is never used.
A good finding names the second cross-entropy over the whole vocabulary whose result nobody reads,
and the line that passes the labels to the model.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the model computes its own loss because it is given the labels; the script ignores it and computes another from the same logits",
    "FIX": "model(input_ids) without labels",
}
BATCH, CONTEXT, WIDTH = by_device(16, 8), by_device(512, 64), by_device(512, 32)
VOCAB = by_device(128_000, 24_000)


class CausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = Decoder(WIDTH, 1, VOCAB, CONTEXT)

    def forward(self, input_ids, labels=None):
        logits, loss = self.decoder(input_ids), None
        if labels is not None:
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss, logits=logits)


def prepare():
    model = CausalLM().to(device())
    tokens = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))
    weights = torch.linspace(0.5, 1.5, VOCAB, device=device())
    return model, adamw(model), tokens, weights


def weighted(logits, labels, weights):
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), weight=weights)


def faulty():
    model, optimizer, tokens, weights = prepare()

    def compute_loss(inputs, labels):
        outputs = model(inputs, labels=labels)  # guilty
        return weighted(outputs.logits, labels, weights)

    def step():
        ids = next(tokens)
        with mixed():
            loss = compute_loss(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def clean():
    model, optimizer, tokens, weights = prepare()

    def compute_loss(inputs, labels):
        outputs = model(inputs)
        return weighted(outputs.logits, labels, weights)

    def step():
        ids = next(tokens)
        with mixed():
            loss = compute_loss(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
