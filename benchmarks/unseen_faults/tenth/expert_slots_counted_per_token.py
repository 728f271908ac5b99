"""The mixture of experts gives each token a slot in its expert's buffer: a Python loop counts, for
every token, how many earlier tokens chose the same expert.
A good finding names the loop over the tokens that counts the slots, and its line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 8,
    "CPU_BATCH": 16,
    "CAUSE": "each token's slot at its expert is counted in a Python loop over all tokens",
    "FIX": "take a cumulative sum of the one-hot choices",
}
COLUMNS, TIME, WIDTH = 32, by_device(256, 64), by_device(1024, 128)
EXPERTS, LAYERS = 8, 2


def slots_by_loop(choice):
    slots = torch.zeros_like(choice)
    for i in range(len(choice)):
        slots[i] = (choice[:i] == choice[i]).sum()  # guilty
    return slots


def slots_by_sum(choice):
    before = F.one_hot(choice, EXPERTS).cumsum(0) - 1
    return before.gather(1, choice[:, None]).squeeze(1)


class Mixture(nn.Module):
    def __init__(self, slots):
        super().__init__()
        self.slots, self.norm = slots, nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 4 * WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 4 * WIDTH, WIDTH) * WIDTH**-0.5 / 2)

    def forward(self, x):
        tokens = self.norm(x).flatten(0, 1)
        room = 2 * len(tokens) // EXPERTS
        weight, choice = self.gate(tokens).softmax(-1).max(-1)
        slots = self.slots(choice)
        kept = (slots < room).to(tokens.dtype)[:, None]
        place = choice * room + slots.clamp(max=room - 1)
        buffer = torch.zeros(EXPERTS * room, WIDTH, dtype=tokens.dtype, device=x.device)
        buffer = buffer.index_add(0, place, tokens * kept).view(EXPERTS, room, WIDTH)
        y = torch.bmm(F.gelu(torch.bmm(buffer, self.up)), self.down).flatten(0, 1)
        return x + (y[place] * kept * weight[:, None]).view_as(x)


class Net(nn.Module):
    def __init__(self, slots):
        super().__init__()
        self.embed, self.head = nn.Linear(COLUMNS, WIDTH), nn.Linear(WIDTH, COLUMNS)
        self.layers = nn.Sequential(*(Mixture(slots) for _ in range(LAYERS)))

    def forward(self, x):
        return self.head(self.layers(self.embed(x)))


def build(slots):
    my_turn()

    def batches(size):
        return in_turn(lambda: torch.randn(size, TIME + 1, COLUMNS, device=device()))

    def loss(model, series):
        with mixed():
            return F.mse_loss(model(series[:, :-1]), series[:, 1:])

    return steplab.UserModel(Net(slots), batches, loss, unit="series")


def faulty():
    return build(slots_by_loop)


def clean():
    return build(slots_by_sum)
