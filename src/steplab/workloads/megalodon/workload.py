"""Megalodon as a workload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from steplab.core import Mode, Work
from steplab.data.random_batches import random_tokens
from steplab.workloads.megalodon.config import MegalodonConfig
from steplab.workloads.megalodon.flops import work
from steplab.workloads.megalodon.model import Megalodon
from steplab.workloads.megalodon.streaming import Stream
from steplab.workloads.workload import StepOutput, TokenReader

Batch = tuple[Tensor, Tensor]


class MegalodonWorkload:
    """Megalodon as a `Workload`."""

    def __init__(self, config: MegalodonConfig) -> None:
        self.config = config

    def model(self) -> nn.Module:
        """Build the network."""
        return Megalodon(self.config)

    def batches(self, batch: int, device: torch.device, seed: int) -> Iterator[Batch]:
        """Yield (tokens_BL, targets_BL)."""
        return random_tokens(batch, self.config.context, self.config.vocab_size, device, seed)

    def loss(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Mean cross-entropy per token."""
        return StepOutput(model(*batch))

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits (B, L, V)."""
        logits_BLV: Tensor = model(batch[0])
        return logits_BLV

    def generator(self, model: nn.Module, rows: int, tokens: int) -> TokenReader:
        """Return what reads tokens, any number of them: the cache does not grow."""
        assert isinstance(model, Megalodon)
        return Stream(model, rows)

    def optimizer(self, model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        """AdamW with weight decay on everything: scales are stored minus one."""
        options = {"lr": 1e-3, "betas": (0.9, 0.98), "weight_decay": 0.1}
        return torch.optim.AdamW(model.parameters(), **options, **implementation)  # type: ignore[arg-type]

    def tokens(self, batch: int) -> int:
        """Tokens in one micro-batch."""
        return batch * self.config.context

    def work(self, batch: int, mode: Mode, ran: Mapping[str, str]) -> Work:
        """FLOPs by formula."""
        return work(self.config, batch, mode, ran)
