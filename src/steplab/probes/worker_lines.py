"""In which lines the workers of a DataLoader spend their time.

They run in processes of their own, begun before anybody watched. So one more worker is asked for
one more batch, of the loader's own dataset, order and collate_fn, and is watched there: nothing
that it draws, opens or counts reaches the training. A thread looks every millisecond where it is.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _DatasetKind

from steplab.probes.compiled_calls import running_line

EVERY_S = 0.001
LEAST_S = 0.2  # batches are made until then: of a quick one few lines would be seen
MOST_S = 20.0  # for a batch, with the start of its process
SHOWN = 2  # lines
SHARE = 0.1  # of the time, below which a line is not told


def worker_lines(iterator: Any) -> dict[str, float]:
    """Return the lines of the user's code that a worker is in for most of the time, and its share.

    `iterator` is torch's iterator over a DataLoader with workers. Empty where a further worker
    cannot be had, as for a dataset that cannot be copied.
    """
    workers = getattr(iterator, "_workers", ())
    if not workers:
        return {}
    try:
        asked = DataLoader(
            _Watched(iterator),
            batch_size=None,
            num_workers=1,
            timeout=MOST_S,
            worker_init_fn=getattr(iterator, "_worker_init_fn", None),
            multiprocessing_context=getattr(workers[0], "_start_method", None),
            generator=torch.Generator(),  # the training's own gives no number away
        )
        seen: Counter[str] = next(iter(asked))
    except Exception:
        # The loader of the training is what counts: whatever its copy lacks is no fault of it.
        return {}
    shares = {line: times / seen.total() for line, times in seen.most_common(SHOWN + 1) if line}
    told = [(line, share) for line, share in shares.items() if share >= SHARE]
    return dict(told[:SHOWN])


class _Watched(Dataset[Counter[str]]):
    """One sample: how often a worker was seen in each line, "" for none, while it made batches."""

    def __init__(self, iterator: Any) -> None:
        self.dataset, self.kind = iterator._dataset, iterator._dataset_kind
        self.sampler, self.collate = iterator._index_sampler, iterator._collate_fn
        self.auto, self.drop_last = iterator._auto_collation, iterator._drop_last

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> Counter[str]:
        made = (self.kind, self.dataset, self.auto, self.collate, self.drop_last)
        fetcher = _DatasetKind.create_fetcher(*made)
        seen: Counter[str] = Counter()
        done = threading.Event()
        watcher = threading.Thread(target=_watch, args=(threading.get_ident(), done, seen))
        watcher.start()
        try:
            indexes, until = iter(self.sampler), perf_counter() + LEAST_S
            while perf_counter() < until:
                fetcher.fetch(next(indexes))
        except StopIteration:  # the epoch is shorter than that
            pass
        finally:
            done.set()
            watcher.join()
        return seen


def _watch(thread: int, done: threading.Event, seen: Counter[str]) -> None:
    """Count where the thread is, until done."""
    while not done.wait(EVERY_S):
        seen[running_line(sys._current_frames().get(thread))] += 1
