"""A chat model is tuned on preferences (DPO): the same instruction, a chosen and a rejected answer, and the
reference's log-probabilities, which were written beside the data. Only the answers count, yet the logits
and the log-softmax over the vocabulary are made for every position, the long instruction among them, and
a mask throws the instruction's values away afterwards. The head needs the states of the answer alone.
A good finding names the logits (or the log-softmax) of positions that never count, and the line of the head
or of the mask.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import Decoder, adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "logits over the vocabulary are made for the prompt too and masked away afterwards",
    "FIX": "cut the hidden states to the answer before the head",
    "BATCH": 8,
    "CPU_BATCH": 1,
}
PROMPT, ANSWER = by_device(768, 160), by_device(128, 48)
VOCAB, WIDTH, LAYERS = by_device(32_000, 4096), by_device(512, 64), by_device(6, 3)
BETA = 0.1


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Decoder(WIDTH, LAYERS, VOCAB, PROMPT + ANSWER)
        counts = torch.arange(1, PROMPT + ANSWER) >= PROMPT
        self.register_buffer("counts", counts.float())

    def forward(self, ids):
        logits = self.body.head(self.body.hidden(ids)[:, :-1])  # guilty
        each = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return (each * self.counts).sum(1)


class Answers(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Decoder(WIDTH, LAYERS, VOCAB, PROMPT + ANSWER)

    def forward(self, ids):
        logits = self.body.head(self.body.hidden(ids)[:, PROMPT - 1 : -1])
        each = logits.float().log_softmax(-1).gather(-1, ids[:, PROMPT:, None]).squeeze(-1)
        return each.sum(1)


def pairs(size):
    def make():
        prompt = torch.randint(VOCAB, (size, PROMPT), device=device()).repeat(2, 1)
        answers = torch.randint(VOCAB, (2 * size, ANSWER), device=device())
        return torch.cat([prompt, answers], 1), torch.randn(2 * size, device=device())

    return in_turn(make)


def preference_loss(model, batch):
    ids, reference = batch
    with mixed():
        gain = model(ids) - reference
    chosen, rejected = gain.chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def faulty():
    return steplab.UserModel(Everything(), pairs, preference_loss, optimizer=adamw)


def clean():
    return steplab.UserModel(Answers(), pairs, preference_loss, optimizer=adamw)
