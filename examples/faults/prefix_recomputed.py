"""Prefix recomputed: steplab profile examples/faults/prefix_recomputed.py:faulty

A model is trained on answers that it writes itself, token by token. For each new token it is given
all tokens so far. The clean twin keeps the keys and values of earlier tokens.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steplab

rule = "prefix_recomputed"
where = "cpu"
VOCABULARY = 256

Past = tuple[Tensor, Tensor] | None


class Writer(nn.Module):
    """One layer of causal attention and a feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, ids_BT: Tensor, past: Past = None) -> tuple[Tensor, Past]:
        """Return the logits of these tokens, which follow the past, and keys and values of all."""
        x_BTD = self.embed(ids_BT)
        q, k, v = (one[:, None] for one in self.qkv(x_BTD).chunk(3, dim=-1))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x_BTD = x_BTD + self.out(y[:, 0])
        return self.head(x_BTD + self.down(F.gelu(self.up(x_BTD)))), (k, v)


@torch.no_grad()
def answer(model: nn.Module, prompt_BT: Tensor, tokens: int, cached: bool) -> Tensor:
    """Return the prompt with so many more tokens, each the likeliest."""
    ids_BT = given_BT = prompt_BT
    past: Past = None
    for _ in range(tokens):
        logits_BTV, past = model(given_BT, past if cached else None)
        next_B1 = logits_BTV[:, -1:].argmax(-1)
        ids_BT = torch.cat([ids_BT, next_B1], 1)
        given_BT = next_B1 if cached else ids_BT
    return ids_BT


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, prompt: int, tokens: int, cached: bool) -> steplab.UserModel:
    """Answers to random prompts, and the loss of writing them again."""

    def batches(size: int) -> Iterator[Tensor]:
        while True:
            yield torch.randint(VOCABULARY, (size, prompt))

    def loss(model: nn.Module, prompt_BT: Tensor) -> Tensor:
        ids_BT = answer(model, prompt_BT, tokens, cached)
        logits_BTV, _ = model(ids_BT[:, :-1])
        return F.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten())

    return steplab.UserModel(Writer(width), batches, loss, prompt + tokens, optimizer=adamw)


def faulty(width: int = 192, prompt: int = 192, tokens: int = 8) -> steplab.UserModel:
    """All tokens again for each new one."""
    return made(width, prompt, tokens, cached=False)


def clean(width: int = 192, prompt: int = 192, tokens: int = 8) -> steplab.UserModel:
    """The new token, with the keys and values of the others."""
    return made(width, prompt, tokens, cached=True)
