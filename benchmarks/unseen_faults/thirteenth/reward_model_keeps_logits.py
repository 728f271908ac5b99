"""A reward model for preferences is a language model with one number per text on top. The script
calls the language model as it is, which computes the logits of the whole vocabulary at every token
and returns them next to the states; the reward reads the states alone. hidden() is enough.
A good finding names the logits (or the vocabulary head) that nobody uses and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import Block, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the reward model computes logits of the whole vocabulary at every token, and uses the states only",
    "FIX": "call model.hidden() and skip the vocabulary head",
}
PAIRS, TIME = by_device(8, 4), by_device(512, 128)
WIDTH, LAYERS, VOCAB = by_device(768, 64), by_device(6, 2), by_device(128000, 6000)


class Language(nn.Module):
    """A decoder with tied embeddings, as it was trained before."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TIME, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, max(1, WIDTH // 64)) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def hidden(self, ids):
        x = self.tokens(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, ids):
        states = self.hidden(ids)
        return F.linear(states, self.tokens.weight), states  # guilty


class Reward(nn.Module):
    def __init__(self):
        super().__init__()
        self.language, self.score = Language(), nn.Linear(WIDTH, 1)


class WithLogits(Reward):
    def forward(self, ids):
        _, states = self.language(ids)
        return self.score(states[:, -1]).squeeze(-1)


class StatesOnly(Reward):
    def forward(self, ids):
        states = self.language.hidden(ids)
        return self.score(states[:, -1]).squeeze(-1)


def build(kind):
    with torch.device(device()):
        model = kind()
    optimizer = adamw(model)
    data = in_turn(lambda: torch.randint(VOCAB, (2 * PAIRS, TIME), device=device()))

    def step():
        with mixed():
            chosen, rejected = model(next(data)).chunk(2)
            loss = -F.logsigmoid(chosen.float() - rejected.float()).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(WithLogits)


def clean():
    return build(StatesOnly)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
