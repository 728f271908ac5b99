"""Batches for a training loop, read ahead by threads, in an order that resumes from a position."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steplab.core.errors import UserError
from steplab.data.sampling import MixedOrder, Order, Position, order_of
from steplab.data.windows import WindowSet


class Batch(NamedTuple):
    """One batch on the device: values float32 and mask bool, both [batch, window length]."""

    values_BT: Tensor
    mask_BT: Tensor


class PackedBatch(NamedTuple):
    """A batch of packed windows: values, mask and an int32 document id per point."""

    values_BT: Tensor
    mask_BT: Tensor
    documents_BT: Tensor


class TextBatch(NamedTuple):
    """A batch of text: tokens and the tokens after them, both int64 [batch, window length]."""

    tokens_BT: Tensor
    targets_BT: Tensor


AnyBatch = Batch | PackedBatch | TextBatch


class Loader:
    """Yields batches forever, epoch after epoch, each epoch in a new order.

    The order depends on (seed, position) alone, not on the number of threads: batches are handed
    out in the order in which they were requested. Windows that do not fill a batch at the end of
    an epoch are left out. `position` is what the loop has received, not what was read ahead; a new
    Loader that starts there continues with the same batches.

    Where `ranks` loaders share one order, each hands out every `ranks`-th batch, beginning with
    number `rank`. All of them have the same position then: it counts the windows of all ranks.

    Threads are enough: numpy and page faults release the interpreter while they copy and wait.
    """

    def __init__(
        self,
        windows: WindowSet,
        batch: int,
        seed: int,
        device: torch.device | str,
        position: Position = Position(0, 0),  # noqa: B008  (frozen)
        prefetch: int = 4,
        workers: int = 2,
        shuffle: bool = True,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self._order = order_of(windows, seed, position.epoch)
        _check(len(self._order), windows.series.name, batch, position, prefetch, workers)
        self.position = position
        self._windows, self._batch, self._seed, self._shuffle = windows, batch, seed, shuffle
        self._device = torch.device(device)
        self._rank, self._ranks = rank, ranks
        self._next = position  # of the batch to request next, the one for rank 0
        self._requested: deque[tuple[Position, Future[AnyBatch]]] = deque()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="steplab-data")
        self._open = True
        for _ in range(prefetch):
            self._request()

    def __iter__(self) -> Iterator[AnyBatch]:
        return self

    def __next__(self) -> AnyBatch:
        """Return the next batch, on the device. A failed read closes the loader."""
        if not self._open:
            raise UserError("This loader is closed.")
        after, future = self._requested.popleft()
        try:
            batch = future.result()
        except BaseException:
            self.close()
            raise
        self._request()
        pinned = self._device.type == "cuda"
        on_device = type(batch)(*(part.to(self._device, non_blocking=pinned) for part in batch))
        self.position = after
        return on_device

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading ahead and end the threads; `position` stays. May be called again."""
        self._open = False
        self._requested.clear()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _request(self) -> None:
        """Have the threads read one more batch. They hold no reference to the loader itself."""
        for rank in range(self._ranks):
            numbers = self._next_numbers()
            if rank == self._rank:
                order = self._order if self._shuffle else None
                job = self._threads.submit(_read_batch, self._windows, order, numbers, self._device)
        self._requested.append((self._next, job))

    def _next_numbers(self) -> NDArray[np.int64]:
        """Return where the next batch lies in the order of its epoch, and move on."""
        epoch, index = self._next.epoch, self._next.index
        if index + self._batch > len(self._order):
            epoch, index = epoch + 1, 0
        if epoch != self._order.epoch:
            self._order = order_of(self._windows, self._seed, epoch)
        self._next = Position(epoch, index + self._batch)
        return np.arange(index, index + self._batch)


def _read_batch(
    windows: WindowSet,
    order: Order | MixedOrder | None,
    positions: np.ndarray,
    device: torch.device,
) -> AnyBatch:
    """Read the windows at `positions` into host memory, pinned if the device is a GPU."""
    numbers = positions if order is None else order[positions]
    rows = [windows.read(number) for number in numbers.tolist()]
    batch = _allocate((len(numbers), windows.length), device, rows[0])
    for part, column in zip(batch, zip(*rows, strict=True), strict=True):
        np.stack(column, out=part.numpy())
    return batch


def _allocate(
    shape: tuple[int, int], device: torch.device, row: tuple[np.ndarray, ...]
) -> AnyBatch:
    """Return an empty batch of such rows in host memory, pinned for a CUDA device."""
    pinned = device.type == "cuda"
    dtypes = [torch.from_numpy(np.empty(0, part.dtype)).dtype for part in row]
    # A new thread starts on the first GPU, whichever the loader's is.
    with torch.cuda.device(device) if pinned else nullcontext():
        parts = [torch.empty(shape, dtype=dtype, pin_memory=pinned) for dtype in dtypes]
    if dtypes[0] == torch.int64:
        return TextBatch(*parts)
    return PackedBatch(*parts) if len(parts) == 3 else Batch(*parts)


def _check(
    windows: int, name: str, batch: int, position: Position, prefetch: int, workers: int
) -> None:
    if min(batch, prefetch, workers) < 1:
        raise UserError(
            f"batch is {batch}, prefetch {prefetch} and workers {workers}; each must be at least 1."
        )
    if position.epoch < 0 or not 0 <= position.index <= windows:
        raise UserError(
            f"Epoch {position.epoch}, window {position.index} is not in {name}, "
            f"which has {windows:,} windows.",
            "Resume with the data, window length and stride of the first run.",
        )
    if batch > windows:
        raise UserError(
            f"{name} has {windows:,} windows, which do not fill one batch of {batch:,}.",
            "Use a smaller batch, a smaller stride or more data.",
        )
