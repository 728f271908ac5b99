"""The shapes that a loop trains on, told from the odd batch at the end of an epoch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

PLAIN_TYPES = (int, float, str, bool, type(None))
UNUSUAL = "ran op by op, its shape is unusual"
OTHERS_IN_A_ROW = 10  # steps of another shape after which it is the usual one
WARNED = 20  # steps of unusual shapes after which a loop is told, if they are most of its steps


class UsualShapes:
    """Remembers one usual shape: the first, until another one has come OTHERS_IN_A_ROW times.

    Compiling or capturing a step takes far longer than the step, so what comes once is not worth
    it: such steps run op by op. A loop in which most steps do, as one whose batches are padded to
    their own longest row, is told once.
    """

    def __init__(self) -> None:
        self._usual: Any = None
        self._last: Any = None
        self._in_a_row = 0  # steps of the last shape
        self._steps = self._unusual = 0

    def include(self, shape: Any) -> bool:
        """Whether a step of this shape is worth compiling and capturing."""
        self._in_a_row = self._in_a_row + 1 if shape == self._last else 1
        self._last = shape
        if self._usual is None or self._in_a_row >= OTHERS_IN_A_ROW:
            self._usual = shape
        is_usual = bool(shape == self._usual)
        self._steps += 1
        self._unusual += not is_usual
        if not is_usual and self._unusual == WARNED and 2 * self._unusual > self._steps:
            warnings.warn(
                f"{self._unusual} of {self._steps} steps had batches of changing shapes and ran op "
                "by op, without compile or a CUDA graph. Pad or cut batches to one shape, or leave "
                "both out of the recipe.",
                stacklevel=4,
            )
        return is_usual


def shape_of(inputs: Any) -> tuple[list[Any], Any]:
    """Return what code was compiled or captured for: shapes, dtypes, values, their nesting."""
    leaves, tree = tree_flatten(inputs)
    return [describe_leaf(leaf) for leaf in leaves], tree


def micro_batch_shapes(micro_batches: Sequence[Any]) -> list[Any]:
    """Return the distinct shapes of micro-batches, whatever their number."""
    found: list[Any] = []
    for shape in map(shape_of, micro_batches):
        if shape not in found:
            found.append(shape)
    return found


def describe_leaf(leaf: Any) -> Any:
    """Return what must stay the same: shape and dtype of a tensor, a plain value itself."""
    if isinstance(leaf, Tensor):
        return f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
    return leaf if isinstance(leaf, PLAIN_TYPES) else type(leaf)
