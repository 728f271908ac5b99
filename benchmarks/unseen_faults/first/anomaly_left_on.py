"""A plain decoder after somebody looked for a NaN."""

import steplab
import torch

from common import Decoder, adamw, my_turn, next_token_loss, pick, token_batches

FAULT = {
    "NAME": "anomaly_left_on",
    "CAUSE": "Autograd's anomaly detection was left on: every operator of the forward records a Python traceback, and every gradient is checked for NaN on the host.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Remove set_detect_anomaly(True), or wrap only the step under suspicion in detect_anomaly().",
    "STYLE": "factory",
    "BATCH": 8,
}
WIDTH, LAYERS, VOCAB, CONTEXT = pick(1024, 32), pick(8, 1), pick(8192, 64), pick(1024, 16)


def make():
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT)
    my_turn()
    return steplab.UserModel(
        model=model,
        batches=token_batches(VOCAB, CONTEXT),
        loss=next_token_loss,
        optimizer=adamw,
        tokens_per_sequence=CONTEXT,
    )


def faulty():
    torch.autograd.set_detect_anomaly(True)  # FAULT
    return make()


def clean():
    return make()
