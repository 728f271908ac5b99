"""Scheme: how the micro-batches of all ranks become one step."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from steplab.parallel.mesh import REPLICA, is_sharded
from steplab.parallel.world import World, current_world


class Scheme:
    """Base of all schemes. The Step calls it in this order, once per step:

    `micro_batch(index, of)` around forward and backward of every micro-batch of this rank, `sync`
    after the last one, `average` on what the step reports. The loss that is differentiated is
    already divided by the micro-batches of all ranks, so gradients are summed, never averaged.
    """

    def __init__(
        self, model: nn.Module, world: World | None = None, mesh: DeviceMesh | None = None
    ) -> None:
        self.model = model
        self.world = world or current_world()
        self.mesh = mesh  # needed where parameters are sharded

    @property
    def ranks(self) -> int:
        """How many ranks share the micro-batches of a step."""
        return self.world.size

    def loss_model(self) -> nn.Module:
        """Return the module that the workload's loss calls: the model, unless it is wrapped."""
        return self.model

    def micro_batch(self, index: int, of: int) -> contextlib.AbstractContextManager[Any]:
        """Surround forward and backward of micro-batch `index` (from 0) of this rank's `of`."""
        return contextlib.nullcontext()

    def sync(self) -> None:
        """Return when every parameter's `grad` is the sum over all ranks (its shard of it)."""
        raise NotImplementedError

    def gradient_group(self, parameter: Tensor) -> dist.ProcessGroup | None:
        """Return the ranks whose gradients are added: all (None), or those with the same experts.

        A rank's gradient of its own experts has the tokens of all ranks that share them already.
        """
        if self.mesh is None or not is_sharded(parameter):
            return None
        return self.mesh.get_group(REPLICA)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Change a new optimizer, where its state is shared out.

        Whole and sharded parameters come into different groups: no foreach op takes both.
        """
        for group in list(optimizer.param_groups):
            sharded = [p for p in group["params"] if is_sharded(p)]
            if 0 < len(sharded) < len(group["params"]):
                group["params"] = [p for p in group["params"] if not is_sharded(p)]
                optimizer.add_param_group({**group, "params": sharded})

    def clip(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor | None:
        """Clip by the norm over all ranks and return it; None: as on one rank."""
        return None

    def average(self, values: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
        """Return the mean over the micro-batches of all ranks; `values` has one each of this one's.

        One collective for all of them: they are small, and each costs a round trip.
        """
        local = {name: torch.stack([v.float() for v in parts]) for name, parts in values.items()}
        flat = torch.cat(
            [part.reshape(len(part), -1) for part in local.values()], 1
        )  # (micro-batch, values)
        every = [torch.empty_like(flat) for _ in range(self.ranks)]
        dist.all_gather(every, flat)
        # (micro-batch of a rank, rank, values): in the order of the global micro-batch number.
        means = torch.stack(every, 1).flatten(0, 1).mean(0)
        sizes = [part[0].numel() for part in local.values()]
        found = zip(local.items(), means.split(sizes), strict=True)
        return {name: mean.view(part.shape[1:]) for (name, part), mean in found}
