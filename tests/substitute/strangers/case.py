"""What a case is: a small model, its loss, and whether a part of it is to be replaced."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

VOCAB, WIDTH, HEADS, BATCH, TIME = 24, 16, 4, 2, 6

Batch = tuple[Tensor, Tensor]  # words and targets, both (B, T)
Loss = Callable[[nn.Module, Batch], Tensor]
Shapes = tuple[tuple[int, int], ...]
THREE_STEPS: Shapes = ((BATCH, TIME),) * 3


@dataclass(frozen=True)
class Case:
    """Whatever is replaced, values and gradients must be those of the model itself."""

    name: str
    model: Callable[[], nn.Module]
    loss: Loss
    replaced: bool
    shapes: Shapes = THREE_STEPS  # of the batches, one for each step
    exact: float = 1e-9  # in fp64; larger where the model rounds by itself
