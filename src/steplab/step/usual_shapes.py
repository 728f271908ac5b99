"""The shapes that a loop trains on, told from the odd batch at the end of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

PLAIN_TYPES = (int, float, str, bool, type(None))
UNUSUAL = "ran op by op, its shape is unusual"
OTHERS_IN_A_ROW = 10  # steps of another shape after which it is the usual one


class UsualShapes:
    """Remembers one usual shape: the first, until another one has come OTHERS_IN_A_ROW times.

    Compiling or capturing a step takes far longer than the step, so what comes once is not worth
    it: such steps run op by op.
    """

    def __init__(self) -> None:
        self._usual: Any = None
        self._others = 0

    def include(self, shape: Any) -> bool:
        """Whether a step of this shape is worth compiling and capturing."""
        if self._usual is None or self._others + 1 >= OTHERS_IN_A_ROW:
            self._usual = shape
        self._others = 0 if shape == self._usual else self._others + 1
        return self._others == 0


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
