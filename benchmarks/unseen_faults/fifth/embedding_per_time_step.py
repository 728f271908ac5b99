"""A decoder with attention is trained with the true words as inputs. It looks up one word per turn
of its loop, and every one of these lookups has a gradient as large as the whole table.
A good finding names the lookups in the loop, or the gradients of the table that are filled and
added up once per time step, and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 64,
    "CPU_BATCH": 2,
    "CAUSE": "words are looked up once per time step, and each lookup fills and adds a gradient of the whole table",
    "FIX": "look all words up before the loop",
}
SOURCE, TARGET, WIDTH, VOCAB = by_device(64, 24), by_device(48, 28), by_device(512, 96), 12_000


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        nn.init.normal_(self.words.weight, std=0.02)
        self.encoder = nn.Linear(32, WIDTH)
        self.cell, self.head = nn.GRUCell(2 * WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.head.weight = self.words.weight

    def turn(self, word, state, memory):
        scores = torch.bmm(memory, state[:, :, None]) / WIDTH**0.5
        seen = torch.bmm(scores.softmax(1).transpose(1, 2), memory)[:, 0]
        return self.cell(torch.cat([word, seen], 1), state)


class Inside(Translator):
    def forward(self, source, words):
        memory = torch.tanh(self.encoder(source))
        state, states = memory.mean(1), []
        for t in range(TARGET):
            state = self.turn(self.words(words[:, t]), state, memory)  # guilty
            states.append(state)
        return self.head(torch.stack(states, 1))


class Before(Translator):
    def forward(self, source, words):
        memory = torch.tanh(self.encoder(source))
        state, states = memory.mean(1), []
        for word in self.words(words).unbind(1):
            state = self.turn(word, state, memory)
            states.append(state)
        return self.head(torch.stack(states, 1))


def build(translator):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.randn(size, SOURCE, 32, device=device()),
                torch.randint(VOCAB, (size, TARGET), device=device()),
                torch.randint(VOCAB, (size * TARGET,), device=device()),
            )
        )

    def loss(model, batch):
        with mixed():
            return F.cross_entropy(model(*batch[:2]).flatten(0, 1), batch[2])

    return steplab.UserModel(translator(), batches, loss, TARGET)


def faulty():
    return build(Inside)


def clean():
    return build(Before)
