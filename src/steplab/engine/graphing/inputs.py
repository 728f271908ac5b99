"""The buffers that a captured graph reads: every call's tensors are copied into them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from steplab.errors import Unsupported

PLAIN = (int, float, str, bool, type(None))


class StaticInputs:
    """Copies of one call's inputs: tensors in tuples, lists, dicts and named tuples.

    `values` has their structure and is what the captured function is called with.
    """

    def __init__(self, inputs: Any, device: torch.device) -> None:
        leaves, self._tree = tree_flatten(inputs)
        for path, leaf in tree_flatten_with_path(inputs)[0]:
            _refuse_leaf(leaf, keystr(path), device)
        self._example = [_described(leaf) for leaf in leaves]
        static = [_copied(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._buffers = [leaf for leaf in static if isinstance(leaf, Tensor)]
        self.values = tree_unflatten(static, self._tree)

    def fill(self, inputs: Any) -> None:
        """Copy one call's tensors into the buffers; refuse inputs of another form."""
        leaves, tree = tree_flatten(inputs)
        if tree != self._tree or [_described(leaf) for leaf in leaves] != self._example:
            raise Unsupported(
                f"A CUDA graph has fixed shapes: {self._difference(inputs)}.",
                "Yield batches of one shape (drop the last, or pad), or leave the graph out.",
            )
        if self._buffers:
            torch._foreach_copy_(self._buffers, [x for x in leaves if isinstance(x, Tensor)])

    def _difference(self, inputs: Any) -> str:
        """Say which input is not what it was when the graph was captured."""
        found = tree_flatten_with_path(inputs)[0]
        if len(found) != len(self._example):
            return f"{len(self._example)} inputs were captured, {len(found)} came"
        for (path, leaf), was in zip(found, self._example, strict=True):
            if _described(leaf) != was:
                return f"input {keystr(path)} was {was} and is {_described(leaf)}"
        return "the inputs stand in another structure than those captured"


def _copied(x: Tensor) -> Tensor:
    """Return a copy with the strides of `x`, gaps included.

    A clone would close the gaps of a slice, and compiled code that was made for the slice would be
    compiled anew for the clone: in the middle of the capture, which it breaks.
    """
    if any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True)):
        return x.detach().clone()  # an expanded tensor cannot be written to
    strided = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return strided.copy_(x.detach())


def _described(leaf: Any) -> Any:
    """What must stay the same: shape and dtype of a tensor, anything else as it is."""
    if isinstance(leaf, Tensor):
        return f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
    return leaf


def _refuse_leaf(leaf: Any, place: str, device: torch.device) -> None:
    if isinstance(leaf, Tensor):
        if leaf.device.type != device.type:
            raise Unsupported(
                f"Input {place} is on {leaf.device}: a CUDA graph on {device} cannot read it.",
                "Move it to the device before the call.",
            )
    elif not isinstance(leaf, PLAIN):
        raise Unsupported(
            f"Input {place} is a {type(leaf).__name__}: its tensors cannot be found and replaced.",
            "Use tensors in tuples, lists, dicts or named tuples.",
        )
