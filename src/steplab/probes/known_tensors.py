"""The tensors that a training loop holds between its steps for a good reason.

Of a tensor that ranks share, the part of this rank counts.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from steplab.modules.shards import stored


def known_addresses(batch: Any) -> set[int]:
    """Return the addresses of all weights, buffers, gradients and optimizer states, and of `batch`.

    Those of every module and optimizer that is alive in this process: in a loop of the user's own
    nobody has told which ones there are.
    """
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    return {
        stored(tensor).untyped_storage().data_ptr()
        for tensor in (*leaves, *held_by_objects())
        if tensor.layout == torch.strided
    }


@dataclass(frozen=True)
class HeldTensors:
    """Storages (as numbers) of tensors that live on between steps."""

    buffers: frozenset[int]
    weights: frozenset[int]  # of modules, trained or not
    trained: frozenset[int]  # weights that an optimizer has, but for those that get no gradient
    gradients: frozenset[int]
    frozen: frozenset[int]  # weights that take no gradient, and that no optimizer updates
    idle_gradients: frozenset[int]  # of weights that no optimizer has, where there is an optimizer


def held_tensors() -> HeldTensors:
    """Return what the modules and optimizers hold that are alive in this process."""
    objects = _objects()
    optimizers = _optimizers(objects)
    modules = [one for one in objects if isinstance(one, nn.Module)]
    trained = [p for one in optimizers for group in one.param_groups for p in group["params"]]
    updated = {id(p) for p in trained}
    weights = [p for one in modules for p in one._parameters.values() if p is not None]
    having = [p for p in (*weights, *trained) if p.is_leaf and p.grad is not None]
    idle = [p.grad for p in having if id(p) not in updated]
    buffers = [b for one in modules for b in one._buffers.values() if b is not None]
    # Optimizers that are given all of a model's weights pass by those that are frozen.
    learning = _storages([p for p in trained if p.requires_grad or p.grad is not None])
    return HeldTensors(
        buffers=_storages(buffers),
        weights=_storages(weights),
        trained=learning,
        gradients=_storages([p.grad for p in having]),
        frozen=_storages([p for p in weights if not p.requires_grad]) - learning,
        idle_gradients=_storages(idle) if updated else frozenset(),
    )


def live_optimizers() -> list[torch.optim.Optimizer]:
    """Return the optimizers of this process."""
    return _optimizers(_objects())


def live_modules() -> list[nn.Module]:
    """Return the modules of this process."""
    return [one for one in _objects() if isinstance(one, nn.Module)]


def _optimizers(objects: list[Any]) -> list[torch.optim.Optimizer]:
    return [one for one in objects if isinstance(one, torch.optim.Optimizer)]


def _storages(tensors: Sequence[Tensor]) -> frozenset[int]:
    strided = (stored(tensor) for tensor in tensors if tensor.layout == torch.strided)
    return frozenset(tensor.untyped_storage()._cdata for tensor in strided)


def _objects() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when they are asked for their class
        return [o for o in gc.get_objects() if _is_either(o)]


def held_by_objects() -> Iterator[Tensor]:
    """Yield what the modules and optimizers that are alive in this process hold in memory."""
    yield from (tensor for tensor in _held() if not isinstance(stored(tensor), FakeTensor))


def _held() -> Iterator[Tensor]:
    for one in _objects():
        if isinstance(one, torch.optim.Optimizer):
            yield from (leaf for leaf in tree_leaves(dict(one.state)) if isinstance(leaf, Tensor))
            tensors = [p for group in one.param_groups for p in group["params"]]
        else:
            tensors = [*one._parameters.values(), *one._buffers.values()]
        for tensor in tensors:
            if tensor is not None:
                yield tensor
                if tensor.is_leaf and tensor.grad is not None:
                    yield tensor.grad


def _is_either(one: object) -> bool:
    return issubclass(type(one), (nn.Module, torch.optim.Optimizer))
