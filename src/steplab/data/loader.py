"""Batches for a training loop: read ahead by threads, in an order that a position can resume."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from steplab.data.order import Order, Position
from steplab.data.windows import Windows
from steplab.errors import UserError


class Batch(NamedTuple):
    """One batch on the device: values float32 and mask bool, both [batch, window length]."""

    values_BT: Tensor
    mask_BT: Tensor


class Loader:
    """Yields batches for ever, epoch after epoch, each epoch in a new order.

    The order is decided by (seed, position) alone, not by the number of threads: batches are
    handed out in the order in which they were asked for. Windows that do not fill a batch at the
    end of an epoch are left out. `position` tells what the loop has received, not what was read
    ahead; a new Loader with it goes on exactly there.

    Threads are enough: numpy and page faults release the interpreter while they copy and wait.
    """

    def __init__(
        self,
        windows: Windows,
        batch: int,
        seed: int,
        device: torch.device | str,
        position: Position = Position(0, 0),  # noqa: B008  (frozen)
        prefetch: int = 4,
        workers: int = 2,
        shuffle: bool = True,
    ) -> None:
        _check(len(windows), windows.series.name, batch, position, prefetch, workers)
        self.position = position
        self._windows, self._batch, self._seed, self._shuffle = windows, batch, seed, shuffle
        self._device = torch.device(device)
        self._next = position  # of the batch to be asked for next
        self._order = Order(len(windows), seed, position.epoch)
        self._asked: deque[tuple[Position, Future[Batch]]] = deque()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="steplab-data")
        self._open = True
        for _ in range(prefetch):
            self._ask()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Return the next batch, on the device. A failed read closes the loader."""
        if not self._open:
            raise UserError("This loader is closed and gives no more batches.")
        after, future = self._asked.popleft()
        try:
            batch = future.result()
        except BaseException:
            self.close()
            raise
        self._ask()
        pinned = self._device.type == "cuda"
        on_device = Batch(*(tensor.to(self._device, non_blocking=pinned) for tensor in batch))
        self.position = after
        return on_device

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading ahead and end the threads; `position` stays. May be called twice."""
        self._open = False
        self._asked.clear()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _ask(self) -> None:
        """Ask the threads for one more batch. They hold no reference to the loader itself."""
        epoch, index = self._next.epoch, self._next.index
        if index + self._batch > len(self._windows):
            epoch, index = epoch + 1, 0
        if epoch != self._order.epoch:
            self._order = Order(len(self._windows), self._seed, epoch)
        numbers = np.arange(index, index + self._batch)
        self._next = Position(epoch, index + self._batch)
        order = self._order if self._shuffle else None
        job = self._threads.submit(_read_batch, self._windows, order, numbers, self._device)
        self._asked.append((self._next, job))


def _read_batch(
    windows: Windows, order: Order | None, positions: np.ndarray, device: torch.device
) -> Batch:
    """Read the windows at `positions` into memory that the device can copy from by itself."""
    numbers = positions if order is None else order[positions]
    batch = _allocate((len(numbers), windows.length), device)
    values, mask = batch.values_BT.numpy(), batch.mask_BT.numpy()
    for row, number in enumerate(numbers.tolist()):
        values[row], mask[row] = windows.read(number)
    return batch


def _allocate(shape: tuple[int, int], device: torch.device) -> Batch:
    """Return an empty batch in host memory, pinned for a CUDA device."""
    if device.type != "cuda":
        return Batch(torch.empty(shape, dtype=torch.float32), torch.empty(shape, dtype=torch.bool))
    with torch.cuda.device(device):  # a thread begins on the first GPU, whatever ours is
        values_BT = torch.empty(shape, dtype=torch.float32, pin_memory=True)
        return Batch(values_BT, torch.empty(shape, dtype=torch.bool, pin_memory=True))


def _check(
    windows: int, name: str, batch: int, position: Position, prefetch: int, workers: int
) -> None:
    if min(batch, prefetch, workers) < 1:
        raise UserError(
            f"batch is {batch}, prefetch {prefetch} and workers {workers}; each must be at least 1."
        )
    if position.epoch < 0 or not 0 <= position.index <= windows:
        raise UserError(
            f"Epoch {position.epoch}, window {position.index} is no position in {name}, "
            f"which has {windows:,} windows.",
            "Resume with the data, window length and stride of the first run.",
        )
    if batch > windows:
        raise UserError(
            f"{name} has {windows:,} windows, which do not fill one batch of {batch:,}.",
            "Use a smaller batch, a smaller stride or more data.",
        )
