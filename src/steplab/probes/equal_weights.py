"""Frozen weights that are in memory twice: a copy of a model that never becomes another one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set

import torch
from torch import Tensor, nn

from steplab.core.dataflow import EqualWeights
from steplab.modules.shards import stored
from steplab.probes.holders import places_of
from steplab.probes.known_tensors import live_modules
from steplab.probes.untrained import named_weights

LEAST_BYTES = 2**16  # of a weight; scales and biases often equal each other, as ones or zeros
COMPARED = 2**24  # elements at a time: comparing takes a byte for each
PROBED = 64  # elements that tell most weights apart


def equal_weights(frozen: Set[int]) -> EqualWeights | None:
    """Return which of the weights with these storages are copies of others; None if none is."""
    alike: dict[object, list[tuple[str, Tensor]]] = defaultdict(list)
    seen: set[tuple[object, ...]] = set()
    with torch.no_grad():
        for name, weight in named_weights():
            own = stored(weight).detach()
            storage = own.untyped_storage()
            place = (storage._cdata, own.storage_offset(), own.shape)
            if storage._cdata in frozen and place not in seen and _is_large(own):
                seen.add(place)
                alike[own.shape, own.dtype, own.device, _print(own)].append((name, own))
        found = [(group, copies) for group in alike.values() if (copies := _copies(group))]
    if not found:
        return None
    copies = [copy for _, several in found for copy in several]
    sizes: dict[str, int] = defaultdict(int)
    for name, copy in copies:
        sizes[name] += copy.nbytes
    held = {weight.untyped_storage()._cdata for group, _ in found for _, weight in group}
    names = tuple(sorted(sizes, key=lambda name: -sizes[name]))
    return EqualWeights(len(copies), sum(sizes.values()), names, places_of(_models(held)))


def _copies(group: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return those that equal one before them, but for weights of one number, as ones."""
    first: list[Tensor] = []
    found = []
    for name, weight in group:
        if any(_equal(weight, other) for other in first):
            found.append((name, weight))
        elif len(group) > 1 and not bool((weight == weight.flatten()[0]).all()):
            first.append(weight)
    return found


def _equal(one: Tensor, other: Tensor) -> bool:
    pairs = zip(one.flatten().split(COMPARED), other.flatten().split(COMPARED), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


def _print(weight: Tensor) -> tuple[float, ...]:
    """Return a few of the elements, from all over the weight."""
    flat = weight.flatten()
    return tuple(flat[:: max(1, len(flat) // PROBED)].float().tolist())


def _is_large(weight: Tensor) -> bool:
    """Whether a weight in plain floats is worth a look; packed ones have no numbers to compare."""
    return (
        weight.dtype.is_floating_point
        and weight.dtype.itemsize > 1
        and weight.nbytes >= LEAST_BYTES
    )


def _models(storages: Set[int]) -> list[nn.Module]:
    """Return the outermost modules that have one of these weights."""
    modules = live_modules()
    inner = {id(child) for one in modules for child in one._modules.values()}
    return [one for one in modules if id(one) not in inner and _has(one, storages)]


def _has(module: nn.Module, storages: Set[int]) -> bool:
    weights = (stored(p) for p in module.parameters() if p.layout == torch.strided)
    return any(weight.untyped_storage()._cdata in storages for weight in weights)
