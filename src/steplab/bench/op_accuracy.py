"""How far an op's output and gradients are from fp64, and how far they may be. Imports torch.

The budget is derived from a peer, the definition in the same dtype. Over the whole tensor it is
twice the peer's own error and one rounding. In every tile of 16 rows it is one rounding and four
times the peer's error, there or on average, whichever is larger: a single wrong row cannot hide
among millions of right ones. An op may add slack, as a share of the truth, for what its algorithm
must lose and the peer's does not. In a tile that is a share of the tile's own truth or of the mean
tile's. For long sums each row has a share of its own truth only: rows may have few terms or many.
"""

# R rows, D the last axis
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from steplab.core import Column, Table

TILE = 16  # rows
# With fewer than 64 values the peer may be right by chance: then 16 roundings are added.
FEW, FEW_ROUNDINGS = 64, 16
COLUMNS = (Column("result"), Column("error"), Column("budget"), Column("worst tile", "of budget"))


@dataclass(frozen=True)
class Accuracy:
    """One result against fp64: norm of the difference over norm of the truth."""

    name: str  # "out", "dq", ...
    error: float
    budget: float
    worst_tile: float  # error of the worst tile over the budget of that tile

    @property
    def of_budget(self) -> float:
        """The larger share of the two budgets; above 1 the result is wrong."""
        return max(self.error / self.budget, self.worst_tile)


@dataclass
class AccuracyCheck:
    """Compares one result piece by piece, so that fp64 need never hold all of it."""

    name: str
    slack: float = 0.0
    truth: list[Tensor] = field(default_factory=list)  # norms of tiles, like the next four
    ours: list[Tensor] = field(default_factory=list)
    theirs: list[Tensor] = field(default_factory=list)
    rounding: list[Tensor] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)  # what long sums may lose
    values: int = 0
    unit: float = 0.0  # one rounding of the dtype

    def add(
        self, actual: Tensor, peer: Tensor, truth: Tensor, sum_slack: Tensor | float = 0.0
    ) -> None:
        """Add one piece; all three tensors have the same shape.

        `sum_slack` is a share of the truth, for all rows or (R, 1) for each.
        """
        if actual.shape != truth.shape:
            raise ValueError(f"{self.name} is {tuple(actual.shape)}, not {tuple(truth.shape)}")
        truth = truth.double()
        self.truth.append(_tile_norms(truth))
        self.ours.append(_tile_norms(actual.double() - truth))
        self.theirs.append(_tile_norms(peer.double() - truth))
        self.rounding.append(_tile_norms(truth.to(actual.dtype).double() - truth))
        self.sums.append(_tile_norms(truth * sum_slack))
        self.values += truth.numel()
        self.unit = torch.finfo(actual.dtype).eps / 2

    def result(self) -> Accuracy:
        """Return the accuracy over all pieces."""
        lists = (self.truth, self.ours, self.theirs, self.rounding, self.sums)
        truth, ours, theirs, rounding, sums = (torch.cat(norms) for norms in lists)
        slack = self.slack + (FEW_ROUNDINGS * self.unit if self.values < FEW else 0.0)
        allowed = 4 * _at_least_mean(theirs) + rounding + slack * _at_least_mean(truth) + sums
        size = max(float(truth.norm()), 1e-300)
        budget = float(2 * theirs.norm() + rounding.norm() + sums.norm()) / size + slack
        worst = float((ours / allowed.clamp_min(1e-300)).max())  # 0 of 0 is right
        return Accuracy(self.name, float(ours.norm()) / size, max(budget, 1e-300), worst)


def check_accuracy(
    actual: Mapping[str, Tensor],
    peer: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    slack: float = 0.0,
) -> list[Accuracy]:
    """Return the accuracy of every result, in the order of `truth`."""
    found = []
    for name in truth:
        check = AccuracyCheck(name, slack)
        check.add(actual[name], peer[name], truth[name])
        found.append(check.result())
    return found


def accuracy_table(results: list[Accuracy], checked: str) -> Table:
    """Return the record of a check; `checked` says how much of the cell's shape it covers."""
    rows = tuple((r.name, r.error, r.budget, r.worst_tile) for r in results)
    return Table(f"against fp64: {checked}", COLUMNS, rows)


def _at_least_mean(norms: Tensor) -> Tensor:
    return torch.maximum(norms, norms.mean())


def _tile_norms(difference: Tensor) -> Tensor:
    """Return the fp64 norm of every tile of rows; NaN counts as infinite."""
    last = difference.shape[-1] if difference.dim() > 1 else 1
    squares_R = difference.reshape(-1, last).nan_to_num(nan=math.inf).square().sum(-1)
    padded = torch.nn.functional.pad(squares_R, (0, -len(squares_R) % TILE))
    return padded.view(-1, TILE).sum(-1).sqrt()
