"""Rows of a tensor that are copies of fewer rows, and whether an operator computes each of them.

`expand`, `repeat`, `repeat_interleave`, indices and windows that overlap make copies. They stay
copies through operators that take every row by itself, until something of its own is added to each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload

# How often an index takes each row of its source before it counts. What `expand` and `repeat` copy
# is the same for certain; a graph of few edges may well be one of few nodes in the next batch.
GATHERED = 4
SELECTS = frozenset(f"aten::{name}" for name in ("index_select", "index", "gather"))
COPIES = frozenset(f"aten::{name}" for name in ("clone", "_to_copy", "copy_"))
# The first dimension of the result is that of the first argument: samples.
PER_SAMPLE = frozenset(
    f"aten::{name}"
    for name in "native_group_norm native_batch_norm cudnn_batch_norm avg_pool1d avg_pool2d "
    "max_pool2d_with_indices _adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d".split()
)
NORMS = frozenset(f"aten::{name}" for name in ("native_layer_norm", "_fused_rms_norm"))
SOFTMAXES = frozenset(f"aten::{name}" for name in ("_softmax", "_log_softmax", "_safe_softmax"))
REDUCTIONS = frozenset(
    f"aten::{name}" for name in ("mean", "sum", "amax", "norm", "linalg_vector_norm")
)
ATTENTION = "aten::_scaled_dot_product_"


@dataclass(frozen=True)
class Copied:
    """Places at a distance from each other, in a storage or a dimension, that hold copies."""

    stride: int
    size: int  # how many such places there are in a row
    copies: float  # of each of them that differs, on average
    pattern: int = 0  # an index, by its number, that tells which are the same; 0: all are
    maker: int = -1  # the operator that copied; -1: none, a view
    computed: bool = False  # an operator has computed each of them

    def matches(self, other: Copied) -> bool:
        """Whether the same places are copies of each other."""
        mine = self.stride, self.size, self.pattern
        return mine == (other.stride, other.size, other.pattern)


Places = tuple[Copied, ...]  # of a storage


class Known(Protocol):
    """What is known of the values before an operator."""

    def places(self, tensor: Tensor) -> Places:
        """Return the copies in a tensor's storage."""

    def number(self, tensor: Tensor) -> int:
        """Return a number that only equal values share."""


@dataclass(frozen=True)
class RowWise:
    """How an operator takes rows: dimensions of the result along which copies remain copies."""

    dims: tuple[int, ...]
    operands: tuple[Tensor, ...]  # that must all hold copies there; the rest is the same for all
    computes: bool = True  # it takes time for every row; what is elementwise follows others


def copied_rows(
    func: OpOverload, args: Any, inputs: list[Tensor], out: Tensor, known: Known, index: int
) -> Places:
    """Return the places of a result that hold copies; `index` is the number of the operator."""
    name = func._schema.name
    if name in SELECTS:
        return _selected(name, args, out, known, index)
    if name == "aten::repeat":
        return _repeated(args, out, index)
    maker = index if name in COPIES else -1
    windows = _overlapping(inputs[-1], out, index) if name in COPIES else ()
    return windows or tuple(
        replace(
            one,
            stride=one.stride * out.stride(dim),
            maker=one.maker if one.maker >= 0 else maker,
            computed=one.computed or part.computes,
        )
        for part in _row_wise(func, args, inputs, out)
        for dim in part.dims
        for one in _common(dim, part.operands, out, known)
    )


def times_computed(places: Places) -> float:
    """Return how often each row was computed, on average; 1: once."""
    return math.prod(one.copies for one in places if one.computed)


def _row_wise(func: OpOverload, args: Any, inputs: list[Tensor], out: Tensor) -> Iterable[RowWise]:
    name = func._schema.name
    first = inputs[0] if inputs else out
    if name in COPIES:
        yield RowWise(_dims(out), (inputs[-1],), computes=False)
    elif torch.Tag.pointwise in func.tags:
        yield RowWise(_dims(out), tuple(inputs), computes=False)
    elif name in SOFTMAXES:
        yield RowWise(_dims(first, [args[1]]), (first,), computes=False)
    elif name in REDUCTIONS and len(args) > 2 and args[2] is True:
        yield RowWise(_dims(first, args[1] or _dims(first)), (first,), computes=False)
    elif name == "aten::mm":
        yield RowWise((0,), (first,))
    elif name == "aten::addmm" and first.dim() < 2:
        yield RowWise((0,), (args[1],))
    elif name == "aten::linear":
        yield RowWise(_dims(first, [-1]), (first,))
    elif name == "aten::bmm":
        yield RowWise((0,), tuple(inputs))
        yield RowWise((1,), (first,))
    elif name == "aten::convolution":
        yield RowWise(_dims(first, [1]) if _is_pointwise(args) else (0,), (first,))
    elif name in NORMS:
        yield RowWise(_dims(first)[: -len(args[1])], (first,))
    elif name in PER_SAMPLE:
        yield RowWise((0,), (first,))
    elif name.startswith(ATTENTION) and "backward" not in name:
        yield RowWise((0, 1), tuple(inputs))


