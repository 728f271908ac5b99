"""Batches made by a thread, ahead of the step that takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from steplab.core.errors import UserError


class Prefetched:
    """Yields what `stream` yields, in its order, with `ahead` batches fetched beforehand.

    On CUDA the thread works on a stream of its own: copies to the device wait for no kernel of
    the step, and no kernel of the step waits for the next batch. One thread, so that the order
    of the batches cannot change. It holds no reference to this object and ends with it.
    """

    def __init__(self, stream: Iterator[Any], device: torch.device, ahead: int) -> None:
        self._stream = stream
        self._device = device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="steplab-prefetch")
        self._pending: deque[Future[tuple[Any, Any]]] = deque()
        for _ in range(ahead):
            self._fetch_next()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return the next batch; an error while it was made is raised here."""
        if not self._pending:
            raise UserError(
                "This loader is read anew since: a later step.batches(loader) ended this reading.",
                "Read one epoch after the other, or give each its own loader.",
            )
        batch, done = self._pending.popleft().result()
        self._fetch_next()
        if done is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(done)
            for leaf in tree_leaves(batch):
                if isinstance(leaf, Tensor) and leaf.is_cuda:
                    # Its memory belongs to the thread's stream: not to be reused before we read.
                    leaf.record_stream(current)
        return batch

    def close(self) -> None:
        """Stop reading the stream; a batch that is being made is waited for."""
        for waiting in self._pending:
            waiting.cancel()
        self._thread.shutdown(wait=True)
        self._pending.clear()

    def _fetch_next(self) -> None:
        self._pending.append(self._thread.submit(_fetch, self._stream, self._side))


def started(stream: Iterator[Any]) -> Iterator[Any]:
    """Return the stream with its first batch made, by the thread that calls this.

    Workers of a DataLoader are forked with the first batch. A fork from beside a thread that
    computes may copy a lock that nobody gives back.
    """
    try:
        return chain((next(stream),), stream)
    except StopIteration:
        return iter(())


def _fetch(stream: Iterator[Any], side: torch.cuda.Stream | None) -> tuple[Any, Any]:
    """Return the next batch and, on CUDA, the event that says when it is on the device."""
    if side is None:
        return next(stream), None
    # A new thread is on the first GPU, whatever the current one of ours is.
    with torch.cuda.device(side.device), torch.cuda.stream(side):
        batch = next(stream)
        return batch, side.record_event()
