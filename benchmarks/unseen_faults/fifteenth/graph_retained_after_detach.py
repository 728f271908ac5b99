"""A recurrent language model of chess games is trained by truncated backpropagation: its state is carried
from window to window. An early version forgot to detach the state, met "Trying to backward through
the graph a second time", and got the advice of the message, `retain_graph=True`. The state is
detached by now, but the word stayed: the activations of a window outlive its backward pass and the
update, and are still there while the next window computes its own.
A good finding names the graph retained by backward (activations kept past it) and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "backward retains the graph, so the activations live until the next loss replaces it",
    "FIX": "call backward() without retain_graph: the carried state is detached",
}
BATCH, WINDOW, MOVES = by_device(128, 24), by_device(256, 80), by_device(4096, 256)
WIDTH, LAYERS = by_device(1024, 96), 2


class Games(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(MOVES, WIDTH)
        self.memory = nn.LSTM(WIDTH, WIDTH, LAYERS, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, MOVES)

    def forward(self, moves, state):
        x, state = self.memory(self.embed(moves), state)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(x), state


def build(retain):
    model = Games().to(device())
    optimizer = adamw(model)

    def window():
        moves = torch.randint(MOVES, (BATCH, WINDOW + 1), device=device())
        return moves[:, :-1].contiguous(), moves[:, 1:].contiguous()

    data = in_turn(window)
    zeros = torch.zeros(LAYERS, BATCH, WIDTH, device=device())
    state, loss = (zeros, zeros), None

    def step():
        nonlocal state, loss
        moves, following = next(data)
        with mixed():
            logits, new = model(moves, state)
            loss = F.cross_entropy(logits.flatten(0, 1), following.flatten())
        state = tuple(part.detach() for part in new)
        loss.backward(retain_graph=retain)  # guilty
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(retain=True)


def clean():
    return build(retain=False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
