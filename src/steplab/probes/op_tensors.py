"""The tensors of an operator: those that it reads, writes and makes, by their storages."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def is_plain(tensor: Any) -> bool:
    """Whether a tensor has a storage of its own kind: no fake, sparse or quantized one."""
    return isinstance(tensor, Tensor) and tensor.layout == torch.strided and type(tensor) in PLAIN


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors among nested arguments."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def storage_number(tensor: Tensor) -> int:
    """Return what tells a storage from others, as long as somebody refers to it."""
    return tensor.untyped_storage()._cdata


def written_tensors(func: OpOverload, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operator writes in place."""
    found: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name) if argument.kwarg_only else None
            if given is None and place < len(args):
                given = args[place]
            found += tensors_of(given)
    return found


def shown_bytes(tensor: Tensor) -> int:
    """Return the bytes of a storage that a tensor shows."""
    return shown_elements(tensor) * tensor.element_size()


def shown_elements(tensor: Tensor) -> int:
    """Return the elements of a storage that a tensor shows; an expanded one shows each once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride)


def shows_all(tensor: Tensor) -> bool:
    """Whether a tensor shows all of its storage."""
    return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()
