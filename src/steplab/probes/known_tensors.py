"""Addresses of the tensors that a training loop holds between its steps for a good reason."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def known_addresses(batch: Any) -> set[int]:
    """Return the addresses of all weights, buffers, gradients and optimizer states, and of `batch`.

    Those of every module and optimizer that is alive in this process: in a loop of the user's own
    nobody has told which ones there are.
    """
    leaves = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    return {
        tensor.untyped_storage().data_ptr()
        for tensor in (*leaves, *_held_by_objects())
        if tensor.layout == torch.strided
    }


def _held_by_objects() -> Iterator[Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when they are asked for their class
        found = [o for o in gc.get_objects() if _is_either(o)]
    for one in found:
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
