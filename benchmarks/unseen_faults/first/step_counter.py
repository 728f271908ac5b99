"""A compiled loss whose temperature is annealed over the steps."""

import steplab
import torch
from torch import nn

from common import Decoder, adamw, my_turn, pick, token_batches

FAULT = {
    "NAME": "step_counter",
    "CAUSE": "The compiled module counts its calls in a Python integer, which the compiler treats as a constant: it recompiles in every step until its limit is reached and then runs eagerly for good.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Keep the counter in a tensor (a buffer), or pass the temperature in as a tensor.",
    "STYLE": "factory",
    "BATCH": 8,
}
WIDTH, LAYERS, VOCAB, CONTEXT = pick(1024, 32), pick(3, 1), pick(16384, 64), pick(1024, 16)


class CappedLoss(nn.Module):
    """Soft-capped logits, annealed temperature, z-loss."""

    def __init__(self, counts_in_python):
        super().__init__()
        if counts_in_python:
            self.calls = 0
        else:
            self.register_buffer("calls", torch.zeros(()))

    def forward(self, logits, target):
        self.calls += 1  # FAULT
        temperature = 1.0 + 1.0 / (1.0 + 0.01 * self.calls)
        logits = 30.0 * torch.tanh(logits.float() / 30.0) / temperature
        normalizer = logits.logsumexp(dim=-1)
        chosen = logits.gather(1, target[:, None]).squeeze(1)
        return (normalizer - chosen).mean() + 1e-4 * normalizer.square().mean()


class Model(nn.Module):
    def __init__(self, counts_in_python):
        super().__init__()
        self.decoder = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT)
        self.criterion = CappedLoss(counts_in_python)
        self.criterion.compile()

    def forward(self, ids):
        with torch.autocast(ids.device.type, torch.bfloat16):
            logits = self.decoder(ids[:, :-1])
        return self.criterion(logits.flatten(0, 1), ids[:, 1:].flatten())


def make(counts_in_python):
    model = Model(counts_in_python)
    my_turn()
    return steplab.UserModel(
        model=model,
        batches=token_batches(VOCAB, CONTEXT),
        loss=lambda model, ids: model(ids),
        optimizer=adamw,
        tokens_per_sequence=CONTEXT,
    )


def faulty():
    return make(counts_in_python=True)


def clean():
    return make(counts_in_python=False)
