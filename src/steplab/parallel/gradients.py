"""Replicated models whose gradients are all-reduced: after the backward, or while it runs.

Gradient hooks, no wrapper: the model keeps its class and its parameters their names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from steplab.parallel.mesh import local
from steplab.parallel.scheme import Scheme
from steplab.parallel.world import World


def with_gradient(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that are trained; one without a gradient in this step gets zeros.

    Every rank must call the same collectives, also where one of them routed no token to an expert.
    """
    trained = [p for p in parameters if p.requires_grad]
    for p in trained:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    return trained


class Naive(Scheme):
    """One all-reduce per parameter, one after the other, after the backward."""

    def sync(self) -> None:
        """Reduce parameter by parameter."""
        for p in with_gradient(list(self.model.parameters())):
            assert p.grad is not None
            dist.all_reduce(local(p.grad), group=self.gradient_group(p))


class Flat(Scheme):
    """One all-reduce for all gradients of one dtype and group, after the backward."""

    def sync(self) -> None:
        """Copy the gradients into one buffer, reduce it, copy them back."""
        together: dict[tuple[Any, torch.dtype], list[Tensor]] = {}
        for p in with_gradient(list(self.model.parameters())):
            assert p.grad is not None
            together.setdefault((self.gradient_group(p), p.dtype), []).append(local(p.grad))
        for (group, _), grads in together.items():
            reduce_together(grads, group)


class Overlap(Scheme):
    """Each parameter is reduced as soon as its gradient is ready, while the backward goes on."""

    def __init__(
        self, model: nn.Module, world: World | None = None, mesh: DeviceMesh | None = None
    ) -> None:
        super().__init__(model, world, mesh)
        self.last = False  # whether the micro-batch in work is the step's last one
        self.works: list[dist.Work] = []
        self.ready: set[Tensor] = set()
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._on_gradient)

    @contextlib.contextmanager
    def micro_batch(self, index: int, of: int) -> Iterator[None]:
        """Reduce in the backward of the last micro-batch only, when gradients are complete."""
        self.last = index == of - 1
        try:
            yield
        finally:
            self.last = False

    def sync(self) -> None:
        """Reduce what no hook has seen, then wait for all."""
        for p in with_gradient(list(self.model.parameters())):
            if p not in self.ready:
                self._reduce(p)
        for work in self.works:
            work.wait()
        self.works.clear()
        self.ready.clear()

    def _on_gradient(self, p: Tensor) -> None:
        if self.last:
            self._reduce(p)

    def _reduce(self, p: Tensor) -> None:
        assert p.grad is not None
        self.ready.add(p)
        group = self.gradient_group(p)
        self.works.append(dist.all_reduce(local(p.grad), group=group, async_op=True))


def reduce_together(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Sum tensors of one dtype over a group (None: all ranks) in one collective, in place."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(list(tensors), [p.view_as(t) for p, t in zip(parts, tensors, strict=True)])
