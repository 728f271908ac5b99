"""Which inputs of a concatenation nobody reads, by the views of its result that were read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

JOINS = ("aten::cat", "aten::stack")
MOST_ELEMENTS = 2**26  # of a result that is looked at, a byte each
View = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, shape and strides, in elements


@dataclass(frozen=True)
class Joined:
    """A contiguous result, and the operators that wrote its parts, in their order along `dim`."""

    shape: tuple[int, ...]
    dim: int
    parts: tuple[tuple[int, int], ...]  # writer and size


def joined(name: str, args: Any, out: Any, writer: Callable[[Tensor], int]) -> Joined | None:
    """Return the parts of what an operator joins; None for other operators."""
    if name not in JOINS or not out.is_contiguous() or out.numel() > MOST_ELEMENTS:
        return None
    dim = (args[1] if len(args) > 1 else 0) % max(out.dim(), 1)
    sizes = [1 if name == "aten::stack" else one.shape[dim] for one in args[0] if one.numel()]
    if sum(sizes) != out.shape[dim]:
        return None
    writers = [writer(one) for one in args[0] if one.numel()]
    return Joined(tuple(out.shape), dim, tuple(zip(writers, sizes, strict=True)))


def unread_writers(one: Joined, views: Iterable[View]) -> set[int]:
    """Return the writers of parts of which no view shows an element, where others are shown."""
    read = torch.zeros(one.shape, dtype=torch.bool)
    for offset, shape, strides in views:
        read.as_strided(shape, strides, offset).fill_(True)
    seen: set[int] = set()
    start = 0
    for writer, size in one.parts:
        if bool(read.narrow(one.dim, start, size).any()):
            seen.add(writer)
        start += size
    return {writer for writer, _ in one.parts} - seen - {-1} if seen else set()
