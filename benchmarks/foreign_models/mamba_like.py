"""Blocks with a selective scan, written as a loop over time: the readable form of Mamba."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steplab

WORDS = 1024


class ScanBlock(nn.Module):
    """A short causal convolution, a scan whose rates depend on the input, and a gate."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.split = nn.Linear(width, 4 * width, bias=False)
        self.conv = nn.Conv1d(2 * width, 2 * width, 4, padding=3, groups=2 * width)
        self.select = nn.Linear(2 * width, 2 * states + 1, bias=False)
        self.rate_bias = nn.Parameter(torch.full((2 * width,), -2.0))
        self.log_decay = nn.Parameter(torch.arange(1, states + 1).log().repeat(2 * width, 1))
        self.skip = nn.Parameter(torch.ones(2 * width))
        self.join = nn.Linear(2 * width, width, bias=False)
        self.states = states

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the stream with the block's output added."""
        T = x_BTD.shape[1]
        inner_BTE, gate_BTE = self.split(self.norm(x_BTD)).chunk(2, dim=-1)
        inner_BTE = F.silu(self.conv(inner_BTE.transpose(1, 2))[..., :T].transpose(1, 2))
        rate, write_BTN, read_BTN = self.select(inner_BTE).split([1, self.states, self.states], -1)
        rate_BTE = F.softplus(rate + self.rate_bias)
        decay_BTEN = (rate_BTE[..., None] * -self.log_decay.exp()).exp()
        push_BTEN = (rate_BTE * inner_BTE)[..., None] * write_BTN[:, :, None]
        state_BEN = torch.zeros_like(push_BTEN[:, 0])
        seen = []
        for t in range(T):
            state_BEN = decay_BTEN[:, t] * state_BEN + push_BTEN[:, t]
            seen.append((state_BEN * read_BTN[:, t, None]).sum(-1))
        out_BTE = torch.stack(seen, dim=1) + self.skip * inner_BTE
        return x_BTD + self.join(out_BTE * F.silu(gate_BTE))


class ScanModel(nn.Module):
    """Words in, logits out."""

    def __init__(self, width: int, layers: int, states: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(ScanBlock(width, states) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, words_BT: Tensor) -> Tensor:
        """Return logits (B, T, V)."""
        x_BTD = self.words(words_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


def make(width: int = 64, layers: int = 2, context: int = 64) -> steplab.UserModel:
    """Two blocks with 16 states a channel, torch's AdamW."""

    def batches(size: int) -> Iterator[Tensor]:
        random = torch.Generator().manual_seed(0)
        while True:
            yield torch.randint(WORDS, (size, context + 1), generator=random)

    def loss(model: nn.Module, words: Tensor) -> Tensor:
        logits = model(words[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())

    return steplab.UserModel(ScanModel(width, layers, 16), batches, loss, context)
