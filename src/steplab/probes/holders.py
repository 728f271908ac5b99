"""Which variables hold the tensors that outlive a step, and the lines that put them there.

The allocator knows where memory was asked for; the garbage collector knows who refers to it now.
"""

from __future__ import annotations

import gc
import warnings
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from types import CellType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from steplab.modules.shards import stored
from steplab.probes.source_lines import written_lines

CONTAINERS = (list, tuple, set, deque)
DEEPEST = 3  # a list in a dict in an attribute
MOST_TENSORS = 1_000


def holding_places(addresses: Collection[int]) -> tuple[str, ...]:
    """Return "predictions, written at loop.py:37 (step)" for what holds memory at `addresses`.

    A tensor holds its own memory and, by its graph, that of the activations behind it.
    """
    return places_of([tensor for tensor in _tensors() if _holds(tensor, addresses)][:MOST_TENSORS])


def places_of(objects: Sequence[Any]) -> tuple[str, ...]:
    """Return the variables that hold some objects, each with the lines that write it."""
    names = list(dict.fromkeys(_names_of(objects)))
    lines = written_lines({name: (f"{name}=",) for name in names})
    return tuple(
        f"{name}, written at {' or '.join(lines[name])}" if name in lines else name
        for name in names
    )


def plain_addresses() -> set[int]:
    """Return the addresses of memory that only tensors without a graph hold, of all in Python."""
    tensors = [tensor for tensor in _tensors() if _has_memory(tensor)]
    graphs = {_address(tensor) for tensor in tensors if tensor.requires_grad}
    return {_address(tensor) for tensor in tensors} - graphs


def python_tensors() -> list[Tensor]:
    """Return the tensors with memory that Python holds in this process."""
    return [tensor for tensor in _tensors() if _has_memory(tensor) and _address(tensor)]


def _tensors() -> list[Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when they are asked for their class
        return [one for one in gc.get_objects() if issubclass(type(one), Tensor)]


def _holds(tensor: Tensor, addresses: Collection[int]) -> bool:
    return _has_memory(tensor) and (tensor.grad_fn is not None or _address(tensor) in addresses)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not isinstance(stored(tensor), FakeTensor)


def _address(tensor: Tensor) -> int:
    """Return where a tensor's memory begins; 0 for one that only stands for another.

    Compilers leave such tensors behind; asking them for their memory is an error.
    """
    try:
        return stored(tensor).untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def _names_of(targets: Sequence[Any]) -> Iterator[str]:
    """Yield the variables and attributes that refer to objects, through containers too.

    The collector looks at every object of the process to answer, so all are asked for at once.
    """
    ours = [targets]  # lists of this search, which are no holders
    for _ in range(DEEPEST + 1):
        holders = _referrers(targets, ours)
        spaces = _namespaces([one for one in holders if isinstance(one, dict)], [*ours, holders])
        yield from _closure_names([h for h in holders if isinstance(h, CellType)], [holders])
        sought = {id(target) for target in targets}
        for holder in holders:
            own = holder if id(holder) in spaces else getattr(holder, "__dict__", {})
            yield from (name for name, value in list(own.items()) if id(value) in sought)
        targets = [
            holder
            for holder in holders
            if isinstance(holder, (dict, *CONTAINERS)) and id(holder) not in spaces
        ]
        ours = [targets, holders]
        if not targets:
            return


def _referrers(targets: Sequence[Any], ours: Sequence[Any]) -> list[Any]:
    """Return what refers to the objects, without running functions and the lists of the search."""
    skipped = {id(one) for one in (*ours, ours)}
    found = gc.get_referrers(*targets) if targets else []
    return [one for one in found if id(one) not in skipped and not isinstance(one, FrameType)]


def _namespaces(spaces: Sequence[dict[Any, Any]], ours: Sequence[Any]) -> set[int]:
    """Return which dicts (their ids) have the variables of a module or the attributes of an object.

    Others are containers.
    """
    owners = _referrers(spaces, [*ours, spaces])
    return {id(getattr(owner, "__dict__", None)) for owner in owners} & {id(one) for one in spaces}


def _closure_names(cells: Sequence[CellType], ours: Sequence[Any]) -> Iterator[str]:
    closures = [c for c in _referrers(cells, [*ours, cells]) if isinstance(c, tuple)]
    sought = {id(cell) for cell in cells}
    for function in _referrers(closures, [closures]):
        if isinstance(function, FunctionType) and function.__closure__:
            names = zip(function.__code__.co_freevars, function.__closure__, strict=True)
            yield from (name for name, cell in names if id(cell) in sought)
