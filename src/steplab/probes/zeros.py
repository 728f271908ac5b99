"""Work on tensors that are nearly all zeros, by a few thousand elements of what it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload

from steplab.core.dataflow import RUNNING, ZEROS
from steplab.probes.op_tensors import is_plain, storage_number, tensors_of
from steplab.probes.value_graph import FILLS, WatchedOp
from steplab.probes.value_samples import EMPTY_ROWS, zero_shares

CAST = "aten::_to_copy"
# Where the factors of a product begin among its arguments.
PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
PUTS = FILLS | frozenset(
    f"aten::{name}"
    for name in "_to_copy copy copy_ scatter scatter_ scatter_add scatter_add_ index_put "
    "index_put_ index_copy index_copy_".split()
)
RECTIFIERS = frozenset(
    f"aten::{name}" for name in ("relu", "relu_", "threshold_backward", "clamp", "clamp_min")
)
LARGE_PRODUCT = 2**22  # multiply-adds from which the factors of a product are looked at
LARGE_TENSOR = 2**20  # elements of a sum or an elementwise product
LEAST_SIDE, LEAST_CHANNELS = 256, 8  # of matrices and kernels from before the step
# Of a sample. ReLU leaves half, a one-hot factor one in hundreds; ReLU and padding together may
# leave a tenth of a factor, but not of a sum.
MOSTLY_ZERO, MOSTLY_ZERO_SUM = 0.95, 0.9
HALF = 0.4, 0.6  # of a triangle


class Value(Protocol):
    """What a storage holds: a number that equal values share, and the operator that wrote it."""

    number: int
    writer: int


class Zeros:
    """Looks at what operators take before they run."""

    def __init__(
        self, value_of: Callable[[Tensor], Value], ops: list[WatchedOp], weights: frozenset[int]
    ) -> None:
        self._value_of = value_of
        self._ops = ops  # so far
        self._weights = weights  # storages
        self._sampled: dict[int, tuple[float, float]] = {}  # by the number of a value
        self._running: dict[int, bool] = {}  # the same

    def letter(self, func: Any, args: Any) -> str:
        """Return ZEROS for work on something of zeros, tenths for a product with rows of zeros.

        Tenths, too, for a convolution of samples with zeros between them. RUNNING for a product
        that only adds up what came before.
        """
        name = func._schema.name if isinstance(func, OpOverload) else ""
        is_product = name in PRODUCTS
        inputs = _factors(name, args) if is_product else _large_inputs(name, args)
        shares = [self._shares(tensor) for tensor in inputs]
        mostly = MOSTLY_ZERO if is_product else MOSTLY_ZERO_SUM
        of_zeros = [t for t, (share, _) in zip(inputs, shares, strict=True) if share > mostly]
        for tensor in of_zeros:
            self._mark_makers(self._value_of(tensor).writer)
        if of_zeros:
            return ZEROS
        if name == "aten::convolution" and (spread := self._spread(args[0])) >= EMPTY_ROWS:
            return str(int(spread * 10))
        rows = max((rows for _, rows in shares), default=0.0)
        if is_product and rows >= EMPTY_ROWS:
            return str(int(rows * 10))
        half = [
            t for t, (share, _) in zip(inputs, shares, strict=True) if HALF[0] < share < HALF[1]
        ]
        return RUNNING if is_product and any(map(self._is_running, half)) else ""

    def _spread(self, x: Tensor) -> float:
        """Return the share of zeros in an input that was put into zeros: between its samples."""
        if torch._C._current_autograd_node() is not None or not is_plain(x) or x.dim() < 3:
            return 0.0
        value = self._value_of(x)
        if value.writer < 0 or self._ops[value.writer].name not in PUTS:
            return 0.0
        return self._shares(x)[0]

    def _is_running(self, factor: Tensor) -> bool:
        """Whether a factor from before the step makes running sums or means of the other."""
        value = self._value_of(factor)
        if value.writer >= 0 or (factor.dim() > 2 and factor.stride(0) and len(factor) > 1):
            return False
        if value.number not in self._running:
            matrix = factor[0] if factor.dim() > 2 else factor
            self._running[value.number] = _is_triangle(matrix) or _is_triangle(matrix.T)
        return self._running[value.number]

    def _mark_makers(self, writer: int) -> None:
        """Mark what filled a tensor of zeros, put something into it, or cast it."""
        while writer >= 0 and self._ops[writer].name in PUTS:
            op = self._ops[writer]
            op.zeros = op.zeros or ZEROS
            writer = max(op.needs, default=-1)

    def _shares(self, tensor: Tensor) -> tuple[float, float]:
        """Return the shares of zeros and of rows, or columns, of zeros in what is no weight.

        Of what is older than the step, large matrices only: those of a filter bank are narrow.
        """
        value = self._value_of(tensor)
        if value.writer < 0:
            large = tensor.dim() > 2 or min(tensor.shape) >= LEAST_SIDE
            if storage_number(tensor) in self._weights or not large:
                return 0.0, 0.0
        elif self._computed_by(value.writer) in RECTIFIERS:  # a learned zero
            return 0.0, 0.0
        if value.number not in self._sampled:
            self._sampled[value.number] = zero_shares(tensor)
        return self._sampled[value.number]

    def _computed_by(self, writer: int) -> str:
        """Return the operator that computed a value, before casts of it."""
        op = self._ops[writer]
        while op.name == CAST and op.needs:
            op = self._ops[op.needs[0]]
        return op.name


def _is_triangle(matrix: Tensor) -> bool:
    """Whether a square matrix has one number in each row up to the diagonal, or from it on."""
    if matrix.shape[0] != matrix.shape[1]:
        return False
    with torch.no_grad():
        diagonal = matrix.diagonal().unsqueeze(1).expand_as(matrix)
        return torch.equal(matrix, diagonal.tril()) or torch.equal(matrix, diagonal.triu())


def _factors(name: str, args: Any) -> list[Tensor]:
    """Return the factors of a large product."""
    left, right = args[PRODUCTS[name] :][:2]
    if not (is_plain(left) and is_plain(right)):
        return []
    return [left, right] if left.numel() * right.shape[-1] >= LARGE_PRODUCT else []


def _large_inputs(name: str, args: Any) -> list[Tensor]:
    """Return what else may be zeros: a kernel for all channels, what is summed or multiplied.

    Not in backward, where a loss that reads little leaves zeros.
    """
    if torch._C._current_autograd_node() is not None:
        return []
    if name == "aten::convolution":
        kernel, groups = args[1], args[8]
        wide = is_plain(kernel) and groups == 1 and min(kernel.shape[:2]) >= LEAST_CHANNELS
        return [kernel] if wide else []
    if name not in ("aten::sum", "aten::mul"):
        return []
    tensors = filter(is_plain, tensors_of(args))
    return [t for t in tensors if t.dim() > 1 and t.numel() >= LARGE_TENSOR]