def _common(dim: int, operands: tuple[Tensor, ...], out: Tensor, known: Known) -> Iterable[Copied]:
    """Return what is copied along a dimension of the result: what is so in all operands.

    An operand that is broadcast along it, or expanded, is the same at all places.
    """
    size = out.shape[dim]
    if size < 2:
        return []
    varying = []
    for tensor in operands:
        place = dim - (out.dim() - tensor.dim())
        if place >= 0 and tensor.shape[place] > 1 and tensor.stride(place):
            varying.append(_along(tensor, place, known.places(tensor)))
    if not varying:
        return [Copied(1, size, size)]
    kept, *others = varying
    for other in others:
        pairs = [(a, b) for a in kept for b in other if a.matches(b)]
        kept = [
            replace(a, copies=min(a.copies, b.copies), computed=a.computed or b.computed)
            for a, b in pairs
        ]
    return kept


def _along(tensor: Tensor, dim: int, places: Places) -> list[Copied]:
    """Return the copies of a storage that lie within one dimension of a view, in its steps."""
    stride, size = tensor.stride(dim), tensor.shape[dim]
    return [
        replace(one, stride=one.stride // stride)
        for one in places
        if one.stride % stride == 0 and one.stride * one.size <= stride * size
    ]


def _overlapping(source: Tensor, out: Tensor, index: int) -> Places:
    """Return the rows that several windows share, where windows are copied row by row.

    `unfold` shows them without copying: one dimension goes from window to window, the next one
    along the rows of each, both through the same rows.
    """
    if source.shape != out.shape:
        return ()
    for dim in range(out.dim() - 1):
        count, length = source.shape[dim : dim + 2]
        step, row = source.stride(dim), source.stride(dim + 1)
        joined = out.stride(dim) == length * out.stride(dim + 1)
        if not joined or not row or step % row or not 0 < step // row < length or count < 2:
            continue
        rows, distinct = count * length, (count - 1) * (step // row) + length
        pattern = hash(("windows", step // row, length))
        return (Copied(out.stride(dim + 1), rows, rows / distinct, pattern, maker=index),)
    return ()


def _repeated(args: Any, out: Tensor, index: int) -> Places:
    source, repeats = args[:2]
    new = len(repeats) - source.dim()
    sizes = [1] * new + list(source.shape)
    return tuple(
        Copied(size * out.stride(dim), times, times, maker=index)
        for dim, (size, times) in enumerate(zip(sizes, repeats, strict=True))
        if times > 1 and out.numel()
    )


def _selected(name: str, args: Any, out: Tensor, known: Known, index: int) -> Places:
    """Return the rows that an index takes many times, where it is one index for whole rows."""
    source = args[0]
    if not source.dim() or not out.numel():
        return ()
    if name == "aten::index":
        given = [(dim, one) for dim, one in enumerate(args[1]) if one is not None]
        dim, chosen = given[0]
        whole = len(given) == 1 and chosen.dim() == 1 and chosen.dtype != torch.bool
    else:
        dim, chosen = args[1] % source.dim(), args[2]
        last = source.dim() - 1
        whole = name == "aten::index_select" or (dim < last and not chosen.stride(last))
    times = out.shape[dim] // source.shape[dim] if whole else 0
    if times < GATHERED:
        return ()
    pattern = known.number(chosen)
    return (Copied(out.stride(dim), out.shape[dim], times, pattern, maker=index),)


def _is_pointwise(args: Any) -> bool:
    """Whether a convolution takes every place by itself: a kernel of one, no step, no border."""
    weight, steps, borders = args[1], args[3], args[4]
    ones = math.prod(weight.shape[2:]) == 1
    return ones and all(step == 1 for step in steps) and not any(borders) and not args[6]


def _dims(tensor: Tensor, left_out: Iterable[int] = ()) -> tuple[int, ...]:
    gone = {dim % tensor.dim() for dim in left_out}
    return tuple(dim for dim in range(tensor.dim()) if dim not in gone)
