"""A mixture of experts with a capacity, after the appendix of a well-known paper: a tensor of ones and zeros
(token, expert, slot) says who goes where, and two einsums with it move the tokens to their experts and the
results back. Nearly all of that tensor is zero, so the two products (and their backward) are as long as
the experts' own. The slot of a token is a number, by which one can copy it there and fetch it again.
A good finding names the dispatch or combine product with a one-hot tensor, and one of its lines.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "tokens go to their experts and back by products with a one-hot (token, expert, slot) tensor",
    "FIX": "copy tokens by slot number: index_copy into the experts' buffer, index_select out of it",
    "BATCH": 16,
    "CPU_BATCH": 4,
}
CONTEXT, VOCAB = by_device(256, 128), by_device(16_384, 256)
WIDTH, INNER, LAYERS = by_device(512, 64), by_device(1024, 128), by_device(4, 2)
EXPERTS, CHOSEN, SLACK = 8, 2, 1.25


class Experts(nn.Module):
    def __init__(self, one_hot):
        super().__init__()
        self.one_hot = one_hot
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * INNER**-0.5)

    def run(self, seats):
        return F.silu(seats @ self.up.to(seats.dtype)) @ self.down.to(seats.dtype)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        count = tokens.shape[0]
        slots = int(SLACK * CHOSEN * count / EXPERTS)
        weight, expert = self.router(tokens).float().softmax(-1).topk(CHOSEN, -1)
        weight = (weight / weight.sum(-1, keepdim=True)).to(tokens.dtype)
        asked = F.one_hot(expert.flatten(), EXPERTS)
        place = (asked.cumsum(0) * asked).sum(-1).view(count, CHOSEN) - 1
        fits = place < slots
        place = place.clamp(max=slots - 1)
        if self.one_hot:
            kind = {"dtype": tokens.dtype, "device": tokens.device}
            combine = torch.zeros(count, EXPERTS, slots, **kind)
            for choice in range(CHOSEN):
                row = F.one_hot(expert[:, choice], EXPERTS).to(tokens.dtype)
                seat = F.one_hot(place[:, choice], slots).to(tokens.dtype)
                gain = weight[:, choice, None] * fits[:, choice, None]
                combine = combine + (gain * row)[:, :, None] * seat[:, None]
            dispatch = (combine > 0).to(tokens.dtype)
            seats = torch.einsum("tes,tw->esw", dispatch, tokens)  # guilty
            return torch.einsum("tes,esw->tw", combine, self.run(seats)).view_as(x)
        seat = torch.where(fits, expert * slots + place, EXPERTS * slots)
        seats = tokens.new_zeros(EXPERTS * slots + 1, WIDTH)
        seats = seats.index_copy(0, seat.flatten(), tokens.repeat_interleave(CHOSEN, 0))
        done = self.run(seats[:-1].view(EXPERTS, slots, WIDTH)).flatten(0, 1)
        back = done.index_select(0, seat.clamp(max=EXPERTS * slots - 1).flatten())
        return (back.view(count, CHOSEN, WIDTH) * (weight * fits)[..., None]).sum(1).view_as(x)


class Mixture(nn.Module):
    def __init__(self, one_hot):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * LAYERS))
        self.mixers = nn.ModuleList(nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(1))
        self.experts = nn.ModuleList(Experts(one_hot) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tokens(ids)
        for mixer in self.mixers:
            x = x + mixer(self.norms[0](x))[0]
        for norm, experts in zip(self.norms[1:], self.experts, strict=False):
            x = x + experts(norm(x))
        return self.head(x)


def texts(size):
    def make():
        ids = torch.randint(VOCAB, (size, CONTEXT + 1), device=device())
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return in_turn(make)


def loss_of(model, batch):
    ids, labels = batch
    with mixed():
        return F.cross_entropy(model(ids).flatten(0, 1).float(), labels.flatten())


def faulty():
    return steplab.UserModel(Mixture(one_hot=True), texts, loss_of, optimizer=adamw)


def clean():
    return steplab.UserModel(Mixture(one_hot=False), texts, loss_of, optimizer=adamw)
