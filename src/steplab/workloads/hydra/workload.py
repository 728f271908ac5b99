"""HYDRA as a workload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from steplab.core import Mode, Work
from steplab.data.random_batches import random_tokens
from steplab.modules.kv_cache import CachedReader
from steplab.workloads.hydra.config import HydraConfig
from steplab.workloads.hydra.flops import work
from steplab.workloads.hydra.model import GenerationState, Hydra
from steplab.workloads.workload import StepOutput, TokenReader, weight_decay_groups

Batch = tuple[Tensor, Tensor]


class HydraWorkload:
    """HYDRA as a `Workload`."""

    def __init__(self, config: HydraConfig) -> None:
        self.config = config

    def model(self) -> nn.Module:
        """Build the network."""
        return Hydra(self.config)

    def batches(self, batch: int, device: torch.device, seed: int) -> Iterator[Batch]:
        """Yield (tokens_BS, targets_BS)."""
        return random_tokens(batch, self.config.context, self.config.vocab_size, device, seed)

    def loss(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Cross-entropy plus the routers' losses; all are in the metrics, with their weights."""
        loss = model(*batch)
        return StepOutput(loss.total, {"pred": loss.prediction, **loss.routers})

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits (B, S, V)."""
        logits_BSV: Tensor = model(batch[0])
        return logits_BSV

    def generator(self, model: nn.Module, rows: int, tokens: int) -> TokenReader:
        """Return what reads tokens.

        Routing is by thresholds: a token cannot be compared with those that follow it.
        """
        assert isinstance(model, Hydra)
        model.become_causal()
        state = GenerationState.empty(model, rows, tokens)
        return CachedReader(model.extend, state, state.static)

    def optimizer(self, model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        """AdamW with weight decay on matrices, except for the embedding."""
        groups = weight_decay_groups(model, [model.get_parameter("embedding.weight")])
        options = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
        return torch.optim.AdamW(groups, **options, **implementation)  # type: ignore[arg-type]

    def tokens(self, batch: int) -> int:
        """Tokens in one micro-batch."""
        return batch * self.config.context

    def work(self, batch: int, mode: Mode, ran: Mapping[str, str]) -> Work | None:
        """FLOPs by formula."""
        return work(self.config, batch, mode, ran)
