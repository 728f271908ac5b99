"""Wide pooling: steplab profile examples/faults/wide_pooling.py:faulty

Pixels near the border of a region count more: the border is widened by a max pool with one square
window. The clean twin pools along the rows, then along the columns, for the same numbers.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steplab

rule = "wide_pooling"
where = "cpu"


def in_one(edge_B1HW: Tensor, window: int) -> Tensor:
    """Look at every pixel of the square, for every pixel."""
    return F.max_pool2d(edge_B1HW, window, stride=1, padding=window // 2)


def in_two(edge_B1HW: Tensor, window: int) -> Tensor:
    """The largest of the rows' largest."""
    rows_B1HW = F.max_pool2d(edge_B1HW, (1, window), stride=1, padding=(0, window // 2))
    return F.max_pool2d(rows_B1HW, (window, 1), stride=1, padding=(window // 2, 0))


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, side: int, window: int, square: bool) -> steplab.UserModel:
    """Two convolutions that tell two regions apart."""
    pool = in_one if square else in_two

    def batches(size: int) -> Iterator[tuple[Tensor, Tensor]]:
        images_B1HW = torch.randn(size, 1, side, side)
        regions_BHW = torch.zeros(size, side, side)
        regions_BHW[:, side // 2 :] = 1.0
        while True:
            yield images_B1HW, regions_BHW

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images_B1HW, regions_BHW = batch
        edge_BHW = F.pad(regions_BHW.diff(dim=1).abs(), (0, 0, 1, 0))
        weight_BHW = 1 + 4 * pool(edge_BHW[:, None], window)[:, 0]
        scores_BHW = model(images_B1HW)[:, 0]
        return F.binary_cross_entropy_with_logits(scores_BHW, regions_BHW, weight_BHW)

    model = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 1, 3, padding=1)
    )
    return steplab.UserModel(model, batches, loss, side * side, optimizer=adamw)


def faulty(width: int = 16, side: int = 192, window: int = 31) -> steplab.UserModel:
    """One pool over squares."""
    return made(width, side, window, square=True)


def clean(width: int = 16, side: int = 192, window: int = 31) -> steplab.UserModel:
    """Two pools over lines."""
    return made(width, side, window, square=False)
