"""The decoder's attention projects all states of the encoder again at every output step, although
they do not change.
A good finding names the same product with the same operands in every step of the recurrence, and
the line of the projection.
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
    "CPU_BATCH": 8,
    "CAUSE": "the encoder's states are projected to keys anew at every output step of the decoder's loop",
    "FIX": "project them once, before the loop",
}
SOURCE, TARGET, WIDTH, VOCAB = by_device(128, 48), by_device(64, 16), by_device(1024, 160), 1000


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.energy = nn.Linear(WIDTH, 1)
        self.cell, self.out = nn.GRUCell(2 * WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)

    def attend(self, state, states, keys):
        scores = self.energy(torch.tanh(self.query(state).unsqueeze(1) + keys)).squeeze(-1)
        return torch.bmm(scores.softmax(-1).unsqueeze(1), states).squeeze(1)


class ProjectsAgain(Decoder):
    def forward(self, source, target):
        states, last = self.encoder(self.source(source))
        state, logits = last[0], []
        for word in self.target(target).unbind(1):
            keys = self.key(states)  # guilty
            seen = self.attend(state, states, keys)
            state = self.cell(torch.cat([word, seen], dim=-1), state)
            logits.append(self.out(state))
        return torch.stack(logits, dim=1)


class ProjectsOnce(Decoder):
    def forward(self, source, target):
        states, last = self.encoder(self.source(source))
        state, logits = last[0], []
        keys = self.key(states)
        for word in self.target(target).unbind(1):
            seen = self.attend(state, states, keys)
            state = self.cell(torch.cat([word, seen], dim=-1), state)
            logits.append(self.out(state))
        return torch.stack(logits, dim=1)


def build(kind):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.randint(VOCAB, (size, SOURCE), device=device()),
                torch.randint(VOCAB, (size, TARGET + 1), device=device()),
            )
        )

    def loss(model, batch):
        source, target = batch
        with mixed():
            logits = model(source, target[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())

    return steplab.UserModel(kind(), batches, loss, tokens_per_sequence=TARGET)


def faulty():
    return build(ProjectsAgain)


def clean():
    return build(ProjectsOnce)
