"""GPT as a workload: seeded tokens in, cross-entropy out, AdamW."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from steplab.core import Mode, Work
from steplab.data.random_batches import random_tokens
from steplab.modules.kv_cache import CachedReader, KVCache
from steplab.workloads.gpt.config import GPTConfig
from steplab.workloads.gpt.flops import work
from steplab.workloads.gpt.model import GPT
from steplab.workloads.workload import StepOutput, TokenReader, weight_decay_groups

Batch = tuple[Tensor, Tensor]


class GPTWorkload:
    """GPT as a `Workload`."""

    def __init__(self, config: GPTConfig) -> None:
        self.config = config

    def model(self) -> nn.Module:
        """Build the network."""
        return GPT(self.config)

    def batches(self, batch: int, device: torch.device, seed: int) -> Iterator[Batch]:
        """Yield (tokens_BT, targets_BT)."""
        return random_tokens(batch, self.config.context, self.config.vocab_size, device, seed)

    def loss(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Mean cross-entropy per token."""
        return StepOutput(model(*batch))

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits (B, T, V)."""
        logits_BTV: Tensor = model(batch[0])
        return logits_BTV

    def generator(self, model: nn.Module, rows: int, tokens: int) -> TokenReader:
        """Return what reads tokens."""
        assert isinstance(model, GPT)
        cache = KVCache.empty(model, rows, tokens)
        return CachedReader(model.extend, cache, cache.static)

    def optimizer(self, model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        """AdamW with weight decay on matrices only."""
        groups = weight_decay_groups(model)
        return torch.optim.AdamW(groups, lr=3e-4, weight_decay=0.1, **implementation)  # type: ignore[arg-type]

    def tokens(self, batch: int) -> int:
        """Tokens in one micro-batch."""
        return batch * self.config.context

    def work(self, batch: int, mode: Mode, ran: Mapping[str, str]) -> Work:
        """FLOPs by formula."""
        return work(
            self.config, batch, mode, ran.get("attention", ""), ran.get("cross_entropy", "")
        )
