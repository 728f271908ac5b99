"""FSDP2: every rank keeps a shard of weights, gradients and state, and gathers block by block.

`fully_shard` makes every parameter a DTensor; a block's are gathered before its forward and its
backward, and freed after them. Nothing here replaces torch's engine.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from steplab.core.errors import Unsupported
from steplab.core.run import Collective
from steplab.modules.shards import is_sharded, local
from steplab.parallel.experts import routed_experts
from steplab.parallel.mesh import REPLICA
from steplab.parallel.scheme import Reduction, Scheme
from steplab.parallel.tree import tree_reduce_scatter

REPLICATE, SHARD = "replicate", "shard"  # axes of the mesh


class Sharded(Scheme):
    """`together` neighbors of `blocks` are gathered at a time, and what is in no block in one go.

    `reshard` frees a block's weights after its forward, so that they are gathered again for the
    backward; without it they are gathered once a step. With `replicate` R, the ranks are R groups
    with a whole set of shards each, between which gradients are all-reduced.

    `expert_mesh` is given where experts are shared out: a rank's own experts are sharded over the
    ranks that hold the same ones, everything else over all.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        reduction: Reduction | None = None,
        reshard: bool = True,
        replicate: int = 1,
        together: int = 1,
        expert_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__(model, reduction, expert_mesh)
        refuse_unshardable(model)
        self.reshard = reshard
        self.shard_mesh = make_mesh(model, self.ranks, replicate)
        if self.reduction.exact and replicate > 2:
            raise Unsupported(
                f"parallel.exact adds in one order over two replicas at most, not {replicate}.",
                "Use parallel.replicate=2 or leave it out.",
            )
        names = {p: name for name, p in model.named_parameters()}
        apart = without_shared_weights(blocks)
        groups = [apart[first : first + together] for first in range(0, len(apart), together)]
        in_groups = [{p for block in group for p in block.parameters()} for group in groups]
        others = set(names).difference(*in_groups)
        ranks = self.shard_mesh[SHARD].size()
        sizes = {p: padded_numel(p.shape, ranks) for p in names}
        self.block_units = len(groups)
        self.block_numel = sum(sizes[p] for group in in_groups for p in group)
        self.other_numel = sum(sizes[p] for p in others)
        self.trained_numel = sum(size for p, size in sizes.items() if p.requires_grad)
        # Whether the backward gathers one again depends on what comes before it.
        self.has_frozen_unit = not all(
            any(p.requires_grad for p in unit) for unit in (*in_groups, others) if unit
        )
        if expert_mesh is not None:
            for experts in routed_experts(model):
                self._shard([experts], reshard, expert_mesh[REPLICA])
        for group in groups:
            self._shard(group, reshard, self.shard_mesh)
        # What is in no block is needed first in the backward too: it stays for the whole step.
        self._shard([model], False, self.shard_mesh)
        sharded = dict(model.named_parameters())
        # Whole -> shard, until the optimizer has its own weights: a whole one must not stay.
        self.shards = {p: sharded[name] for p, name in names.items()}
        self.units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for unit in self.units:
            self._set_up(unit)

    @contextlib.contextmanager
    def backward_context(self, reduces: bool) -> Iterator[None]:
        """Every micro-batch is scattered, so that no rank ever holds a whole gradient.

        The all-reduce between replicas is left to the last one; without `reshard` the weights are
        kept until then.
        """
        for unit in self.units:
            if self.shard_mesh.ndim == 2:
                unit.set_requires_all_reduce(reduces, recurse=False)
            if not self.reshard:
                unit.set_reshard_after_backward(reduces, recurse=False)
        yield

    def reduce(self) -> None:
        """Done: the backward waits for its last reduction."""

    def release(self) -> None:
        """Return to shards: what is in no block stays gathered until a backward frees it."""
        for unit in self.units:
            unit.reshard()

    def planned(self, accumulate: int) -> tuple[Collective, ...]:
        """A block is gathered for its forward and its backward, and scattered after it.

        What is in no block is gathered once a micro-batch. Without `reshard`, all is gathered once
        a step. What is frozen is gathered, not scattered. `exact` exchanges the slices of a sum;
        what it gathers depends on whether gradients are clipped, and is left open.
        """
        ranks = self.shard_mesh[SHARD].size()
        if self.mesh is not None or ranks == 1 or self.has_frozen_unit:
            return ()
        rest = 1 if self.other_numel else 0
        units, numel = self.block_units + rest, self.block_numel + self.other_numel
        often = accumulate if self.reshard else 1
        more = accumulate if self.reshard else 0  # the second time, of the blocks
        dtype = self.held[0].dtype
        scattered = self.trained_numel * self.reduction.dtype_for(dtype).itemsize
        if self.reduction.exact:
            return (Collective("all-to-all", ranks, accumulate * units, accumulate * scattered),)
        calls = often * units + more * self.block_units
        gathered = (often * numel + more * self.block_numel) * dtype.itemsize
        # The loss and the metrics of all ranks are gathered too.
        calls += 1 if ranks == self.ranks else 0
        plan = [
            Collective("all-gather", ranks, calls, gathered),
            Collective("reduce-scatter", ranks, accumulate * units, accumulate * scattered),
        ]
        if ranks < self.ranks:
            # Any number of calls: that of the norm may go to as many ranks.
            plan.append(Collective("all-reduce", self.ranks // ranks, 0, scattered // ranks))
        return tuple(plan)

    def own_weights(self, masters: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Shard them like their parameters, and let go of the whole ones."""
        own = {self.shards[p]: shard_like(whole, self.shards[p]) for p, whole in masters.items()}
        self.shards.clear()
        return own

    def _shard(self, modules: list[nn.Module], reshard: bool, mesh: DeviceMesh) -> None:
        ranks = mesh.size(-1)
        dtypes = {p.dtype for p in self.model.parameters() if p.requires_grad}
        policy = MixedPrecisionPolicy(
            reduce_dtype=next((self.reduction.dtype_for(dtype) for dtype in dtypes), None)
        )
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=mesh,
            reshard_after_forward=reshard,
            shard_placement_fn=lambda p: Shard(sharded_axis(p.shape, ranks, is_sharded(p))),
            mp_policy=policy,
        )

    def _set_up(self, unit: FSDPModule) -> None:
        # The loss is divided already: a plain sum.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        if hasattr(unit, "set_reduce_scatter_unused_params"):  # since torch 2.13
            unit.set_reduce_scatter_unused_params(True)
        if self.reduction.exact:
            unit.set_custom_reduce_scatter(TreeReduceScatter())  # type: ignore[arg-type]


class TreeReduceScatter:
    """torch's reduce-scatter in one order over the ranks."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for an input or an output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum; done when it returns."""
        tree_reduce_scatter(output_tensor, input_tensor, group)


def sharded_axis(shape: Sequence[int], ranks: int, shared_out: bool = False) -> int:
    """Return the axis along which a parameter is cut.

    The first, where a few rows of padding do not matter. But a stack of matrices (experts) has few
    entries along it: 8 experts on 64 ranks would be padded to 64. So a stack is cut along the first
    axis that divides; one whose matrices are `shared_out` already, along one of the others.
    """
    if len(shape) < 3:
        return 0
    axes = range(int(shared_out), len(shape))
    return next((axis for axis in axes if shape[axis] % ranks == 0), 0)


def padded_numel(shape: Sequence[int], ranks: int) -> int:
    """Return how many numbers a parameter has when its shards are padded to one size."""
    cut = shape[sharded_axis(shape, ranks)]
    return math.prod(shape) // max(cut, 1) * -(-cut // ranks) * ranks


def without_shared_weights(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks that share no parameter with another one; the others stay together."""
    uses = Counter(p for block in blocks for p in block.parameters())
    return [block for block in blocks if all(uses[p] == 1 for p in block.parameters())]


def shard_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, cut as `parameter` is.

    Of the tensor all ranks have the whole, or the part that `expert_part` left them.
    """
    assert isinstance(parameter, DTensor)
    mesh, placements = parameter.device_mesh, parameter.placements
    if not is_sharded(tensor):
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    over_replicas = distribute_tensor(
        local(tensor), mesh[REPLICA], placements[:1], src_data_rank=None
    )
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(
        local(over_replicas), mesh, placements, run_check=False, shape=shape, stride=stride
    )


def make_mesh(model: nn.Module, ranks: int, replicate: int) -> DeviceMesh:
    """Return the ranks as one axis, or as replicas of a sharded model."""
    device = next(model.parameters()).device.type
    if ranks % replicate:
        raise Unsupported(
            f"{ranks} ranks cannot be divided into {replicate} replicas.",
            f"Choose a parallel.replicate that divides {ranks}.",
        )
    if replicate == 1:
        return init_device_mesh(device, (ranks,), mesh_dim_names=(SHARD,))
    shape = (replicate, ranks // replicate)
    return init_device_mesh(device, shape, mesh_dim_names=(REPLICATE, SHARD))


def refuse_unshardable(model: nn.Module) -> None:
    """Refuse what torch would refuse in the first step, or in words of its own."""
    for name, p in model.named_parameters():
        if p.ndim == 0:
            raise Unsupported(
                f"parallel=fsdp cannot cut the scalar parameter {name}.",
                "Make it a tensor of one element, or use parallel=ddp.",
            )
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    if len(dtypes) > 1:
        found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise Unsupported(
            f"parallel=fsdp sends gradients of one dtype, but the model has {found}.",
            "Bring the parameters to one dtype, or use parallel=ddp.",
        )
