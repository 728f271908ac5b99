"""torch's DistributedDataParallel, which copies gradients into buckets while the backward runs."""

# No postponed annotations: torch looks at those of the hook.
import contextlib
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from steplab.core.run import Collective
from steplab.parallel.scheme import Reduction, Scheme
from steplab.parallel.tree import planned_tree, tree_all_reduce


class TransparentDDP(DistributedDataParallel):
    """A wrapper that a loss can use like the model: what it lacks is taken from there."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class Ddp(Scheme):
    """DDP with a static graph: what is used in the first step is used in every step."""

    def __init__(
        self, model: nn.Module, reduction: Reduction | None = None, bucket_mb: int = 25
    ) -> None:
        super().__init__(model, reduction)
        self.has_learned_graph = False
        options = inspect.signature(DistributedDataParallel).parameters
        names = ("forward_sync_buffers", "broadcast_buffers")  # since torch 2.13, and before
        not_buffers: Any = {next(name for name in names if name in options): False}
        # Weights are shared already, and buffers stay each rank's own, as in the other schemes.
        self.wrapper = TransparentDDP(
            model,
            bucket_cap_mb=bucket_mb,
            static_graph=True,
            gradient_as_bucket_view=True,
            init_sync=False,
            **not_buffers,
        )
        self.wrapper.register_comm_hook(self.reduction, sum_bucket)

    def loss_model(self) -> nn.Module:
        """The wrapper: its forward arms the reduction."""
        return self.wrapper

    @property
    def reduces_each(self) -> bool:
        """In the first step too: a static graph is learned from a backward that reduces."""
        return self.reduction.exact or not self.has_learned_graph

    def sync(self, is_last: bool) -> None:
        """As always; after a whole step the graph is known."""
        super().sync(is_last)
        self.has_learned_graph |= is_last

    def backward_context(self, reduces: bool) -> contextlib.AbstractContextManager[Any]:
        """Leave all micro-batches but the last to accumulate."""
        return contextlib.nullcontext() if reduces else self.wrapper.no_sync()

    def planned(self, accumulate: int) -> tuple[Collective, ...]:
        """All gradients in buckets that torch fills: once a step; `exact`, every micro-batch."""
        sent = self.gradient_bytes(self.held)
        if self.reduction.exact:
            return planned_tree(self.ranks, 0, accumulate * sent)
        return (Collective("all-reduce", self.ranks, 0, sent),)

    def reduce(self) -> None:
        """Done: the backward waits for its last bucket."""


def sum_bucket(reduction: Reduction, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket over ranks; DDP would average, but the loss is divided already."""
    buffer = bucket.buffer()
    if reduction.exact:
        tree_all_reduce(buffer)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done
    sent = buffer.to(reduction.dtype_for(buffer.dtype))
    work = dist.all_reduce(sent, async_op=True)
    assert work is not None

    def received(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        total = future.value()[0]
        return total if sent is buffer else buffer.copy_(total)

    return work.get_future().then(received)
