"""ZeRO stage 1: every rank has the whole model but updates, and keeps the state of, a part of it.

A gradient is reduced to the rank that owns its parameter, and the updated parameter is sent from
there to all: as many bytes as an all-reduce. Whole parameters are shared out, so any optimizer that
treats them one by one can be used.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steplab.core.run import Collective
from steplab.parallel.gradients import fill_buckets, flatten, unflatten
from steplab.parallel.scheme import (
    Reduction,
    Scheme,
    gradients_of,
    norm_of_norms,
    parameter_norm,
)
from steplab.parallel.tree import planned_tree, tree_all_reduce


class Zero1(Scheme):
    """One reduction and one broadcast per owner (and dtype), after the backward."""

    def __init__(self, model: nn.Module, reduction: Reduction | None = None) -> None:
        super().__init__(model, reduction)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.shares = share_out(self.trained, self.ranks)
        self.own = set(self.shares[self.world.rank])

    def reduce(self) -> None:
        """Send every gradient to its owner; the others drop it."""
        for owner, share in enumerate(self.shares):
            for bucket in fill_buckets(share, math.inf):
                self._reduce_to(owner, bucket)

    def _reduce_to(self, owner: int, bucket: Sequence[nn.Parameter]) -> None:
        grads = gradients_of(bucket)
        flat = flatten(grads, self.reduction.dtype_for(grads[0].dtype)).flatten()
        if self.reduction.exact:
            tree_all_reduce(flat)
        else:
            dist.reduce(flat, owner)
        if owner == self.world.rank:
            unflatten(flat, grads)
        else:
            for p in bucket:
                p.grad = None

    @functools.cached_property
    def held(self) -> list[nn.Parameter]:
        """This rank's own."""
        return [p for p in self.trained if p in self.own]

    def summed_gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return its owner's."""
        owner = next(rank for rank, share in enumerate(self.shares) if _has(share, parameter))
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.broadcast(gradient, owner)
        return gradient

    def planned(self, accumulate: int) -> tuple[Collective, ...]:
        """One reduction and one broadcast for every owner and dtype.

        `exact`: a tree for every micro-batch in place of the reduction, its padding not counted.
        """
        calls = sum(len(fill_buckets(share, math.inf)) for share in self.shares)
        weights = Collective("broadcast", self.ranks, calls, sum(p.nbytes for p in self.trained))
        sent = self.gradient_bytes(self.trained)
        if self.reduction.exact:
            return (*planned_tree(self.ranks, accumulate * calls, accumulate * sent), weights)
        return (Collective("reduce", self.ranks, calls, sent), weights)

    def own_weights(self, masters: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Return those of this rank's parameters."""
        return {p: master for p, master in masters.items() if p in self.own}

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave the optimizer this rank's parameters; share them after every update."""
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p in self.own]
        optimizer.register_step_post_hook(self._share)

    def gradient_norm(self) -> Tensor:
        """Return the norm over all ranks' parameters, in the order of the model."""
        mine = [p.grad if p in self.own else None for p in self.trained]
        device = self.trained[0].device
        nothing = torch.zeros((), device=device)
        norms = torch.stack([nothing if grad is None else parameter_norm(grad) for grad in mine])
        dist.all_reduce(norms)
        return norm_of_norms(list(norms))

    @torch.no_grad()
    def _share(self, *_: Any) -> None:
        for owner, share in enumerate(self.shares):
            for bucket in fill_buckets(share, math.inf):
                flat = flatten([p.detach() for p in bucket], bucket[0].dtype).flatten()
                dist.broadcast(flat, owner)
                if owner != self.world.rank:
                    unflatten(flat, [p.detach() for p in bucket])


def _has(share: Sequence[nn.Parameter], parameter: nn.Parameter) -> bool:
    return any(p is parameter for p in share)


def share_out(parameters: Sequence[nn.Parameter], ranks: int) -> list[list[nn.Parameter]]:
    """Give every parameter to a rank, the largest first to whoever has least so far."""
    shares: list[list[nn.Parameter]] = [[] for _ in range(ranks)]
    held = [0] * ranks
    for p in sorted(parameters, key=lambda p: p.numel(), reverse=True):
        poorest = held.index(min(held))
        shares[poorest].append(p)
        held[poorest] += p.numel()
    return shares
