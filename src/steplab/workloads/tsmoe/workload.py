"""The time-series mixture as a workload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from steplab.core import Mode, Work
from steplab.data.random_batches import random_walks
from steplab.workloads.tsmoe.config import TsmoeConfig
from steplab.workloads.tsmoe.flops import parameters, work
from steplab.workloads.tsmoe.model import Tsmoe
from steplab.workloads.workload import StepOutput, weight_decay_groups

Batch = tuple[Tensor, Tensor]


class TsmoeWorkload:
    """The time-series mixture as a `Workload`."""

    def __init__(self, config: TsmoeConfig) -> None:
        self.config = config

    def model(self) -> nn.Module:
        """Build the network."""
        return Tsmoe(self.config)

    def batches(self, batch: int, device: torch.device, seed: int) -> Iterator[Batch]:
        """Yield (values_BT, mask_BT) with one point more than the tokens cover."""
        return random_walks(batch, self.config.seq_max_len + 1, device, seed)

    def loss(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Prediction losses plus the weighted balancing loss; each is in the metrics."""
        loss = model(*batch)
        metrics = {
            "pred": loss.prediction,
            "aux": loss.balance,
            "dropped": loss.dropped,
            "load_LE": loss.load_LE,
        }
        if loss.quantile is not None:
            metrics["quantile"] = loss.quantile
        return StepOutput(loss.total, metrics)

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Predictions of all horizons after every token."""
        outputs_BNH: Tensor = model(batch[0][:, :-1]).outputs_BNH
        return outputs_BNH

    def optimizer(self, model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        """AdamW with weight decay on matrices only."""
        groups = weight_decay_groups(model)
        options = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
        return torch.optim.AdamW(groups, **options, **implementation)  # type: ignore[arg-type]

    def tokens(self, batch: int) -> int:
        """Tokens in one micro-batch."""
        return batch * self.config.tokens

    def active_parameters(self) -> int:
        """Parameters that one token meets: k of the routed experts."""
        return parameters(self.config)[1]

    def work(self, batch: int, mode: Mode, ran: Mapping[str, str]) -> Work:
        """FLOPs by formula."""
        return work(self.config, batch, mode, ran)
