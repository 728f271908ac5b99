"""Logits adjusted by the frequency of the classes, which was counted with numpy."""

import numpy as np
import steplab
import torch
import torch.nn.functional as F

from common import Decoder, adamw, my_turn, pick, token_batches

FAULT = {
    "NAME": "prior_float64",
    "CAUSE": "The class prior comes from numpy as float64, so adding it turns all logits and the whole cross-entropy, forward and backward, into double precision.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Convert the prior to float32 when it is loaded.",
    "STYLE": "factory",
    "BATCH": 8,
}
WIDTH, LAYERS, VOCAB, CONTEXT = pick(1024, 32), pick(4, 1), pick(32768, 64), pick(1024, 16)


class Adjusted(Decoder):
    def __init__(self, *sizes, prior):
        super().__init__(*sizes)
        self.register_buffer("prior", prior)

    def forward(self, ids):
        logits = self.head(self.hidden(ids))
        return logits.float() + self.prior  # FAULT


def loss(model, ids):
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits = model(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def make(keep_double):
    counts = np.random.default_rng(0).zipf(1.5, VOCAB).clip(max=10**6)
    prior = torch.from_numpy(np.log(counts / counts.sum()))
    if not keep_double:
        prior = prior.float()
    model = Adjusted(WIDTH, LAYERS, VOCAB, CONTEXT, prior=prior)
    my_turn()
    return steplab.UserModel(
        model=model,
        batches=token_batches(VOCAB, CONTEXT),
        loss=loss,
        optimizer=adamw,
        tokens_per_sequence=CONTEXT,
    )


def faulty():
    return make(keep_double=True)


def clean():
    return make(keep_double=False)
