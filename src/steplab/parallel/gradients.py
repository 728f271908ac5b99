"""Replicated models whose gradients are all-reduced: after the backward, or while it runs.

Gradient hooks, no wrapper: the model keeps its class and its parameters their names.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from steplab.core.run import Collective
from steplab.modules.shards import local
from steplab.parallel.scheme import Reduction, Scheme, gradients_of
from steplab.parallel.tree import padded, planned_tree, tree_all_reduce


class Pending(NamedTuple):
    """A bucket under way: what is reduced, for which gradients."""

    work: dist.Work | None  # None: done
    flat: Tensor
    grads: list[Tensor]

    def finish(self) -> None:
        """Wait for the sum and put it into the gradients."""
        if self.work is not None:
            self.work.wait()
        if self.flat is not self.grads[0]:
            unflatten(self.flat, self.grads)


class Replicated(Scheme):
    """One all-reduce per bucket of parameters.

    `bucket_bytes` 0 puts every parameter into a bucket of its own, infinity all into one.
    `while_backward`: a bucket is sent as soon as its gradients and those of the buckets before it
    are there. The order is the same on all ranks, also where one of them routed no token to an
    expert, which would otherwise pair unlike tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        reduction: Reduction | None = None,
        bucket_bytes: float = math.inf,
        while_backward: bool = False,
        mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__(model, reduction, mesh)
        self.buckets = fill_buckets(
            list(model.parameters()), bucket_bytes, lambda p: (p.dtype, self.gradient_group(p))
        )
        self.while_backward = while_backward
        self.sends = False  # whether the gradients of the micro-batch in work are to be sent
        self.pending: list[Pending] = []
        self.missing = self._all_missing()
        if while_backward:
            for number, bucket in enumerate(self.buckets):
                for p in bucket:
                    p.register_post_accumulate_grad_hook(lambda _, n=number: self._on_gradient(n))

    @contextlib.contextmanager
    def backward_context(self, reduces: bool) -> Iterator[None]:
        """Let hooks send gradients only when they are complete."""
        self.sends = reduces
        try:
            yield
        finally:
            self.sends = False

    def reduce(self) -> None:
        """Send the buckets that are not under way, then wait for all."""
        for bucket in self.buckets[len(self.pending) :]:
            self._send(bucket)
            if not self.while_backward:
                self.pending[-1].finish()
        if self.while_backward:
            for pending in self.pending:
                pending.finish()
        self.pending.clear()
        self.missing = self._all_missing()

    def planned(self, accumulate: int) -> tuple[Collective, ...]:
        """One all-reduce per bucket, once a step; `exact`, one tree for every micro-batch.

        Experts of which others have the rest are reduced over fewer ranks, and so are the norms of
        their gradients: any number of calls.
        """
        if self.reduction.exact and self.mesh is None:
            calls, sent = accumulate * len(self.buckets), accumulate * self._padded_bytes()
            return planned_tree(self.ranks, calls, sent)
        if self.reduction.exact:
            return ()
        if self.mesh is None:
            sent = self.gradient_bytes(self.held)
            return (Collective("all-reduce", self.ranks, len(self.buckets), sent),)
        by_ranks: Counter[int] = Counter()
        for bucket in self.buckets:
            ranks = dist.get_world_size(self.gradient_group(bucket[0]))
            by_ranks[ranks] += self.gradient_bytes([local(p) for p in bucket])
        return tuple(Collective("all-reduce", ranks, 0, sent) for ranks, sent in by_ranks.items())

    def _padded_bytes(self) -> int:
        sizes = (padded(sum(p.numel() for p in bucket), self.ranks) for bucket in self.buckets)
        dtypes = (self.reduction.dtype_for(bucket[0].dtype) for bucket in self.buckets)
        return sum(n * dtype.itemsize for n, dtype in zip(sizes, dtypes, strict=True))

    def _all_missing(self) -> list[int]:
        return [len(bucket) for bucket in self.buckets]

    def _on_gradient(self, number: int) -> None:
        if not self.sends:
            return
        self.missing[number] -= 1
        while len(self.pending) < len(self.buckets) and not self.missing[len(self.pending)]:
            self._send(self.buckets[len(self.pending)])

    def _send(self, bucket: Sequence[nn.Parameter]) -> None:
        grads = [local(grad) for grad in gradients_of(bucket)]
        group = self.gradient_group(bucket[0])
        flat = flatten(grads, self.reduction.dtype_for(grads[0].dtype))
        if self.reduction.exact:
            tree_all_reduce(flat.view(-1), group)
            self.pending.append(Pending(None, flat, grads))
        else:
            work = dist.all_reduce(flat, group=group, async_op=self.while_backward)
            self.pending.append(Pending(work, flat, grads))


def fill_buckets(
    parameters: Sequence[nn.Parameter],
    bucket_bytes: float,
    kind: Callable[[nn.Parameter], Hashable] = lambda p: p.dtype,
) -> list[list[nn.Parameter]]:
    """Put the trained parameters into buckets of one `kind`, the last ones first.

    Backward reaches them about in that order. A bucket is closed when it holds `bucket_bytes`.
    """
    buckets: list[list[nn.Parameter]] = []
    unfilled: dict[Hashable, list[nn.Parameter]] = {}
    for p in reversed(parameters):
        if not p.requires_grad:
            continue
        if kind(p) not in unfilled:
            buckets.append(unfilled.setdefault(kind(p), []))
        bucket = unfilled[kind(p)]
        bucket.append(p)
        if sum(local(q).nbytes for q in bucket) >= bucket_bytes:
            del unfilled[kind(p)]
    return buckets


def flatten(grads: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the gradients as one tensor of `dtype`; a single one as it is, where it can be."""
    first = grads[0]
    if len(grads) == 1 and first.dtype == dtype and first.is_contiguous():
        return first
    return torch.cat([grad.to(dtype).flatten() for grad in grads])


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the parts of a flat tensor into `tensors`, rounded to their dtype."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    views = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
    torch._foreach_copy_(list(tensors), views)
