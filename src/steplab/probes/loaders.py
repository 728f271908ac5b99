"""How long a loop's own thread waits for torch's DataLoader, what its workers send, how it is read.

A loop of the user's own takes its batches inside the step, where the clock sees no fetch. A trace
sees it, but not how long it takes: workers fill their queue while a recording starts.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
from torch.utils._pytree import tree_leaves
from torch.utils.data import dataloader

from steplab.core.run import LoaderUse
from steplab.probes.worker_lines import worker_lines

ASKED = 0.05  # of the time: workers that are waited for longer are asked what they do


class LoaderWaits:
    """Adds up the time in `next` of every DataLoader between `open` and `close`.

    Other threads are left out: they may fetch ahead of the step.
    """

    def __init__(self) -> None:
        self.waited_ms = 0.0
        self._waits: Counter[int] = Counter()  # us by the workers of the loader
        self._piped: dict[int, int] = {}  # bytes of the first batch, by the same
        self._batches: Counter[int] = Counter()
        self._left: Counter[int] = Counter()  # epochs that were begun, but for those that ended
        self._iterators: dict[int, weakref.ref[Any]] = {}  # the last of each
        self._began = self._ended = 0.0
        self._next: Any = None

    def open(self) -> None:
        """Begin; what this costs is 1 us a batch."""
        self._began = perf_counter()
        self._next = original = dataloader._BaseDataLoaderIter.__next__
        thread, waiting = threading.get_ident(), False

        def timed(iterator: Any) -> Any:
            nonlocal waiting
            if waiting or threading.get_ident() != thread:  # a loader inside another's dataset
                return original(iterator)
            waiting, began, is_first = True, perf_counter(), iterator._num_yielded == 0
            try:
                batch = original(iterator)
            except StopIteration:
                self._left[iterator._num_workers] -= 1
                raise
            finally:
                waiting = False
            self._left[iterator._num_workers] += is_first
            self._iterators[iterator._num_workers] = weakref.ref(iterator)
            self._note(iterator._num_workers, (perf_counter() - began) * 1e3, batch)
            return batch

        self._set(timed)

    def close(self) -> None:
        """End."""
        self._ended = perf_counter()
        self._set(self._next)

    def result(self) -> LoaderUse | None:
        """Return the loader that was waited for the longest; None if there was none.

        Workers that were waited for are asked what they do, which takes another one and a batch.
        """
        if not self._waits:
            return None
        workers = self._waits.most_common(1)[0][0]
        left = max(0, self._left[workers] - 1)  # without the one that goes on
        use = LoaderUse(workers, self._piped[workers], left / self._batches[workers])
        waited = self.waited_ms > ASKED * (self._ended - self._began) * 1e3
        iterator = self._iterators[workers]()
        if not (workers and waited and iterator is not None):
            return use
        return replace(use, lines=worker_lines(iterator))

    def _note(self, workers: int, ms: float, batch: Any) -> None:
        self.waited_ms += ms
        self._batches[workers] += 1
        self._waits[workers] += round(ms * 1e3)
        if workers not in self._piped:
            self._piped[workers] = pickled_bytes(batch) if workers else 0

    @staticmethod
    def _set(function: Any) -> None:
        dataloader._BaseDataLoaderIter.__next__ = function  # type: ignore[method-assign]


def pickled_bytes(batch: Any) -> int:
    """Return the bytes of a batch that go through a pipe: arrays and texts.

    Tensors lie in memory that the processes share.
    """
    leaves = tree_leaves(batch)
    arrays = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, np.ndarray))
    return arrays + sum(len(leaf) for leaf in leaves if isinstance(leaf, (bytes, str)))
