"""Full logits: steplab profile examples/faults/full_logits.py:faulty

Cross-entropy over the logits of all tokens at once. The clean twin computes head and loss in
chunks, whose logits are freed and recomputed in backward.
"""

import os
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import steplab

rule = "full_logits"
where = "cpu"
# One step is thousands of operators; three would be too large a trace to keep for a test.
flags = {"clean": ("--schedule", "1", "2", "1", "1")}

CHUNKS = 16
SHARE = 0.015  # of the memory, for one tensor of logits; three live at once


class Reader(nn.Module):
    """An embedding and a head."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)


def whole(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    """Loss from all logits."""
    hidden_BTD = model.embedding(tokens_BT[:, :-1])
    return F.cross_entropy(model.head(hidden_BTD).flatten(0, 1), tokens_BT[:, 1:].flatten())


def chunked(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    """The same loss, chunk by chunk."""
    hidden_ND = model.embedding(tokens_BT[:, :-1]).flatten(0, 1)
    targets_N = tokens_BT[:, 1:].flatten()

    def part(hidden_CD: Tensor, targets_C: Tensor) -> Tensor:
        return F.cross_entropy(model.head(hidden_CD), targets_C, reduction="sum")

    total = hidden_ND.new_zeros(())
    for pair in zip(hidden_ND.chunk(CHUNKS), targets_N.chunk(CHUNKS), strict=True):
        total = total + checkpoint(part, *pair, use_reentrant=False)
    return total / targets_N.numel()


def memory_bytes() -> int:
    """Memory of the device that the step will run on."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(vocabulary: int, width: int, loss: object) -> steplab.UserModel:
    """As many tokens as fill the share of memory."""
    context = int(SHARE * memory_bytes() / (4 * 4 * vocabulary))  # four sequences, fp32

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randint(vocabulary, (size, context + 1))
        while True:
            yield batch

    return steplab.UserModel(Reader(vocabulary, width), batches, loss, context, optimizer=adamw)


def faulty(vocabulary: int = 50_304, width: int = 32) -> steplab.UserModel:
    """All logits at once."""
    return made(vocabulary, width, whole)


def clean(vocabulary: int = 50_304, width: int = 32) -> steplab.UserModel:
    """A sixteenth of them at a time."""
    return made(vocabulary, width, chunked)
