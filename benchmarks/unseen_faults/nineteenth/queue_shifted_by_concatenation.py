"""Sensor traces are embedded contrastively: a bank remembers the keys of the last many batches, and every
query is told apart from some thousand keys drawn from it. New keys enter at the front by torch.cat,
and the oldest fall off at the end, so the whole bank is copied in every step for the sake of a few
rows. A pointer that goes around and writes over the oldest rows in place moves only the new keys.
A good finding names the copy of the whole bank by cat in every step, and its line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the queue of keys is shifted by concatenation: all of it is copied for a few new rows",
    "FIX": "write the new keys over the oldest ones in place, at a pointer that goes around",
}
BATCH, TRACE, DRAWN = by_device(512, 192), by_device(1024, 256), by_device(16_384, 1024)
BANK, WIDTH, HIDDEN = by_device(2_097_152, 122_880), by_device(256, 128), by_device(1024, 640)
HEAT, KEEP = 0.1, 0.99


def encoder():
    return nn.Sequential(
        nn.Linear(TRACE, HIDDEN),
        nn.GELU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.GELU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.GELU(),
        nn.Linear(HIDDEN, WIDTH),
    ).to(device())


class ShiftedBank:
    def __init__(self):
        self.keys = F.normalize(torch.randn(BANK, WIDTH, device=device()), dim=-1)

    def add(self, new):
        self.keys = torch.cat([new, self.keys[: BANK - len(new)]])  # guilty


class RingBank:
    def __init__(self):
        self.keys = F.normalize(torch.randn(BANK, WIDTH, device=device()), dim=-1)
        self.at = 0

    def add(self, new):
        self.keys[self.at : self.at + len(new)] = new
        self.at = (self.at + len(new)) % BANK


def train(bank_of):
    torch.manual_seed(0)
    student, slow = encoder(), encoder()
    slow.load_state_dict(student.state_dict())
    slow.requires_grad_(False)
    bank, updates = bank_of(), adamw(student)
    first = torch.zeros(BATCH, dtype=torch.long, device=device())

    def two_views():
        trace = torch.randn(BATCH, TRACE, device=device())
        return trace + 0.1 * torch.randn_like(trace), trace + 0.1 * torch.randn_like(trace)

    stream = in_turn(two_views)

    def step():
        one, other = next(stream)
        with mixed():
            query = F.normalize(student(one).float(), dim=-1)
            with torch.no_grad():
                key = F.normalize(slow(other).float(), dim=-1)
        others = bank.keys[torch.randint(BANK, (DRAWN,), device=device())]
        scores = torch.cat([(query * key).sum(1, keepdim=True), query @ others.T], 1)
        loss = F.cross_entropy(scores / HEAT, first)
        loss.backward()
        updates.step()
        updates.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(list(slow.parameters()), list(student.parameters()), 1 - KEEP)
        bank.add(key)
        return loss.detach()

    return step


def faulty():
    return train(ShiftedBank)


def clean():
    return train(RingBank)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
