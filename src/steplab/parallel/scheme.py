"""Scheme: how the micro-batches of all ranks become one step."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from steplab.core.errors import Unsupported
from steplab.core.run import Collective
from steplab.modules.shards import is_sharded, local, shared_norm, wholes
from steplab.parallel.mesh import REPLICA
from steplab.parallel.tree import PairwiseSum
from steplab.parallel.world import World, current_world, in_order


@dataclass(frozen=True)
class Reduction:
    """How gradients are added over ranks."""

    dtype: torch.dtype = torch.float32  # of what is sent; a wider gradient keeps its own
    # In one binary tree over the number of the micro-batch, which gives the same bits on 1, 2, 4
    # ... ranks. Every micro-batch is then reduced by itself, in the gradients' own dtype: a rank
    # alone rounds every sum to it too.
    exact: bool = False

    def dtype_for(self, gradient: torch.dtype) -> torch.dtype:
        """Return the dtype in which a gradient is sent: fp64 is never narrowed."""
        return gradient if self.exact or gradient == torch.float64 else self.dtype


class Scheme:
    """Base of all schemes. The Step calls it in this order, once per step:

    `micro_batch(index, of)` around forward and backward of every micro-batch of this rank and
    `sync` after it, `gradient_norm` where gradients are clipped, `average` on what the step
    reports. The loss that is differentiated is already divided by the micro-batches of all ranks,
    so gradients are summed, never averaged.
    """

    def __init__(
        self,
        model: nn.Module,
        reduction: Reduction | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.model = model
        self.world: World = current_world()
        self.mesh = mesh  # where experts are shared out; None: every rank has all of them
        self.reduction = reduction or Reduction()
        if self.reduction.exact and self.ranks & (self.ranks - 1):
            raise Unsupported(
                f"parallel.exact adds in a binary tree, which {self.ranks} ranks do not make.",
                "Start 1, 2, 4, 8 ... ranks.",
            )
        self.steps_done = 0  # random numbers follow from it: a run that is resumed sets it
        self.sums = PairwiseSum()
        self.seed = _shared_seed()

    @property
    def ranks(self) -> int:
        """How many ranks share the micro-batches of a step."""
        return self.world.size

    def loss_model(self) -> nn.Module:
        """Return the module that the workload's loss calls: the model, unless it is wrapped."""
        return self.model

    @contextlib.contextmanager
    def micro_batch(self, index: int, of: int) -> Iterator[None]:
        """Surround forward and backward of micro-batch `index` (from 0) of this rank's `of`.

        Its random numbers depend on its number among those of all ranks alone.
        """
        number = index * self.ranks + self.world.rank
        torch.manual_seed(_mixed(self.seed, self.steps_done, number))
        with self.backward_context(self.reduces_each or index == of - 1):
            yield

    def sync(self, is_last: bool) -> None:
        """After the last micro-batch: return when every `grad` is the sum over all ranks.

        Of what is sharded it is this rank's shard.
        """
        if is_last or self.reduces_each:
            self.reduce()
        if self.reduces_each:
            grads = [local(grad) for grad in gradients_of(self.held)]
            self.sums.add(grads)
            if is_last:
                torch._foreach_copy_(grads, self.sums.total())
            else:
                self.model.zero_grad(set_to_none=True)
        self.steps_done += is_last

    @property
    def reduces_each(self) -> bool:
        """Whether every micro-batch is reduced by itself, and the sums are added."""
        return self.reduction.exact

    @functools.cached_property
    def held(self) -> list[nn.Parameter]:
        """The parameters whose reduced gradients, or shards of them, this rank has."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def backward_context(self, reduces: bool) -> contextlib.AbstractContextManager[Any]:
        """Surround a micro-batch; `reduces`: its gradients are reduced, now or in `reduce`."""
        return contextlib.nullcontext()

    def reduce(self) -> None:
        """Add the gradients over ranks, as far as the backward has not done so."""
        raise NotImplementedError

    def release(self) -> None:
        """Free what a forward without a backward has gathered."""

    def own_weights(self, masters: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Return what this rank's optimizer keeps of the fp32 weights of 16-bit parameters."""
        return dict(masters)

    def gradient_group(self, parameter: Tensor) -> dist.ProcessGroup | None:
        """Return the ranks whose gradients are added: all (None), or those with the same experts.

        A rank's gradient of its own experts has the tokens of all ranks that share them already.
        """
        if self.mesh is None or not is_sharded(parameter):
            return None
        return self.mesh.get_group(REPLICA)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Change a new optimizer, where its state is shared out.

        Parameters that are whole, or sharded over different meshes, come into different groups:
        no foreach op takes them together.
        """
        for group in list(optimizer.param_groups):
            by_mesh: dict[Any, list[Tensor]] = {}
            for p in group["params"]:
                by_mesh.setdefault(getattr(p, "device_mesh", None), []).append(p)
            group["params"], *others = by_mesh.values()
            for params in others:
                optimizer.add_param_group({**group, "params": params})

    def gradient_norm(self) -> Tensor | None:
        """Return the norm of the gradients over all ranks; None: that of this rank's is it.

        `exact`: of the whole gradients, gathered a few at a time, which no number of ranks changes.
        """
        grads = gradients_of(self.held)
        if self.reduction.exact:
            return norm_of_norms([parameter_norm(grad) for grad in wholes(grads)])
        return shared_norm(grads) if any(map(is_sharded, grads)) else None

    def summed_gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return a parameter's gradient after `sync`, on every rank. Called by all together."""
        return gradients_of([parameter])[0]

    def planned(self, accumulate: int) -> tuple[Collective, ...]:
        """Return the large collectives of a step with so many micro-batches; () where unknown."""
        return ()

    def gradient_bytes(self, parameters: Sequence[Tensor]) -> int:
        """Return the bytes that the gradients of whole parameters have when they are sent."""
        return sum(p.numel() * self.reduction.dtype_for(p.dtype).itemsize for p in parameters)

    def average(self, values: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
        """Return the mean over the micro-batches of all ranks; `values` has one each of this one's.

        One collective for all of them: they are small, and each costs a round trip.
        """
        wide = torch.promote_types(values["loss"][0].dtype, torch.float32)
        local = {name: torch.stack([v.to(wide) for v in parts]) for name, parts in values.items()}
        flat = torch.cat(
            [part.reshape(len(part), -1) for part in local.values()], 1
        )  # (micro-batch, values)
        means = in_order(flat).mean(0)
        sizes = [part[0].numel() for part in local.values()]
        found = zip(local.items(), means.split(sizes), strict=True)
        return {name: mean.view(part.shape[1:]) for (name, part), mean in found}


def share_weights(model: nn.Module, masters: Mapping[nn.Parameter, Tensor]) -> None:
    """Give every rank the weights and buffers of rank 0: they must begin as one model.

    `masters` are the fp32 weights of 16-bit parameters.
    """
    for tensor in chain(model.parameters(), model.buffers(), masters.values()):
        whole = tensor.detach().contiguous()
        dist.broadcast(whole, 0)
        if whole.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(whole)


def gradients_of(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the gradients; a parameter without one in this step gets zeros.

    Every rank must send the same sizes, also where one of them did not use a parameter.
    """
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    return [p.grad for p in parameters if p.grad is not None]


def parameter_norm(grad: Tensor) -> Tensor:
    """Return the norm of a whole gradient, summed in fp32 or better."""
    return torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32))


def norm_of_norms(norms: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients from that of each."""
    return torch.linalg.vector_norm(torch.stack(list(norms)))


def _shared_seed() -> int:
    """Return the seed of rank 0's random numbers, on every rank."""
    seed = torch.tensor(torch.initial_seed() % 2**63)
    dist.broadcast(seed, 0)
    return int(seed)


def _mixed(*numbers: int) -> int:
    """Return a seed in which every one of the numbers counts."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")
