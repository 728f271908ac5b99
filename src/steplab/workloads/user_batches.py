"""The batches of a user's own model: without an end, and on the device of the step."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from steplab.core.errors import Unsupported, UserError
from steplab.workloads.misuse import BATCHES, describe


def endless_batches(
    where: str, batches: Callable[[int], Iterable[Any]], size: int, device: torch.device
) -> Iterator[Any]:
    """Yield what `batches(size)` yields, on the device; what ends is started again.

    A list or a DataLoader is read again; a generator has ended for good, so its function is called
    again.
    """
    epoch: Iterable[Any] = ()
    for passes in itertools.count():
        if passes == 0 or isinstance(epoch, Iterator):
            epoch = _check_epoch(where, batches(size), size)
        any_batch = False
        for batch in _whole_batches(where, epoch, size):
            any_batch = True
            yield to_device(batch, device)
        if not any_batch:
            raise _no_batch(where, size, passes)


def with_workers(where: str, found: Any, workers: int, pinned: bool) -> DataLoader[Any]:
    """Return a DataLoader that gives what `found` gives, in its order, made by `workers` processes.

    They stay from epoch to epoch. `pinned`: batches lie in memory from which a GPU can copy while
    it computes.
    """
    asked = f"{where}: prefetch.workers={workers} asks for"
    leave_out = "Leave workers out of the recipe: a thread fetches ahead without them."
    if not isinstance(found, DataLoader):
        raise Unsupported(f"{asked} a DataLoader; the batches are {describe(found)}.", leave_out)
    if isinstance(found.dataset, IterableDataset):
        raise Unsupported(
            f"{asked} a dataset with an index: of an IterableDataset each worker reads everything.",
            leave_out,
        )
    if type(found).__iter__ is not DataLoader.__iter__:
        kind = type(found).__name__
        raise Unsupported(f"{asked} torch's own DataLoader, not {kind}.", leave_out)
    if found.batch_size is None and found.batch_sampler is not None:
        order: dict[str, Any] = {"batch_sampler": found.batch_sampler}
    else:
        order = {"batch_size": found.batch_size, "sampler": found.sampler}
        order["drop_last"] = found.drop_last
    return DataLoader(
        found.dataset,
        **order,
        num_workers=workers,
        persistent_workers=True,
        pin_memory=pinned or found.pin_memory,
        collate_fn=found.collate_fn,
        timeout=found.timeout,
        worker_init_fn=found.worker_init_fn,
        multiprocessing_context=found.multiprocessing_context,
        generator=found.generator,
        prefetch_factor=found.prefetch_factor,
    )


def _check_epoch(where: str, found: Any, size: int) -> Iterable[Any]:
    """Refuse what would be taken apart into something else than batches."""
    call = f"{where}: batches({size}) returned"
    if isinstance(found, (Tensor, dict, tuple)):
        kind = type(found).__name__
        raise UserError(f"{call} one {kind}, not many batches.", "Yield it: while True: yield ...")
    if isinstance(found, Dataset):
        kind = type(found).__name__
        raise UserError(f"{call} the dataset {kind}, whose items are no batches.", BATCHES)
    if not isinstance(found, Iterable):
        line = "Yield them, or return a DataLoader."
        raise UserError(f"{call} {describe(found)}, not batches.", line)
    if isinstance(found, DataLoader) and found.batch_size not in (None, size):
        raise UserError(
            f"{call} a DataLoader with batch_size={found.batch_size}.",
            "Write DataLoader(dataset, batch_size=size).",
        )
    return found


def _whole_batches(where: str, epoch: Iterable[Any], size: int) -> Iterable[Any]:
    """Leave out the last batch of a DataLoader when it is short: its step would be shorter too."""
    if not isinstance(epoch, DataLoader) or epoch.batch_size is None:
        return epoch
    try:
        samples = len(epoch.sampler)  # type: ignore[arg-type]
    except TypeError:  # an IterableDataset does not know its length
        return epoch
    if samples < size:
        raise UserError(
            f"{where}: the DataLoader has {samples} samples, too few for a batch of {size}.",
            f"Use --batch {samples} or more samples." if samples else "Look at its dataset.",
        )
    return itertools.islice(epoch, samples // size)


def _no_batch(where: str, size: int, passes: int) -> UserError:
    if passes == 0:
        return UserError(f"{where}: batches({size}) yields no batch.", "Look at its data.")
    return UserError(
        f"{where}: batches({size}) ended after {passes} pass{'es' if passes > 1 else ''} over the "
        "data and yields no more: it returns the same used-up iterator again.",
        "Make a new one in batches, or return the DataLoader itself.",
    )


def to_device(item: Any, device: torch.device) -> Any:
    """Move the tensors of a batch: in lists, tuples, dicts, dataclasses, or whatever has `to`."""
    if isinstance(item, Tensor):
        return item.to(device, non_blocking=True)
    if isinstance(item, dict):
        return {key: to_device(value, device) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        moved = [to_device(value, device) for value in item]
        return type(item)(*moved) if hasattr(item, "_fields") else type(item)(moved)
    if callable(getattr(item, "to", None)) and not isinstance(item, type):
        return item.to(device)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        values = {
            f.name: to_device(getattr(item, f.name), device) for f in dataclasses.fields(item)
        }
        return dataclasses.replace(item, **values)
    return item
