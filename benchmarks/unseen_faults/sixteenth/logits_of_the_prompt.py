"""A language model is fine-tuned on instructions: three quarters of each row are the prompt, and the loss
counts the answer alone. The labels of the prompt are set to -100, as every tutorial does, so the
largest matrix of the model and the softmax still run for positions whose loss is thrown away.
A good finding names the logits of masked (prompt) positions, at the head or its loss, and the line.
"""

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "the head makes logits for prompt positions that the loss ignores",
    "FIX": "take the states of the answer before the head",
    "BATCH": 16,
    "CPU_BATCH": 4,
}
VOCAB, WIDTH, LAYERS = by_device(50_304, 4000), by_device(768, 128), by_device(6, 2)
PROMPT, ANSWER = by_device(768, 96), by_device(256, 32)


def loss_of_masked(model, ids):
    labels = ids[:, 1:].clone()
    labels[:, : PROMPT - 1] = -100
    with mixed():
        states = model.hidden(ids[:, :-1])
        logits = model.head(states)  # guilty
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def loss_of_answers(model, ids):
    labels = ids[:, PROMPT:]
    with mixed():
        states = model.hidden(ids[:, :-1])[:, PROMPT - 1 :]
        logits = model.head(states)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batches(size):
    return in_turn(lambda: torch.randint(VOCAB, (size, PROMPT + ANSWER), device=device()))


def build(loss):
    import steplab

    model = Decoder(WIDTH, LAYERS, VOCAB, PROMPT + ANSWER)
    return steplab.UserModel(model, batches, loss, optimizer=adamw)


def faulty():
    return build(loss_of_masked)


def clean():
    return build(loss_of_answers)
